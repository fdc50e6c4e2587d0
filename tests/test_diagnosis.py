"""What is read from trials written by hand."""

import pytest
from helpers import a_trial

from oomprobe.records.trials import Verdict
from oomprobe.rules.diagnosis import known_so_far

OOM, CRASHED = Verdict.OOM, Verdict.CRASHED
BRACKET = [a_trial(8, steps=3), a_trial(15, steps=3), a_trial(16, OOM), a_trial(18, OOM), a_trial(1, steps=50)]


@pytest.mark.parametrize(
    ("trials", "known"),
    [
        ([], ""),
        ([a_trial(4, CRASHED), a_trial(4, Verdict.TIMED_OUT), a_trial(2, Verdict.POISONED)], ""),
        ([a_trial(4, steps=1)], "after batch 4 ran for 1 step, "),
        ([a_trial(4)], "after batch 4 ran, "),
        ([a_trial(4, OOM)], "after batch 4 failed, "),
        (BRACKET, "after batch 15 ran for 3 steps and batch 16 failed, "),
        ([*BRACKET, a_trial(17, CRASHED)], "after batch 15 ran for 3 steps and batch 16 failed, "),
        ([*BRACKET, a_trial(16, steps=6)], "after batch 16 ran for 6 steps and batch 18 failed, "),
        ([*BRACKET, a_trial(15, OOM)], "after batch 8 ran for 3 steps and batch 15 failed, "),
        ([a_trial(64, steps=3), *BRACKET], "after batch 15 ran for 3 steps and batch 16 failed, "),
        ([*BRACKET, a_trial(15, OOM, accumulation_steps=2)], "after batch 15 ran for 3 steps and batch 16 failed, "),
        ([a_trial(8, steps=3), a_trial(16, replayed=True), a_trial(32, OOM, replayed=True)], "after batch 8 ran for 3 steps, "),
    ],
)  # fmt: skip
def test_what_is_known_begins_with_the_bracket(trials, known):
    assert known_so_far(trials) == known
