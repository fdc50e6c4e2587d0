import pytest

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
    error = kind("what happened")
    assert isinstance(error, OomProbeError)
    assert isinstance(error, TREE[kind])
    assert error.args == ("what happened",)
    assert error.trials == ()


def test_the_docstring_draws_the_real_tree():
    drawn = [line.split("(") for line in errors.__doc__.splitlines() if line.strip().startswith("+--")]
    pairs = {name.strip(" +-"): rest.split(")")[0] for name, rest in drawn}
    assert pairs == {kind.__name__: base.__name__ for kind, base in TREE.items()}
    assert set(pairs) == {kind.__name__ for kind in OomProbeError.__subclasses__()}


# --- a failed step ---


class Speechless(Exception):
    def __str__(self):
        raise ValueError("no text either")


CALLER = errors.Caller(alone="run train({batch_size})", limit="starting_batch_size", more="It has no logger.")
AT_EVERY_SIZE = (
    "This is not about memory, so no batch size would help: the same error occurs without oomprobe. "
    "Run step_fn(model, 8) once by itself to see it."
)


@pytest.mark.parametrize(
    ("own", "options", "said"),
    [
        (KeyError("labels"), {}, f"KeyError: 'labels'\n{AT_EVERY_SIZE}"),
        (StepFailedError("inner"), {}, f"StepFailedError: inner\n{AT_EVERY_SIZE}"),
        (Speechless("x"), {}, f"Speechless: (no text)\n{AT_EVERY_SIZE}"),
        (ValueError("x"), {"largest_passed": 8}, f"ValueError: x\n{AT_EVERY_SIZE}"),
        (
            ValueError("x"),
            {"largest_passed": 4},
            "ValueError: x\nThis is not about memory; batch 4 ran: pass max_batch=4 if sizes above it are not meant to "
            "work (a data set that ends?). Run step_fn(model, 8) once by itself to see it.",
        ),
        (
            ValueError("x"),
            {"caller": CALLER},
            "ValueError: x\nThis is not about memory, so no batch size would help. To see whether it comes without "
            "oomprobe, run train(8). It has no logger.",
        ),
        (
            ValueError("x"),
            {"caller": CALLER, "largest_passed": 4},
            "ValueError: x\nThis is not about memory; batch 4 ran: pass starting_batch_size=4 if sizes above it are not "
            "meant to work (a data set that ends?). To see whether it comes without oomprobe, run train(8). It has no "
            "logger.",
        ),
    ],
    ids=["a bug", "our own", "no text", "at each size", "above a pass", "adapter", "adapter above a pass"],
)
def test_a_failed_step_says_what_to_do(own, options, said):
    failed = step_failed(own, batch_size=8, **options)
    assert type(failed) is StepFailedError
    assert failed.batch_size == 8
    assert str(failed) == f"the step failed at batch size 8 with {said}"


def test_batch_norm_with_one_sample_suggests_min_batch():
    own = ValueError("Expected more than 1 value per channel when training, got input size [1, 4]")
    assert "Use min_batch=2" in str(step_failed(own, batch_size=1))


def test_a_failed_target_keeps_its_own_text():
    failed = errors.target_failed(KeyError("config"), "train.py:build")
    assert str(failed).startswith("the target train.py:build failed with KeyError while it was imported and built: ")
    assert (failed.trials, failed.batch_size) == ((), 0)
    assert str(errors.target_failed(Speechless("x"), "t:b")).count("(no text)") == 1
