"""Deadlines: the earlier of two limits, and time to confirm."""

import math
from types import SimpleNamespace

import pytest
from helpers import a_trial

from oomprobe.records.options import Options
from oomprobe.records.patience import Clock


@pytest.fixture
def now(monkeypatch):
    here = SimpleNamespace(s=100.0)
    monkeypatch.setattr("oomprobe.records.patience.time", SimpleNamespace(monotonic=lambda: here.s))
    return here


def test_times_count_from_the_start(now):
    def told(clock):
        return clock.elapsed_s, clock.left_s, clock.end_s, clock.deadline_s(), clock.is_over

    limited, free = Clock(Options(time_limit_s=60, trial_time_limit_s=7)), Clock(Options())
    of_a_table = Clock(Options(time_limit_s=60), end_s=120.0)
    now.s = 110.0
    assert told(limited) == (10, 50, 160, 117, False)
    assert told(free) == (10, math.inf, None, None, False)
    assert told(of_a_table) == (10, 10, 120, 120, False)
    limited.limit(5)
    free.limit(30)
    now.s = 130.0
    assert told(limited) == (30, 30, 160, 137, False)
    assert told(free) == (30, 0, 130, 130, True)


@pytest.mark.parametrize(
    ("options", "more", "needed_s"),
    [
        ({}, {}, 1.5 * 6 * 2 * 0.5),
        ({"confirm_steps": 3}, {}, 1.5 * 4 * 2 * 0.5),
        ({}, {"calls": 10}, 1.5 * 10 * 2 * 0.5),
        ({}, {"starting_s": 4.0}, 4 + 1.5 * 6 * 2 * 0.5),
    ],
)
def test_a_confirmation_takes_as_long_as_the_last_timed_calls(options, more, needed_s, now):
    trials = [a_trial(10, step_s=9.0), a_trial(4, step_s=2.0), a_trial(8)]
    clock = Clock(Options(**options), end_s=now.s + needed_s)
    assert clock.suffices_to_confirm(2, trials, **more)
    now.s += 0.01
    assert not clock.suffices_to_confirm(2, trials, **more)
    assert clock.suffices_to_confirm(1, trials, **more)
    assert clock.suffices_to_confirm(10**9, [a_trial(8)])
    assert Clock(Options(**options)).suffices_to_confirm(10**9, trials, **more)
