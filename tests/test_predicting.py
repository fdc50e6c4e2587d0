"""A runner around a card's, on a card that only replays: which trials run, and which follow from those that ran."""

from dataclasses import replace

import pytest
from helpers import ARunner

from oomprobe.allocator.caching import CachingAllocator
from oomprobe.records.trials import Call, CallRecord, Outcome, Phase, Request, Trial, Verdict
from oomprobe.runners.predicting import WRONG, predict_on_card
from oomprobe.tape.calls import ALLOCATED, FREED, RecordedCall
from oomprobe.tape.record import TapedTrial
from oomprobe.tape.reductions import Processors

MIB = 2**20
GROW, BISECT = Phase.GROW, Phase.BISECT


class Card(ARunner):
    """Each call of its step asks for a MiB per example."""

    capacity, unrecorded = 1000 * MIB, ""
    served = ()  # in each call of each step

    def run(self, request):
        self.ran.append(request)
        size, count = request.batch_size, len(request.calls)
        calls = [RecordedCall(((ALLOCATED, 0, 0), (FREED, 0, 0)), (size * MIB,))] * count
        allocator, processors = CachingAllocator(1000 * MIB), Processors((9, 0), 132, 2048)
        taped = TapedTrial(calls=calls, allocator=allocator, live={}, processors=processors)
        verdict = Verdict.FITS if size * MIB <= self.capacity else Verdict.OOM
        return Outcome(
            trial=Trial.of(request, verdict, peak_reserved_bytes=size * MIB),
            records=self.records(count),
            taped=(taped,) * (request.records and not self.unrecorded),
            unrecorded=self.unrecorded,
        )

    def records(self, count):
        if not self.served:
            return (CallRecord(step="step"),) * count
        return tuple(
            CallRecord(step=step, served_bytes=MIB * served, stepped=1)
            for step in self.facts.step_names
            for served in self.served
        )


@pytest.fixture
def card():
    card = Card(records=True)
    card.ran = []
    return card


def asked(phase, size, calls=3):
    return Request(phase=phase, calls=(Call(step="step", batch_size=size),) * calls, must_run=False)


def run(runner, *sizes):
    """Return those of the sizes, each with its phase, that run."""
    outcomes = [runner.run(asked(*size)) for size in sizes]
    assert [outcome.trial.passed for outcome in outcomes] == [size[1] <= 1000 for size in sizes]
    return [outcome.trial.batch_size for outcome in outcomes if not outcome.trial.replayed]


@pytest.mark.parametrize(
    ("sizes", "ran"),
    [
        ([1, 2, 4, 100, 125, 126, 252, 504, 1008], [1, 2, 126]),  # 8 times 126 would fail
        ([1, 2, 128, 4], [1, 2, 128]),
        ([1, 2, 129, 4], [1, 2, 129]),  # further than 64 times what ran
        ([1, 2, 1001], [1, 2]),
        ([1, 1, 1, 2, 4], [1, 1, 1, 2]),
    ],
)
def test_sizes_run_until_one_is_near_the_limit(sizes, ran, card):
    assert run(predict_on_card(card), *[(GROW, size) for size in sizes]) == ran


def test_what_must_run_runs_and_is_not_lengthened(card):
    runner, plain = predict_on_card(card), asked(BISECT, 7)
    sizes = (GROW, 1), (GROW, 2), (BISECT, 999), (BISECT, 1001), (Phase.RECHECK, 5), (BISECT, 7)
    assert run(runner, *sizes) == [1, 2, 5]
    several = (*[replace(plain.calls[0], accumulates=True)] * 2, plain.calls[0])
    for name, value in [
        *(("must_run", True), ("phase", Phase.CONFIRM), ("looks", True), ("as_built", True)),
        *(("records", True), ("calls", several)),
    ]:
        outcome = runner.run(replace(plain, **{name: value}))
        assert (outcome.trial.replayed, outcome.contradicts_replay) == (False, False)
    assert [len(request.calls) for request in card.ran] == [5] * 3 + [3] * 6


def test_trials_that_may_teach_something_make_more_calls(card):
    runner = predict_on_card(card)
    for calls in (1, 3, 8, 23, 24):
        runner.run(asked(GROW, 1, calls))
    extra = [sum(call.is_extra for call in request.calls) for request in card.ran]
    assert (extra, len(card.ran[-2].calls)) == ([2, 2, 4, 23, 0], 46)
    assert all(request.records for request in card.ran)


@pytest.mark.parametrize(
    ("capacity", "phase", "mistakes", "left"),
    [(3, BISECT, 1, True), (2000, Phase.CONFIRM, 2, False), (2000, Phase.CONFIRM, 3, True)],
)
def test_replays_that_were_wrong_end_predictions(capacity, phase, mistakes, left, card):
    runner, size = predict_on_card(card), 4 if capacity == 3 else 1001
    assert run(runner, (GROW, 1), (GROW, 2)) == [1, 2]
    card.capacity = capacity * MIB
    for _ in range(mistakes):
        assert runner.run(replace(asked(phase, size), must_run=True)).contradicts_replay
    card.capacity = 1000 * MIB
    assert runner.facts.environment["predicted"] == (WRONG if left else True)
    assert run(runner, (BISECT, 9)) == [9] * left


def test_what_cannot_be_recorded_is_not_predicted(card):
    card.unrecorded = "no history"
    runner = predict_on_card(card)
    assert run(runner, (GROW, 1), (GROW, 2), (GROW, 4)) == [1, 2, 4]
    assert runner.facts.environment["predicted"] == "no history"
    assert predict_on_card(plain := ARunner()) is plain


def test_recordings_shorter_than_one_of_several_steps_needs_predict_nothing(card):
    """A trial's calls are those of all steps; a look counts those of each."""
    card.facts = replace(card.facts, step_names=("train", "eval"))
    runner = predict_on_card(card)
    run(runner, (GROW, 1, 8), (GROW, 2, 8))
    assert run(runner, (BISECT, 7, 8)) == []
    card.served = [1] * 7 + [9] + [1] * 7  # the eighth call of each step asks for more
    runner.run(replace(asked(GROW, 2, 15), looks=True))
    card.served = ()
    assert run(runner, (BISECT, 7, 8)) == [7]
