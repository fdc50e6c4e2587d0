"""What fifty calls of a loop tell: where it needs the most memory, and whether it leaks."""

import random

import pytest

from oomprobe.records.patience import PATIENCE
from oomprobe.rules.look import (
    EXACT_CALLS,
    WIDEST,
    bracket_tolerance,
    calls_needed,
    growth_bytes,
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
    "every 25th": (row(lambda call: call % 25 == 0), STEADY, STEADY, 26, 26),
    "every 10th from the 2nd": (row(lambda call: call % 10 == 2), STEADY, STEADY, 11, 11),
    "once at the 20th": (ONCE, STEADY, STEADY, 21, 50),
    "a peak at the 20th": (STEADY, row(lambda call: call >= 20, large=950_000), STEADY, 20, 20),
    "an average made at the 20th": (STEADY, STEADY, row(lambda call: call >= 20, large=950_000), 21, 21),
    "a deque of 40": (STEADY, STEADY, [min(call, 40) * KIB for call in CALLS], 41, 41),
    "drawn lengths": (drawn(1), STEADY, STEADY, drawn(1).index(max(drawn(1)[1:])) + 2, 50),
}


@pytest.mark.parametrize("loop", NEEDED)
def test_trials_reach_the_call_that_needs_the_most(loop):
    *rows, exact, inexact = NEEDED[loop]
    found = [calls_needed(*rows, first_calls=1, ordinary_calls=3, is_exact=is_exact) for is_exact in (True, False)]
    assert found == [exact, inexact]


def test_a_period_within_an_ordinary_trial_asks_for_no_more():
    served = row(lambda call: call % 4 == 0)  # the optimizer steps at every fourth call
    assert calls_needed(served, STEADY, STEADY, first_calls=4, ordinary_calls=12, is_exact=True) == 12


GROWN = {  # live bytes after each call, and the leak of each call
    "nothing": ([0 for call in CALLS], 0),
    "a leak at every call": ([call * 64 * KIB for call in CALLS], 64 * KIB),
    "a leak at every 10th": ([call // 10 * 640 * KIB for call in CALLS], 64 * KIB),
    "a leak beside varying lengths": ([call * 64 * KIB + held for call, held in enumerate(drawn(1))], 64 * KIB),
    "losses as numbers": ([call * 32 for call in CALLS], 0),
    "a deque of 40": ([min(call, 40) * 64 * KIB for call in CALLS], 0),
    "a list cleared at 10": ([call % 10 * 64 * KIB for call in CALLS], 0),
    "an average made at the 20th": ([640 * KIB * (call >= 20) for call in CALLS], 0),
    "caches for the first shapes": ([min(call, 5) * 64 * KIB for call in CALLS], 0),
}


@pytest.mark.parametrize("loop", GROWN)
def test_only_what_still_grows_at_the_end_is_a_leak(loop):
    live_bytes, leak_bytes = GROWN[loop]
    assert growth_bytes(live_bytes) == pytest.approx(leak_bytes, rel=0.05)


def test_keeping_the_last_of_varying_batches_is_rarely_a_leak():
    """Fifty numbers drawn at random can look like growth."""
    assert sum(growth_bytes(drawn(seed, 2**24)) > 0 for seed in range(400)) <= 20


def test_longer_trials_leave_a_wider_bracket_up_to_a_limit():
    widths = [bracket_tolerance(calls) for calls in CALLS]
    assert widths == sorted(widths)
    assert (widths[EXACT_CALLS - 1], widths[EXACT_CALLS] > 0, widths[-1]) == (0, True, WIDEST)
