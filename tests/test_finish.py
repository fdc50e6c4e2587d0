"""What follows an answer: leaks that refuse it, the plan for a global batch, the breakdown; on a runner that only says what runs."""

import pytest
from helpers import GIB, ARunner, a_trial, records, texts

from oomprobe.errors import NothingFitsError, StepFailedError, TimeLimitError, UnreliableError
from oomprobe.probing.finish import finish
from oomprobe.records.breakdown import FRAGMENTATION, KINDS, Breakdown
from oomprobe.records.trials import Outcome, Phase, Trial, Verdict
from oomprobe.rules.search import Found

BREAKDOWN = Breakdown(
    batch_size=8, peak_allocated_bytes=1, peak_reserved_bytes=1, parts={}, peak_in="forward"
)


class Fitting(ARunner):
    """A runner whose trials pass if a function of the request says so; it may also raise."""

    def __init__(self, fits=lambda request: True, breakdown=None, **facts):
        super().__init__(**facts)
        self.fits, self.breakdown, self.requests = fits, breakdown, []

    def run(self, request):
        self.requests.append(request)
        verdict = Verdict.FITS if self.fits(request) else Verdict.OOM
        trial = Trial.of(request, verdict, steps=len(request.calls))
        return Outcome(trial=trial, records=records(trial.steps), breakdown=self.breakdown)


def finished(runner, answer, broken_down_at=None, trial=None, told=lambda session: None, **options):
    session = runner.session(**options)
    session.budget.take(runner.measure())
    session.trials.append(trial or a_trial(answer, phase=Phase.CONFIRM))
    told(session)
    found = Found(batch_size=answer)
    assert finish(session, found, broken_down_at) == found
    return session


def raising(error):
    def fits(request):
        raise error

    return fits


NO_SPLIT = "no split of global_batch=400 into micro-batches of at most 100 ran"
CUT_OFF = "the plan for global_batch was not run to completion (time passed)"


@pytest.mark.parametrize(
    ("runner", "answer", "options", "tried", "noted"),
    [
        (Fitting(), 100, {}, [], ""),
        (Fitting(runs_plans=False), 100, {"global_batch": 400}, [], "the plan for global_batch was not run: the command"),
        (Fitting(), 8, {"global_batch": 8}, [], ""),  # the answer itself
        (Fitting(), 16, {"global_batch": 8}, [(8, 1)], ""),
        (Fitting(world_size=2), 16, {"global_batch": 64}, [(16, 2)], ""),
        (Fitting(), 100, {"global_batch": 400}, [(100, 4)], ""),
        (Fitting(), 2, {"global_batch": 1000}, [(2, 32)], ""),
        (Fitting(lambda request: request.batch_size < 90), 100, {"global_batch": 400}, [(100, 4), (80, 5)], ""),
        (Fitting(lambda _: False), 100, {"global_batch": 400}, [(100, 4), (80, 5), (50, 8), (40, 10), (25, 16)], NO_SPLIT),
        (Fitting(lambda _: False), 100, {"global_batch": 400, "min_batch": 70}, [(100, 4), (80, 5), (70, 6)], NO_SPLIT),
        (Fitting(lambda _: False), 100, {"global_batch": 400, "multiple_of": 50}, [(100, 4), (50, 8)], NO_SPLIT),
        (Fitting(raising(TimeLimitError("time passed\nmore"))), 100, {"global_batch": 400}, [(100, 4)], CUT_OFF),
        (Fitting(raising(StepFailedError("time passed\nmore", batch_size=8))), 100, {"global_batch": 400}, [(100, 4)], CUT_OFF),
    ],
)  # fmt: skip
def test_the_plan_is_run_and_shrinks_while_it_fails(runner, answer, options, tried, noted):
    session = finished(runner, answer, **options)
    assert [
        (request.batch_size, request.accumulation_steps) for request in runner.requests
    ] == tried
    assert all(
        request.confirms and request.fresh and request.cap_bytes == 18 * GIB
        for request in runner.requests
    )
    assert "".join(texts(session.notes)).startswith(noted)
    assert noted or not texts(session.notes)


@pytest.mark.parametrize("answer", [16, 100])
def test_the_plan_starts_as_building_left_its_process(answer):
    runner = Fitting(builds=True, replaceable=True)
    finished(runner, answer, global_batch=8 if answer == 16 else 400)
    assert [request.as_built for request in runner.requests] == [True]


@pytest.mark.parametrize(
    ("runner", "noted"),
    [
        (Fitting(breakdown=BREAKDOWN), []),
        (Fitting(), ["no breakdown: a card does not record its allocations (torch's own CUDA allocator and simulated cards"]),
        (Fitting(lambda _: False), ["no breakdown: its extra step ended with out of memory"]),
        (Fitting(raising(UnreliableError("a reason\nmore"))), ["no breakdown: a reason"]),
    ],
)  # fmt: skip
def test_the_breakdown_is_a_step_of_its_own(runner, noted):
    session = finished(runner, 8, breakdown=True)
    [request] = runner.requests
    assert (request.batch_size, request.cap_bytes) == (8, 18 * GIB)
    assert [call for call in request.calls if call.is_recorded] == [request.calls[-1]]
    assert (len(session.trials), session.breakdown) == (1, runner.breakdown)
    said = texts(session.notes)
    assert len(said) == len(noted)
    assert all(text.startswith(start) for text, start in zip(said, noted, strict=True))


def test_another_size_may_be_broken_down():
    runner = Fitting(breakdown=BREAKDOWN)
    finished(runner, 8, broken_down_at=4, breakdown=True)
    assert [request.batch_size for request in runner.requests] == [4]


def test_live_bytes_are_all_but_fragmentation():
    parts = {kind: 10**number for number, kind in enumerate(KINDS)}
    breakdown = Breakdown(
        batch_size=1, peak_allocated_bytes=1, peak_reserved_bytes=1, parts=parts, peak_in="forward"
    )
    assert breakdown.live_bytes == sum(parts.values()) - parts[FRAGMENTATION]


def holding(session):
    session.held_by_step = ". The code held a list"


def with_graphs(session):
    session.gradients_hold_graphs = True


@pytest.mark.parametrize(
    ("steps", "replaceable", "told", "refused"),
    [
        (100, False, holding, None),
        (
            99,
            False,
            holding,
            "after about 99 more. Something keeps tensors .*probe. The code held a list",
        ),
        (99, False, with_graphs, "after about 99 more. The gradients hold the graph of every step"),
        (1000, True, holding, None),
        (999, True, holding, "after about 999 more"),
    ],
)
def test_an_answer_that_soon_fills_the_memory_is_refused(steps, replaceable, told, refused):
    """Of 20 GiB the answer leaves 8 free."""
    leaking = a_trial(
        8, phase=Phase.CONFIRM, step_leaked_bytes=8 * GIB // steps, peak_reserved_bytes=12 * GIB
    )
    runner = Fitting(replaceable=replaceable)
    if refused is None:
        finished(runner, 8, trial=leaking, told=told)
        return
    with pytest.raises(UnreliableError, match=refused):
        finished(runner, 8, trial=leaking, told=told)


def test_no_answer_is_an_error():
    with pytest.raises(NothingFitsError):
        finished(Fitting(), None, trial=a_trial(1, Verdict.OOM))
