import pytest

from oomprobe.devices.simulated import SimulatedDevice
from oomprobe.rehearsal import Rehearsals
from oomprobe.result import Phase, Trial
from oomprobe.verdict import Verdict


def a_trial(phase, *, passed, accumulation_steps=1):
    verdict = Verdict.FITS if passed else Verdict.OOM
    return Trial(batch_size=8, verdict=verdict, phase=phase, accumulation_steps=accumulation_steps)


@pytest.mark.parametrize(
    ("phase", "passed", "borne_out"),
    [
        (Phase.GROW, True, True),
        (Phase.GROW, False, True),
        (Phase.RECHECK, False, True),
        (Phase.RECHECK, True, False),  # the failure that decided was only replayed
        (Phase.CONFIRM, True, True),
        (Phase.CONFIRM, False, False),
    ],
)
def test_what_is_run_at_the_end_bears_rehearsals_out_or_not(phase, passed, borne_out):
    rehearsals = Rehearsals(SimulatedDevice("1GiB"), single=True)
    assert rehearsals.borne_out(a_trial(Phase.RECHECK, passed=True))  # a size above a hole, tried for the first time
    assert rehearsals.borne_out(a_trial(Phase.BISECT, passed=False))
    assert rehearsals.borne_out(a_trial(phase, passed=passed)) is borne_out
    assert rehearsals.borne_out(a_trial(phase, passed=passed, accumulation_steps=4))  # no question of the search's


def test_several_steps_and_nothing_known_are_not_rehearsed():
    for single in (True, False):
        rehearsals = Rehearsals(SimulatedDevice("1GiB"), single=single)
        assert rehearsals.trial(8, Phase.GROW, steps=2, cap_bytes=None) is None
