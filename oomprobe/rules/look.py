"""What a step does over many calls: which call needs the most memory, and whether memory keeps growing. Pure.

Training loops evaluate, log, average and refresh at every n-th call, and a trial of three calls does not see that. At a small
size many calls are cheap, and three rows of numbers, one number for each call, tell these loops apart: the bytes that the
allocator handed out, the peak so far, and the bytes in live tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

# A call that hands out more than this fraction above the others counts as larger. At size 1, a call with four times the
# usual batch handed out 0.8 % more; calls that do the same hand out the same bytes, but for scalars that are logged.
LARGER = 0.002
SMALLEST_GROWTH_BYTES = 2**14  # more than a growing list of losses as numbers takes
# Searches that make many calls per trial stop at a wider bracket, so that they end within about 300 calls of the answer's size.
EXACT_CALLS, STRIDE_OF_MANY, WIDEST = 12, 1 / 128, 1 / 32
# Fraction of the bytes that full steps allocate, or of a peak, by which steps that do the same may differ.
VARIES = 0.01


@dataclass(slots=True)
class Series:
    """What one step did in one trial, a number for each call."""

    served_bytes: list[int] = field(default_factory=list)  # that the allocator handed out
    blocks: list[int] = field(default_factory=list)  # that it handed out; empty if not watched
    peak_bytes: list[int] = field(default_factory=list)  # the highest allocation so far; empty if not watched
    live_bytes: list[int] = field(default_factory=list)  # in live tensors afterwards; empty if not watched
    durations_s: list[float] = field(default_factory=list)  # of the calls that were not repeated
    timed_from: int = 0  # how many of these to ignore: the first full step creates optimizer state, so it is slower
    waited_calls: int = 0  # of the first full step, after its last optimizer had stepped, spent waiting for another
    first_calls: int | None = None  # until every optimizer had stepped; None: not yet
    step_calls: int = 1  # of the last full step
    turn_calls: int = 0  # before the last turn

    @property
    def after_first_bytes(self) -> list[int]:
        """Bytes handed out by each call after the first full step."""
        return self.served_bytes[self.waited_calls + (self.first_calls or 0) :]

    def end_first_step(self, calls: int) -> None:
        """End the first full step, whose optimizers had all stepped after this many calls."""
        self.first_calls, self.waited_calls = calls, len(self.served_bytes) - calls
        self.timed_from = len(self.durations_s)

    @property
    def varies(self) -> bool:
        """Whether full steps allocated different amounts."""
        served, step_calls = self.after_first_bytes, self.step_calls
        starts = range(0, len(served) - step_calls + 1, step_calls)
        return varies([sum(served[start : start + step_calls]) for start in starts])

    def period(self, least_calls: int) -> int:
        """Return `period` of the bytes and blocks that each call handed out, leaving out the first `least_calls`."""
        return period([*zip(self.served_bytes, self.blocks, strict=False)][least_calls:])

    def calls_needed(self, ordinary_calls: int, *, is_exact: bool) -> int:
        """Return `calls_needed` of this series."""
        numbers = self.served_bytes, self.peak_bytes, self.live_bytes
        first_calls = self.first_calls or 0
        return calls_needed(*numbers, first_calls=first_calls, ordinary_calls=ordinary_calls, is_exact=is_exact)

    @property
    def steady_live_bytes(self) -> list[int]:
        """Bytes in live tensors after each call of the last turn, from the first full step on."""
        first_calls = 1 if self.first_calls is None else self.first_calls
        return self.live_bytes[max(self.turn_calls, first_calls - 1) :]


def calls_needed(
    served_bytes: Sequence[int],
    peak_bytes: Sequence[int],
    live_bytes: Sequence[int],
    *,
    first_calls: int,
    ordinary_calls: int,
    is_exact: bool,
) -> int:
    """Return how many calls a trial must make to meet the call that needs the most memory.

    Args:
        served_bytes: Bytes that the allocator handed out in each call.
        peak_bytes: The highest allocation until the end of each call.
        live_bytes: Bytes in live tensors after each call. What a call leaves is in memory when the next one peaks.
        first_calls: Calls until every optimizer has stepped; these create state, so they are no measure for later ones.
        ordinary_calls: Calls of a trial of a step that does the same at each call.
        is_exact: Whether every trial starts at the same call. If not, the large call may come at any time within its period.

    Returns:
        A number of calls, at least `ordinary_calls` and at most as many as were given.

    Examples:
        >>> trial = {"first_calls": 1, "ordinary_calls": 3, "is_exact": True}
        >>> calls_needed([90, 10, 10, 10, 40, 10, 10, 10, 40, 10], [90] * 10, [5] * 10, **trial)
        6
        >>> calls_needed([90, 10, 10, 10, 10], [90, 95, 95, 95, 120], [5] * 5, **trial)
        5
        >>> calls_needed([90, 10, 10, 10, 10, 10], [90] * 6, [5, 5, 5, 8, 8, 8], **trial)
        5
    """
    count = len(served_bytes)
    level = (1 - LARGER) * max(served_bytes[first_calls:], default=0)
    largest = [number for number in range(first_calls, count) if served_bytes[number] >= level]
    needed = ordinary_calls
    distances = [*(number + 1 for number in largest[:1]), *(later - earlier for earlier, later in pairwise(largest))]
    if max(distances, default=0) > ordinary_calls:
        needed = max(distances) + 1  # the call after the largest runs in a cache that the largest has split
    if not is_exact and len(largest) == 1:  # its period is unknown
        needed = count
    for numbers, later in ((peak_bytes, 1), (live_bytes, 2)):
        top_bytes = numbers[first_calls - 1] if first_calls else 0
        for number in range(first_calls, count):
            if numbers[number] > (1 + LARGER) * top_bytes:
                top_bytes, needed = numbers[number], max(needed, number + later)
    return min(needed, count)


def period(calls: Sequence[object]) -> int:
    """Return after how many calls these repeat, if they do so at least three times; 0 if they do not.

    Examples:
        >>> period([5, 5, 5]), period([5, 5, 8, 5, 5, 8, 5, 5, 8, 5]), period([5, 5, 8, 5, 5, 8])
        (1, 3, 0)
    """
    lengths = range(1, len(calls) // 3 + 1)
    return next((length for length in lengths if calls[length:] == calls[:-length]), 0)


def calls_since(marks: Sequence[object], period: int = 1) -> int:
    """Return how many calls ago the last mark was there before; 0 if it was not. A mark stands for what a call did and left.

    Only multiples of the `period` that a look found count: within a period, calls may be alike.

    Examples:
        >>> calls_since([9, 5]), calls_since([9, 5, 5]), calls_since([1, 2, 3, 1]), calls_since([8, 5, 5, 8], period=2)
        (0, 1, 3, 0)
    """
    distances = range(period, len(marks), period)
    return next((distance for distance in distances if marks[-1 - distance] == marks[-1]), 0)


def growth_bytes(live_bytes: Sequence[int]) -> int:
    """Return the bytes by which live memory still grows with each call at the end; 0 if it has levelled off.

    A list that is cleared at every tenth call, or a full buffer, levels off; a leak reaches new heights until the end.

    Examples:
        >>> kib = 2**10
        >>> growth_bytes([number * 64 * kib for number in range(50)]) // kib
        64
        >>> growth_bytes([min(number, 40) * 64 * kib for number in range(50)])  # a buffer of 40
        0
        >>> growth_bytes([number % 10 * 64 * kib for number in range(50)])  # cleared at every tenth call
        0
    """
    last, heights, top_bytes = len(live_bytes) - 1, [0], live_bytes[0] if live_bytes else 0
    for number, held_bytes in enumerate(live_bytes):
        if held_bytes >= top_bytes + SMALLEST_GROWTH_BYTES:
            heights.append(number)
            top_bytes = held_bytes
    if len(heights) < 3 or last - heights[-1] > max(later - earlier for earlier, later in pairwise(heights)):
        return 0
    part = max(1, len(live_bytes) // 4)
    lows = [min(live_bytes[start : start + part]) for start in range(0, 4 * part, part) if live_bytes[start:]]
    # Otherwise it keeps something of the last call, whose size varies.
    is_rising = all(later > earlier for earlier, later in pairwise(lows))
    return max(0, live_bytes[-1] - live_bytes[0]) // last if is_rising else 0


def tolerance_of(calls: int) -> float:
    """Return how narrow the bracket must be, as a fraction of the size, if each trial makes this many calls.

    Examples:
        >>> tolerance_of(10), tolerance_of(24), tolerance_of(50)
        (0.0, 0.015625, 0.03125)
    """
    return 0.0 if calls <= EXACT_CALLS else min(WIDEST, STRIDE_OF_MANY * calls / EXACT_CALLS)


def varies(served_bytes: Sequence[int]) -> bool:
    """Return whether some steps allocated more bytes than others, ignoring the first, which may fill caches.

    Examples:
        >>> varies([120, 100, 100]), varies([120, 100, 150])
        (False, True)
    """
    steady = served_bytes[1:]
    return bool(steady) and max(steady) - min(steady) > VARIES * max(steady)


def differ(one_bytes: int, other_bytes: int) -> bool:
    """Return whether two peaks differ by more than the rounding of blocks explains."""
    return abs(one_bytes - other_bytes) > VARIES * max(one_bytes, other_bytes)
