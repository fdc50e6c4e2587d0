"""A recording's calls in other orders: which of them run in the memory that it had."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

import numpy as np

from oomprobe.allocator.caching import AllocatorOutOfMemory, CachingAllocator
from oomprobe.allocator.segments import LARGE_SEGMENT
from oomprobe.allocator.settings import AllocatorSettings
from oomprobe.tape.calls import RecordedCall
from oomprobe.tape.epochs import OrderEnd, replay_order, replay_orders
from oomprobe.tape.history import History
from oomprobe.tape.record import GIVES_BACK, STREAMS, NotRecorded, TapedTrial, record_calls
from oomprobe.tape.replay import begin
from oomprobe.tape.shapes import name_by_rank
from oomprobe.tape.snapshot import Event

ORDERS = 40
MOST_REPLAYED = 10_000_000  # events of all orders: about half a minute on a core
FEWEST_SHAPES = 3  # of the calls that change places
LAST_CALLS = 2  # that do not: nobody knows what the last but one leaves for others than the last
# Functions of an optimizer, of which one asks for memory or frees some in every step: AdamW's step
# has temporary tensors, while SGD's and that of fused optimizers have none.
_SIGNS = (
    re.compile(r"wrapper .*\btorch[/\\]optim[/\\]optimizer\.py"),  # around the step of each
    re.compile(r"zero_grad .*\btorch[/\\](?:optim|nn)[/\\]"),
)
_EMPTIES = re.compile(r"empty_cache .*\btorch[/\\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reordered:
    """How the calls of a recording end in other orders, in the memory that they had.

    Attributes:
        calls: Those that change places, each up to a step of the optimizer. What came before them
            stays first, and the last two stay last.
        orders: How many were replayed; order k is ``random.Random(k).sample(calls, len(calls))``.
        run: Those that run, with the request that was refused.
        run_expandable: Those that run with expandable segments.
    """

    calls: int
    orders: int
    run: int
    run_expandable: int

    def lines(self) -> list[str]:
        """Return what a report says."""
        return [
            f"as recorded: {self.run} of {self.orders} orders of {self.calls:,} calls run",
            f"with expandable segments: {self.run_expandable} of {self.orders}",
        ]


def reorder(
    history: History, settings: AllocatorSettings, available_bytes: int, *, is_cap: bool
) -> Reordered | None:
    """Replay the calls of a recording in other orders.

    Args:
        history: In which a request was refused.
        settings: The allocator's.
        available_bytes: What it could hold.
        is_cap: Whether that is a cap on a larger card.

    Returns:
        How they end; None where no calls can be told apart, or their shapes hardly vary.
    """
    cap_bytes = available_bytes if is_cap else None
    most_bytes = available_bytes + is_cap * LARGE_SEGMENT
    try:
        calls = name_by_rank([*_calls_of(history), RecordedCall((), ())])
        movable = calls[1:-LAST_CALLS]
        if len({call.sizes for call in movable}) < FEWEST_SHAPES:
            return None
        count = max(1, min(ORDERS, MOST_REPLAYED // len(history.events)))
        as_recorded = _start_of(history, settings, most_bytes)
        if replay_order(as_recorded, cap_bytes, calls).died != len(calls):
            return None  # not even the recorded order ends as it did
        expanding = replace(settings, expandable_segments=True)
        expandable = _start_of(history, expanding, most_bytes)
        return Reordered(
            calls=len(movable),
            orders=count,
            run=_count_runs(as_recorded, cap_bytes, calls, count),
            run_expandable=_count_runs(expandable, cap_bytes, calls, count),
        )
    except (NotRecorded, AllocatorOutOfMemory):
        return None


def _start_of(history: History, settings: AllocatorSettings, most_bytes: int) -> TapedTrial:
    """Return an allocator in the state in which a history begins."""
    total_bytes = history.card_bytes() or most_bytes
    allocator = CachingAllocator(most_bytes, settings, total_bytes=total_bytes)
    return TapedTrial(calls=(), allocator=allocator, live=begin(history, allocator))


def _count_runs(
    start: TapedTrial, cap_bytes: int | None, calls: Sequence[RecordedCall], orders: int
) -> int:
    """Return how many orders run; the first of the calls and the last keep their places."""
    movable = calls[1:-LAST_CALLS]

    def replay(order: int) -> OrderEnd:
        placed = random.Random(order).sample(movable, len(movable))
        return replay_order(start, cap_bytes, [calls[0], *placed, *calls[-LAST_CALLS:]])

    return sum(end.died is None for _, end in replay_orders(range(orders), replay))


def _calls_of(history: History) -> list[RecordedCall]:
    """Return the calls up to the last refusal.

    All but the first and the last free as many blocks of the one before; the first is all that came
    before such calls.

    Raises:
        NotRecorded: no calls can change places.
    """
    if len(history.snapshot.streams()) > 1:
        raise NotRecorded(STREAMS)
    refused = history.last_refused()
    assert refused is not None
    served = history.events[: history.number_of(refused)]
    # What a retry gave back, another order may keep.
    events = [
        event for event in served if event.action not in GIVES_BACK or event.is_inside(_EMPTIES)
    ]
    events.append(replace(refused, action="alloc", address=-1))
    ends = max((ends_of(sign, events) for sign in _SIGNS), key=len)
    entries = [*map(Event.entry, events)]
    parts = [entries[start:end] for start, end in pairwise([0, *ends, len(entries)])]
    before = sorted(history.begins)
    calls = record_calls(parts, before, may_retry=False)
    # How many calls ago the blocks of others that a call frees were made.
    ages = [[ago for _, ago, _ in {*call.events} - {*call.core}] for call in calls]
    first = max(0, len(calls) - LAST_CALLS)
    if max(chain(*ages[first:]), default=1) > 1:
        raise NotRecorded("a call frees what was made before the last")
    while first > 1 and ages[first - 1] == ages[-LAST_CALLS]:
        first -= 1
    return record_calls([[*chain(*parts[:first])], *parts[first:]], before, may_retry=False)


def ends_of(sign: re.Pattern[str], events: Sequence[Event]) -> list[int]:
    """Return the numbers of the events before which a function ended, as far as stacks tell."""
    framed = np.flatnonzero([bool(event.frames) for event in events])
    inside = [events[number].is_inside(sign) for number in framed.tolist()]
    ends: list[int] = framed[1:][np.diff(np.array(inside, dtype=int)) < 0].tolist()
    return ends
