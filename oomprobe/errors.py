"""The errors, one class for each that a caller would handle differently.

::

    OomProbeError
     +-- InvalidArgumentError (ValueError)    the call itself is wrong; nothing was run
     +-- NoDeviceError (RuntimeError)         the device is not available to this process
     +-- NothingFitsError (MemoryError)       not even the smallest size fits
     +-- StepFailedError (RuntimeError)       a bug in the step: raised from the user's own exception
     +-- DeviceLostError (RuntimeError)       a sticky error; the process can no longer use the device
     +-- TimeLimitError (RuntimeError)        the time limit passed before a size was confirmed
     +-- UnreliableError (RuntimeError)       a number would be a guess: no work, a leak, state not restored

Each carries ``.trials``, the trials run before it, and ``.exit_status``, that of the command line.
"""

from __future__ import annotations

import re
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar

from oomprobe.records.trials import Trial


class OomProbeError(Exception):
    """Base of all errors raised by this package.

    ``trials`` holds the trials run before it, and ``table``, of `find_max_batches`, the rows that were finished, or None.

    Examples:
        >>> import oomprobe
        >>> try:
        ...     card = oomprobe.SimulatedDevice("RTX-4099")
        ... except oomprobe.OomProbeError as error:
        ...     print(f"exit with {error.exit_status}: {error}")
        exit with 4: 'RTX-4099' is not in the catalogue; ...
    """

    exit_status: ClassVar[int] = 6
    trials: tuple[Trial, ...] = ()
    table: object = None


class InvalidArgumentError(OomProbeError, ValueError):
    """An argument is invalid. Nothing was run.

    In a text that is about `options`, ``{}`` stands for the name of each in turn, ``{options}`` for all names, and
    ``{name}`` for one of the further `values`.

    Examples:
        >>> import oomprobe
        >>> oomprobe.check_target("oomprobe.demo:wide_mlp", 8, memory_fraction=90)
        Traceback (most recent call last):
        oomprobe.errors.InvalidArgumentError: memory_fraction must be ...
    """

    exit_status = 2

    def __init__(self, text: str = "", *, options: Sequence[str] = (), **values: object) -> None:
        super().__init__(text)
        self.options, self.values = tuple(options), values

    def __str__(self) -> str:
        return self.spelled(str)

    def spelled(self, spell: Callable[[str], str]) -> str:
        """Return the text with the options' names as `spell` writes them: as Python does with `str`, or as flags.

        Examples:
            >>> error = InvalidArgumentError("{} must be above 0", options=("steps",))
            >>> error.spelled("--{}".format)
            '--steps must be above 0'
        """
        if not self.options:
            return super().__str__()
        names = [*map(spell, self.options)]
        return str(self.args[0]).format(*names, options=", ".join(names), **self.values)


class UnknownOptionError(InvalidArgumentError, TypeError):
    """There is no keyword argument of this name."""


class NotApplicableError(InvalidArgumentError):
    """A saving has nothing to apply to in this step, or is on already; the text says which, in a word."""


class NoDeviceError(OomProbeError, RuntimeError):
    """The requested device is not available to this process.

    Examples:
        >>> import oomprobe, torch
        >>> oomprobe.check(torch.nn.Linear(8, 8), print, 32, device="cuda:99")
        Traceback (most recent call last):
        oomprobe.errors.NoDeviceError: ...
    """

    exit_status = 4


class NothingFitsError(OomProbeError, MemoryError):
    """The smallest size allowed does not fit in the memory allowed.

    Examples:
        >>> import oomprobe
        >>> try:
        ...     oomprobe.check_target("oomprobe.demo:wide_mlp", 9999, device="sim:1GiB", progress="off")
        ... except oomprobe.NothingFitsError as error:
        ...     print(error.trials[-1].verdict)
        out of memory
    """

    exit_status = 1


class DeviceLostError(OomProbeError, RuntimeError):
    """A sticky error: this process can no longer use the device, and what was in its memory is lost.

    Examples:
        >>> import oomprobe, torch
        >>> def step(model, batch_size):
        ...     raise RuntimeError("CUDA error: device-side assert triggered")
        >>> oomprobe.check(torch.nn.Linear(8, 8), step, 8, device="sim:1GiB", progress="off")
        Traceback (most recent call last):
        oomprobe.errors.DeviceLostError: a sticky error ...
    """


class TimeLimitError(OomProbeError, RuntimeError):
    """The time limit passed before a size was confirmed.

    Examples:
        >>> import oomprobe
        >>> oomprobe.probe_target("oomprobe.demo:wide_mlp", device="sim:1GiB", time_limit_s=0.001, progress="off")
        Traceback (most recent call last):
        oomprobe.errors.TimeLimitError: time passed ...
    """


class UnreliableError(OomProbeError, RuntimeError):
    """An answer would be wrong or a guess.

    Examples:
        >>> import oomprobe, torch
        >>> def step(model, batch_size):
        ...     model(torch.randn(8, 64)).sum().backward()  # always the same size
        >>> oomprobe.find_max_batch(torch.nn.Linear(64, 8), step, device="sim:1GiB", progress="off")
        Traceback (most recent call last):
        oomprobe.errors.UnreliableError: ...
    """


class NotRunError(UnreliableError):
    """A step did not run the requested size, or did not step the optimizer whose gradients it computed."""


class NotTrainedError(UnreliableError):
    """An optimizer that stepped at smaller sizes did not step, so this size was not trained."""


class SimulationError(UnreliableError):
    """The step needs data, or a kind of tensor, that a simulated card does not have."""


class StepFailedError(OomProbeError, RuntimeError):
    """The step failed with an error that is not about memory: the user's own exception is its ``__cause__``.

    ``batch_size`` is the size that was being tried; 0 if the probe had not started.

    Examples:
        >>> import oomprobe, torch
        >>> def step(model, batch_size):
        ...     model(torch.randn(batch_size, 7)).sum().backward()  # the model takes 8 numbers
        >>> try:
        ...     oomprobe.check(torch.nn.Linear(8, 8), step, 32, device="sim:1GiB", progress="off")
        ... except oomprobe.StepFailedError as error:
        ...     print(error.batch_size, type(error.__cause__).__name__)
        32 RuntimeError
    """

    exit_status = 3

    def __init__(self, message: str = "", *, batch_size: int = 0) -> None:
        super().__init__(message)
        self.batch_size = batch_size


class FramesHidden:
    """Lets an error of this package leave a public function without a frame inside it: its traceback ends at the caller's line."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, OomProbeError):
            error.__traceback__, error.__suppress_context__ = None, True


class TimeUp(BaseException):
    """Raised inside a step when its time has passed. Not an Exception, so that no step swallows it."""


SIGNALS = (
    KeyboardInterrupt,
    SystemExit,
    TimeUp,
)  # raised by signals, no matter which code was running

REQUIRED_FAILS, UNFORESEEN, INTERRUPTED = 5, 70, 130
EXIT_TERMINATED = 128 + signal.SIGTERM  # the exit status that a shell reports after SIGTERM
EXIT_STATUSES = {
    0: "an answer was found",
    NothingFitsError.exit_status: "nothing fits",
    InvalidArgumentError.exit_status: "wrong usage; nothing was run",
    StepFailedError.exit_status: "the target, its step or the command failed, or called sys.exit",
    NoDeviceError.exit_status: "no such device",
    REQUIRED_FAILS: "less than was asked: the size of --require does not fit, or compare --tolerance found growth",
    OomProbeError.exit_status: "no trustworthy number (no answer in time, a large leak, a lost device; with --quiet also\n"
    "       when other processes took memory)",
    UNFORESEEN: "internal error",
    INTERRUPTED: "interrupted (Ctrl-C)",
    int(EXIT_TERMINATED): "terminated (SIGTERM, or SIGHUP of a closed terminal)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """How to run the adapter's loop without a probe."""

    alone: str  # how to run the same without a probe; "{batch_size}" stands for the size
    limit: str = "max_batch"  # the argument that limits the size of a search
    more: str = ""  # a sentence about what trials leave out


LONGEST_TEXT = 2000  # characters of an exception's text: some carry all their data
MISTYPED = (NameError, ImportError, SyntaxError)  # errors of the code alone, wherever it runs


# What Python and torch say where the batch size is taken for a batch.
OF_A_NUMBER = re.compile(r"'int' object|\bint object|must be Tensor, not int|got \(int,")
A_NUMBER = (
    ": perhaps a number was taken for a batch. step_fn(model, batch_size) gets the number of "
    "examples, and makes a batch of as many"
)


def step_failed(
    error: BaseException,
    *,
    batch_size: int,
    largest_passed: int | None = None,
    caller: Caller | None = None,
    row: str = "",
    trial: int = 1,
    simulated: bool = False,
) -> StepFailedError:
    """Return the `StepFailedError` for a user's exception; raise it ``from`` that exception.

    `largest_passed` is the largest size that ran; `caller` is given if the step belongs to an adapter, and `row`, such as
    ``length=512``, if it has a further argument. Of the trials of a process only the first, `trial` 1, ran from the state as it was
    found; later ones, those of an adapter and those of a `simulated` device may themselves be at fault.
    """
    ran_larger = largest_passed is not None and largest_passed >= batch_size
    known = trial == 1 and not simulated and caller is None and not ran_larger
    alone = _alone(error, batch_size, caller, row, known=known, simulated=simulated)
    places = []
    if trial > 1:
        places.append(f"in trial {trial} of its process")
    if simulated and not isinstance(error, MISTYPED):
        places.append("on a simulated card, whose tensors have no data")
    came, text = "", text_of(error)
    if len(text) > LONGEST_TEXT:
        text = f"{text[:LONGEST_TEXT]} ... ({len(text):,} characters in all)"
    if places:
        came = f" It came {', '.join(places)}."
    if simulated and largest_passed is not None and 2 * largest_passed < batch_size:
        reason = f"; batch {largest_passed} ran, and sizes between were predicted: if the step takes no larger ones, pass max_batch"
    else:
        reason = _no_answer(error, batch_size, largest_passed, caller, trial, known)
    return StepFailedError(
        f"the step failed at batch size {batch_size} with {type(error).__name__}: {text}\n"
        f"This is not about memory{reason}.{came} {alone}",
        batch_size=batch_size,
    )


# Sources: torch/cuda/__init__.py, torch/xpu/__init__.py (_lazy_init), c10/cuda/CUDAFunctions.cpp, c10/xpu/XPUFunctions.cpp.
NO_GPU = re.compile(
    r"Torch not compiled with (?:CUDA|XPU) enabled|Found no NVIDIA driver|No (?:CUDA|HIP) GPUs are available"
    r"|No XPU devices are available"
)
NO_GPU_FOR_STEP = (
    'The step needs a GPU, and this process sees none: simulate one with device="sim:24GiB" or, where building the model calls '
    ".cuda() too, with oomprobe run train.py:build --device sim:24GiB. Or run it where a GPU is."
)
# What os.environ["LOCAL_RANK"] raises, and torch/distributed/rendezvous.py (_env_rendezvous_handler).
OF_A_RANK = re.compile(
    r"^'(?:(?:LOCAL_|GROUP_)?RANK|(?:LOCAL_)?WORLD_SIZE|MASTER_(?:ADDR|PORT))'$|env:// rendezvous: environment variable \w+ expected"
)


def target_failed(error: BaseException, target: str) -> OomProbeError:
    """Return the error for an exception raised while a target was imported or built."""
    if NO_GPU.search(text_of(error)):
        return NoDeviceError(
            f"the target {target} needs a GPU, and this process sees none ({type(error).__name__}: {text_of(error)}). Try it on "
            'a simulated one with --device sim:24GiB (in Python device="sim:24GiB"), or run it where a GPU is'
        )
    alone = (
        "To see whether it comes without oomprobe, import the file and call the function by itself"
    )
    if OF_A_RANK.search(text_of(error)):
        alone = "It expects to be one of several ranks: add --nproc-per-node N (in Python nproc_per_node=N), the ranks of this machine"
    return StepFailedError(
        f"the target {target} failed with {type(error).__name__} while it was imported and built: {text_of(error)}\n"
        f"Nothing was probed. {alone}."
    )


def device_lost(device_name: str, what: str, *, replaceable: bool = False) -> DeviceLostError:
    """Return the error for a device on which this process, or if `replaceable` two processes, can run nothing any more."""
    if replaceable:
        lost = "a fresh process hit the same error. Run the step once by itself with CUDA_LAUNCH_BLOCKING=1 to see where"
    else:
        lost = (
            f"this process can no longer use {device_name}, and all tensors on it are lost. Start a new process. If the "
            "model cannot be built again, save it before you probe; to run trials in child processes that may fail like this, use "
            "oomprobe run path/to/train.py:build or oomprobe.probe_target"
        )
    return DeviceLostError(f"a sticky error ({what}): {lost}")


def unmeasured(device_name: str, error: BaseException) -> UnreliableError:
    """Return the error for a healthy device that failed to report its memory."""
    return UnreliableError(
        f"{device_name} did not report its memory ({type(error).__name__}: {text_of(error)}), so there is no answer. The "
        "step is not the cause: probe again, or check the driver"
    )


def _alone(
    error: BaseException,
    batch_size: int,
    caller: Caller | None,
    row: str,
    *,
    known: bool,
    simulated: bool,
) -> str:
    """Return the sentence on how to see the error without oomprobe."""
    call = f"step_fn(model, {batch_size}, {row})" if row else f"step_fn(model, {batch_size})"
    if caller is not None:
        how = caller.alone.replace("{batch_size}", str(batch_size))
        return f"To see whether it comes without oomprobe, {how}. {caller.more}".rstrip()
    if NO_GPU.search(text_of(error)):
        return NO_GPU_FOR_STEP
    if known or isinstance(error, MISTYPED):
        return f"Run {call} once by itself to see it."
    where = "on a real device, such as the CPU" if simulated else "in a new process"
    return f"To see whether it comes without oomprobe, run {call} once {where}."


def _no_answer(
    error: BaseException,
    batch_size: int,
    largest_passed: int | None,
    caller: Caller | None,
    trial: int,
    known: bool,
) -> str:
    if batch_size == 1 and "Expected more than 1 value per channel when training" in text_of(error):
        return ": BatchNorm cannot train on one sample (torch/nn/functional.py). Use min_batch=2"
    if largest_passed is None:
        if caller is None and OF_A_NUMBER.search(text_of(error)):
            return A_NUMBER
        if trial > 1:
            return ""
        if known:
            return (
                ", so a smaller batch size would not help: the same error occurs without oomprobe"
            )
        return ", so a smaller batch size would not help"
    if largest_passed >= batch_size:
        return f"; batch {largest_passed} ran before, so it may depend on what earlier calls left, or on chance"
    limit = "max_batch" if caller is None else caller.limit
    return (
        f"; batch {largest_passed} ran: pass {limit}={largest_passed} if sizes above it are not meant to work "
        "(a data set that ends?)"
    )


def check_size(name: str, value: object) -> None:
    """Raise InvalidArgumentError unless `value` is a positive int. True is no size, and numpy integers are not JSON."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return
    how = ""
    if hasattr(value, "__index__") and not isinstance(value, int):
        how = f" of type {type(value).__module__}.{type(value).__name__}: pass int({value})"
    text = "{} must be an integer of at least 1, not {value}{how}"
    raise InvalidArgumentError(text, options=(name,), value=repr(value), how=how)


def text_of(error: BaseException) -> str:
    """Return the text of an exception, or a placeholder if its own code raises anything but a signal."""
    try:
        with _tensors_by_shape():
            return str(error)
    except SIGNALS:
        raise
    except BaseException:
        return "(no text)"


IN_CHILD = "in the trial's process:\n"  # begins the note with the traceback of an exception that was raised there


def traceback_of(error: BaseException) -> str:
    """Return the traceback of an exception and its causes, as Python prints it; or as another process did, if it was raised there."""
    for note in getattr(error, "__notes__", ()):
        if note.startswith(IN_CHILD):
            return str(note.removeprefix(IN_CHILD))
    with _tensors_by_shape():
        return "".join(traceback.format_exception(error)).rstrip()


def _tensors_by_shape() -> AbstractContextManager[object]:
    if (
        "torch" not in sys.modules
    ):  # importing it takes seconds, and without it there are no tensors
        return nullcontext()
    from oomprobe.ground.frames import TensorsByShape

    return TensorsByShape()
