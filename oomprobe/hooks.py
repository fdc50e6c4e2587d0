"""What a probe sees of the steps it calls: optimizers that step, and what torch.compile compiles."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from oomprobe.state.tracker import drop_later_state, parameters_of, state_names

COMPILED = (
    "the step is compiled by torch.compile: each size was compiled anew, as training at that size alone would, and training "
    "compiles once more"
)


class OptimizerWatch:
    """Sees every `torch.optim.Optimizer` that steps, even where a GradScaler or an accumulation skips some steps.

    `before_step` is called with each just before it steps. On a GPU, autograd calls its hooks in a thread of its own: an
    optimizer that steps in another thread counts only if it trains `model`.
    """

    def __init__(
        self, before_step: Callable[[torch.optim.Optimizer], None], model: torch.nn.Module | None = None
    ) -> None:
        self._before_step = before_step
        self._trained = set() if model is None else {id(parameter) for parameter in model.parameters()}
        self._handles: list[Any] = []
        self.stepped: set[int] = set()
        # Those in the midst of a step, and what they kept before it.
        self._begun: MutableMapping[torch.optim.Optimizer, dict[int, set[Any]]] = WeakIdKeyDictionary()
        self._thread = threading.get_ident()

    def __enter__(self) -> OptimizerWatch:
        self._handles = [
            register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: self._here(self._begin, optimizer)),
            register_optimizer_step_post_hook(lambda optimizer, args, kwargs: self._here(self._after_step, optimizer)),
        ]
        return self

    def _here(self, act: Callable[[torch.optim.Optimizer], None], optimizer: torch.optim.Optimizer) -> None:
        """The hooks are of the whole process: what trains another model in another thread is no part of this probe."""
        if threading.get_ident() == self._thread or any(id(one) in self._trained for one in parameters_of(optimizer)):
            act(optimizer)

    def _begin(self, optimizer: torch.optim.Optimizer) -> None:
        self._before_step(optimizer)
        self._begun[optimizer] = state_names(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._begun.pop(optimizer, None)
        self.stepped.add(id(optimizer))

    def drop_half_made(self) -> None:
        """After a call that failed: the state that an optimizer was making is made anew by its next step.

        An AdamW that ran out of memory on the way has a step count for a parameter and no averages: its next step at any
        size would end in a ``KeyError``, and what it has made already is missing from the memory of that.
        """
        for optimizer, before in self._begun.items():
            drop_later_state(optimizer, before)
        self._begun.clear()

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()


@contextmanager
def outside_modes() -> Iterator[None]:
    """For work of our own in the midst of a step: modes that look at the step's operators do not see it."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


@contextmanager
def accumulating(optimizers: Iterable[torch.optim.Optimizer], model: torch.nn.Module) -> Iterator[None]:
    """Make `step` and `zero_grad` do nothing, so that calls of a full step accumulate like micro-batches.

    Of the model only `zero_grad`: a module's `step` is the user's own, a method of a cell or a buffer that counts.
    """
    replaced: list[tuple[Any, str]] = [(model, "zero_grad")]
    replaced += [(optimizer, name) for optimizer in optimizers for name in ("step", "zero_grad")]
    before = [(holder, name, vars(holder).get(name)) for holder, name in replaced]
    try:
        for holder, name in replaced:
            vars(holder)[name] = lambda *args, **kwargs: None
        yield
    finally:
        for holder, name, own in before:
            if own is None:
                vars(holder).pop(name, None)
            else:
                vars(holder)[name] = own


class Compiled:
    """Whether torch.compile compiles the step, and that it forgets each size before the next.

    Example:
        >>> compiled = Compiled()
        >>> compiled.start_size(1), compiled.is_used  # where nothing is compiled
        (False, False)
    """

    def __init__(self) -> None:
        self._frames = _count("frames", "total")  # tried since dynamo last forgot; also those that did not compile
        self._graphs = _count("stats", "unique_graphs")  # compiled before this probe
        self._size: int | None = None

    def start_size(self, size: int, *, anew: bool = False) -> bool:
        """Before the steps of a trial: compile this size as if it were the only one; whether compiled code was dropped.

        `anew` drops also what was compiled for this very size.
        """
        forgets = (anew or size != self._size) and self._forget()
        self._size = size
        return forgets

    def finish(self) -> None:
        """At the end of the probe: training is to compile as if there had been none."""
        self._forget()

    @property
    def is_used(self) -> bool:
        """Whether a graph was compiled in this probe."""
        return _count("stats", "unique_graphs") > self._graphs

    def _forget(self) -> bool:
        frames = _count("frames", "total")
        if frames == self._frames:
            return False
        torch._dynamo.reset()
        self._frames = frames
        return True


def _count(kind: str, name: str) -> int:
    """A counter of dynamo, which its own reset leaves alone; 0 where dynamo is not loaded."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    return 0 if counters is None else int(counters[kind][name])


def preload_dynamo() -> None:
    """Import torch._dynamo now, which the first optimizer does, and not between trials.

    If a trial imported it, each later garbage collection would traverse its objects (50 ms), and on host memory its 20 MiB
    would pass for a leak of the step. An import that fails for want of memory is ignored.
    """
    with suppress(Exception):
        importlib.import_module("torch._dynamo")
