"""A size, tried on the allocator alone: the calls that a cold trial of it would make, replayed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from oomprobe.simulation.allocator import AllocatorOutOfMemory, CachingAllocator
from oomprobe.simulation.tape import BORN, DIED, ENDED, RELEASED, STARTED, Call, Line, line_through

Alive = dict[tuple[int, int], int]  # blocks by (calls ago, index in that call)
SIZES_FOR_A_LINE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """How a replay ended.

    Attributes:
        error: The allocator's refusal; None when the size fits.
        peak_allocated_bytes: Most memory in live blocks.
        peak_reserved_bytes: Most memory held by the allocator.
        alloc_retries: Times the cache had to be given back.
    """

    error: str | None
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    alloc_retries: int


def replay_call(allocator: CachingAllocator, call: Call, alive: Alive) -> Alive:
    """Do to an allocator what a call did to it.

    Args:
        allocator: Changed in place.
        call: Its events.
        alive: Blocks that earlier calls left, by (calls ago as the call that comes counts, index).

    Returns:
        The blocks left now, named for the next call.

    Raises:
        AllocatorOutOfMemory: there was no room.
    """
    alive, held = dict(alive), dict[int, list[int]]()
    sizes, malloc, free = call.sizes, allocator.malloc, allocator.free
    for kind, one, two in call.events:
        if kind == BORN:
            alive[0, one] = malloc(sizes[one])
        elif kind == DIED:
            block = alive.pop((one, two), None)
            if block is not None:
                free(block)
        elif kind == STARTED:
            needs = two.needs(sizes[one : one + two.count])
            held[one] = [malloc(nbytes) for nbytes in needs.held]
            _pass(allocator, needs.before)
        elif kind == ENDED:
            _pass(allocator, two.needs(sizes[one : one + two.count]).groups)
            for block in held.pop(one):
                free(block)
        elif kind == RELEASED:
            allocator.empty_cache()
    return {(ago + 1, index): block for (ago, index), block in alive.items()}


def _pass(allocator: CachingAllocator, groups: tuple[tuple[int, ...], ...]) -> None:
    """Take and free one group after the other."""
    for group in groups:
        for block in [allocator.malloc(nbytes) for nbytes in group]:
            allocator.free(block)


@dataclass(slots=True)
class Replayer:
    """Learns the lines that the calls of a cold trial follow, and tries sizes on them.

    A trial is its first call, which makes gradients, optimizer state and workspaces, those that follow until one is like
    the one before, and that steady one as often as it likes.

    Attributes:
        lines: What was learned, one for each of these calls; None while they are not known, or were contradicted.
    """

    lines: tuple[Line, ...] | None = None
    _trials: dict[int, tuple[Call, ...]] = field(default_factory=dict)
    _given_up: bool = False

    def learn(self, batch_size: int, calls: Sequence[Call]) -> bool:
        """A trial was run for real, and these were its calls.

        Returns:
            Whether they are what the lines say, as far as there are any.
        """
        trial = self._pattern(calls)
        if trial is None or self._given_up:
            return True
        if self.lines is not None and tuple(line.at(batch_size) for line in self.lines) != trial:
            self.give_up()
            return False
        self._trials[batch_size] = trial
        if self.lines is None:
            self.lines = self._lines()
        return True

    def _lines(self) -> tuple[Line, ...] | None:
        last = list(self._trials.items())[-SIZES_FOR_A_LINE:]
        if len({len(trial) for _, trial in last}) > 1:
            return None
        lines = [line_through([(size, trial[nth]) for size, trial in last]) for nth in range(len(last[0][1]))]
        return None if None in lines else tuple(line for line in lines if line is not None)

    def _pattern(self, calls: Sequence[Call]) -> tuple[Call, ...] | None:
        """The calls of a trial up to the steady one; None where none is."""
        steady = self.steady(calls)
        if steady is None:
            return None
        pattern = [*calls, steady]
        while len(pattern) > 1 and pattern[-2] == steady:
            pattern.pop()
        return tuple(pattern)

    def give_up(self) -> None:
        """A size did not do what the lines say: from here on every size is run."""
        self.lines, self._given_up = None, True

    def steady(self, calls: Sequence[Call]) -> Call | None:
        """The call that the next one would be again: the last one, if it is like the one before or like a known one."""
        last = calls[-1] if calls else None
        if last is None:
            return None
        if len(calls) > 1 and (calls[-2].core, calls[-2].sizes) == (last.core, last.sizes) and last.closed:
            return last
        known = next((trial[-1] for trial in self._trials.values() if trial[-1].core == last.core), None)
        return None if known is None else Call(known.events, last.sizes)

    def try_size(self, batch_size: int, allocator: CachingAllocator, alive: Alive, *, calls: int) -> Replayed | None:
        """Replay a trial; None where its calls are not known.

        Args:
            batch_size: To try.
            allocator: As it is before the trial; left as it is.
            alive: Its blocks, by name.
            calls: How many the trial has.
        """
        if self.lines is None:
            return None
        trial = [line.at(batch_size) for line in self.lines]
        return try_calls(allocator, [*trial, *trial[-1:] * calls][:calls], alive)


def try_calls(allocator: CachingAllocator, calls: Sequence[Call], alive: Alive) -> Replayed:
    """Replay calls one after the other, on a copy of the allocator.

    Args:
        allocator: As it is before; left as it is.
        calls: Their events and sizes.
        alive: What is there before, by (calls ago, index).
    """
    allocator = allocator.copy()
    allocator.reset_peaks()
    retries, error = allocator.alloc_retries, None
    try:
        for call in calls:
            alive = replay_call(allocator, call, alive)
    except AllocatorOutOfMemory as refusal:
        error = str(refusal)
    return Replayed(
        error=error,
        peak_allocated_bytes=allocator.peak_allocated_bytes,
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        alloc_retries=allocator.alloc_retries - retries,
    )
