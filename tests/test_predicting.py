"""A runner around a card's, on a card that only replays: which trials run, and which follow from those that ran."""

from dataclasses import replace

import pytest
from helpers import ARunner

from oomprobe.allocator.caching import AllocatorOutOfMemory, CachingAllocator
from oomprobe.records.trials import Call, CallRecord, Outcome, Phase, Request, Trial, Verdict
from oomprobe.runners.predicting import WRONG, predict_on_card
from oomprobe.tape.calls import ALLOCATED, FREED, RecordedCall, replay_call
from oomprobe.tape.record import TapedTrial
from oomprobe.tape.reductions import Processors

MIB = 2**20
GROW, BISECT = Phase.GROW, Phase.BISECT
CAPACITY = 1000 * MIB


def call_of(size):
    return RecordedCall(((ALLOCATED, 0, 0), (FREED, 0, 0)), (size * MIB,))


class Card(ARunner):
    """Each call of its step asks for a MiB per example."""

    def __init__(self, **facts):
        super().__init__(records=True, **facts)
        self.ran, self.fails, self.unrecorded = [], False, ""

    def run(self, request):
        self.ran.append(request)
        allocator, live = CachingAllocator(CAPACITY), {}
        call, names = call_of(request.batch_size), [call.step for call in request.calls]
        taped = TapedTrial(
            calls=[call] * len(names),
            allocator=allocator.copy(),
            live={},
            processors=Processors((9, 0), 132, 2048),
        )
        verdict = Verdict.FITS
        try:
            for _ in names:
                live = replay_call(allocator, call, live)
        except AllocatorOutOfMemory:
            verdict = Verdict.OOM
        if self.fails:
            verdict = Verdict.OOM
        trial = Trial.of(request, verdict, peak_reserved_bytes=allocator.peak_reserved_bytes)
        return Outcome(
            trial=trial,
            records=tuple(CallRecord(step=name) for name in names),
            taped=(taped,) if request.records and not self.unrecorded else (),
            unrecorded=self.unrecorded,
        )


def asked(phase, size, calls=3, **more):
    return Request(
        phase=phase,
        calls=(Call(step="step", batch_size=size),) * calls,
        **{"must_run": False, **more},
    )


def ask(runner, *asked_for):
    """Return which of these sizes run."""
    card = runner._runner
    ran = []
    for phase, size in asked_for:
        before = len(card.ran)
        outcome = runner.run(asked(phase, size))
        assert outcome.trial.passed is (size <= 1000)
        assert outcome.trial.replayed is (len(card.ran) == before)
        assert outcome.taped == ()
        if not outcome.trial.replayed:
            ran.append(size)
    return ran


@pytest.mark.parametrize(
    ("sizes", "run"),
    [
        ([1, 2, 4, 100, 125, 126, 252, 504, 1008], [1, 2, 126]),  # 8 times 126 would fail
        ([1, 2, 128, 4], [1, 2, 128]),
        ([1, 2, 129, 4], [1, 2, 129]),  # further than 64 times what ran
        ([1, 2, 1001], [1, 2]),
        ([1, 1, 1, 2, 4], [1, 1, 1, 2]),
    ],
)
def test_sizes_run_until_one_is_near_the_limit(sizes, run):
    assert ask(predict_on_card(Card()), *[(GROW, size) for size in sizes]) == run


def test_what_searches_after_growing_follows_and_what_must_run_runs():
    runner = predict_on_card(Card())
    sizes = (GROW, 1), (GROW, 2), (BISECT, 999), (BISECT, 1001), (Phase.RECHECK, 5)
    assert ask(runner, *sizes) == [1, 2, 5]
    card, plain = runner._runner, asked(BISECT, 7)
    micro_batches = (*[replace(plain.calls[0], accumulates=True)] * 2, plain.calls[0])
    assert runner.run(plain).trial.replayed
    for more in (
        *({"must_run": True}, {"phase": Phase.CONFIRM}, {"looks": True}, {"as_built": True}),
        *({"records": True}, {"explains": True}, {"calls": micro_batches}),
    ):
        before = len(card.ran)
        outcome = runner.run(replace(plain, **more))
        assert (outcome.trial.replayed, outcome.contradicts_replay) == (False, False)
        assert [len(request.calls) for request in card.ran[before:]] == [3]


def test_trials_that_may_teach_something_make_more_calls():
    card = Card()
    runner = predict_on_card(card)
    for calls in (1, 3, 8, 23, 24):
        runner.run(asked(GROW, 1, calls))
    assert [len(request.calls) for request in card.ran] == [3, 5, 12, 34, 24]
    assert [sum(call.is_extra for call in request.calls) for request in card.ran] == [
        2,
        2,
        4,
        11,
        0,
    ]
    runner.run(asked(BISECT, 1, 3))
    assert len(card.ran[-1].calls) == 3
    assert all(request.records for request in card.ran)


def test_a_replay_that_was_wrong_ends_predictions():
    card = Card()
    runner = predict_on_card(card)
    assert ask(runner, (GROW, 1), (GROW, 2)) == [1, 2]
    assert runner.facts.environment["predicted"] is True
    card.fails = True
    assert runner.run(asked(BISECT, 4, must_run=True)).contradicts_replay
    assert runner.facts.environment["predicted"] == WRONG
    card.fails = False
    assert ask(runner, (BISECT, 8), (GROW, 16)) == [8, 16]


@pytest.mark.parametrize("mistakes", [2, 3])
def test_sizes_that_run_though_a_replay_failed_are_counted(mistakes, monkeypatch):
    runner = predict_on_card(Card())
    assert ask(runner, (GROW, 1), (GROW, 2)) == [1, 2]
    monkeypatch.setattr("test_predicting.CAPACITY", 2000 * MIB)
    for size in range(1001, 1001 + mistakes):
        outcome = runner.run(asked(Phase.CONFIRM, size))
        assert (outcome.trial.passed, outcome.contradicts_replay) == (True, True)
    assert ask(runner, (BISECT, 9)) == ([] if mistakes == 2 else [9])


def test_what_cannot_be_recorded_is_not_predicted():
    card = Card()
    card.unrecorded = "no history"
    runner = predict_on_card(card)
    assert ask(runner, (GROW, 1), (GROW, 2), (GROW, 4)) == [1, 2, 4]
    assert runner.facts.environment["predicted"] == "no history"
    plain = ARunner()
    assert predict_on_card(plain) is plain
    assert replace(card.facts, records=False) == plain.facts
