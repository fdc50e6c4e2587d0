import pytest

from oomprobe import errors
from oomprobe.isolation.messages import raise_failure, told


class StrangeError(Exception):
    def __init__(self, one, two):
        super().__init__(one, two)


class MuteError(Exception):
    def __str__(self):
        raise RuntimeError("mute")


def told_again(error, *, building=None, **changes):
    """An error of a child as its parent raises it; `changes` are to what is told of its cause."""
    try:
        raise error
    except BaseException as one:
        failed = told(one, building=building)["failed"]
    failed["cause"] |= changes
    with pytest.raises((errors.OomProbeError, KeyError)) as caught:
        raise_failure(failed, 16)
    return caught.value


def of_step(error, **given):
    try:
        raise error
    except Exception as own:
        failed = errors.step_failed(own, batch_size=16, **given)
        failed.__cause__ = own
    return told_again(failed)


def test_a_bug_of_the_step_has_its_own_exception_as_cause():
    failed = of_step(KeyError("labels"), largest_passed=8)
    assert type(failed) is errors.StepFailedError
    assert isinstance(failed.__cause__, KeyError)
    assert failed.__cause__.args == ("labels",)
    assert failed.batch_size == 16
    assert "batch 8 ran" in str(failed)
    assert "test_messages.py" in failed.__cause__.__notes__[0]


@pytest.mark.parametrize(
    "error",
    [StrangeError(1, "x"), StrangeError(object(), 2), MuteError(), ExceptionGroup("two", [ValueError("a")])],
    ids=["two arguments", "an object", "mute", "group"],
)
def test_odd_exceptions_have_their_name(error):
    assert type(error).__name__ in str(of_step(error))


def test_a_class_that_is_not_known_here_is_named():
    failed = told_again(ValueError("x"), building="t.py:b", module="their_train", text="Theirs: x")
    assert type(failed.__cause__) is RuntimeError
    assert "Theirs: x" in str(failed)


@pytest.mark.parametrize(
    "error", [errors.InvalidArgumentError("the model is on two devices"), KeyError("no such thing in the child")]
)
def test_an_error_that_is_not_the_steps_stays_what_it_is(error):
    failed = told_again(error)
    assert type(failed) is type(error)
    assert str(failed) == str(error)


@pytest.mark.parametrize(
    ("error", "building", "said"),
    [
        (SystemExit(3), None, "the step at batch size 16 left the process, sys.exit(3)"),
        (SystemExit(3), "t.py:b", "the target t.py:b left the process"),
        (OSError("no data"), "t.py:b", "the target t.py:b failed with OSError"),
    ],
)
def test_leaving_and_building(error, building, said):
    failed = told_again(error, building=building)
    assert type(failed) is errors.StepFailedError
    assert said in str(failed)
