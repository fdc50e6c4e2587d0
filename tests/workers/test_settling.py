"""Who is believed when the ranks of a group disagree about a trial."""

from dataclasses import replace

import pytest

from oomprobe.errors import UnreliableError
from oomprobe.records.trials import (
    Call,
    CallRecord,
    DeviceInfo,
    Measured,
    Outcome,
    Phase,
    Request,
    RunnerInfo,
    Trial,
    Verdict,
)
from oomprobe.runners.workers.exit_status import ExitStatus
from oomprobe.runners.workers.messages import Lost, Ready, failed
from oomprobe.runners.workers.settling import (
    LATE,
    TIMED_OUT,
    WAITED,
    built_late,
    culprit,
    failed_outcome,
    first_to_end,
    has_failed,
    passed_outcome,
    sum_of_known,
)

MIB = 2**20
REQUEST = Request(calls=(Call(step="step", batch_size=8),), phase=Phase.BISECT, cap_bytes=500 * MIB)
DEVICE = DeviceInfo(name="a card", torch_device="cuda:0", total_bytes=1000 * MIB, on_host=False)
READY = Ready(
    facts=RunnerInfo(device=DEVICE, step_names=("step",), threads=1),
    resident_bytes=0,
    trials_in_children=False,
    available_bytes=None,
)
AVAILABLE = {0: 1000 * MIB, 1: 1000 * MIB, 2: 1000 * MIB}


def told(verdict=Verdict.FITS, *, peak_mib=100, error=None, measured=None, **shown):
    trial = Trial(
        batch_size=8,
        verdict=verdict,
        phase=Phase.BISECT,
        steps=3,
        cap_bytes=500 * MIB,
        peak_allocated_bytes=peak_mib * MIB // 2,
        peak_reserved_bytes=peak_mib * MIB,
        step_s=peak_mib / 100,
        samples_per_s=800 / peak_mib,
        error=error,
    )
    return Outcome(trial=trial, measured=measured, **shown)


def ended(*, signal=None, code=None, why=None, stderr=""):
    return ExitStatus(
        signal=signal, code=code, why=why, stderr=stderr, peak_resident_bytes=0, oom_kills=0
    )


WHERE = 'Current thread 0x1 (most recent call first):\n  File "/home/me/train.py", line 7 in step\n'
PASSED, OOM = told(), told(Verdict.OOM, error="CUDA out of memory")
BUG, LOST = failed(ValueError("shape")), Lost(text="an illegal memory access")
NOISE = failed(RuntimeError("Connection closed by peer"))
KILLED, WAITING, SLOW = (
    ended(signal=9),
    ended(signal=15, why=WAITED),
    ended(signal=15, why=TIMED_OUT),
)


@pytest.mark.parametrize(
    ("answers", "believed"),
    [
        ({0: PASSED, 1: PASSED}, None),
        ({1: OOM, 0: PASSED}, 1),
        ({0: NOISE, 1: OOM}, 1),  # whatever came first
        ({0: NOISE, 1: KILLED}, 1),
        ({1: BUG, 0: NOISE}, 1),
        ({1: BUG, 0: BUG}, 0),  # all have the same
        ({1: BUG, 0: SLOW}, 1),
        ({0: SLOW, 1: SLOW}, 0),
        ({1: OOM, 0: WAITING}, 1),
        ({1: told(Verdict.HOST_OOM), 0: KILLED}, 1),
        ({1: told(Verdict.SIZE_LIMIT), 0: BUG}, 1),
        (
            {0: told(Verdict.OOM, peak_mib=300), 1: told(Verdict.OOM, peak_mib=400)},
            1,
        ),  # it has less left
        ({1: PASSED, 0: ended(signal=15, why=LATE)}, None),
    ],
)
def test_believed(answers, believed):
    assert culprit(answers, AVAILABLE) == believed


@pytest.mark.parametrize("answer", [OOM, BUG, LOST, KILLED, told(ended_early="StopIteration")])
def test_one_that_has_failed_ends_the_trial_of_all(answer):
    assert has_failed(answer)


@pytest.mark.parametrize("answer", [PASSED, READY, Measured(available_bytes=1, outside_bytes=None)])
def test_one_that_has_passed_does_not(answer):
    assert not has_failed(answer)


def test_the_rank_whose_data_ended_first_is_believed():
    one, two = (
        told(
            ended_early="StopIteration", records=(CallRecord(step="step", served_bytes=1),) * calls
        )
        for calls in (1, 2)
    )
    assert first_to_end(REQUEST, {0: two, 1: one, 2: PASSED}, 1.0) is one


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({0: PASSED, 2: PASSED, 1: ended(why=LATE, stderr=WHERE)}, "rank 1 was still in the step more than 60 s after the others had finished batch 8: rank 1 at train.py:7."),
        ({1: PASSED, 0: ended(why=LATE), 2: ended(why=LATE, stderr=WHERE)}, "ranks 0, 2 were still in the step more than 60 s after rank 1 had finished batch 8: rank 0 at an unknown place; rank 2 at train.py:7."),
    ],
)  # fmt: skip
def test_ranks_out_of_step_are_named_with_their_places(answers, said):
    with pytest.raises(UnreliableError) as raised:
        first_to_end(REQUEST, answers, 60.0)
    assert said in str(raised.value)
    late = built_late(answers, 60.0)
    assert str(late).startswith(f"rank {next(iter(answers))} had built the target, but 60 s later")
    assert f"not built on {said.partition(' w')[0]}: " in str(late)


def test_a_pass_adds_up_what_ranks_share():
    assert sum_of_known([None, None]) is sum_of_known([]) is None
    alone, other = (
        replace(told(unrecorded=text), trial=replace(PASSED.trial, pinned_bytes=pinned))
        for text, pinned in (("", 10), ("?", 11))
    )
    outcome = passed_outcome({0: alone, 1: other}, AVAILABLE)
    assert (outcome.unrecorded, outcome.trial.pinned_bytes) == ("?", 21)
    assert outcome.trial.host_bytes is outcome.outside_after_bytes is None


def test_a_pass_is_the_slowest_and_the_largest_of_all_ranks():
    answers = {
        2: told(
            peak_mib=200,
            records=(CallRecord(step="step", served_bytes=9),),
            measured=Measured(available_bytes=7, outside_bytes=2),
        ),
        0: told(
            peak_mib=100,
            records=(CallRecord(step="step", served_bytes=5, blocks=3),),
            starts_alike=False,
            measured=Measured(available_bytes=5, outside_bytes=9),
        ),
    }
    outcome = passed_outcome(answers, {0: 150 * MIB, 2: 1000 * MIB})
    trial = outcome.trial
    assert (trial.peak_reserved_bytes, trial.peak_allocated_bytes, trial.step_s) == (
        200 * MIB,
        100 * MIB,
        2.0,
    )
    assert trial.samples_per_s == 4
    assert trial.limiting_rank == 0  # 50 MiB are left there, and 800 MiB on the other
    assert [(one.rank, one.verdict, one.available_bytes) for one in trial.ranks] == [
        (0, Verdict.FITS, 150 * MIB),
        (2, Verdict.FITS, 1000 * MIB),
    ]
    assert outcome.records == (CallRecord(step="step", served_bytes=9, blocks=3),)
    assert not outcome.starts_alike
    assert outcome.measured == Measured(available_bytes=5, outside_bytes=9)


def test_a_failure_says_on_which_rank_and_what_the_others_did():
    outcome = failed_outcome(
        REQUEST,
        {1: OOM, 0: ended(signal=15, why=WAITED, stderr=WHERE), 2: PASSED},
        1,
        AVAILABLE,
        [READY] * 3,
    )
    assert outcome.trial.verdict is Verdict.OOM
    assert outcome.trial.error == "on rank 1 of 3: CUDA out of memory"
    assert outcome.trial.limiting_rank == 1
    assert [(one.verdict, one.where) for one in outcome.trial.ranks] == [
        (None, "train.py:7"),
        (Verdict.OOM, None),
        (Verdict.FITS, None),
    ]
    assert outcome.trial.ranks[0].error == "it waited for another rank, and was ended"


def test_each_rank_has_a_tape_of_its_own():
    outcome = passed_outcome({1: told(taped=("b",)), 0: told(taped=("a",))}, AVAILABLE)
    assert outcome.taped == ("a", "b")
    ran_out = told(Verdict.OOM, error="no memory", taped=("b",))
    answers = {1: ran_out, 0: ended(signal=9, why=WAITED)}
    assert failed_outcome(REQUEST, answers, 1, AVAILABLE, [READY] * 2).taped == (None, "b")


def test_a_death_is_a_trial_too():
    trial = failed_outcome(REQUEST, {0: NOISE, 1: KILLED}, 1, AVAILABLE, [READY] * 3).trial
    assert (trial.verdict, trial.batch_size, trial.cap_bytes) == (Verdict.CRASHED, 8, 500 * MIB)
    assert trial.error.startswith("on rank 1 of 2: the trial's process was killed by SIGKILL")


def test_a_time_limit_names_no_rank():
    trial = failed_outcome(REQUEST, {0: SLOW, 1: SLOW}, 0, AVAILABLE, [READY] * 3).trial
    assert (trial.verdict, trial.limiting_rank) == (Verdict.TIMED_OUT, None)
    assert trial.error == "rank 0 at an unknown place; rank 1 at an unknown place"
