import builtins

import pytest

from oomprobe import errors
from oomprobe.isolation.failures import raise_failure
from oomprobe.isolation.serve import told
from oomprobe.isolation.wire import Message


def raised(error, *, building=None) -> tuple[BaseException, Message]:
    try:
        raise error
    except BaseException as one:
        message = told(one, building=building)
    with pytest.raises(errors.OomProbeError) as caught:
        raise_failure(message["failed"], 16)
    return caught.value, message


def raised_in_step(error) -> BaseException:
    try:
        raise error
    except Exception as own:
        of_step = errors.step_failed(own, batch_size=16)
        of_step.__cause__ = own
    return raised(of_step)[0]


class StrangeError(Exception):
    def __init__(self, one, two):
        super().__init__(one, two)


class MuteError(Exception):
    def __str__(self):
        raise RuntimeError("mute")


def test_a_bug_of_the_step_has_its_own_exception_as_cause():
    told_of = errors.step_failed(KeyError("labels"), batch_size=16, largest_passed=8)
    told_of.__cause__ = KeyError("labels")
    failed, _ = raised(told_of)
    assert type(failed) is errors.StepFailedError
    assert isinstance(failed.__cause__, KeyError)
    assert failed.__cause__.args == ("labels",)
    assert failed.batch_size == 16
    assert "batch 8 ran" in str(failed)
    failed = raised_in_step(KeyError("labels"))
    assert "test_failures.py" in str(failed.__cause__.__cause__)


@pytest.mark.parametrize(
    "error", [StrangeError(1, "x"), StrangeError(object(), 2), MuteError(), ExceptionGroup("two", [ValueError("a")])]
)
def test_odd_exceptions_have_their_name(error):
    failed = raised_in_step(error)
    assert type(error).__name__ in str(failed)


def test_a_class_that_is_not_known_here_has_its_name():
    _, message = raised(ValueError("x"), building="t.py:b")
    message["failed"]["cause"] |= {"module": "their_train", "name": "Theirs"}
    with pytest.raises(errors.OomProbeError) as caught:
        raise_failure(message["failed"], 4)
    assert type(caught.value.__cause__).__module__ == "their_train"
    assert "Theirs" in str(caught.value)
    assert "their_train" not in vars(builtins)


def test_our_own_errors_stay_what_they_are():
    failed, _ = raised(errors.InvalidArgumentError("the model is on two devices"))
    assert type(failed) is errors.InvalidArgumentError
    assert str(failed) == "the model is on two devices"


def test_an_error_of_ours_is_not_told_as_the_steps():
    message = told(KeyError("no such thing in the child"), building=None)
    with pytest.raises(KeyError, match="no such thing") as caught:
        raise_failure(message["failed"], 16)
    assert not isinstance(caught.value, errors.OomProbeError)


def test_leaving_and_building():
    assert "the step at batch size 16 left the process, sys.exit(3)" in str(raised(SystemExit(3))[0])
    assert "the target t.py:b left the process" in str(raised(SystemExit(3), building="t.py:b")[0])
    failed, _ = raised(OSError("no data"), building="t.py:b")
    assert "the target t.py:b failed with OSError" in str(failed)


def test_texts_are_shortened():
    _, message = raised(ValueError("x" * 10**6), building="t.py:b")
    assert len(str(message)) < 10**5
