"""A recorded history as memory over time, with the gaps of its segments at the moment that matters."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from oomprobe.records.timeline import SegmentGaps, Timeline, highest_moments, live_over_time
from oomprobe.tape.history import History, Live, Moment
from oomprobe.tape.snapshot import Frames
from oomprobe.tape.stacks import total_by

MOST_SEGMENTS = 24
LEAST_GAP = 2**18  # bytes: smaller ones cannot be seen


def timeline_of(
    history: History, moment: Moment, name_of: Callable[[Frames], str]
) -> Timeline | None:
    """Return memory over time, by a name of each block's stack; None where nothing was recorded.

    Of expandable segments, whose pages come and go, none is kept.
    """
    if not history.events:
        return None
    moments = {*highest_moments([*history.live_totals()]), moment.number}
    names: dict[int, str] = {}

    def name_once(frames: Frames) -> str:
        if id(frames) not in names:
            names[id(frames)] = name_of(frames)
        return names[id(frames)]

    reserved_bytes = [history.reserved_at_begin, *history.reserved()]
    totals, reserved = [], []
    segments = list[SegmentGaps]()
    for number, (live, sizes) in enumerate(history.states()):
        if number in moments:
            totals.append(total_by(name_once, live.values()))
            reserved.append(reserved_bytes[number])
        if number == moment.number and not history.is_expandable:
            largest_first = sorted(sizes, key=lambda start: -sizes[start])[:MOST_SEGMENTS]
            segments = [gaps_of(start, sizes[start], live) for start in largest_first]
    return Timeline(
        events=tuple(sorted(moments)),
        live_bytes=live_over_time(totals),
        reserved_bytes=tuple(reserved),
        refused=None if moment.refused is None else moment.number,
        segments=tuple(segments),
    )


def gaps_of(start: int, size: int, live: Mapping[int, Live]) -> SegmentGaps:
    """Return what lies between the live blocks of a segment; blocks are given by address."""
    inside = sorted(address for address in live if start <= address < start + size)
    ends = [start, *(address + live[address].size for address in inside)]
    gaps = {}
    for end, address in zip(ends, [*inside, start + size], strict=True):
        if address - end >= LEAST_GAP:
            gaps[end - start] = address - end
    return SegmentGaps(size_bytes=size, starts=tuple(gaps), gap_bytes=tuple(gaps.values()))
