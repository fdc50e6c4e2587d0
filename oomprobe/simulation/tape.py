"""What one call of a step asked of the allocator, as data: births, deaths, and the shape they have in common.

The events of a step are the same for every batch size but for their sizes, and those grow along straight lines. Two
tapes of different sizes show the line, and from then on a size is tried by replaying its predicted tape on the allocator
alone; every further size that is run checks the line. What does not follow one (a step that cuts its batch into chunks,
a shape that is padded) is not predicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oomprobe.simulation.scratch import Kernel

# An event is (kind, a, b): born (BORN, index, 0); died (DIED, calls ago, index); the cache given back (RELEASED, 0, 0); a
# kernel that takes memory for itself begins (STARTED, index, kernel), and ends once its results were made (ENDED, index,
# kernel). Sizes are kept apart, by index: of a kernel the numbers from which it computes what it takes.
BORN, DIED, RELEASED, STARTED, ENDED = range(5)
Event = tuple[int, int, Any]


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
    def freed(self) -> frozenset[tuple[int, int]]:
        """Blocks of earlier calls that it frees, by (calls ago, index)."""
        return frozenset((ago, index) for kind, ago, index in self.events if kind == DIED and ago > 0)

    @property
    def closed(self) -> bool:
        """Whether a call like this one frees just what the one before it left, so that it can follow itself."""
        dead = {event[1:] for event in self.events if event[0] == DIED}
        left = {event[1] for event in self.events if event[0] == BORN and (0, event[1]) not in dead}
        return self.freed == {(1, index) for index in left}


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


@dataclass(frozen=True, slots=True)
class Line:
    """Sizes of a call's blocks as straight lines of the batch size.

    Attributes:
        events: The sequence all sizes share.
        fixed: Bytes of each block at batch 0.
        per_sample: Bytes of each block for one more sample.
    """

    events: tuple[Event, ...]
    fixed: tuple[int, ...]
    per_sample: tuple[int, ...]

    def at(self, batch_size: int) -> Call:
        """The call that this size would make."""
        return Call(self.events, tuple(a + b * batch_size for a, b in zip(self.fixed, self.per_sample, strict=True)))


def line_through(calls: Sequence[tuple[int, Call]]) -> Line | None:
    """The line through calls of at least two sizes; None where they differ in more than sizes along lines.

    Example:
        >>> events = ((BORN, 0, 0), (DIED, 0, 0))
        >>> calls = [(n, Call(events, (8 + 4 * n,))) for n in (1, 2, 4)]
        >>> line_through(calls).at(100).sizes
        (408,)
        >>> line_through([*calls, (8, Call(events, (1000,)))]) is None
        True
    """
    by_size = dict(calls)
    if len(by_size) < 2:
        return None
    (low, first), (high, last) = min(by_size.items()), max(by_size.items())
    if any(call.events != first.events for call in by_size.values()):
        return None
    slopes = [(b - a) / (high - low) for a, b in zip(first.sizes, last.sizes, strict=True)]
    if not all(slope.is_integer() for slope in slopes):
        return None
    per_sample = tuple(int(slope) for slope in slopes)
    fixed = tuple(a - slope * low for a, slope in zip(first.sizes, per_sample, strict=True))
    line = Line(first.events, fixed, per_sample)
    return line if all(line.at(size) == call for size, call in by_size.items()) else None
