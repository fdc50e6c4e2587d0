"""Watch the steps of a probe: which optimizers step, and what torch.compile compiles."""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from itertools import filterfalse
from typing import Any

import torch
from torch._guards import TracingContext
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from oomprobe.devices import Device
from oomprobe.errors import NotRunError, NotTrainedError
from oomprobe.ground.frames import user_line
from oomprobe.ground.replaced import replaced
from oomprobe.ground.words import count
from oomprobe.records.notes import Note, remark, warning
from oomprobe.records.options import MAX_CALLS, MAX_WAITING_CALLS, WAITING_S, Step
from oomprobe.state.tracker import Tracker, gradients_of, parameters_of
from oomprobe.verdicts.failure import clear_frames

NO_BACKWARD = (
    "weak: no optimizer stepped in {calls} of {steps}, and no gradient was left: the result covers only what the step did, perhaps just a "
    "forward pass. If that is what you want, call model.eval() first"
)
NO_OPTIMIZER_STEPPED = (
    "weak: no optimizer stepped in {calls} of {steps}, though gradients were computed: the result does not cover an optimizer's state. "
    "Let step_fn step the optimizer that training has"
)
NO_OPTIMIZER_OF_TORCH = (
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


CAUGHT = "{error} (raised at {line}; the step caught it and went on)"
STOPPED_STEPPING = (
    "at batch {size} the optimizer that stepped before did not step in {calls} calls, so this size "
    "was not trained: does the step skip it (a scaler that sees infinities)?"
)
REPLAYS_GRAPH = (
    "at batch {size} no optimizer stepped in {calls} calls, and this process has captured a CUDA graph: a step that replays one "
    "cannot be probed, since a graph is made for one batch size and never calls the optimizer's step(). Pass the step that you "
    "capture as step_fn"
)


UNWATCHED = {"OptimizedModule", "RecursiveScriptModule", "FullyShardedDataParallel", "DTensor"}


class _WentOnError(BaseException):
    """Ends a call that caught an out-of-memory error and met another.

    Not an Exception, so that no step catches it.
    """


class OutOfMemoryWatch:
    """Notices the out-of-memory errors of a call, in any thread, though the step may catch them.

    A step that skips a batch or halves it did not run the size, and one that tries again may do so
    for ever. Errors made for Python count: the allocator's own count has those that cuDNN handles.

    Attributes:
        error: The first one, in words; "" if there was none.
    """

    def __init__(self) -> None:
        self.error = ""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the code inside, and raise the error if that has gone on."""
        make, self.error = torch.OutOfMemoryError.__init__, ""
        thread = threading.get_ident()

        def notice(error: torch.OutOfMemoryError, *args: Any) -> None:
            make(error, *args)
            if TracingContext.try_get() is not None:
                return  # Inductor tries kernels, and handles what they raise.
            if self.error and threading.get_ident() == thread:
                raise _WentOnError
            if not self.error:
                self.error = CAUGHT.format(error=error, line=user_line())

        try:
            with replaced([(torch.OutOfMemoryError, "__init__", notice)]):
                yield
        except _WentOnError as ended:
            clear_frames(ended)
        if self.error:
            raise torch.OutOfMemoryError(self.error)


class InputWatch:
    """Counts what reaches a model in a call of a step, as `CallRecord` has it.

    Where a model is compiled or sharded, a hook would change what is compiled, or come between
    others: it is not watched.
    """

    def __init__(self) -> None:
        self.examples = self.values = 0

    @contextmanager
    def watching(self, model: torch.nn.Module) -> Iterator[None]:
        """Count what reaches the model inside, by a hook that is gone afterwards."""
        self.examples = self.values = 0
        # No module is kept in a variable here: the step may drop it.
        kinds = {type(part).__name__ for part in (*model.modules(), *model.parameters())}
        is_compiled = any(module._compiled_call_impl for module in model.modules())
        if is_compiled or kinds & UNWATCHED:
            yield
            return
        handle = model.register_forward_pre_hook(self._count, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def _count(self, model: object, *inputs: object) -> None:
        tensors = []
        for leaf in tree_leaves(inputs):
            if isinstance(leaf, torch.Tensor) and leaf.ndim:
                tensors.append(leaf)
        if tensors:
            self.examples += tensors[0].size(0)
            self.values += sum(map(torch.numel, tensors))


class OptimizerWatch:
    """Records the ids of the optimizers that really step, even if a GradScaler or accumulation skips some steps.

    `before_step` is called with each optimizer just before it steps. On a GPU, autograd calls hooks in a separate thread:
    an optimizer that steps in another thread counts only if it trains `model`.
    """

    def __init__(
        self,
        before_step: Callable[[torch.optim.Optimizer], None],
        model: torch.nn.Module | None = None,
    ) -> None:
        self._before_step = before_step
        self._trained = set() if model is None else {*map(id, model.parameters())}
        self._handles: list[Any] = []
        self.stepped: set[int] = set()
        self._thread = threading.get_ident()

    def __enter__(self) -> OptimizerWatch:
        self._handles = [
            register_optimizer_step_pre_hook(
                lambda optimizer, args, kwargs: self._if_ours(self._before_step, optimizer)
            ),
            register_optimizer_step_post_hook(
                lambda optimizer, args, kwargs: self._if_ours(self._end, optimizer)
            ),
        ]
        return self

    def _if_ours(
        self, act: Callable[[torch.optim.Optimizer], None], optimizer: torch.optim.Optimizer
    ) -> None:
        """Call `act`. Hooks are process-wide; ignore optimizers that train another model in another thread."""
        if threading.get_ident() == self._thread or not self._trained.isdisjoint(
            map(id, parameters_of(optimizer))
        ):
            act(optimizer)

    def _end(self, optimizer: torch.optim.Optimizer) -> None:
        self.stepped.add(id(optimizer))

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()


NO_OPTIMIZER = None  # of a step that steps none
ANY_OPTIMIZER: frozenset[int] = frozenset()  # whichever steps first completes a full step


class Stepping:
    """Knows which optimizers each step of a probe steps: learned in its first trial, demanded of later ones.

    Optimizers are known by their ids. A step may make its optimizers on each call: then as many new ones must step.
    """

    def __init__(self, watch: OptimizerWatch, tracker: Tracker, device: Device) -> None:
        self._watch, self._tracker, self._device = watch, tracker, device
        # By the name of a step that is known; empty: it steps none.
        self._expected: dict[str, set[int]] = {}
        self._last_call: set[int] = set()  # that stepped in the last call that ran
        self._idle: set[int] = set()  # that were waited for in vain
        self._waited_calls = 0
        self._size, self._is_learning = 0, False
        # Of the turn: the step, and its full steps.
        self._name, self._longest = "", 1
        self._max_calls = self._completed = self._turn_calls = 0
        # Of the full step: what has stepped, the calls until now, and until the last one in which another optimizer stepped.
        self._stepped: set[int] = set()
        self._wanted: Set[int] | None = NO_OPTIMIZER
        self._calls = self._last = 0
        self._started_s = 0.0
        self._gradients: set[tuple[int, int, int]] = set()  # when it began
        self._weights: set[tuple[int, int]] = set()

    # --- turns and calls ---

    def start_turn(self, name: str, step: Step, batch_size: int, *, learns: bool) -> None:
        """Begin the calls of a step; where the trial `learns`, they go on until an optimizer has stepped, or cannot."""
        self._name, self._max_calls = name, step.max_calls
        self._size, self._is_learning = batch_size, learns
        self._completed, self._turn_calls, self._longest = 0, 0, 1
        self._start_full_step()

    def start_call(self) -> None:
        """Begin a call that runs."""
        self._watch.stepped.clear()

    def end_call(self) -> int | None:
        """End a call that ran, and return `CallRecord.stepped`.

        Raises:
            NotTrainedError: an optimizer that stepped before no longer does, so the size was not really trained.
            NotRunError: an optimizer that has gradients to step does not step.
        """
        self._last_call = set(self._watch.stepped)
        return self._count_call()

    def end_turn(self) -> None:
        """Raise NotTrainedError if no full step was made in a turn that had as many calls as one takes."""
        is_known = self._name in self._expected
        if (
            self._wanted is not NO_OPTIMIZER
            and is_known
            and not self._completed
            and not self._is_learning
        ):
            raise self._not_trained(self._turn_calls)

    def _count_call(self) -> int | None:
        self._calls += 1
        self._turn_calls += 1
        if self._last_call - self._stepped:
            self._stepped |= self._last_call
            self._last = self._calls
        if not self._is_complete():
            return None
        # Only here: if a call raises, the next trial learns it.
        if self._name not in self._expected:
            self._waited_calls = max(self._waited_calls, self._calls)
            self._expected[self._name] = set(self._stepped)
            wanted = self._wanted or ANY_OPTIMIZER
            if not self._made_anew(wanted):
                self._idle = (self._idle | wanted) - self._stepped
        self._completed += 1
        last = self._last
        self._longest = last or 1
        self._start_full_step(is_further=True)
        return last

    def _start_full_step(self, *, is_further: bool = False) -> None:
        self._stepped, self._calls, self._last, self._started_s = set(), 0, 0, time.monotonic()
        if self._is_learning:  # takes a look at every parameter
            self._gradients = gradients_of(self._tracker.parameters())
            self._weights = self._tracker.weights()
        self._wanted = self._wanted_now()
        if is_further and self._wanted is not NO_OPTIMIZER and self._name in self._expected:
            # A loop may be done with an optimizer (SGD to warm up, then AdamW): only what stepped last must step again.
            self._wanted = (self._wanted & self._last_call) or self._wanted

    # --- which optimizers complete a full step ---

    def _wanted_now(self) -> Set[int] | None:
        """Return the optimizers that complete a full step, or one of the two values with a name."""
        if self._name in self._expected:
            return self._expected[self._name] or NO_OPTIMIZER
        within_reach = {*map(id, filterfalse(wraps_another, self._tracker.optimizers))}
        of_other_steps = set[int]().union(*self._expected.values())
        if not of_other_steps:
            return within_reach or ANY_OPTIMIZER
        return (within_reach - of_other_steps) or NO_OPTIMIZER

    def _is_complete(self) -> bool:
        """Return whether the last call completed a full step; where the trial learns, also if it waits for an optimizer in vain."""
        if self._wanted is not NO_OPTIMIZER and self._have_stepped(self._wanted):
            return True
        if not self._is_learning:
            return False  # more calls follow in any case
        if self._wanted is NO_OPTIMIZER:
            return True
        if (
            self._wanted == ANY_OPTIMIZER
            and not self._last
            and not gradients_of(self._tracker.parameters())
        ):
            return True  # it may only run the model forward
        if self._calls < max(self._max_calls, self._longest) or self._waits():
            return False
        if self._name in self._expected:
            raise self._not_trained(self._calls)
        waiting = self._waiting() if self._calls >= MAX_CALLS else None
        if waiting is not None:
            raise NotRunError(
                NEVER_STEPPED.format(kind=waiting, calls=count(self._calls, "call", "calls"))
            )
        return True

    def _have_stepped(self, wanted: Set[int]) -> bool:
        """Return whether all the wanted optimizers that are alive have stepped, or as many new ones."""
        if not self._stepped:
            return False
        alive = wanted & {*map(id, self._tracker.optimizers)}
        all_known = self._stepped >= alive
        return all_known or self._made_anew(wanted)

    def _made_anew(self, wanted: Set[int]) -> bool:
        """Return whether optimizers that the step has made stepped in the place of those wanted."""
        return bool(self._stepped - wanted) and len(self._stepped) >= len(wanted)

    def _waits(self) -> bool:
        """Return whether to go on calling a step of the user's, because an optimizer within reach has gradients to step."""
        if self._max_calls != MAX_CALLS or self._calls >= MAX_WAITING_CALLS:
            return False
        return time.monotonic() - self._started_s < WAITING_S and self._waiting() is not None

    def _waiting(self) -> str | None:
        """Return the kind of an optimizer that has gradients to step, while none has stepped; None if there is none."""
        has_moved = self._tracker.weights() - self._weights
        if self._stepped or has_moved:
            return None
        for optimizer in self._tracker.optimizers:
            has_new_gradients = gradients_of(parameters_of(optimizer)) - self._gradients
            if has_new_gradients and not wraps_another(optimizer):
                return type(optimizer).__name__
        return None

    def _not_trained(self, calls: int) -> NotTrainedError:
        reason = REPLAYS_GRAPH if self._device.has_graphs() else STOPPED_STEPPING
        return NotTrainedError(reason.format(size=self._size, calls=calls))

    # --- notes, and what other processes need to know ---

    def note(self, step_names: Iterable[str], *, trains: bool) -> Note | None:
        """Return a note if no optimizer stepped, or one did not: its state is not in the measured memory.

        Where the model does not train, no optimizer is missing.
        """
        if not self._expected:
            return None  # more calls will tell
        said = {
            "steps": " and ".join(map(repr, step_names)),
            "calls": count(self._waited_calls, "call", "calls"),
        }
        has_stepped = bool(self._stepped) or any(self._expected.values())
        if has_stepped and self._idle:
            return remark(IDLE.format(count=len(self._idle), **said))
        if has_stepped or not trains:
            return None
        if self._tracker.weights() - self._tracker.first_weights:
            return remark(NO_OPTIMIZER_OF_TORCH.format(**said))
        if gradients_of(self._tracker.parameters()) - self._tracker.first_gradients:
            return warning(NO_OPTIMIZER_STEPPED.format(**said))
        return warning(NO_BACKWARD.format(**said))

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
        known = [*map(id, self._tracker.optimizers)]
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
def accumulating(
    optimizers: Iterable[torch.optim.Optimizer], model: torch.nn.Module
) -> Iterator[None]:
    """Make `zero_grad` and the optimizers' `step` do nothing, so that full steps accumulate like micro-batches.

    A `step` attribute of the model stays: it belongs to the user, such as the method of a cell or a counting buffer.
    """
    ignored: list[tuple[Any, str]] = [(model, "zero_grad")]
    ignored += [(optimizer, name) for optimizer in optimizers for name in ("step", "zero_grad")]
    with replaced((holder, name, lambda *args, **kwargs: None) for holder, name in ignored):
        yield


class Compiled:
    """Drops what torch.compile compiled for one size before the next, and knows whether the step is compiled at all.

    Examples:
        >>> compiled = Compiled()
        >>> compiled.start_size((0, 1)), compiled.is_used  # nothing was compiled
        (False, False)
    """

    def __init__(self) -> None:
        # That dynamo tried until its last reset, successfully or not.
        self._frames = _count("frames", "total")
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
