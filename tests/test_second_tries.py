"""When a trial that ended its process, or its time, is made once more, and when the probe ends."""

import pytest
from helpers import ARunner, a_trial, texts

from oomprobe.errors import DeviceLostError, StepFailedError, TimeLimitError
from oomprobe.records.trials import Outcome, Phase, RankTrial, Verdict

FITS, OOM, TIMED_OUT = Verdict.FITS, Verdict.OOM, Verdict.TIMED_OUT
CRASHED, POISONED = Verdict.CRASHED, Verdict.POISONED


class Dying(ARunner):
    """A runner whose trials end one after the other as it is told, and then pass."""

    def __init__(self, verdicts, *, replaceable=True, ranks=()):
        super().__init__(replaceable=replaceable)
        self.verdicts, self.ranks, self.asked = [*verdicts], ranks, []

    def run(self, request):
        self.asked.append((request.phase, request.fresh, request.must_run))
        verdict = self.verdicts.pop(0) if self.verdicts else FITS
        return Outcome(
            trial=a_trial(
                request.batch_size, verdict, request.phase, error="as told", ranks=self.ranks
            )
        )


def ran(runner, **options):
    session = runner.session(**options)
    trial = session.run(session.requested(8, Phase.GROW, None))
    return trial, session


@pytest.mark.parametrize(
    ("verdicts", "noted"),
    [
        ([FITS], ""),
        ([OOM], ""),
        ([CRASHED, FITS], "batch 8 ended its process once (crashed: as told); tried again in a new one: fits"),
        ([POISONED, OOM], "batch 8 ended its process once (poisoned: as told); tried again in a new one: out of memory"),
    ],
)  # fmt: skip
def test_a_death_is_tried_again_in_a_new_process(verdicts, noted):
    runner = Dying(verdicts)
    trial, session = ran(runner)
    assert trial.verdict is verdicts[-1]
    first, *again = runner.asked
    assert first == (Phase.GROW, False, False)
    assert again == [(Phase.RECHECK, True, True)] * (len(verdicts) - 1)
    assert "".join(texts(session.notes)) == noted


def test_after_a_second_try_the_next_death_is_a_first_one():
    runner = Dying([CRASHED, FITS, CRASHED, FITS])
    session = runner.session()
    for _ in range(2):
        assert session.run(session.requested(8, Phase.GROW, None)).passed
    assert len(runner.asked) == 4


def test_a_sticky_error_that_recurs_limits_the_size_once_a_smaller_one_has_passed():
    session = Dying([FITS, POISONED, POISONED]).session()
    session.run(session.requested(4, Phase.GROW, None))
    assert session.run(session.requested(8, Phase.GROW, None)).verdict is POISONED
    [note] = texts(session.notes)
    assert note.startswith(
        "batch 8 ended in a sticky error in two processes (poisoned: as told): the cause is not memory"
    )


RANK = RankTrial(rank=1, verdict=None)


@pytest.mark.parametrize(
    ("runner", "options", "error", "said", "trials"),
    [
        (Dying([CRASHED, CRASHED]), {}, StepFailedError, "died twice at batch size 8 .*: as told\nRun step_fn", 2),
        (Dying([CRASHED], replaceable=False), {}, StepFailedError, "died twice", 1),
        (Dying([POISONED, POISONED]), {}, DeviceLostError, "batch 8, as told", 2),
        (Dying([CRASHED, TIMED_OUT]), {}, TimeLimitError, "during batch 8, in trial 2, after", 2),
        (Dying([TIMED_OUT] * 2, ranks=(RANK,)), {}, TimeLimitError, "in trial 2 .as told., after", 2),
        (Dying([CRASHED, FITS]), {"time_limit_s": 1e-9}, TimeLimitError, "during batch 8, in trial 1, after", 1),
    ],
)  # fmt: skip
def test_a_second_death_ends_the_probe(runner, options, error, said, trials):
    with pytest.raises(error, match=f"(?s){said}"):
        ran(runner, **options)
    assert len(runner.asked) == trials
