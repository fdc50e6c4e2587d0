"""The arguments of a probe, checked before anything runs."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from oomprobe.errors import Caller, InvalidArgumentError, check_size
from oomprobe.records.axis import NO_AXIS, Axis
from oomprobe.records.sizes import Sizes

StepFn = Callable[..., object]  # of the model and a batch size, and in a table of a value by name
SEVERAL_RANKS = (
    "{what}: one that runs out of memory leaves the others waiting in a collective, and no group survives that. Move what builds "
    "the model into a function build() and type oomprobe run train.py:build --nproc-per-node {ranks}; or probe the command that "
    "starts the ranks, oomprobe run -- torchrun ... --batch-size {{batch}}"
)
NO_GROUP = (
    "neither build() nor the step initialised a process group on rank {rank}, so its model trains alone: call "
    "torch.distributed.init_process_group() in build(), as under torchrun"
)
OTHER_GROUP = "the process group of rank {rank} has {made} ranks, but the probe has {ranks}: call init_process_group() without world_size"
MAX_CALLS = 32  # of a step without an optimizer stepping, before it is assumed to have none
# The same where an optimizer has gradients to step, as in loops that accumulate them, if there is time.
MAX_WAITING_CALLS, WAITING_S = 300, 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step function and what is known about it; adapters to frameworks pass one instead of a function."""

    run: StepFn
    max_calls: int = MAX_CALLS  # while waiting for an optimizer to step; 1 for a step that is a whole training run
    # Whether each call is a training run of its own, so that many calls show no more than few.
    starts_anew: bool = False
    max_batch: int | None = None  # the largest size that there are data for; None: unknown
    is_timed: bool = True  # whether its times are those of training; a loop that sets itself up takes longer
    caller: Caller | None = None  # what the user typed, for error messages; None if the user wrote `run`
    # Whether the current call created an optimizer and its parameters, which it also drops, so they need no snapshot.
    has_made: Callable[[torch.optim.Optimizer], bool] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of `find_max_batch` that are numbers or flags; their meaning is documented there."""

    memory_fraction: float = 0.9
    min_batch: int = 1
    max_batch: int | None = None
    multiple_of: int = 1
    start_batch: int | None = None
    steps: int = 2
    confirm_steps: int = 5
    global_batch: int | None = None
    resolution: float = 0.0
    time_limit_s: float | None = None
    trial_time_limit_s: float | None = None
    breakdown: bool = False

    def __post_init__(self) -> None:
        for name in ("min_batch", "multiple_of", "steps", "confirm_steps"):
            check_size(name, getattr(self, name))
        for name in ("max_batch", "start_batch", "global_batch"):
            if getattr(self, name) is not None:
                check_size(name, getattr(self, name))
        for name in ("time_limit_s", "trial_time_limit_s"):
            if getattr(self, name) is not None:
                _check_number(name, getattr(self, name), "a positive number of seconds", lambda x: 0 < x < math.inf)
        _check_number("memory_fraction", self.memory_fraction, "above 0 and at most 1", lambda x: 0 < x <= 1)
        _check_number("resolution", self.resolution, "at least 0 and under 1", lambda x: 0 <= x < 1)
        if self.max_batch is not None and self.min_batch > self.max_batch:
            raise InvalidArgumentError(
                f"min_batch={self.min_batch} is larger than max_batch={self.max_batch}: swap them"
            )
        if self.start_batch is not None and not self.min_batch <= self.start_batch <= (self.max_batch or math.inf):
            raise InvalidArgumentError(
                f"start_batch={self.start_batch} is not between min_batch={self.min_batch} and max_batch={self.max_batch}"
            )
        if self.sizes.last is not None and self.sizes.first > self.sizes.last:
            raise InvalidArgumentError(
                f"no multiple of {self.multiple_of} lies between min_batch={self.min_batch} and "
                f"max_batch={self.max_batch}: lower multiple_of or raise max_batch"
            )

    def within(self, max_batch: int | None) -> Options:
        """Return the options with sizes up to `max_batch`, that of the data; None: as they are."""
        if max_batch is None or (self.max_batch is not None and self.max_batch <= max_batch):
            return self
        if self.sizes.first > max_batch or (self.start_batch or 0) > max_batch:
            sizes = {name: getattr(self, name) for name in ("min_batch", "start_batch", "multiple_of")}
            asked = ", ".join(f"{name}={size}" for name, size in sizes.items() if size not in (None, 1))
            raise InvalidArgumentError(f"the data set has {max_batch} examples, too few for {asked}")
        return replace(self, max_batch=max_batch)

    @property
    def sizes(self) -> Sizes:
        """The sizes that may be tried."""
        return Sizes.between_limits(self.min_batch, self.max_batch, self.multiple_of)


def check_seconds(name: str, value: object) -> None:
    """Raise InvalidArgumentError unless `value` is a number of seconds."""
    _check_number(name, value, "a number of seconds, at least 0", lambda x: x >= 0)


def _check_number(name: str, value: object, wanted: str, holds: Callable[[float], bool]) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not holds(value):
        raise InvalidArgumentError(f"{name} must be {wanted}, not {value!r}")


def named_steps(step_fn: object, axis: Axis = NO_AXIS) -> dict[str, Step]:
    """Return the steps by name; a single one is named ``"step"``. Each must take the argument of the `axis`, if there is one."""
    steps: Mapping[Any, Any] = step_fn if isinstance(step_fn, Mapping) else {"step": step_fn}
    if not steps:
        raise InvalidArgumentError("step_fn is an empty mapping: give at least one step, {'train': step_fn}")
    for name, step in steps.items():
        if not isinstance(name, str):
            raise InvalidArgumentError(f"names of steps must be strings, not {name!r}")
        _check_step(name, step.run if isinstance(step, Step) else step, axis)
    return {name: step if isinstance(step, Step) else Step(run=step) for name, step in steps.items()}


def _check_step(name: str, step: object, axis: Axis) -> None:
    if not callable(step):
        raise InvalidArgumentError(
            f"{name} must be a function (model, batch_size) that runs one full optimisation step, "
            f"not {type(step).__name__}"
        )
    if inspect.isgeneratorfunction(step) or inspect.iscoroutinefunction(step):
        raise InvalidArgumentError(
            f"{name} is a generator or async, so calling it runs nothing: make it a plain function"
        )
    try:
        signature = inspect.signature(step)
    except (TypeError, ValueError):  # a callable implemented in C
        return
    try:
        signature.bind(torch.nn.Identity(), 1, **axis.arguments(0))
    except TypeError as error:
        arguments = f"(model, batch_size{axis.name and ', '}{axis.name})"
        raise InvalidArgumentError(
            f"{name}{signature} cannot be called with {arguments}: {error}. Write it as def step_fn{arguments}: ..."
        ) from None


def check_model(model: object) -> torch.nn.Module:
    """Raise InvalidArgumentError unless `model` is a module whose parameters have their shapes."""
    if isinstance(model, torch.nn.Module):
        lazy = next((name for name, one in model.named_parameters() if torch.nn.parameter.is_lazy(one)), None)
        if lazy is None:
            return model
        raise InvalidArgumentError(
            f"the parameter {lazy} of a lazy module has no shape yet: call the model once with a small batch before the probe, as "
            "before making the optimizer"
        )
    kind = f"the class {model.__name__}: make an instance" if isinstance(model, type) else type(model).__name__
    raise InvalidArgumentError(f"model must be a torch.nn.Module, not {kind}")


def check_process_group(ranks: int = 1, *, has_stepped: bool = True) -> None:
    """Raise InvalidArgumentError unless the process group has as many ranks as run each trial.

    Others would wait for a step that this one abandons. A group of several must exist once the step has been called.
    """
    distributed = torch.distributed
    made = distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 0
    if ranks == 1 and made > 1:
        raise InvalidArgumentError(SEVERAL_RANKS.format(what=f"torch.distributed has {made} ranks", ranks=made))
    rank = os.environ.get("RANK", 0)
    if ranks > 1 and made not in (0, ranks):
        raise InvalidArgumentError(OTHER_GROUP.format(rank=rank, made=made, ranks=ranks))
    if ranks > 1 and not made and has_stepped:
        raise InvalidArgumentError(NO_GROUP.format(rank=rank))
