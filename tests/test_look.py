"""What fifty calls of a loop tell: where it needs the most memory, and whether it leaks."""

import random

import pytest
from helpers import records

from oomprobe.records.patience import PATIENCE
from oomprobe.records.trials import CallRecord
from oomprobe.rules.look import (
    EXACT_CALLS,
    STRIDE_OF_MANY,
    bracket_tolerance,
    calls_needed,
    differ,
    first_calls,
    growth_bytes,
    growth_of,
    is_varying,
    merged,
    needed,
    varies,
)

KIB = 2**10
CALLS = range(1, PATIENCE.look_calls + 1)


def row(larger=lambda call: False, *, usual=100_000, large=150_000):
    """Return a number for each call, the first of which creates the optimizer's state."""
    return [900_000, *(large if larger(call) else usual for call in CALLS[1:])]


def drawn(seed, scale=100_000):
    return [random.Random(100 * seed + call).randrange(scale) for call in CALLS]


STEADY, ONCE = row(), row(lambda call: call == 20)
NEEDED = {  # bytes handed out, peaks so far, live bytes, and the calls needed if trials start at the same call or not
    "the same": (STEADY, STEADY, STEADY, 3, 3),
    "a logged scalar": (row(lambda call: call % 10 == 0, large=100_100), STEADY, STEADY, 3, 3),
    "every 2nd": (row(lambda call: call % 2 == 0), STEADY, STEADY, 3, 3),
    "every 4th": (row(lambda call: call % 4 == 0), STEADY, STEADY, 5, 5),
    "every 10th from the 2nd": (row(lambda call: call % 10 == 2), STEADY, STEADY, 11, 11),
    "once at the 20th": (ONCE, STEADY, STEADY, 21, 50),
    "a deque of 40": (STEADY, STEADY, [min(call, 40) * KIB for call in CALLS], 41, 41),
    "drawn lengths": (drawn(1), STEADY, STEADY, drawn(1).index(max(drawn(1)[1:])) + 2, 50),
}


@pytest.mark.parametrize("loop", NEEDED)
def test_trials_reach_the_call_that_needs_the_most(loop):
    *rows, exact, inexact = NEEDED[loop]
    found = [
        calls_needed(*rows, first_calls=1, ordinary_calls=3, is_exact=is_exact)
        for is_exact in (True, False)
    ]
    assert found == [exact, inexact]


def test_without_an_optimizer_no_call_is_of_a_first_step():
    assert first_calls([CallRecord(step="step")] * 3) == 0


def test_a_period_within_an_ordinary_trial_asks_for_no_more():
    served = row(lambda call: call % 4 == 0)  # the optimizer steps at every fourth call
    assert (
        calls_needed(served, STEADY, STEADY, first_calls=4, ordinary_calls=12, is_exact=True) == 12
    )


GROWN = {  # live bytes after each call, and the leak of each call
    "a leak at every call": ([call * 64 * KIB for call in CALLS], 64 * KIB),
    "a leak at every 10th": ([call // 10 * 640 * KIB for call in CALLS], 64 * KIB),
    "a leak beside varying lengths": (
        [call * 64 * KIB + held for call, held in enumerate(drawn(1))],
        64 * KIB,
    ),
    "a deque of 40": ([min(call, 40) * 64 * KIB for call in CALLS], 0),
    "a list cleared at 10": ([call % 10 * 64 * KIB for call in CALLS], 0),
}


@pytest.mark.parametrize("loop", GROWN)
def test_only_what_still_grows_at_the_end_is_a_leak(loop):
    live_bytes, leak_bytes = GROWN[loop]
    assert growth_bytes(live_bytes) == pytest.approx(leak_bytes, rel=0.05)


def test_keeping_the_last_of_varying_batches_is_rarely_a_leak():
    """Fifty numbers drawn at random can look like growth."""
    assert sum(growth_bytes(drawn(seed, 2**24)) > 0 for seed in range(400)) <= 20


@pytest.mark.parametrize(
    ("live_bytes", "grown_bytes"),
    [
        ([], 0),
        ([0, 64 * KIB], 0),  # one rise is no growth
        ([0, 16 * KIB, 32 * KIB], 16 * KIB),
        ([64 * KIB, 80 * KIB, 96 * KIB], 16 * KIB),
        ([0, 16 * KIB - 1, 32 * KIB - 2], 0),  # a list of losses as numbers
        ([0, 64 * KIB, 128 * KIB, 128 * KIB], 0),  # it does not rise at the end
        (
            [number * KIB for number in (0, 64, 64, 192, 192, 320, 320, 448)],
            64 * KIB,
        ),  # at every second call
        (
            [number * KIB for number in (0, 64, 128, 192, 256, 256, 320, 320)],
            320 * KIB // 7,
        ),  # more and more rarely
        # The rest is longer than any before.
        ([number * KIB for number in (0, 64, 64, 192, 192, 320, 320, 320, 320)], 0),
    ],
)
def test_growth_of_few_calls(live_bytes, grown_bytes):
    assert growth_bytes(live_bytes) == grown_bytes


def test_growth_is_that_of_the_last_turn_of_each_step_from_its_first_full_step_on():
    def turn(step, *live_kib, first=1):
        return [
            CallRecord(step=step, live_bytes=live * KIB, stepped=None if number < first else 1)
            for number, live in enumerate(live_kib, 1)
        ]

    trains_again = turn("train", 0, 900, 964, 1028, first=2)
    shown = [*turn("train", 0, 500, 900), *turn("eval", 900, 916, 932), *trains_again]
    assert growth_of(shown) == (64 + 16) * KIB


@pytest.mark.parametrize(
    ("served", "peaks", "live", "needed"),
    [
        ([9], [9], [1], 1),  # the first alone
        ([9, 1, 1, 1, 1], [9, 9, 9, 9, 9], [1, 1, 1, 1, 1], 2),
        ([9, 1, 1, 2, 1, 1, 1, 2], 8 * [9], 8 * [1], 5),  # every fourth call, and the one after
        ([9, 1, 1, 1, 1], [9, 9, 9, 10, 10], [1, 1, 1, 1, 1], 4),  # the peak of the fourth
        (
            [9, 1, 1, 1, 1],
            [9, 9, 9, 9, 9],
            [1, 1, 2, 2, 2],
            4,
        ),  # the fourth runs beside what the third left
        ([9, 1, 1, 1, 1], [9, 9, 9, 9, 9], [1, 1, 1, 1, 2], 5),  # no more than were seen
    ],
)
def test_calls_that_are_needed(served, peaks, live, needed):
    assert (
        calls_needed(served, peaks, live, first_calls=1, ordinary_calls=2, is_exact=True) == needed
    )


@pytest.mark.parametrize(
    ("resumed_kib", "calls"),
    [
        ([30] * 4, 2),  # what evaluation has taken is no rise of training
        ([34] * 4, 2),  # nor is what training takes beside what evaluation keeps: all trials resume
        ([30, 30, 30, 35], 8),  # its last call is
    ],
)
def test_calls_that_several_steps_need(resumed_kib, calls):
    heights = [("train", [10] * 4), ("eval", [30] * 4), ("train", resumed_kib), ("eval", [35] * 4)]
    records = [
        CallRecord(step=step, stepped=1, peak_bytes=peak * KIB)
        for step, turn in heights
        for peak in turn
    ]
    assert needed(records, 2, starts_alike=True) == calls


@pytest.mark.parametrize(
    ("before", "after", "different"),
    [(100, 101, False), (101, 100, False), (100, 102, True), (0, 0, False), (0, 1, True)],
)
def test_peaks_that_differ_by_more_than_blocks_are_rounded(before, after, different):
    assert differ(before, after) is different


@pytest.mark.parametrize(
    ("served", "varying"),
    [
        ([], False),
        ([5], False),
        ([5, 1], False),
        ([5, 100, 101], False),
        ([5, 100, 102], True),
        ([5, 102, 100], True),
    ],
)
def test_steps_that_allocate_different_amounts(served, varying):
    assert varies(served) is varying


@pytest.mark.parametrize(
    ("served", "accumulated", "varying"),
    [
        ([9, 5, 5, 5], 1, False),  # but the first
        ([9, 5, 5, 7], 1, True),
        ([9, 9, 1, 5, 1, 5, 1, 5], 2, False),
        ([9, 9, 1, 5, 1, 5, 1, 7], 2, True),
    ],
)
def test_only_whole_steps_are_compared(served, accumulated, varying):
    calls = [
        CallRecord(
            step="step", served_bytes=amount, stepped=None if number % accumulated else accumulated
        )
        for number, amount in enumerate(served, 1)
    ]
    assert is_varying(calls) is varying


@pytest.mark.parametrize(
    ("calls", "tolerance"),
    [
        (EXACT_CALLS, 0.0),
        (EXACT_CALLS + 1, STRIDE_OF_MANY * (EXACT_CALLS + 1) / EXACT_CALLS),
        (48, 1 / 32),
        (49, 1 / 32),
    ],
)
def test_trials_of_many_calls_stop_at_a_wider_bracket(calls, tolerance):
    assert bracket_tolerance(calls) == tolerance


def test_ranks_complete_a_step_when_the_last_of_them_does():
    quick, slow = records(4), records(4, first=3)
    assert merged([slow]) == [*slow]
    assert [record.stepped for record in merged([quick, slow])] == [None, None, 3, 1]
    assert len(merged([quick, slow[:2]])) == 2
    taking_turns = [
        [CallRecord(step="step", stepped=1 if n % 2 == odd else None) for n in range(6)]
        for odd in (0, 1)
    ]
    assert [record.stepped for record in merged(taking_turns)] == [None, 1, None, 1, None, 1]
