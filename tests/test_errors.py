"""The errors: their classes, exit codes and texts."""

import pickle
import traceback
from argparse import Namespace as typed
from pathlib import Path

import pytest
import torch
from ledger import LedgerDevice

import oomprobe
from oomprobe import errors
from oomprobe.cli import explain
from oomprobe.errors import EXIT_TERMINATED, OomProbeError, StepFailedError, step_failed

TREE = {
    errors.InvalidArgumentError: (ValueError, 2),
    errors.NoDeviceError: (RuntimeError, 4),
    errors.NothingFitsError: (MemoryError, 1),
    errors.StepFailedError: (RuntimeError, 3),
    errors.DeviceLostError: (RuntimeError, 6),
    errors.TimeLimitError: (RuntimeError, 6),
    errors.UnreliableError: (RuntimeError, 6),
}


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("kind", TREE)
def test_errors_are_builtins_and_have_one_exit_code(capsys, kind, required):
    base, code = TREE[kind]
    code = 5 if required and kind is errors.NothingFitsError else code
    error = kind("what happened")
    assert isinstance(error, base)
    assert error.trials == ()
    assert explain(error, typed(require=8 if required else None)) == code
    assert code in errors.EXIT_STATUSES
    assert capsys.readouterr() == ("", "oomprobe: what happened\n")


def test_a_text_about_options_is_spelled_as_they_are_typed():
    text = "{} and {}, so {options}, of {size}"
    error = errors.InvalidArgumentError(text, options=("over", "isolate"), size="{8}")
    assert str(error) == "over and isolate, so over, isolate, of {8}"
    assert error.spelled(str.upper) == "OVER and ISOLATE, so OVER, ISOLATE, of {8}"
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.options) == (str(error), error.options)
    plain = errors.InvalidArgumentError("of {batch}")
    assert str(plain) == plain.spelled(str.upper) == str(pickle.loads(pickle.dumps(plain)))
    assert plain.args == ("of {batch}",)


def test_the_docstring_draws_the_real_tree():
    drawn = [
        line.split("(") for line in errors.__doc__.splitlines() if line.strip().startswith("+--")
    ]
    pairs = {name.strip(" +-"): rest.split(")")[0] for name, rest in drawn}
    assert pairs == {kind.__name__: base.__name__ for kind, (base, _) in TREE.items()}
    kinds = OomProbeError.__subclasses__()  # adapters, if another test imported them, add their own
    assert set(pairs) == {kind.__name__ for kind in kinds if kind.__module__ == errors.__name__}


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [(KeyboardInterrupt(), 130, "interrupted"), (SystemExit(EXIT_TERMINATED), 143, "terminated")],
)
def test_signals_have_their_own_codes(capsys, error, code, said):
    assert explain(error, typed()) == code
    assert code in errors.EXIT_STATUSES
    assert said in capsys.readouterr().err


def test_an_internal_error_is_70_with_its_traceback(capsys):
    assert explain(ZeroDivisionError("a bug of oomprobe"), typed(require=8)) == 70
    assert 70 in errors.EXIT_STATUSES
    err = capsys.readouterr().err
    assert err.index("ZeroDivisionError: a bug of oomprobe") < err.index(
        "unexpected internal error (ZeroDivisionError)"
    )


# --- a failed step ---


CALLER = errors.Caller(
    alone="run train({batch_size})", limit="starting_batch_size", more="It has no logger."
)
UNKNOWN = "To see whether it comes without oomprobe, run step_fn(model, 8) once"
AT_EVERY_SIZE = (
    "This is not about memory, so a smaller batch size would not help: the same error occurs without oomprobe. "
    "Run step_fn(model, 8) once by itself to see it."
)


@pytest.mark.parametrize(
    ("own", "options", "said"),
    [
        (KeyError("labels"), {}, f"KeyError: 'labels'\n{AT_EVERY_SIZE}"),
        (
            ValueError("x"),
            {"largest_passed": 8},
            "ValueError: x\nThis is not about memory; batch 8 ran before, so it may depend on what earlier calls left, or on "
            f"chance. {UNKNOWN} in a new process.",
        ),
        (ValueError("x"), {"trial": 3}, f"ValueError: x\nThis is not about memory. It came in trial 3 of its process. {UNKNOWN} in a new process."),
        (
            ValueError("x"),
            {"simulated": True, "row": "length=512"},
            "ValueError: x\nThis is not about memory, so a smaller batch size would not help. It came on a simulated card, whose tensors have "
            "no data. To see whether it comes without oomprobe, run step_fn(model, 8, length=512) once on a real device, such as the CPU.",
        ),
        (
            ValueError("x"),
            {"caller": CALLER, "largest_passed": 4},
            "ValueError: x\nThis is not about memory; batch 4 ran: pass starting_batch_size=4 if sizes above it are not "
            "meant to work (a data set that ends?). To see whether it comes without oomprobe, run train(8). It has no "
            "logger.",
        ),
    ],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_a_failed_step_says_what_to_do(own, options, said):
    failed = step_failed(own, batch_size=8, **options)
    assert type(failed) is StepFailedError
    assert failed.batch_size == 8
    assert str(failed) == f"the step failed at batch size 8 with {said}"


@pytest.mark.parametrize(
    "own", [KeyError("x"), errors.InvalidArgumentError("of a probe inside the step")]
)
def test_a_failed_step_is_3_whatever_its_error(capsys, own):
    failed = step_failed(own, batch_size=4)
    failed.__cause__ = own
    assert explain(failed, typed(require=8)) == 3
    assert f"{type(own).__name__}: {own}" in capsys.readouterr().err


def test_batch_norm_with_one_sample_suggests_min_batch():
    own = ValueError("Expected more than 1 value per channel when training, got input size [1, 4]")
    assert "Use min_batch=2" in str(step_failed(own, batch_size=1))


def test_the_error_of_a_target_is_not_said_to_occur_elsewhere():
    failed = errors.target_failed(KeyError("config"), "train.py:build")
    assert str(failed).startswith(
        "the target train.py:build failed with KeyError while it was imported and built: "
    )
    assert (
        "To see whether it comes without oomprobe, import the file and call the function by itself."
        in str(failed)
    )
    assert (failed.trials, failed.batch_size) == ((), 0)


@pytest.mark.parametrize(
    "name", ["LOCAL_RANK", "WORLD_SIZE", "env:// rendezvous: environment variable RANK expected"]
)
def test_a_target_that_expects_ranks_is_told_how_to_get_them(name):
    text = str(
        errors.target_failed((ValueError if " " in name else KeyError)(name), "train.py:build")
    )
    assert "add --nproc-per-node N (in Python nproc_per_node=N)" in text
    assert "without oomprobe" not in text


def test_only_a_caller_with_a_device_is_told_of_simulated_cards():
    assert "sim:" not in str(
        step_failed(RuntimeError("No CUDA GPUs are available"), batch_size=1, caller=CALLER)
    )


def files_of(error):
    return [
        Path(frame.f_code.co_filename).name for frame, _ in traceback.walk_tb(error.__traceback__)
    ]


@pytest.mark.parametrize("device", [LedgerDevice(), "sim:1GiB"], ids=["real", "simulated"])
def test_the_traceback_of_a_failed_step_has_only_frames_of_its_own(device):
    def step(model, batch_size):
        try:
            raise KeyError("labels")
        except KeyError:
            model(torch.ones(batch_size, 3))

    with pytest.raises(StepFailedError) as caught:
        oomprobe.find_max_batch(torch.nn.Linear(2, 2), step, device=device, progress="off")
    own = Path(__file__).name
    assert files_of(caught.value) == [own]
    assert list(dict.fromkeys(files_of(caught.value.__cause__))) == [own, "module.py", "linear.py"]
    assert files_of(caught.value.__cause__.__context__) == [own]


def test_other_errors_begin_at_the_call_without_what_led_to_them():
    for options in ({"max_batch": 0}, {"device": "sim:24"}, {"device": LedgerDevice(1)}):
        with pytest.raises(OomProbeError) as caught:
            oomprobe.find_max_batch(
                torch.nn.Linear(2, 2), lambda model, n: torch.ones(n), progress="off", **options
            )
        assert files_of(caught.value) == [Path(__file__).name]
        assert caught.value.__suppress_context__


# --- an error that holds tensors ---


class OwnText(Exception):
    def __str__(self):
        return f"the loss is {self.args[0]} at {self.args[1]}"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KeyError(torch.zeros(3, 4)), "a tensor of shape (3, 4), torch.float32, on cpu"),
        (OwnText(torch.zeros(2), 3), "the loss is a tensor of shape (2,), torch.float32, on cpu at 3"),
    ],
    ids=["key", "own text"],
)  # fmt: skip
def test_a_text_gives_the_shape_of_a_tensor(error, text):
    assert errors.text_of(error) == text
    assert errors.traceback_of(error).endswith(f"{type(error).__name__}: {text}")
    assert "0." in str(error)  # as elsewhere
