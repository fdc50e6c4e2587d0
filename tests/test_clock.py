"""Deadlines: the earlier of two limits, and time to confirm."""

import time

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
