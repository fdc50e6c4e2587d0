from dataclasses import replace

import pytest
import torch

from oomprobe import errors
from oomprobe.runners.workers.messages import failed, raise_failure


class StrangeError(Exception):
    def __init__(self, one, two):
        super().__init__(one, two)


class MuteError(Exception):
    def __str__(self):
        raise RuntimeError("mute")


def sent_to_parent(error, *, building=None, **changes):
    """Return a child's error as its parent raises it; `changes` replace parts of the message about its cause."""
    try:
        raise error
    except BaseException as raised:
        told = replace(failed(raised, building=building), **changes)
    with pytest.raises((errors.OomProbeError, KeyError)) as caught:
        raise_failure(told, 16)
    return caught.value


def step_failure(error, **options):
    try:
        raise error
    except Exception as cause:
        error = errors.step_failed(cause, batch_size=16, **options)
        error.__cause__ = cause
    return sent_to_parent(error)


def test_a_bug_in_the_step_keeps_its_exception_as_the_cause():
    raised = step_failure(KeyError("labels"), largest_passed=8)
    assert type(raised) is errors.StepFailedError
    assert isinstance(raised.__cause__, KeyError)
    assert raised.__cause__.args == ("labels",)
    assert raised.batch_size == 16
    assert "batch 8 ran" in str(raised)
    assert "test_messages.py" in raised.__cause__.__notes__[0]


@pytest.mark.parametrize(
    "error",
    [StrangeError(object(), 2), MuteError(), ExceptionGroup("two", [ValueError("a")])],
    ids=["two arguments", "mute", "group"],
)
def test_an_unusual_exception_is_named(error):
    assert type(error).__name__ in str(step_failure(error))


def test_a_class_that_the_parent_has_not_imported_is_named():
    raised = sent_to_parent(
        ValueError("x"), building="t.py:b", module="their_train", cause="Theirs: x"
    )
    assert type(raised.__cause__) is RuntimeError
    assert "Theirs: x" in str(raised)


def test_a_tensor_is_sent_as_its_shape():
    raised = step_failure(KeyError(torch.zeros(3, 4)))
    assert "KeyError: a tensor of shape (3, 4), torch.float32, on cpu" in str(raised)


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidArgumentError("the model is on two devices"),
        KeyError("no such thing in the child"),
    ],
)
def test_an_error_from_outside_the_step_keeps_class_and_text(error):
    raised = sent_to_parent(error)
    assert type(raised) is type(error)
    assert str(raised) == str(error)


@pytest.mark.parametrize(
    ("error", "building", "words"),
    [
        (SystemExit(3), None, "the step at batch size 16 left the process, sys.exit(3)"),
        (SystemExit(3), "t.py:b", "the target t.py:b left the process"),
        (OSError("no data"), "t.py:b", "the target t.py:b failed with OSError"),
    ],
)
def test_an_exit_or_a_failed_build_is_a_failed_step(error, building, words):
    raised = sent_to_parent(error, building=building)
    assert type(raised) is errors.StepFailedError
    assert words in str(raised)
