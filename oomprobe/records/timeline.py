"""Memory over time: what was live, by what held it, what was reserved, and the gaps in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import sub

from oomprobe.records.kinds import Bytes

MOST_MOMENTS = 200
MOST_HOLDERS = 7  # with a name of their own
REST = "the rest"


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentGaps:
    """A segment, and the gaps between its live blocks: where each begins, and its bytes."""

    size_bytes: Bytes
    starts: tuple[Bytes, ...] = ()
    gap_bytes: tuple[Bytes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Memory while requests and frees were recorded, at the moments at which the most was live.

    Attributes:
        events: How many requests and frees came before each moment.
        live_bytes: What was live at each moment, by what held it, largest first.
        reserved_bytes: What the allocator held at each moment; empty if that was not recorded.
        refused: How many events came before the request that was refused; None: none was.
        segments: The largest segments before that request or, without one, at the peak.
    """

    events: tuple[int, ...]
    live_bytes: Mapping[str, tuple[Bytes, ...]]
    reserved_bytes: tuple[Bytes, ...] = ()
    refused: int | None = None
    segments: tuple[SegmentGaps, ...] = ()

    def __post_init__(self) -> None:
        series = [*self.live_bytes.values(), self.reserved_bytes or self.events]
        if not self.live_bytes or {len(self.events)} != {*map(len, series)}:
            raise TypeError("it needs bytes for each of its events")


def highest_moments(totals: Sequence[int]) -> list[int]:
    """Return where totals are highest, in each of at most 200 stretches of equal length.

    Examples:
        >>> highest_moments([1, 5, 2, 7])
        [0, 1, 2, 3]
    """
    length = -(-len(totals) // MOST_MOMENTS)
    places = []
    for first in range(0, len(totals), length):
        stretch = totals[first : first + length]
        places.append(first + stretch.index(max(stretch)))
    return places


def live_over_time(totals: Sequence[Mapping[str, int]]) -> dict[str, tuple[int, ...]]:
    """Return the bytes at each moment by what held them, the small ones together.

    Examples:
        >>> live_over_time([{"a": 1}, {"a": 2, "b": 3}])
        {'b': (0, 3), 'a': (1, 2)}
    """
    peaks = Counter[str]()
    for total in totals:
        peaks |= Counter(total)
    over_time = dict[str, tuple[int, ...]]()
    rest = [sum(total.values()) for total in totals]
    for name, _ in peaks.most_common(MOST_HOLDERS):
        over_time[name] = tuple(total.get(name, 0) for total in totals)
        rest = [*map(sub, rest, over_time[name])]
    if any(rest) or not over_time:
        over_time[REST] = tuple(rest)
    return over_time
