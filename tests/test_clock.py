"""Deadlines: the earlier of two limits, and time to confirm."""

import time
from types import SimpleNamespace

import pytest
from helpers import a_trial

from oomprobe.records.options import Options
from oomprobe.records.patience import CONFIRM_SLACK, Clock


@pytest.mark.parametrize(
    ("whole_s", "trial_s", "expected_s"), [(None, None, None), (60, None, 60), (None, 7, 7), (60, 7, 7), (5, 7, 5)]
)
def test_the_deadline_is_the_earlier_limit(whole_s, trial_s, expected_s):
    deadline_s = Clock(Options(time_limit_s=whole_s, trial_time_limit_s=trial_s)).deadline_s()
    if expected_s is None:
        assert deadline_s is None
    else:
        assert deadline_s - time.monotonic() == pytest.approx(expected_s, abs=0.5)


def test_time_left_is_kept_for_the_confirmation():
    trials = [a_trial(10, step_s=1.0)]  # 0.1 s per sample
    options = Options(time_limit_s=100.0, confirm_steps=4)
    fits = 100 / (CONFIRM_SLACK * 5 * 0.1)
    assert Clock(options).suffices_to_confirm(int(0.95 * fits), trials)
    assert not Clock(options).suffices_to_confirm(int(1.05 * fits), trials)
    assert not Clock(options).suffices_to_confirm(1, [], starting_s=100.0)
    assert Clock(options).suffices_to_confirm(10**9, [])
    assert Clock(Options()).suffices_to_confirm(10**9, trials)


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
    assert told(free) == (10, None, None, None, False)
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
