"""The arguments of a probe, checked before anything runs. Importing this module does not import torch."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, TypeGuard

from oomprobe.errors import Caller, InvalidArgumentError, check_size
from oomprobe.ground.units import parse_bytes
from oomprobe.records.axis import NO_AXIS, Axis
from oomprobe.records.epoch import UNLIMITED
from oomprobe.records.sizes import Sizes

if TYPE_CHECKING:
    import torch

ONE_STEP = "a table takes the epoch of one step, and there are {steps}: give the one that trains"
Judge = Callable[
    [str, object], None
]  # of the name of an option and its value; raises InvalidArgumentError
StepFn = Callable[..., object]  # of the model and a batch size; in a table also of a value, by name
MAX_CALLS = 32  # of a step in which no optimizer steps, before it is assumed to have none
# The same where an optimizer has gradients to step with, as in loops that accumulate them, if time allows.
MAX_WAITING_CALLS, WAITING_S = 300, 10.0
SIZE_NAMES = {"batch", "batch_size", "batchsize", "bs", "b", "n", "size"}  # of parameters
MODEL_NAMES = {"model", "module", "net", "network"}


@dataclass(frozen=True, slots=True)
class Step:
    """A step function, and how training calls it. Give it to a probe in place of the function.

    A step stands for the body of a training loop: between two calls its variables live on until
    the next call binds them again, as they do in a loop.

    Attributes:
        function: ``function(model, batch_size)``, one full optimisation step.
        is_loop: False where training calls it as a function, whose variables die when it returns.

    Examples:
        A trainer whose `fit` calls `training_step` once for each batch:

        >>> step = Step(lambda model, batch_size: model(batch_size), is_loop=False)
        >>> step.is_loop
        False
    """

    function: StepFn
    _: KW_ONLY
    is_loop: bool = True
    max_calls: int = MAX_CALLS  # while waiting for an optimizer to step; 1 for a step that is a whole training run
    # Whether each call is a training run of its own, so that many calls show no more than a few do.
    starts_anew: bool = False
    max_batch: int | None = None  # the largest size that there are data for; None: unknown
    # Whether a call takes as long as in training; a loop that sets itself up takes longer.
    is_timed: bool = True
    # What the user typed, for error messages; None if the user wrote `run`.
    caller: Caller | None = None
    # Whether the current call has created an optimizer and its parameters; it also drops them, so they need no snapshot.
    has_made: Callable[[torch.optim.Optimizer], bool] | None = None


Steps = StepFn | Step | Mapping[str, StepFn | Step]


@dataclass(frozen=True, slots=True)
class _Number:
    """Judges a number: raises InvalidArgumentError unless it is what is `wanted`."""

    wanted: str
    holds: Callable[[float], bool]

    def __call__(self, name: str, value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not self.holds(value):
            text = f"{{}} must be {self.wanted}, not {{value}}"
            raise InvalidArgumentError(text, options=(name,), value=repr(value))


check_seconds = _Number("a number of seconds, at least 0", lambda x: x >= 0)
_LIMIT = _Number("a positive number of seconds", lambda x: 0 < x < math.inf)
_SHARE = _Number("above 0 and at most 1 (0.9 is 90 %)", lambda x: 0 < x <= 1)
# Sizes up to 255 are answered exactly. Of 55 answers, those at 1/128 were at most 0.36 % below the exact ones; at 1/64, 19 %.
RESOLUTION = 1 / 128
_RESOLUTION = _Number("at least 0 and under 1", lambda x: 0 <= x < 1)


def check_flag(name: str, value: object) -> None:
    """Raise InvalidArgumentError unless `value` is a bool, which another process reads as one."""
    if not isinstance(value, bool):
        text = "{} must be True or False, not {value}"
        raise InvalidArgumentError(text, options=(name,), value=repr(value))


def check_memory(name: str, value: object) -> None:
    """Raise InvalidArgumentError unless `value` is a text such as "64GiB"."""
    if not isinstance(value, str):
        text = "{} must be a text such as '64GiB', not {value}"
        raise InvalidArgumentError(text, options=(name,), value=repr(value))
    parse_bytes(value)  # raises


def _option(
    default: object,
    group: str,
    metavar: str,
    help: str,
    judge: Judge,
    *,
    in_checks: bool = False,
) -> Any:
    """Return the field of an option. Its `group`, `metavar` and `help`, in which ``{}`` stands for the default, are those of the command line.

    A flag has no metavar. `in_checks` says whether a check of one size takes the option too.
    """
    about = {
        "group": group,
        "metavar": metavar,
        "help": help.format(default),
        "judge": judge,
        "in_checks": in_checks,
    }
    return field(default=default, metadata=about)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of `find_max_batch` that are numbers or flags; their meaning is documented there."""

    memory_fraction: float = _option(
        0.9, "memory", "F", "share of available memory to use ({})", _SHARE, in_checks=True
    )
    min_batch: int = _option(1, "search", "N", "smallest size to try ({})", check_size)
    max_batch: int | None = _option(
        None, "search", "N", "largest size to try (no limit)", check_size
    )
    multiple_of: int = _option(
        1, "search", "N", "try only multiples of this ({})", check_size, in_checks=True
    )
    start_batch: int | None = _option(
        None, "search", "N", "size to begin at, then doubled or halved (--min-batch)", check_size
    )
    steps: int = _option(1, "search", "N", "full steps per trial ({})", check_size)
    confirm_steps: int | None = _option(
        None,
        "search",
        "N",
        "full steps to confirm the answer (3; 5 without a look)",
        check_size,
        in_checks=True,
    )
    global_batch: int | None = _option(
        None, "search", "N", "plan gradient accumulation for N samples", check_size
    )
    resolution: float = _option(
        RESOLUTION,
        "search",
        "F",
        "stop within this fraction of the size (1/128; a command: 1/64; 0: exact)",
        _RESOLUTION,
    )
    time_limit_s: float | None = _option(
        None, "search", "S", "seconds for the whole probe", _LIMIT, in_checks=True
    )
    trial_time_limit_s: float | None = _option(None, "search", "S", "seconds for one trial", _LIMIT)
    host_memory: str | None = _option(
        None,
        "memory",
        "SIZE",
        "host memory that a size may take, such as 64GiB (no limit but the machine's)",
        check_memory,
        in_checks=True,
    )
    breakdown: bool = _option(
        False,
        "memory",
        "",
        "run one more step to show where the memory went",
        check_flag,
        in_checks=True,
    )

    def __post_init__(self) -> None:
        for option in fields(self):
            value, judge = getattr(self, option.name), option.metadata["judge"]
            if value is not None or option.default is not None:
                judge(option.name, value)
        low, high, start = self.min_batch, self.max_batch, self.start_batch
        limits = ("min_batch", "max_batch")
        if high is not None and low > high:
            text = f"{{}}={low} is larger than {{}}={high}: swap them"
            raise InvalidArgumentError(text, options=limits)
        if start is not None and not low <= start <= (high or math.inf):
            text = f"{{}}={start} is not between {{}}={low} and {{}}={high}"
            raise InvalidArgumentError(text, options=("start_batch", *limits))
        if self.sizes.last is not None and self.sizes.first > self.sizes.last:
            text = f"no multiple of {self.multiple_of} lies between {{}}={low} and {{}}={high}: lower {{}} or raise {{}}"
            raise InvalidArgumentError(text, options=(*limits, "multiple_of", "max_batch"))

    def within(self, max_batch: int) -> Options:
        """Return the options with sizes up to `max_batch`, that of the data."""
        if (self.max_batch or UNLIMITED) <= max_batch:
            return self
        smallest = max(self.sizes.first, self.start_batch or 0)
        if smallest > max_batch:
            asked = []
            for name in ("min_batch", "start_batch", "multiple_of"):
                if getattr(self, name) not in (None, 1):
                    asked.append(f"{name}={getattr(self, name)}")
            raise InvalidArgumentError(
                f"the data set has {max_batch} examples, too few for {', '.join(asked)}"
            )
        return replace(self, max_batch=max_batch)

    @property
    def host_limit_bytes(self) -> float:
        """The most host memory that a size may take."""
        return math.inf if self.host_memory is None else parse_bytes(self.host_memory)

    @property
    def sizes(self) -> Sizes:
        """The sizes that may be tried."""
        return Sizes.between_limits(self.min_batch, self.max_batch, self.multiple_of)


def names_simulated(device: object) -> TypeGuard[str]:
    """Return whether the device is ``"sim:..."``."""
    return isinstance(device, str) and device.partition(":")[0] == "sim"


def is_simulated(device: object) -> bool:
    """Return whether this is a simulated card, or names one."""
    return names_simulated(device) or bool(getattr(device, "is_simulated", False))


def named_steps(step_fn: object, axis: Axis = NO_AXIS) -> dict[str, Step]:
    """Return the steps by name; a single one is named ``"step"``. Each must take what the `axis` gives it."""
    given: Mapping[Any, Any] = step_fn if isinstance(step_fn, Mapping) else {"step": step_fn}
    if not given:
        raise InvalidArgumentError(
            "step_fn is an empty mapping: give at least one step, {'train': step_fn}"
        )
    steps = {}
    for name, step in given.items():
        if not isinstance(name, str):
            raise InvalidArgumentError(f"names of steps must be strings, not {name!r}")
        if not isinstance(step, Step):
            step = Step(step)
        _check_step(name, step.function, axis)
        steps[name] = step
    if axis.name and axis.epochs and len(steps) > 1:
        raise InvalidArgumentError(ONE_STEP.format(steps=", ".join(steps)))
    unknown = axis.epochs.keys() - {"", *steps}
    if unknown:
        raise InvalidArgumentError(
            f"epoch names {', '.join(unknown)}, and the steps are {', '.join(steps)}"
        )
    return steps


def _check_step(name: str, step: object, axis: Axis) -> None:
    if not callable(step):
        raise InvalidArgumentError(
            f"{name} must be a function (model, batch_size) that runs one full optimisation step, "
            f"not {type(step).__name__}: pass the function itself, without calling it"
        )
    if inspect.isgeneratorfunction(step) or inspect.iscoroutinefunction(step):
        raise InvalidArgumentError(
            f"{name} is a generator or async, so calling it runs nothing: make it a plain function"
        )
    try:
        signature = inspect.signature(step)
    except (TypeError, ValueError):  # a callable implemented in C
        return
    further = axis.names(name)
    arguments = f"({', '.join(['model', 'batch_size', *further])})"
    first, second = [*map(str.lower, signature.parameters), "", ""][:2]
    if first in SIZE_NAMES and second in MODEL_NAMES:
        raise InvalidArgumentError(
            f"{name}{signature} is called with {arguments}: swap its first two parameters"
        )
    try:
        signature.bind(None, None, **dict.fromkeys(further))
    except TypeError as error:
        raise InvalidArgumentError(
            f"{name}{signature} cannot be called with {arguments}: {error}. Write it as def step_fn{arguments}: ..."
        ) from None


def refuse_lazy(name: str, tensor: torch.Tensor) -> None:
    """Raise InvalidArgumentError for a parameter or buffer of a lazy module that was not called yet."""
    import torch

    if torch.nn.parameter.is_lazy(tensor):
        raise InvalidArgumentError(
            f"the parameter {name} of a lazy module has no shape yet: call the module once with a small batch before the "
            "probe, as you must before you make the optimizer"
        )


def check_model(model: object) -> torch.nn.Module:
    """Raise InvalidArgumentError unless `model` is a module whose parameters have their shapes."""
    import torch

    if isinstance(model, type):
        raise InvalidArgumentError(
            f"model must be a torch.nn.Module, not the class {model.__name__}: make an instance"
        )
    if inspect.isroutine(model):
        raise InvalidArgumentError(
            "the first argument is a function, and model must be a torch.nn.Module: swap the two, as in "
            f"find_max_batch(model, {getattr(model, '__name__', 'step_fn')})"
        )
    if not isinstance(model, torch.nn.Module):
        raise InvalidArgumentError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    for name, parameter in model.named_parameters():
        refuse_lazy(name, parameter)
    return model
