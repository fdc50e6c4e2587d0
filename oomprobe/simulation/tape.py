"""What one call of a step asked of the allocator, as data: births, deaths, and the shape they have in common.

The events of a step are the same for every batch size but for their sizes, and those grow along straight lines. Two
tapes of different sizes show the line, and from then on a size is tried by replaying its predicted tape on the allocator
alone; every further size that is run checks the line. What does not follow one (a step that cuts its batch into chunks,
a shape that is padded) is not predicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from oomprobe.simulation.allocator import CachingAllocator
from oomprobe.simulation.scratch import Kernel, needs_of

# An event is (kind, a, b): born (BORN, index, 0); died (DIED, calls ago, index); the cache given back (RELEASED, 0, 0); a
# kernel that takes memory for itself begins (STARTED, index, kernel), and ends once its results were made (ENDED, index,
# kernel). Sizes are kept apart, by index: of a kernel the numbers from which it computes what it takes.
BORN, DIED, RELEASED, STARTED, ENDED = range(5)
Event = tuple[int, int, Any]
Alive = dict[tuple[int, int], int]  # blocks by (calls ago, index in that call)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a step: the sequence of its events, and the bytes of those that have a size."""

    events: tuple[Event, ...]
    sizes: tuple[int, ...]

    @property
    def core(self) -> tuple[Event, ...]:
        """The events without the deaths of what earlier calls left, which a clean-up in between may have taken."""
        return tuple(event for event in self.events if event[0] != DIED or event[1] == 0)

    @property
    def closed(self) -> bool:
        """Whether a call like this one frees just what the one before it left, so that it can follow itself."""
        dead = {event[1:] for event in self.events if event[0] == DIED}
        left = {event[1] for event in self.events if event[0] == BORN and (0, event[1]) not in dead}
        return {(ago, index) for ago, index in dead if ago > 0} == {(1, index) for index in left}


class Tape:
    """Records one call after the other."""

    def __init__(self) -> None:
        self.call_number = 0
        self._events: list[Event] = []
        self._sizes: list[int] = []

    def begin(self, count: int) -> list[tuple[int, int]]:
        """A trial begins: the names of as many blocks as there are, the same in every trial."""
        self.call_number = 0
        self._events, self._sizes = [], [0] * count
        return [(0, index) for index in range(count)]

    def start(self) -> None:
        """A call begins; what happened since the last one is not part of either."""
        self.call_number += 1
        self._events, self._sizes = [], []

    def born(self, nbytes: int) -> tuple[int, int]:
        """A block was served; its name on the tapes."""
        index = len(self._sizes)
        self._sizes.append(nbytes)
        self._events.append((BORN, index, 0))
        return self.call_number, index

    def died(self, name: tuple[int, int]) -> None:
        """A block was freed."""
        call_number, index = name
        self._events.append((DIED, self.call_number - call_number, index))

    def started(self, kernel: Kernel, numbers: Sequence[int]) -> int:
        """A kernel that takes memory for itself begins; the index of its numbers."""
        index = len(self._sizes)
        self._sizes.extend(numbers)
        self._events.append((STARTED, index, kernel))
        return index

    def ended(self, kernel: Kernel, index: int) -> None:
        """Its results were made, and it has run."""
        self._events.append((ENDED, index, kernel))

    def released(self) -> None:
        """The step gave the cache back itself."""
        self._events.append((RELEASED, 0, 0))

    def finish(self) -> Call:
        """The call that ends here."""
        return Call(tuple(self._events), tuple(self._sizes))


def replay_call(allocator: CachingAllocator, call: Call, alive: Alive) -> Alive:
    """Do to an allocator what a call did to it; it raises what the allocator raises.

    Args:
        allocator: Changed in place.
        call: Its events.
        alive: Blocks that earlier calls left, by (calls ago as the call that comes counts, index).

    Returns:
        The blocks left now, named for the next call.
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
            needs = needs_of(two, sizes[one : one + two.count])
            held[one] = allocator.malloc_all(needs.held)
            allocator.borrow(needs.before)
        elif kind == ENDED:
            allocator.borrow(needs_of(two, sizes[one : one + two.count]).groups)
            for block in held.pop(one):
                free(block)
        elif kind == RELEASED:
            allocator.empty_cache()
    return {(ago + 1, index): block for (ago, index), block in alive.items()}


@dataclass(frozen=True, slots=True)
class Line:
    """Calls that differ only in sizes, which are straight lines of the batch size."""

    events: tuple[Event, ...]
    fixed: tuple[int, ...]  # at batch 0
    per_sample: tuple[int, ...]

    def at(self, batch_size: int) -> Call:
        """The call that this size would make."""
        return Call(self.events, tuple(a + b * batch_size for a, b in zip(self.fixed, self.per_sample, strict=True)))


def lines_through(size: int, calls: Sequence[Call], other_size: int, other_calls: Sequence[Call]) -> list[Line] | None:
    """The lines through calls of two sizes; None where they differ in more than sizes, or a sample takes parts of a byte.

    Example:
        >>> events = ((BORN, 0, 0), (DIED, 0, 0))
        >>> lines_through(1, [Call(events, (12,))], 2, [Call(events, (16,))])[0].at(100).sizes
        (408,)
    """
    if len(calls) != len(other_calls):
        return None
    lines = []
    for call, other in zip(calls, other_calls, strict=True):
        if call.events != other.events:
            return None
        slopes = [divmod(b - a, other_size - size) for a, b in zip(call.sizes, other.sizes, strict=True)]
        if any(rest for _, rest in slopes):
            return None
        per_sample = tuple(slope for slope, _ in slopes)
        fixed = tuple(a - slope * size for a, slope in zip(call.sizes, per_sample, strict=True))
        lines.append(Line(call.events, fixed, per_sample))
    return lines


class Replayer:
    """Learns the lines that the calls of a cold trial follow.

    A trial is its first call, which makes gradients, optimizer state and workspaces, those that follow until one is like
    the one before, and that steady one as often as it likes.

    Attributes:
        lines: What was learned, one for each of these calls; None while they are not known, or were contradicted.
    """

    def __init__(self, *, gives_up: bool = False) -> None:
        self.lines: list[Line] | None = None
        self._trials: dict[int, list[Call]] = {}
        self._given_up = gives_up

    def learn(self, batch_size: int, calls: Sequence[Call]) -> bool:
        """Learn from a trial that was run; whether its calls are what the lines say, as far as there are any."""
        steady = self.steady(calls)
        if steady is None or self._given_up:
            return True
        trial = [*calls, steady]
        while len(trial) > 1 and trial[-2] == steady:
            trial.pop()
        if self.lines is not None and [line.at(batch_size) for line in self.lines] != trial:
            self.lines, self._given_up = None, True
            return False
        self._trials[batch_size] = trial
        if self.lines is None and len(self._trials) > 1:
            (size, first), (other_size, second) = list(self._trials.items())[-2:]
            self.lines = lines_through(size, first, other_size, second)
        return True

    def steady(self, calls: Sequence[Call]) -> Call | None:
        """The call that the next one would be again: the last one, if it is like the one before or like a known one."""
        if not calls:
            return None
        last = calls[-1]
        if len(calls) > 1 and (calls[-2].core, calls[-2].sizes) == (last.core, last.sizes) and last.closed:
            return last
        known = next((trial[-1] for trial in self._trials.values() if trial[-1].core == last.core), None)
        return None if known is None else Call(known.events, last.sizes)

    def calls(self, batch_size: int, count: int) -> list[Call] | None:
        """So many calls of a cold trial of this size; None where they are not known."""
        if self.lines is None:
            return None
        trial = [line.at(batch_size) for line in self.lines]
        return [*trial, *trial[-1:] * count][:count]
