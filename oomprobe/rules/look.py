"""What the calls of a trial showed: the call that needs the most memory, growth, a period, whether calls repeat. Pure.

Training loops evaluate, log, average and refresh at every n-th call, and a trial of three calls does not see that. At a small
size many calls are cheap, and three rows of numbers, one number for each call, tell these loops apart: the bytes that the
allocator handed out, the peak so far, and the bytes in live tensors.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import chain, groupby, pairwise

from oomprobe.records.trials import CallRecord

Records = Sequence[CallRecord]

# A call that hands out more than this fraction above the others counts as larger. At size 1, a call
# with four times the usual batch handed out 0.8 % more; calls that do the same hand out the same
# bytes, but for scalars that are logged.
LARGER = 0.002
SMALLEST_GROWTH_BYTES = 2**14  # more than a growing list of losses as numbers takes
# Searches that make many calls per trial stop at a wider bracket, so that they end within about 300
# calls of the answer's size.
EXACT_CALLS, STRIDE_OF_MANY, WIDEST = 12, 1 / 128, 1 / 32
# Fraction of the bytes that full steps allocate, or of a peak, by which steps that do the same may
# differ.
VARIES = 0.01


# --- full steps: a step may take several calls until all its optimizers have stepped ---
# `CallRecord.stepped` tells where: the calls that it took, None within one, and 0 at each call of a
# step that has no optimizer, such as an evaluation.


def by_step(records: Records) -> dict[str, list[CallRecord]]:
    """Return the records of each step, by its name."""
    steps: dict[str, list[CallRecord]] = {}
    for record in records:
        steps.setdefault(record.step, []).append(record)
    return steps


def turns_of(records: Records) -> list[list[CallRecord]]:
    """Return the records of each turn, in which the calls of one step follow each other."""
    return [[*turn] for _, turn in groupby(records, key=lambda record: record.step)]


def full_steps(records: Records) -> int:
    """Return how many full steps these calls completed."""
    return sum(record.stepped is not None for record in records)


def first_calls(records: Records) -> int:
    """Return the calls of the first full step, which creates optimizer state; 0 if no optimizer stepped.

    Calls that came after its last optimizer, to wait for another in vain, are not counted.
    """
    return next((record.stepped for record in records if record.stepped is not None), 0)


def after_first(records: Records) -> Records:
    """Return the calls after the first full step; all of them if there was none."""
    for number, record in enumerate(records):
        if record.stepped is not None:
            return records[number + 1 :]
    return records


def later_calls(records: Records) -> list[CallRecord]:
    """Return the calls after the first full step of each step."""
    return [*chain.from_iterable(map(after_first, by_step(records).values()))]


def step_calls(records: Records) -> int:
    """Return the calls of a full step after the first; at least 1."""
    later = after_first(records)
    return max(1, len(later) // max(1, full_steps(later)))


def seconds_of(records: Records) -> list[float]:
    """Return the times of the calls that were timed: a device has repeated the others."""
    return [record.seconds for record in records if record.seconds is not None]


def step_s(records: Records) -> float | None:
    """Return the median time of a call of each step, added up; None if a device has repeated them all."""
    medians = []
    for calls in by_step(records).values():
        seconds = seconds_of(calls)
        if seconds:
            medians.append(statistics.median(seconds))
    return sum(medians) if medians else None


def later_step_s(records: Records) -> float | None:
    """Return `step_s` without the first full step of each step, which is slower."""
    return step_s(later_calls(records))


def limiting_step(records: Records) -> str:
    """Return the name of the step whose call reached the highest peak."""
    return max(records, key=lambda record: record.peak_bytes).step


def largest(records: Records, name: str) -> int:
    """Return the largest value that a field has; 0 if there are no records."""
    return max((int(getattr(record, name)) for record in records), default=0)


def merged(ranks: Sequence[Records]) -> list[CallRecord]:
    """Return one record for each call that all ranks have made: the most that any has seen, and repeated where all repeat.

    The ranks together complete a full step when the last of them does.
    """
    if len(ranks) == 1:
        return [*ranks[0]]
    calls, done, completed = [], 0, [0] * len(ranks)
    for records in zip(*ranks, strict=False):
        for rank, record in enumerate(records):
            completed[rank] += record.stepped is not None
        stepped = None
        if min(completed) > done:
            stepped = max(record.stepped or 0 for record in records)
        done = min(completed)
        calls.append(
            CallRecord(
                step=records[0].step,
                served_bytes=largest(records, "served_bytes"),
                blocks=largest(records, "blocks"),
                live_bytes=largest(records, "live_bytes"),
                peak_bytes=largest(records, "peak_bytes"),
                examples=largest(records, "examples"),
                values=largest(records, "values"),
                seconds=max(seconds_of(records), default=None),
                stepped=stepped,
                mark=_together(records, "mark"),
                counted=_together(records, "counted"),
            )
        )
    return calls


def _together(records: Records, name: str) -> int | None:
    every = tuple(getattr(record, name) for record in records)
    return None if None in every else hash(every)


# --- the call that needs the most memory ---


def needed(records: Records, ordinary_calls: int, *, starts_alike: bool) -> int:
    """Return `calls_needed` of the step that needs the most."""
    most, peaks, lives = 0, _heights(records, "peak_bytes"), _heights(records, "live_bytes")
    for step, calls in by_step(records).items():
        calls_of_it = calls_needed(
            [record.served_bytes for record in calls],
            peaks[step],
            lives[step],
            first_calls=first_calls(calls),
            ordinary_calls=ordinary_calls,
            is_exact=starts_alike,
        )
        most = max(most, calls_of_it)
    return most


def _heights(records: Records, name: str) -> dict[str, list[int]]:
    """Return a number of each call, by step; in later turns 0, unless a call raises it."""
    heights: dict[str, list[int]] = {}
    for turn in turns_of(records):
        numbers = [getattr(record, name) for record in turn]
        if turn[0].step in heights:  # its first call finds what other steps have left
            numbers = [0, *(now if now > before else 0 for before, now in pairwise(numbers))]
        heights.setdefault(turn[0].step, []).extend(numbers)
    return heights


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
    # Without those that created state.
    level = (1 - LARGER) * max(served_bytes[first_calls:], default=0)
    largest = [
        number for number in range(first_calls, len(served_bytes)) if served_bytes[number] >= level
    ]
    needed = ordinary_calls
    # The calls until the first of the largest, or from one to the next.
    gap = max((later - earlier for earlier, later in pairwise([-1, *largest])), default=0)
    if gap > ordinary_calls:
        needed = gap + 1  # the call after the largest runs in a cache that the largest has split
    has_no_period = len(largest) == 1
    if has_no_period and not is_exact:
        needed = len(served_bytes)
    needed = max(needed, _last_rise(peak_bytes, first_calls) + 1)
    # What a call leaves is in memory when the next one peaks.
    needed = max(needed, _last_rise(live_bytes, first_calls) + 2)
    return min(needed, len(served_bytes))


def _last_rise(numbers: Sequence[int], first_calls: int) -> int:
    """Return the number of the last call, from 0, that took memory to a new height; less than 0 if none did."""
    last, top_bytes = -2, numbers[first_calls - 1] if first_calls else 0
    for number in range(first_calls, len(numbers)):
        if numbers[number] > (1 + LARGER) * top_bytes:
            top_bytes, last = numbers[number], number
    return last


def period(calls: Sequence[object], times: int = 3) -> int:
    """Return after how many calls these repeat, if they do so this many times; 0 if they do not.

    Examples:
        >>> period([5, 5, 5]), period([5, 5, 8, 5, 5, 8, 5, 5, 8, 5]), period([5, 5, 8, 5, 5, 8])
        (1, 3, 0)
    """
    lengths = range(1, len(calls) // times + 1)
    return next((length for length in lengths if calls[length:] == calls[:-length]), 0)


def period_of(records: Records, ordinary_calls: int, times: int = 3) -> int:
    """Return `period` of the bytes and blocks that each call handed out, after those of an ordinary trial."""
    served = [(record.served_bytes, record.blocks) for record in records[ordinary_calls:]]
    return period(served, times)


# --- whether further calls can only repeat the last ones ---


def calls_since(marks: Sequence[object], period: int = 1) -> int:
    """Return how many calls ago the last mark was there before; 0 if it was not. A mark stands for what a call did and left.

    Only multiples of the `period` that a look found count: within a period, calls may be alike.

    Examples:
        >>> calls_since([9, 5]), calls_since([9, 5, 5]), calls_since([1, 2, 3, 1]), calls_since([8, 5, 5, 8], period=2)
        (0, 1, 3, 0)
    """
    distances = range(period, len(marks), period)
    return next((distance for distance in distances if marks[-1 - distance] == marks[-1]), 0)


def marks_of(records: Records) -> list[int]:
    """Return the marks of the calls since one whose mark says too little, or since the call that completed the first full step."""
    marks: list[int] = []
    has_stepped = False
    for record in records:
        has_stepped |= record.stepped is not None
        if record.mark is None:
            marks = []
        elif has_stepped:
            marks.append(record.mark)
    return marks


def have_settled(records: Records, period: int) -> bool:
    """Return whether the calls that follow can only repeat the last ones, which have repeated those before them.

    Where the device is as it was some calls before, and nothing that the user's code counts with
    has changed since, the next calls can be the same as those; that they were the same once ends
    the doubt.
    """
    marks = marks_of(records)
    length = calls_since(marks, period)
    checks = checks_of(records)
    if not length or len(checks) < 2:
        return False
    before, now = checks[-2:]
    between = now - before
    if now != len(records) - 1 or len(marks) < between + length + 1:
        return False
    if marks[-between - 1 :] != marks[-between - length - 1 : -length]:
        return False
    return between % length == 0 and records[now].counted == records[before].counted


def checks_of(records: Records) -> list[int]:
    """Return the numbers of the calls, from 0, after which the runner checked what the user's code counts with."""
    return [number for number, record in enumerate(records) if record.counted is not None]


# --- growth, and steps that vary ---


def growth_of(records: Records) -> int:
    """Return the bytes by which each further call adds to live memory, over the last turn of each step."""
    last_turns = {turn[0].step: turn for turn in turns_of(records)}
    total_bytes = 0
    for turn in last_turns.values():
        # From the call that ended the first full step on.
        steady = turn[max(0, len(turn) - len(after_first(turn)) - 1) :]
        total_bytes += growth_bytes([record.live_bytes for record in steady])
    return total_bytes


def growth_bytes(live_bytes: Sequence[int]) -> int:
    """Return the bytes by which live memory still grows with each call at the end; 0 if it has levelled off.

    A list that is cleared at every tenth call, or a full buffer, levels off; a leak reaches new
    heights until the end.

    Examples:
        >>> kib = 2**10
        >>> growth_bytes([number * 64 * kib for number in range(50)]) // kib
        64
        >>> growth_bytes([min(number, 40) * 64 * kib for number in range(50)])  # a buffer of 40
        0
        >>> growth_bytes([number % 10 * 64 * kib for number in range(50)])  # cleared at every tenth call
        0
    """
    if not live_bytes:
        return 0
    last, heights, top_bytes = len(live_bytes) - 1, [0], live_bytes[0]
    for number, now_bytes in enumerate(live_bytes):
        if now_bytes >= top_bytes + SMALLEST_GROWTH_BYTES:
            heights.append(number)
            top_bytes = now_bytes
    if len(heights) < 3:
        return 0
    longest_rest = max(later - earlier for earlier, later in pairwise(heights))
    if last - heights[-1] > longest_rest:
        return 0  # it has levelled off
    quarter = max(1, len(live_bytes) // 4)
    lows = [
        min(live_bytes[start : start + quarter])
        for start in range(0, min(4 * quarter, len(live_bytes)), quarter)
    ]
    is_rising = all(later > earlier for earlier, later in pairwise(lows))
    if not is_rising:
        return 0  # it keeps something of the last call, whose size varies
    return max(0, live_bytes[-1] - live_bytes[0]) // last


def bracket_tolerance(calls: int) -> float:
    """Return how narrow the bracket must be, as a fraction of the size, if each trial makes this many calls.

    Examples:
        >>> bracket_tolerance(10), bracket_tolerance(24), bracket_tolerance(50)
        (0.0, 0.015625, 0.03125)
    """
    return 0.0 if calls <= EXACT_CALLS else min(WIDEST, STRIDE_OF_MANY * calls / EXACT_CALLS)


def is_varying(records: Records) -> bool:
    """Return whether full steps of any step allocated different amounts."""
    for calls in by_step(records).values():
        later, length = after_first(calls), max(1, first_calls(calls[::-1]))  # of the last step
        starts = range(0, len(later) - length + 1, length)
        if varies(
            [
                sum(record.served_bytes for record in later[start : start + length])
                for start in starts
            ]
        ):
            return True
    return False


def varies(served_bytes: Sequence[int]) -> bool:
    """Return whether some steps allocated more bytes than others, ignoring the first, which may fill caches.

    Examples:
        >>> varies([120, 100, 100]), varies([120, 100, 150])
        (False, True)
    """
    steady = served_bytes[1:]
    return bool(steady) and max(steady) - min(steady) > VARIES * max(steady)


def differ(before_bytes: int, after_bytes: int) -> bool:
    """Return whether two peaks differ by more than the rounding of blocks explains."""
    return abs(before_bytes - after_bytes) > VARIES * max(before_bytes, after_bytes)
