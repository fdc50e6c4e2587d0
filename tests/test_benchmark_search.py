"""The script that tells what a search costs: which run of a row is told, and what counts as missed."""

import benchmark_search
import pytest


def line(**changed):
    plain = {"step_ms": 10, "answer": 500, "trials": 20, "bound": 21, "step_times": 22, "outside": 0.05}
    return {**plain, **changed}


def test_the_run_in_the_middle_is_told():
    lines = [line(outside=outside) for outside in (0.2, 0.01, 0.08, 0.07, 0.3)]
    assert benchmark_search.middle_of(lines)["outside"] == 0.08


@pytest.mark.parametrize(
    ("lines", "missed"),
    [
        ([line()], []),
        ([line(outside=0.11)], ["outside"]),
        ([line(outside=0.11), line(), line()], []),
        ([line(), line(trials=22), line()], ["trials"]),
        ([line(step_ms=100, step_times=27, outside=0.04)], ["step-times", "outside"]),
        ([line(step_ms=100, step_times=27, answer=100)], ["outside"]),
        ([line(step_ms=100, step_times=27, answer=100, outside=0.01)], []),
        ([line(step_ms=1, outside=0.9)], []),
    ],
)
def test_a_goal_in_trials_is_for_every_run_and_one_in_time_for_that_in_the_middle(lines, missed):
    assert benchmark_search.missed(lines) == missed
