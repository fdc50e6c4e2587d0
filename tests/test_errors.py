import pytest
from test_result import a_trial

from oomprobe import errors
from oomprobe.errors import OomProbeError, StepFailedError, step_failed

TREE = {
    errors.InvalidArgumentError: ValueError,
    errors.NoDeviceError: RuntimeError,
    errors.NothingFitsError: MemoryError,
    errors.StepFailedError: RuntimeError,
    errors.DeviceLostError: RuntimeError,
    errors.TimeLimitError: RuntimeError,
    errors.UnreliableError: RuntimeError,
}


# --- the tree ---


@pytest.mark.parametrize("kind", TREE)
def test_errors_are_builtins_and_carry_trials(kind):
    trials = (a_trial(), a_trial())
    error = kind("what happened", trials=trials)
    assert isinstance(error, OomProbeError)
    assert isinstance(error, TREE[kind])
    assert error.trials is trials
    assert error.args == ("what happened",)
    assert kind("what happened").trials == ()


def test_the_tree_in_the_docstring_is_the_tree():
    drawn = [line.split("(") for line in errors.__doc__.splitlines() if line.strip().startswith("+--")]
    pairs = {name.strip(" +-"): rest.split(")")[0] for name, rest in drawn}
    assert pairs == {kind.__name__: base.__name__ for kind, base in TREE.items()}
    assert set(pairs) == {kind.__name__ for kind in OomProbeError.__subclasses__()}


def test_a_lost_device_carries_the_snapshot():
    snapshot = object()
    assert errors.DeviceLostError("lost", snapshot=snapshot).snapshot is snapshot
    assert errors.DeviceLostError("lost").snapshot is None


# --- a failed step ---


class Speechless(Exception):
    def __str__(self):
        raise ValueError("no text either")


@pytest.mark.parametrize("own", [KeyError("labels"), StopIteration(7), StepFailedError("inner")])
def test_a_step_failure_is_one_plain_class(own):
    failed = step_failed(own, batch_size=16)
    assert type(failed) is StepFailedError
    assert failed.batch_size == 16
    assert str(failed) == (
        f"the step failed at batch size 16 with {type(own).__name__}: {own}\n"
        "This is not about memory, so no batch size would answer it: the same error comes without oomprobe. "
        "Run step_fn(model, 16) once by itself to see it."
    )


def test_an_exception_without_text_is_still_told():
    failed = step_failed(Speechless("x"), batch_size=4)
    assert str(failed).startswith("the step failed at batch size 4 with Speechless: (no text)\n")


# --- where a smaller size ran ---


def test_a_bug_above_a_size_that_ran_names_max_batch():
    text = str(step_failed(ValueError("sample larger than population"), batch_size=1024, largest_passed=512))
    assert "batch 512 ran: pass max_batch=512 if sizes above it are not meant to work (a data set that ends?)" in text
    assert "no batch size would answer it" not in text
    assert text.endswith("Run step_fn(model, 1024) once by itself to see it.")


@pytest.mark.parametrize("largest_passed", [None, 8, 16])
def test_a_bug_at_every_size_says_so(largest_passed):
    text = str(step_failed(ValueError("x"), batch_size=8, largest_passed=largest_passed))
    assert "so no batch size would answer it: the same error comes without oomprobe" in text
    assert "max_batch" not in text


def test_a_user_of_an_adapter_is_told_what_he_can_type():
    caller = errors.Caller(alone="run train({batch_size})", limit="starting_batch_size", more="It has no logger.")
    text = str(step_failed(ValueError("x"), batch_size=8, caller=caller))
    assert text.endswith(
        "This is not about memory, so no batch size would answer it. To see whether it comes without oomprobe, run "
        "train(8). It has no logger."
    )
    text = str(step_failed(ValueError("x"), batch_size=8, largest_passed=4, caller=caller))
    assert "batch 4 ran: pass starting_batch_size=4 if" in text
    assert "step_fn" not in text


def test_a_failed_target_keeps_its_own_text():
    failed = errors.target_failed(KeyError("config"), "train.py:build")
    assert str(failed).startswith("the target train.py:build failed with KeyError while it was imported and built: ")
    assert (failed.trials, failed.batch_size) == ((), 0)
    assert str(errors.target_failed(Speechless("x"), "t:b")).count("(no text)") == 1


def test_the_users_exception_is_not_changed():
    own = OSError(28, "No space left", "/data")
    own.extra = 1
    before = (own.args, dict(vars(own)), str(own))
    step_failed(own, batch_size=4)
    assert (own.args, dict(vars(own)), str(own)) == before
