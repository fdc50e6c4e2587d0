"""A size, tried on the allocator alone: the call it would make, replayed from where the last real call left off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from oomprobe.simulation.allocator import AllocatorOutOfMemory, CachingAllocator
from oomprobe.simulation.tape import BORN, DIED, ENDED, RELEASED, STARTED, TRANSIENT, Call, Line, line_through

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


def replay_call(allocator: CachingAllocator, call: Call, alive: Alive, *, soft: bool = False) -> Alive:
    """Do to an allocator what a call did to it.

    Args:
        allocator: Changed in place.
        call: Its events.
        alive: Blocks that earlier calls left, by (calls ago as the call that comes counts, index).
        soft: Whether workspaces of convolutions are taken where there is room.

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
        elif kind == TRANSIENT:
            if soft and allocator.fits(sizes[one]):
                free(malloc(sizes[one]))
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
    """Learns the line that the calls of a step follow, and tries sizes on it.

    Attributes:
        line: What was learned; None while it is not known, or was contradicted.
    """

    line: Line | None = None
    _calls: dict[int, Call] = field(default_factory=dict)
    _given_up: bool = False

    def learn(self, batch_size: int, call: Call) -> bool:
        """A size was run for real, and this is its steady call.

        Returns:
            Whether it is what the line says, as far as there is one.
        """
        if self._given_up:
            return True
        if self.line is not None and self.line.at(batch_size) != call:
            self.give_up()
            return False
        self._calls[batch_size] = call
        if self.line is None:
            self.line = line_through(list(self._calls.items())[-SIZES_FOR_A_LINE:])
        return True

    def give_up(self) -> None:
        """A size did not do what the line says: from here on every size is run."""
        self.line, self._given_up = None, True

    def steady(self, calls: Sequence[Call]) -> Call | None:
        """The call that the next one would be again: the last one, if it is like the one before or like a known one."""
        last = calls[-1]
        if len(calls) > 1 and (calls[-2].core, calls[-2].sizes) == (last.core, last.sizes) and last.closed:
            return last
        known = next((known for known in self._calls.values() if known.core == last.core), None)
        return None if known is None else Call(known.events, last.sizes)


def try_call(allocator: CachingAllocator, call: Call, alive: Alive, *, calls: int) -> Replayed:
    """Replay a call several times, one after the other.

    Args:
        allocator: As it is before; left as it is.
        call: Its events and sizes.
        alive: What the call before left, by (calls ago, index).
        calls: How often.
    """
    allocator = allocator.copy()
    allocator.reset_peaks()
    retries, error = allocator.alloc_retries, None
    try:
        for _ in range(calls):
            alive = replay_call(allocator, call, alive)
    except AllocatorOutOfMemory as refusal:
        error = str(refusal)
    return Replayed(
        error=error,
        peak_allocated_bytes=allocator.peak_allocated_bytes,
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        alloc_retries=allocator.alloc_retries - retries,
    )
