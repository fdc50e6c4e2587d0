from dataclasses import replace

import pytest
from helpers import GIB, ARunner, a_trial, texts

from oomprobe.errors import OomProbeError
from oomprobe.probing.neighbours import ATTEMPTS, LOOKS, Neighbours
from oomprobe.records.patience import Patience
from oomprobe.records.trials import Measured, Outcome, Phase, Verdict


def ran(before, after, verdict=Verdict.OOM, cap_bytes=None):
    return Outcome(
        trial=replace(a_trial(), verdict=verdict, cap_bytes=cap_bytes),
        outside_before_bytes=before,
        outside_after_bytes=after,
    )


class Schedule(ARunner):
    """Returns one outcome after the other, and the last one for ever."""

    def __init__(self, *rans, look=lambda: GIB):
        super().__init__()
        self.rans, self.look, self.calls = list(rans), look, 0

    def run(self, request):
        self.calls += 1
        return self.rans[min(self.calls, len(self.rans)) - 1]

    def measure(self):
        return Measured(available_bytes=20 * GIB, outside_bytes=self.look())


def watching(expected=GIB):
    slept = []
    watch = Neighbours(Schedule(), Patience(sleep=slept.append))
    watch.names = lambda: "pid 7 (python) holds 3.00 GiB"
    watch.expect(expected)
    return watch, slept


def run_undisturbed(watch, runner):
    """Return the trial that a session believes."""
    session = runner.session()
    session.neighbours = watch
    return session.run(session.requested(8, Phase.GROW, None))


@pytest.mark.parametrize(
    "disturbed",
    [
        ran(GIB, 5 * GIB),
        ran(5 * GIB, 5 * GIB),
        ran(5 * GIB, GIB, cap_bytes=20 * GIB),
        ran(None, GIB + 513 * 2**20),
        ran(5 * GIB, None),
    ],
)
def test_a_failure_while_others_grew_is_run_again(disturbed):
    watch, slept = watching()
    levels = iter([9 * GIB, 9 * GIB, GIB, GIB])
    run = Schedule(disturbed, disturbed, ran(GIB, GIB), look=lambda: next(levels))
    assert run_undisturbed(watch, run) is run.rans[2].trial
    assert run.calls == 3
    assert slept == [2, 4]
    assert not watch.contaminated
    assert "discarded and tried again" in texts(watch.notes)[0]


@pytest.mark.parametrize(
    "stands",
    [
        ran(GIB, 9 * GIB, Verdict.FITS),
        ran(GIB, 0),
        ran(GIB, GIB + 512 * 2**20),  # its own kernels, loaded late
        ran(GIB, 5 * GIB, cap_bytes=19 * GIB),  # the others left the whole cap free
    ],
)
def test_a_trial_that_others_did_not_disturb_counts(stands):
    watch, slept = watching()
    run = Schedule(stands, look=pytest.fail)
    assert run_undisturbed(watch, run) is stands.trial
    assert (run.calls, slept, watch.contaminated, texts(watch.notes)) == (1, [], False, [])
    assert watch.held_bytes == [GIB, stands.outside_after_bytes]


@pytest.mark.parametrize(("grown_mib", "calls"), [(2000, 1), (2100, 2)])
def test_of_a_large_device_a_fiftieth_may_move(grown_mib, calls):
    watch, _ = watching()
    moved = ran(GIB, GIB + grown_mib * 2**20)
    run = Schedule(moved, ran(GIB, GIB))
    run.facts = replace(run.facts, device=replace(run.facts.device, total_bytes=100 * GIB))
    watch._runner = run
    run_undisturbed(watch, run)
    assert run.calls == calls


def test_other_processes_are_named_on_cuda_only(monkeypatch):
    monkeypatch.setattr(
        "oomprobe.probing.neighbours.processes_on", lambda device: f"pid 7 on {device}"
    )
    runner = ARunner()
    assert Neighbours(runner).names_in_brackets() == " (pid 7 on cuda:0)"
    runner.facts = replace(runner.facts, device=replace(runner.facts.device, torch_device="xpu:0"))
    assert Neighbours(runner).names_in_brackets() == ""


def test_memory_that_keeps_changing_contaminates():
    watch, _ = watching()
    run = Schedule(*(ran(GIB, n * GIB) for n in range(3, 20)))
    assert run_undisturbed(watch, run) is run.rans[ATTEMPTS - 1].trial
    assert watch.contaminated
    assert "pid 7 (python) holds 3.00 GiB" in texts(watch.notes)[-1]


def test_each_trial_has_its_own_attempts():
    watch, _ = watching()
    for _ in range(2):
        run = Schedule(*[ran(GIB, 9 * GIB)] * (ATTEMPTS - 1), ran(GIB, GIB))
        run_undisturbed(watch, run)
        assert (run.calls, watch.contaminated) == (ATTEMPTS, False)


def test_only_one_trial_waits_in_vain():
    watch, slept = watching()
    moved = ran(5 * GIB, 5 * GIB)
    first = Schedule(moved, look=lambda: 5 * GIB)
    run_undisturbed(watch, first)
    assert (first.calls, len(slept)) == (ATTEMPTS, (ATTEMPTS - 1) * (LOOKS - 1))
    again = Schedule(ran(15 * GIB, 15 * GIB), look=pytest.fail)
    run_undisturbed(watch, again)
    assert again.calls == 1
    assert watch.contaminated


@pytest.mark.parametrize("verdict", [Verdict.POISONED, Verdict.CRASHED, Verdict.TIMED_OUT])
def test_the_end_of_a_process_is_not_blamed_on_others(verdict):
    watch, slept = watching()
    run = Schedule(ran(GIB, 9 * GIB, verdict), look=pytest.fail)
    with pytest.raises(OomProbeError):
        run_undisturbed(watch, run)
    assert (run.calls, slept, watch.contaminated, texts(watch.notes)) == (1, [], False, [])


@pytest.mark.parametrize(
    "held", [(0, 5 * GIB), (None, None)], ids=["no kernel loaded yet", "unknown to the device"]
)
def test_without_a_normal_level_no_trial_is_run_again(held):
    watch, _ = watching(None)
    run = Schedule(ran(*held), look=pytest.fail)
    run_undisturbed(watch, run)
    assert (run.calls, watch.held_bytes) == (1, [])
