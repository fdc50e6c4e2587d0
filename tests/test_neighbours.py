from dataclasses import replace

import pytest
from example_results import a_trial

from oomprobe.session import ATTEMPTS, LOOKS, Neighbours
from oomprobe.trial import Outcome
from oomprobe.verdicts import Verdict

GIB = 2**30


def ran(before, after, verdict=Verdict.OOM, cap_bytes=None):
    return Outcome(
        trial=replace(a_trial(), verdict=verdict, cap_bytes=cap_bytes),
        outside_before_bytes=before,
        outside_after_bytes=after,
    )


class Schedule:
    """Returns one outcome after the other, and the last one for ever."""

    def __init__(self, *rans):
        self.rans, self.calls = list(rans), 0

    def __call__(self):
        self.calls += 1
        return self.rans[min(self.calls, len(self.rans)) - 1]


def run_undisturbed(watch, run, look):
    """Run a trial as a session does."""
    outcome = run()
    while watch.should_rerun(outcome, look):
        outcome = run()
    return outcome


def watching(expected=GIB):
    slept = []
    watch = Neighbours(24 * GIB, lambda: "pid 7 (python) holds 3.00 GiB", sleep=slept.append)
    watch.expect(expected)
    return watch, slept


@pytest.mark.parametrize("disturbed", [ran(GIB, 5 * GIB), ran(5 * GIB, 5 * GIB), ran(5 * GIB, GIB, cap_bytes=20 * GIB)])
def test_a_failure_while_others_grew_is_run_again(disturbed):
    watch, slept = watching()
    run, levels = Schedule(disturbed, disturbed, ran(GIB, GIB)), iter([9 * GIB, 9 * GIB, GIB, GIB])
    assert run_undisturbed(watch, run, lambda: next(levels)) is run.rans[2]
    assert run.calls == 3
    assert slept == [2, 4]
    assert not watch.contaminated
    assert "discarded and tried again" in next(iter(watch.notes))


@pytest.mark.parametrize(
    "stands",
    [
        ran(GIB, 9 * GIB, Verdict.FITS),
        *(ran(GIB, 9 * GIB, verdict) for verdict in (Verdict.POISONED, Verdict.CRASHED, Verdict.TIMED_OUT)),
        ran(GIB, 0),
        ran(GIB, GIB + 500 * 2**20),  # its own kernels, loaded late
        ran(GIB, 5 * GIB, cap_bytes=19 * GIB),  # the others left the whole cap free
    ],
)
def test_a_trial_that_others_did_not_disturb_counts(stands):
    watch, slept = watching()
    run = Schedule(stands)
    assert run_undisturbed(watch, run, pytest.fail) is stands
    assert (run.calls, slept, watch.contaminated, watch.notes) == (1, [], False, {})


def test_memory_that_keeps_changing_contaminates():
    watch, _ = watching()
    run = Schedule(*(ran(GIB, n * GIB) for n in range(3, 20)))
    assert run_undisturbed(watch, run, lambda: GIB) is run.rans[ATTEMPTS - 1]
    assert watch.contaminated
    assert "pid 7 (python) holds 3.00 GiB" in list(watch.notes)[-1]


def test_only_one_trial_waits_in_vain():
    watch, slept = watching()
    moved = ran(5 * GIB, 5 * GIB)
    first = Schedule(moved)
    run_undisturbed(watch, first, lambda: 5 * GIB)
    assert (first.calls, len(slept)) == (ATTEMPTS, (ATTEMPTS - 1) * (LOOKS - 1))
    again = Schedule(ran(15 * GIB, 15 * GIB))
    run_undisturbed(watch, again, pytest.fail)
    assert again.calls == 1
    assert watch.contaminated


@pytest.mark.parametrize("held", [(0, 5 * GIB), (None, None)], ids=["no kernel loaded yet", "unknown to the device"])
def test_without_a_normal_level_no_trial_is_run_again(held):
    watch, _ = watching(None)
    run = Schedule(ran(*held))
    run_undisturbed(watch, run, pytest.fail)
    assert (run.calls, watch.held_bytes) == (1, [])
