"""How many calls trials make, on a runner that only counts them."""

import dataclasses

import pytest
from helpers import ARunner, a_trial, records, texts

from oomprobe.probing.budget import Budget
from oomprobe.records.trials import Outcome, Phase, Verdict
from oomprobe.rules.program import most_calls

LIMIT, LATE_LIMIT = 500, 280  # of the first calls, and of the large one


class Loop(ARunner):
    """A loop whose n-th call needs more memory than the others; `bonus` is the least calls of a confirmation."""

    def __init__(self, *, large_call, call_s=None, bonus=0, period=0, **facts):
        super().__init__(**facts)
        self.large_call, self.call_s, self.bonus, self.period, self.requests = (
            large_call,
            call_s,
            bonus,
            period,
            [],
        )

    def run(self, request):
        self.requests.append(request)
        names = self.facts.step_names
        total, large_call = (
            max(most_calls(request) // len(names), self.bonus * request.confirms),
            self.large_call,
        )
        if request.batch_size > LIMIT:
            steps = 0
        elif request.batch_size > LATE_LIMIT and total >= large_call:
            steps = large_call - 1
        else:
            steps = total
        verdict = Verdict.FITS if steps == total else Verdict.OOM
        trial = a_trial(
            request.batch_size,
            verdict,
            request.phase,
            steps=steps * len(names),
            cap_bytes=request.cap_bytes,
        )
        # With a period, as long as that of calls that differ too little to need longer trials; otherwise it never repeats.
        served = [
            10**6 + (n % self.period if self.period else n * (n + 1) // 2) for n in range(steps)
        ]
        return Outcome(
            trial=trial, records=records(steps, names=names, served=served, seconds=self.call_s)
        )


def run(session, size, phase):
    return session.run(session.requested(size, phase, None))


def settles_after(request):
    """Return the calls after which a trial may end once they repeat; None if it makes all its calls."""
    settles = request.settles
    return None if settles is None else len(request.calls) + settles.period


GROUPS = {"confirmations": 2, "grows_capped": True}
LOOPS = {
    "one process": (Loop(large_call=7), {}),
    "two steps": (Loop(large_call=7, step_names=("train", "eval")), {}),
    "ranks": (
        Loop(large_call=6, call_s=3.0, failure_cost_s=60.0, **GROUPS),
        {"resolution": 1 / 128},
    ),
    "a command": (
        Loop(large_call=20, bonus=25, starts_anew=True, **GROUPS),
        {"resolution": 1 / 64},
    ),
}


@pytest.mark.parametrize("name", LOOPS)
def test_trials_are_longer_after_a_late_failure(name):
    runner, options = LOOPS[name]
    session = runner.session(**options)
    found = session.find()
    assert (1 - 1 / 32) * LATE_LIMIT <= found.batch_size <= LATE_LIMIT < found.deciding
    assert len(found.unconfirmed) == 1
    first = next(
        number for number, trial in enumerate(session.trials) if trial.phase is Phase.CONFIRM
    )
    short, long = session.trials[:first], session.trials[first + 1 :]
    assert max(trial.steps for trial in short) < runner.large_call * len(runner.facts.step_names)
    assert all(trial.steps >= runner.large_call - 1 for trial in long)
    [note] = [note for note in texts(session.notes) if "failed its confirmation" in note]
    made = (runner.large_call - 1) * len(runner.facts.step_names)
    assert (
        f"batch {found.unconfirmed[0]} failed its confirmation after {made} calls, and each trial had made "
        in note
    )


def test_trials_that_were_replayed_made_no_calls():
    session = Loop(large_call=30).session()
    run(session, 4, Phase.GROW)
    session.program._decided = 0  # as a replay leaves it
    run(session, LATE_LIMIT + 1, Phase.CONFIRM)
    [note] = texts(session.notes)
    assert "failed its confirmation after 29 calls, and the trials before it were replayed:" in note


def test_a_failure_that_is_not_late_lengthens_no_trial():
    session = Loop(large_call=51).session()
    session.find()
    assert session.program.needed == 0
    run(session, LIMIT + 1, Phase.CONFIRM)
    assert session.program.needed == 0
    assert not any("failed its confirmation" in note for note in texts(session.notes))


@pytest.mark.parametrize(
    ("facts", "phase", "wanted"),
    [
        ({}, Phase.BISECT, None),  # makes no more calls than it must
        ({}, Phase.CONFIRM, 4),
        ({"failure_cost_s": 60.0}, Phase.BISECT, 2),
        ({"failure_cost_s": 60.0}, Phase.CONFIRM, 4),
        ({"step_names": ("train", "eval")}, Phase.CONFIRM, None),
    ],
)
@pytest.mark.parametrize("period", [0, 1, 3])
def test_trials_that_make_many_calls_may_settle_by_the_period_of_the_look(
    facts, phase, wanted, period
):
    runner = Loop(large_call=51, call_s=0.1, period=period, **facts)
    session = runner.session()
    run(session, 16, Phase.GROW)
    session.run(session.program.looking(1, 50))
    run(session, 16, phase)
    request = runner.requests[-1]
    assert settles_after(request) == (max(wanted, 1 + period) if wanted and period else None)
    assert request.settles is None or request.settles.period == period


@pytest.mark.parametrize(
    ("large_call", "settled_after"), [(5, 5), (9, None)], ids=["where calls divide memory", "later"]
)
def test_no_trial_settles_after_a_late_call_that_the_look_has_not_met(large_call, settled_after):
    runner = Loop(large_call=large_call, period=1)
    session = runner.session()
    run(session, 16, Phase.GROW)
    session.run(session.program.looking(16, 50))
    for size in (LATE_LIMIT + 1, LATE_LIMIT):
        run(session, size, Phase.CONFIRM)
    assert [settles_after(request) for request in runner.requests[-2:]] == [4, settled_after]


def test_no_trial_settles_after_a_size_that_failed_and_passed_alike():
    runner = Loop(large_call=51, period=1)
    session = runner.session()
    run(session, 16, Phase.GROW)
    session.run(session.program.looking(16, 50))
    session.program.lengthen(16)
    run(session, 16, Phase.CONFIRM)
    assert settles_after(runner.requests[-1]) is None


GIB = 2**30


@pytest.mark.parametrize(
    ("trial", "facts", "is_steady", "leaked", "certain"),
    [
        ({}, {}, True, 0, True),  # the cap alone decided
        ({"verdict": Verdict.CRASHED}, {}, True, 0, False),
        ({"cap_bytes": None}, {}, True, 0, False),  # what others left decided
        ({"cap_bytes": 20 * GIB}, {}, True, 0, False),
        ({}, {}, False, 0, False),  # calls differ
        ({}, {}, True, 2**20, False),  # an earlier trial has left something behind
        ({"cap_bytes": None}, {"grows_capped": True}, False, 2**20, True),  # in a fresh process
    ],
)
def test_a_failure_is_certain_where_the_cap_alone_decided(trial, facts, is_steady, leaked, certain):
    budget = Budget(runner := ARunner(**facts), 0.9)
    budget.take(runner.measure())
    failed = dataclasses.replace(a_trial(8, Verdict.OOM, cap_bytes=18 * GIB), **trial)
    trials = [a_trial(4, leaked_bytes=leaked), failed]
    assert budget.decided(failed, trials, is_steady=is_steady) is certain
    assert budget.decided_all(trials, is_steady=is_steady) is certain


@pytest.mark.parametrize(
    ("facts", "edge", "fraction", "before", "after"),
    [
        ({}, 0, 0.9, (None, None), (None, 18)),
        ({}, 1, 0.9, (None, 19), (19, 18)),
        ({}, 4, 0.9, (None, 18), (18, 18)),
        ({}, 1, 1, (20, 20), (20, 20)),
        ({}, 0, 1, (None, None), (None, None)),
        ({"replaceable": True}, 1, 0.9, (None, None), (None, 18)),
        ({"replaceable": True, "world_size": 2}, 1, 0.9, (None, 19), (19, 18)),
        ({"grows_capped": True}, 1, 0.9, (None, None), (18, 18)),
        ({"grows_capped": True}, 1, 1, (20, 20), (20, 20)),
    ],
)
def test_caps_leave_a_margin_and_growing_goes_up_to_the_edge(facts, edge, fraction, before, after):
    """In GiB: of the search and while growing before the memory is sampled, which growing may do; then the other way round."""
    runner = ARunner(**facts)
    runner.facts = dataclasses.replace(
        runner.facts, device=dataclasses.replace(runner.facts.device, edge_bytes=edge * GIB)
    )
    budget = Budget(runner, fraction)
    caps = [budget.search_cap(), budget.grow_cap()]
    assert not budget.is_final
    budget.take(runner.measure())
    budget.take(runner.measure(), is_final=False)
    caps += [budget.grow_cap(), budget.search_cap()]
    assert caps == [None if cap is None else cap * GIB for cap in (*before, *after)]
    assert (budget.is_final, budget.total_bytes) == (True, int(fraction * 20 * GIB))


@pytest.mark.parametrize(
    ("peak_bytes", "verdict", "holds"),
    [(18 * GIB, Verdict.FITS, True), (18 * GIB + 1, Verdict.FITS, False), (None, Verdict.FITS, False), (1, Verdict.OOM, False)],
)  # fmt: skip
def test_the_budget_holds_a_pass_that_took_no_more(peak_bytes, verdict, holds):
    budget = Budget(runner := ARunner(), 0.9)
    budget.take(runner.measure())
    assert budget.holds(a_trial(8, verdict, peak_reserved_bytes=peak_bytes)) is holds
