"""Replay orders of an epoch on an allocator: which of them run out of memory, and when."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

from oomprobe.allocator.caching import AllocatorOutOfMemory, CachingAllocator
from oomprobe.records.epoch import Curve
from oomprobe.tape.calls import RecordedCall, replay_call
from oomprobe.tape.record import TapedTrial

_OLD = 1 << 40  # calls ago, of what was there before the trial: only its first call can free that


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderEnd:
    """How an order ended: `died` in the call of this number, from 1; None: it ran.

    `hardest` is the number of the call in which the most was reserved for the first time, and `curve`
    what was reserved in all. `rank` is the one of several to which that happened.
    """

    died: int | None
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    hardest: int
    curve: Curve
    rank: int = 0


def expand(start: TapedTrial) -> TapedTrial:
    """Return how a trial begins with expandable segments: what was there before is requested anew.

    Raises:
        AllocatorOutOfMemory: it does not fit.
    """
    before = start.allocator
    settings = replace(before.settings, expandable_segments=True)
    allocator = CachingAllocator(before.capacity_bytes, settings, total_bytes=before.total_bytes)
    requested = before.requested()
    live = {name: allocator.malloc(requested.get(block, 0)) for name, block in start.live.items()}
    return replace(start, allocator=allocator, live=live)


def replay_order(
    start: TapedTrial, cap_bytes: int | None, calls: Iterable[RecordedCall]
) -> OrderEnd:
    """Replay one call after the other from where a trial began, until one runs out of memory."""
    allocator, live = start.allocator.copy(), start.live
    allocator.limit_bytes = cap_bytes
    died = None
    peaks = []  # of each call
    for number, call in enumerate(calls, start=1):
        allocator.peak_reserved_bytes = allocator.reserved_bytes
        try:
            live = replay_call(allocator, call, live)
        except AllocatorOutOfMemory:
            died = number
        if number == 1:
            live = {(ago + _OLD * (ago > 1), index): block for (ago, index), block in live.items()}
        peaks.append(allocator.peak_reserved_bytes)
        if died:
            break
    return OrderEnd(
        died=died,
        peak_allocated_bytes=allocator.peak_allocated_bytes,
        peak_reserved_bytes=max(peaks),
        hardest=peaks.index(max(peaks)) + 1,
        curve=Curve.of(peaks),
    )


_replay: Callable[[int], OrderEnd]  # of the processes that are forked next


def replay_here(order: int) -> OrderEnd:
    """Replay an order as the process has begun to that forked this one."""
    return _replay(order)


def replay_orders(
    orders: Sequence[int], replay: Callable[[int], OrderEnd]
) -> Iterator[tuple[int, OrderEnd]]:
    """Yield each order and how it ended, side by side on the cores there are.

    Where a process cannot fork, one after the other.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    workers = min(cores, len(orders))
    if workers < 2 or sys.platform != "linux":
        yield from ((order, replay(order)) for order in orders)
        return
    global _replay
    _replay = replay
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork of a process with threads
        pool = ProcessPoolExecutor(
            workers,
            multiprocessing.get_context("fork"),
            initializer=signal.signal,
            initargs=(signal.SIGINT, signal.SIG_IGN),
        )
        try:
            yield from zip(orders, pool.map(replay_here, orders), strict=True)
        finally:
            pool.shutdown(cancel_futures=True)
