"""Watch the steps of a probe: which optimizers step, and what torch.compile compiles."""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes

from oomprobe.ground.words import count
from oomprobe.state.tracker import Tracker, gradients_of, parameters_of

NO_BACKWARD = (
    "weak: no optimizer stepped in {calls} of {steps}, and no gradient was left: the result covers only what the step did, perhaps just a "
    "forward pass. If that is what you want, call model.eval() first"
)
NO_OPTIMIZER = (
    "weak: no optimizer stepped in {calls} of {steps}, though gradients were computed: the result does not cover an optimizer's state. "
    "Let step_fn step the optimizer that training has"
)
OTHER_OPTIMIZER = (
    "no torch.optim.Optimizer stepped in {calls} of {steps}, but weights changed: the result covers what the step did, such as an update "
    "by hand or by an engine's own optimizer"
)
NEVER_STEPPED = (
    "{kind} did not step in {calls} of the step, though its parameters have gradients, so there is no answer: its state and its step were "
    "not measured. If the step accumulates gradients over more calls, let step_fn run a whole step of the optimizer, or take one "
    "micro-batch, step each time and pass global_batch=; if it never steps it, add optimizer.step()"
)
IDLE = (
    "some optimizers ({count}) did not step in {calls} of {steps}, so the result does not cover their state: let the step "
    "function step every optimizer that training has"
)
COMPILED = (
    "the step uses torch.compile: each size was compiled from scratch, as if training at that size alone, and training will "
    "compile once more"
)


HOOKS_GONE = (
    "oomprobe's own hooks on optimizers are gone after batch {size}, so it cannot see whether they step: the step clears "
    "torch.optim's global hooks, or this is a fault of oomprobe. Please report it with the step's code"
)


def never_stepped(kind: str, calls: int) -> str:
    """Say that an optimizer of this kind has gradients to step, and did not step in this many calls."""
    return NEVER_STEPPED.format(kind=kind, calls=count(calls, "call", "calls"))


class OptimizerWatch:
    """Records the ids of the optimizers that really step, even if a GradScaler or accumulation skips some steps.

    `before_step` is called with each optimizer just before it steps. On a GPU, autograd calls hooks in a separate thread:
    an optimizer that steps in another thread counts only if it trains `model`.
    """

    def __init__(
        self, before_step: Callable[[torch.optim.Optimizer], None], model: torch.nn.Module | None = None
    ) -> None:
        self._before_step = before_step
        self._trained = set() if model is None else {id(parameter) for parameter in model.parameters()}
        self._handles: list[Any] = []
        self.stepped: set[int] = set()
        self._thread = threading.get_ident()

    def __enter__(self) -> OptimizerWatch:
        self._handles = [
            register_optimizer_step_pre_hook(
                lambda optimizer, args, kwargs: self._if_ours(self._before_step, optimizer)
            ),
            register_optimizer_step_post_hook(lambda optimizer, args, kwargs: self._if_ours(self._end, optimizer)),
        ]
        return self

    @property
    def is_alive(self) -> bool:
        """Whether torch still calls the hooks."""
        return all(handle.id in (handle.hooks_dict_ref() or ()) for handle in self._handles)

    def _if_ours(self, act: Callable[[torch.optim.Optimizer], None], optimizer: torch.optim.Optimizer) -> None:
        """Call `act`. Hooks are process-wide; ignore optimizers that train another model in another thread."""
        if threading.get_ident() == self._thread or any(id(one) in self._trained for one in parameters_of(optimizer)):
            act(optimizer)

    def _end(self, optimizer: torch.optim.Optimizer) -> None:
        self.stepped.add(id(optimizer))

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()


class Stepping:
    """Knows which optimizers each step of a probe steps: learned in its first trial, demanded of later ones.

    Optimizers are known by their ids. A step may make its optimizers on each call: then as many new ones must step.
    """

    def __init__(self, watch: OptimizerWatch, tracker: Tracker) -> None:
        self._watch, self._tracker = watch, tracker
        self._expected: dict[str, set[int]] = {}  # by the name of a step that is known; empty: it steps none
        self._last_call: set[int] = set()  # that stepped in the last call that ran
        self._idle: set[int] = set()  # that were waited for in vain
        self._waited_calls = 0
        self.calls = self.last = 0  # since `start_step`, and until the last one in which another optimizer stepped
        self._count = 0  # of optimizers that had stepped by then
        self._started_s = 0.0
        self._gradients: set[tuple[int, int, int]] = set()  # when `start_step` was called
        self._weights: set[tuple[int, int]] = set()

    def knows(self, name: str) -> bool:
        """Return whether a trial has shown what the step steps."""
        return name in self._expected

    def wanted(self, name: str) -> set[int] | None:
        """Return the optimizers that end a full step; an empty set: whichever steps first; None: the step has none."""
        if name in self._expected:
            return self._expected[name] or None
        found = {id(one) for one in self._tracker.optimizers if not wraps_another(one)}
        elsewhere = set[int]().union(*self._expected.values())  # optimizers of other steps
        return (found - elsewhere or None) if elsewhere else found

    def start_step(self, name: str, *, is_further: bool, may_wait: bool) -> set[int] | None:
        """Count the calls and the optimizers that step from here on; return those that end a full step, as `wanted` does.

        If the last call stepped some of the wanted optimizers, only those must step again: a loop may be done with an optimizer (SGD
        to warm up, then AdamW). `waiting` needs `may_wait`,
        which takes a look at every parameter.
        """
        self._watch.stepped.clear()
        self.calls = self.last = self._count = 0
        self._started_s = time.monotonic()
        if may_wait:
            self._gradients = gradients_of(self._tracker.parameters())
            self._weights = self._tracker.weights()
        wanted = self.wanted(name)
        return wanted and ((is_further and self.knows(name) and self._last_call & wanted) or wanted)

    @property
    def waited_s(self) -> float:
        """Seconds since `start_step`."""
        return time.monotonic() - self._started_s

    def has_stepped(self, wanted: set[int]) -> bool:
        """Return whether all the wanted optimizers that are alive have stepped, or as many new ones."""
        stepped = self._watch.stepped
        alive = wanted & {id(optimizer) for optimizer in self._tracker.optimizers}
        return bool(stepped) and (stepped >= alive or (bool(stepped - wanted) and len(stepped) >= len(wanted)))

    def learn_step(self, name: str, wanted: set[int] | None) -> None:
        """Take what has stepped since `start_step` as what the step steps."""
        self._waited_calls = max(self._waited_calls, self.calls)
        self._expected[name] = set(self._watch.stepped)
        self._idle = (self._idle | (wanted or set())) - self._watch.stepped

    def start_call(self) -> set[int]:
        """Begin a call; pass what is returned to `end_call`."""
        before = set(self._watch.stepped)
        self._watch.stepped.clear()
        return before

    def end_call(self, before: set[int]) -> None:
        """End a call that ran."""
        self._last_call = set(self._watch.stepped)
        self._watch.stepped |= before
        self._count_call()

    def repeat_call(self) -> None:
        """Count the optimizers of the last call again."""
        self._watch.stepped |= self._last_call
        self._count_call()

    def _count_call(self) -> None:
        self.calls += 1
        if len(self._watch.stepped) > self._count:
            self._count, self.last = len(self._watch.stepped), self.calls

    def did_all(self, name: str) -> bool:
        """Return whether the last call stepped every optimizer of a step that is known, so that repeating it is a full step."""
        return self.knows(name) and self._last_call >= self._expected[name]

    @property
    def waiting(self) -> str:
        """The kind of an optimizer that has gradients to step, while none has stepped; "" if there is none."""
        if self._watch.stepped or self._tracker.weights() - self._weights:
            return ""
        found = (one for one in self._tracker.optimizers if not wraps_another(one))
        kinds = (type(one).__name__ for one in found if gradients_of(parameters_of(one)) - self._gradients)
        return next(kinds, "")

    def note(self, step_names: Iterable[str], *, trains: bool) -> str | None:
        """Return a note if no optimizer stepped, or one did not: its state is not in the measured memory.

        Where the model does not train, no optimizer is missing.
        """
        steps, calls = " and ".join(map(repr, step_names)), count(self._waited_calls, "call", "calls")
        if not self._expected:
            return None  # more calls will tell
        if not any(self._expected.values()) and not self._watch.stepped:
            has_gradients = gradients_of(self._tracker.parameters()) - self._tracker.first_gradients
            moved = self._tracker.weights() - self._tracker.first_weights
            text = OTHER_OPTIMIZER if moved else NO_OPTIMIZER if has_gradients else NO_BACKWARD
            return text.format(calls=calls, steps=steps) if trains else None
        return IDLE.format(count=len(self._idle), calls=calls, steps=steps) if self._idle else None

    # Between processes that built the same target, an optimizer is known by its place.

    def learned(self) -> dict[str, list[int]]:
        """Return for each step the places of the optimizers that step; negative for those created during the probe."""
        places = {id(optimizer): place for place, optimizer in enumerate(self._tracker.optimizers)}
        return {
            name: [places.get(one, -1 - nth) for nth, one in enumerate(stepped)]
            for name, stepped in self._expected.items()
        }

    def learn(self, learned: Mapping[str, Sequence[int]]) -> None:
        """Take over what trials of the same target learned in another process, unless something is known already."""
        known = [id(optimizer) for optimizer in self._tracker.optimizers]
        self._expected = self._expected or {
            name: {known[place] if 0 <= place < len(known) else place for place in places}
            for name, places in learned.items()
        }


def wraps_another(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether this wraps another optimizer, as accelerate's does; only the inner one fires the hooks."""
    return any(isinstance(value, torch.optim.Optimizer) for value in vars(optimizer).values())


@contextmanager
def outside_modes() -> Iterator[None]:
    """Hide oomprobe's own tensor operations from modes that the user's step has active."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


@contextmanager
def accumulating(optimizers: Iterable[torch.optim.Optimizer], model: torch.nn.Module) -> Iterator[None]:
    """Make `zero_grad` and the optimizers' `step` do nothing, so that full steps accumulate like micro-batches.

    A `step` attribute of the model stays: it belongs to the user, such as the method of a cell or a counting buffer.
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
    """Drops what torch.compile compiled for one size before the next, and knows whether the step is compiled at all.

    Examples:
        >>> compiled = Compiled()
        >>> compiled.start_size((0, 1)), compiled.is_used  # nothing was compiled
        (False, False)
    """

    def __init__(self) -> None:
        self._frames = _count("frames", "total")  # that dynamo tried until its last reset, successfully or not
        self._graphs = _count("stats", "unique_graphs")  # compiled before this probe
        self._size: tuple[int, int] | None = None

    def start_size(self, size: tuple[int, int], *, anew: bool = False) -> bool:
        """Drop code compiled for other rows and sizes, and with `anew` for this one. Return whether there was any."""
        dropped = (anew or size != self._size) and self.drop()
        self._size = size
        return dropped

    @property
    def is_used(self) -> bool:
        """Whether a graph was compiled in this probe."""
        return _count("stats", "unique_graphs") > self._graphs

    def drop(self) -> bool:
        """Drop all compiled code. Return whether there was any."""
        frames = _count("frames", "total")
        if frames == self._frames:
            return False
        torch._dynamo.reset()
        self._frames = frames
        return True


def _count(kind: str, name: str) -> int:
    """Return a counter of dynamo, which survives its reset; 0 if dynamo is not loaded."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    return 0 if counters is None else int(counters[kind][name])


def preload_dynamo() -> None:
    """Import torch._dynamo before the first trial, because the first optimizer imports it anyway.

    If a trial imported it, each later garbage collection would traverse its objects (50 ms), and on host memory its 20 MiB
    would look like a leak of the step. Ignore an import that fails, such as for lack of memory.
    """
    with suppress(Exception):
        importlib.import_module("torch._dynamo")
