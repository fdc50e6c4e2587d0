"""A session confirms in a process as building left it first, where the runner's processes build."""

import pytest
from helpers import ARunner, a_trial, records, texts

from oomprobe.records.trials import Outcome, Phase, Verdict

FITS, OOM = Verdict.FITS, Verdict.OOM


class Building(ARunner):
    """A runner whose trials fail after ten calls if the cache is as building left it, or however it is."""

    def __init__(self, *, builds=True, fails=lambda request: request.as_built):
        super().__init__(replaceable=True, builds=builds)
        self.fails, self.asked = fails, []

    def run(self, request):
        self.asked.append(request.as_built)
        fails = self.fails(request)
        steps = 10 if fails else len(request.calls)
        trial = a_trial(request.batch_size, OOM if fails else FITS, request.phase, steps=steps)
        return Outcome(trial=trial, records=records(steps))


def asked_to_confirm(session, times=2):
    return [session.try_size(8, Phase.CONFIRM, capped=True).passed for _ in range(times)]


@pytest.mark.parametrize("phase", [Phase.GROW, Phase.BISECT, Phase.RECHECK])
def test_only_confirmations_are_made_as_built(phase):
    session = Building().session()
    session.run(session.requested(8, phase, None))
    assert session.runner.asked == [False]


def test_a_runner_that_does_not_build_confirms_as_ever():
    session = Building(builds=False).session()
    assert asked_to_confirm(session) == [True, True]
    assert session.runner.asked == [False, False]


def test_a_size_that_needs_an_empty_cache_is_confirmed_so_from_then_on():
    session = Building().session()
    assert asked_to_confirm(session) == [True, True]
    assert session.runner.asked == [True, False, False]
    assert session.as_built.needs_emptying
    assert [
        note
        for note in texts(session.notes)
        if "in call 11 of a fresh process as building left it" in note
    ]


def test_a_size_that_fails_either_way_is_not_confirmed():
    session = Building(fails=lambda request: request.confirms).session()
    assert asked_to_confirm(session) == [False, False]
    assert session.runner.asked == [True, False, True, False]
    assert not session.as_built.needs_emptying
    assert not [note for note in texts(session.notes) if "as building left it" in note]


def test_a_late_failure_as_built_makes_no_trial_longer():
    session = Building().session()
    session.run(session.requested(4, Phase.BISECT, None))
    needed = session.program.needed
    assert not session.try_size(8, Phase.CONFIRM, capped=True).lengthens
    assert session.program.needed == needed
