"""Allocator events of each call of a step, and their prediction for other batch sizes.

The events of a step usually differ between batch sizes only in their sizes, which grow linearly. Tapes of two batch sizes
determine the lines. Other batch sizes are then tried by replaying their predicted tape on the allocator alone, and each
further batch size that runs checks the lines. Steps that do not follow lines (a batch split into chunks, a padded shape)
are not predicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from oomprobe.simulation.allocator import CachingAllocator
from oomprobe.simulation.reductions import Processors
from oomprobe.simulation.scratch import Kernel, needs_of

# Events are (ALLOCATED, index, 0), (FREED, calls ago, index), (RELEASED, 0, 0) for the cache, and, for a kernel with scratch
# memory, (KERNEL_STARTED, index, kernel) and, after its results are allocated, (KERNEL_ENDED, index, kernel). An index points
# into the list of sizes; a kernel's sizes are the numbers from which its rule computes its scratch memory.
ALLOCATED, FREED, RELEASED, KERNEL_STARTED, KERNEL_ENDED = range(5)
Event = tuple[int, int, Any]
NUMBERS_BYTES = 4096  # losses and counts, of which a loop may hold one more at the peak
LiveBlocks = dict[tuple[int, int], int]  # handles by (calls ago, index in that call)


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One call of a step: its events in order, and their sizes."""

    events: tuple[Event, ...]
    sizes: tuple[int, ...]

    @property
    def core(self) -> tuple[Event, ...]:
        """Events except frees of earlier calls' blocks, which a clean-up between calls may already have freed."""
        core = []
        for event in self.events:
            kind, ago, _ = event
            if kind != FREED or ago == 0:
                core.append(event)
        return tuple(core)

    @property
    def closed(self) -> bool:
        """Whether the call frees exactly the blocks that an identical call before it leaves."""
        left, freed = set(), set()  # blocks of this call, and blocks of earlier calls, as the next call names them
        for kind, index, detail in self.events:
            if kind == ALLOCATED:
                left.add((1, index))
            elif kind == FREED and index == 0:
                left.discard((1, detail))
            elif kind == FREED:
                freed.add((index, detail))
        return left == freed


class Tape:
    """Recorder of the current call."""

    def __init__(self) -> None:
        self.call_number = 0
        self._events: list[Event] = []
        self._sizes: list[int] = []

    def start_trial(self, count: int) -> list[tuple[int, int]]:
        """Start a trial; return names for its `count` existing blocks, the same in every trial."""
        self.call_number = 0
        self._events, self._sizes = [], [0] * count
        return [(0, index) for index in range(count)]

    def start(self) -> None:
        """Start a call, dropping events since the last one."""
        self.call_number += 1
        self._events, self._sizes = [], []

    def allocated(self, nbytes: int) -> tuple[int, int]:
        """Record an allocated block; return its name."""
        index = len(self._sizes)
        self._sizes.append(nbytes)
        self._events.append((ALLOCATED, index, 0))
        return self.call_number, index

    def freed(self, name: tuple[int, int]) -> None:
        call_number, index = name
        self._events.append((FREED, self.call_number - call_number, index))

    def kernel_started(self, kernel: Kernel, numbers: Sequence[int]) -> int:
        """Record the start of a kernel with scratch memory; return the index of its numbers."""
        index = len(self._sizes)
        self._sizes.extend(numbers)
        self._events.append((KERNEL_STARTED, index, kernel))
        return index

    def kernel_ended(self, kernel: Kernel, index: int) -> None:
        self._events.append((KERNEL_ENDED, index, kernel))

    def cache_released(self) -> None:
        self._events.append((RELEASED, 0, 0))

    def finish(self) -> RecordedCall:
        return RecordedCall(tuple(self._events), tuple(self._sizes))


def replay_call(allocator: CachingAllocator, call: RecordedCall, live: LiveBlocks) -> LiveBlocks:
    """Replay a call's events on an allocator, which is changed in place and may raise.

    Args:
        allocator: Allocator in the state before the call.
        call: The call to replay.
        live: Blocks left by earlier calls.

    Returns:
        The blocks alive after the call, named for the next call.
    """
    live, scratch_blocks = dict(live), dict[int, list[int]]()
    sizes, malloc, free = call.sizes, allocator.malloc, allocator.free
    for kind, index, detail in call.events:
        if kind == ALLOCATED:
            live[0, index] = malloc(sizes[index])
        elif kind == FREED:
            free(live.pop((index, detail), 0))  # `index` is calls ago; 0 is no block
        elif kind == KERNEL_STARTED:
            needs = needs_of(detail, sizes[index : index + detail.count])
            scratch_blocks[index] = allocator.malloc_all(needs.throughout)
            allocator.borrow(needs.before)
        elif kind == KERNEL_ENDED:
            needs = needs_of(detail, sizes[index : index + detail.count])
            allocator.borrow(needs.after)
            for block in scratch_blocks.pop(index):
                free(block)
            allocator.borrow(needs.last)
        elif kind == RELEASED:
            allocator.empty_cache()
    return {(ago + 1, index): block for (ago, index), block in live.items()}


def peak_bytes(calls: Sequence[RecordedCall]) -> int:
    """Return the most bytes that calls, made one after the other, request at any time."""
    allocator, live = CachingAllocator(2**62), LiveBlocks()
    allocator.log = []
    for call in calls:
        live = replay_call(allocator, call, live)
    return max(accumulate(nbytes for _, nbytes in allocator.log), default=0)


@dataclass(frozen=True, slots=True)
class Line:
    """A call whose sizes are linear in the batch size."""

    call: RecordedCall
    batch_size: int
    slopes: tuple[int, ...]

    def at(self, batch_size: int) -> RecordedCall:
        """Return the call predicted for a batch size."""
        more = batch_size - self.batch_size
        sizes = (size + slope * more for size, slope in zip(self.call.sizes, self.slopes, strict=True))
        return RecordedCall(self.call.events, tuple(sizes))

    def on(self, processors: Processors) -> Line:
        """Return the line on a card of the same compute capability with these processors."""
        events = []
        for kind, index, detail in self.call.events:
            if isinstance(detail, Kernel):
                detail = detail.on(processors)
            events.append((kind, index, detail))
        return replace(self, call=replace(self.call, events=tuple(events)))


def lines_through(
    size: int, calls: Sequence[RecordedCall], other_size: int, other_calls: Sequence[RecordedCall]
) -> list[Line] | None:
    """Return the lines through calls of two batch sizes; None if the events differ or a slope is not whole.

    Example:
        >>> events = ((ALLOCATED, 0, 0), (FREED, 0, 0))
        >>> lines_through(1, [RecordedCall(events, (12,))], 2, [RecordedCall(events, (16,))])[0].at(100).sizes
        (408,)
    """
    if len(calls) != len(other_calls):
        return None
    lines = []
    for call, other_call in zip(calls, other_calls, strict=True):
        if call.events != other_call.events:
            return None
        slopes = []
        for nbytes, other_bytes in zip(call.sizes, other_call.sizes, strict=True):
            slope, rest = divmod(other_bytes - nbytes, other_size - size)
            if rest:
                return None
            slopes.append(slope)
        lines.append(Line(call, size, tuple(slopes)))
    return lines


class Predictor:
    """Prediction of the calls of a cold trial.

    A trial consists of a first call, which creates gradients, optimizer state and workspaces, of further calls until two
    are equal, and of any number of repetitions of that steady call.

    Attributes:
        lines: One for each of these calls up to the steady one; None while unknown or after a contradiction.
    """

    def __init__(self, *, gives_up: bool = False) -> None:
        self.lines: list[Line] | None = None
        self._trials: dict[int, list[RecordedCall]] = {}
        self._given_up = gives_up

    def learn(self, batch_size: int, calls: Sequence[RecordedCall]) -> bool:
        """Learn from a trial that ran; return False if its calls contradict the lines and take another peak."""
        steady = self.steady(calls)
        if steady is None or self._given_up:
            return True
        trial = [*calls, steady]
        while len(trial) > 1 and trial[-2] == steady:
            trial.pop()
        if self.lines is not None:
            predicted = [line.at(batch_size) for line in self.lines]
            # A loop whose smaller last batch only some sizes leave makes other calls, with the same peak.
            if abs(peak_bytes(predicted) - peak_bytes(trial)) > NUMBERS_BYTES:
                self.lines, self._given_up = None, True
                return False
        self._trials[batch_size] = trial
        if self.lines is None and len(self._trials) > 1:
            (size, first), (other_size, second) = list(self._trials.items())[-2:]
            self.lines = lines_through(size, first, other_size, second)
        return True

    def on(self, processors: Processors) -> Predictor | None:
        """Return the prediction for a card of the same compute capability with these processors; None if there is none."""
        if self.lines is None:
            return None
        predictor = Predictor(gives_up=True)
        predictor.lines = [line.on(processors) for line in self.lines]
        return predictor

    def steady(self, calls: Sequence[RecordedCall]) -> RecordedCall | None:
        """Return the call that would repeat: the last one if it equals the one before."""
        if len(calls) < 2:
            return None
        before, last = calls[-2:]
        if (before.core, before.sizes) != (last.core, last.sizes) or not last.closed:
            return None
        return last

    def calls(self, batch_size: int, count: int) -> list[RecordedCall] | None:
        """Predict the first `count` calls of a cold trial; None if unknown."""
        if self.lines is None:
            return None
        trial = [line.at(batch_size) for line in self.lines]
        return [*trial, *trial[-1:] * count][:count]
