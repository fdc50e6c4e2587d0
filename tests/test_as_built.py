"""A session confirms in a process as building left it first, where the runner's processes build."""

import pytest
from helpers import a_trial

from oomprobe.probing.session import Session
from oomprobe.records.options import Options
from oomprobe.records.trials import Calls, DeviceInfo, Measured, Outcome, Phase, RunnerInfo, Verdict
from oomprobe.report.progress import Reporter
from oomprobe.runners.signals import Clock

GIB = 2**30
FITS, OOM = Verdict.FITS, Verdict.OOM


class Building:
    """A runner whose trials fail after ten calls if the cache is as building left it, or however it is."""

    def __init__(self, *, builds=True, fails=lambda request: request.as_built):
        device = DeviceInfo(name="a card", torch_device="cuda:0", total_bytes=24 * GIB, on_host=False)
        self.facts = RunnerInfo(device=device, step_names=("step",), threads=1, replaceable=True, builds=builds)
        self.fails, self.asked = fails, []

    def run(self, request):
        self.asked.append(request.as_built)
        fails = self.fails(request)
        steps = 10 if fails else request.calls or 3
        trial = a_trial(request.batch_size, OOM if fails else FITS, request.phase, steps=steps)
        return Outcome(trial=trial, calls=Calls(made=trial.steps, first=1))

    def measure(self):
        return Measured(available_bytes=20 * GIB, outside_bytes=GIB)


def opened(runner):
    options = Options()
    return Session(runner, options, Reporter(), Clock(options), [])


def asked_to_confirm(session, times=2):
    return [session.try_size(8, Phase.CONFIRM, capped=True).passed for _ in range(times)]


@pytest.mark.parametrize("phase", [Phase.GROW, Phase.BISECT, Phase.RECHECK])
def test_only_confirmations_are_made_as_built(phase):
    session = opened(Building())
    session.run(8, phase, cap_bytes=None)
    assert session.runner.asked == [False]


def test_a_runner_that_does_not_build_confirms_as_ever():
    session = opened(Building(builds=False))
    assert asked_to_confirm(session) == [True, True]
    assert session.runner.asked == [False, False]


def test_a_size_that_needs_an_empty_cache_is_confirmed_so_from_then_on():
    session = opened(Building())
    assert asked_to_confirm(session) == [True, True]
    assert session.runner.asked == [True, False, False]
    assert session.needs_emptying
    assert [note for note in session.notes if "in call 11 of a fresh process as building left it" in note]


def test_a_size_that_fails_either_way_is_not_confirmed():
    session = opened(Building(fails=lambda request: request.confirms))
    assert asked_to_confirm(session) == [False, False]
    assert session.runner.asked == [True, False, True, False]
    assert not session.needs_emptying
    assert not [note for note in session.notes if "as building left it" in note]


def test_a_late_failure_as_built_makes_no_trial_longer():
    session = opened(Building())
    session.run(4, Phase.BISECT, cap_bytes=None)
    needed = session.call_plan.needed
    assert not session.try_size(8, Phase.CONFIRM, capped=True).lengthens
    assert session.call_plan.needed == needed
