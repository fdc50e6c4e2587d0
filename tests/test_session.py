"""What a session asks of its runner and concludes from trials, on a runner that ends them as it is told."""

from dataclasses import replace

import pytest
from helpers import GIB, ARunner, a_trial, records, texts

from oomprobe.errors import StepFailedError, UnreliableError
from oomprobe.probing.session import ContradictedError
from oomprobe.records.trials import Measured, Outcome, Phase, Verdict
from oomprobe.rules.search import Found, Reply

FITS, OOM = Verdict.FITS, Verdict.OOM


class Told(ARunner):
    """A runner whose trials end as a list says, with fields of trials and outcomes; the last for ever."""

    def __init__(self, *ends, available=(20,), device=None, **facts):
        super().__init__(**facts)
        self.facts = replace(self.facts, device=replace(self.facts.device, **(device or {})))
        self.ends, self.available, self.requests = [*ends], [*available], []

    def measure(self):
        gib = self.available.pop(0) if len(self.available) > 1 else self.available[0]
        return Measured(available_bytes=gib * GIB, outside_bytes=None)

    def run(self, request):
        self.requests.append(request)
        end = self.ends[min(len(self.requests), len(self.ends)) - 1]
        if isinstance(end, Exception):
            raise end
        made, of_trial = {**end}, {}
        for name in [*made]:
            if name in a_trial().__slots__:
                of_trial[name] = made.pop(name)
        trial = a_trial(
            request.batch_size,
            phase=request.phase,
            cap_bytes=request.cap_bytes,
            steps=len(request.calls),
        )
        made.setdefault("records", records(trial.steps))
        return Outcome(trial=replace(trial, **of_trial), **made)


PASSED, FAILED, FULL = {}, {"verdict": OOM}, {"peak_reserved_bytes": 17 * GIB}


@pytest.mark.parametrize(
    ("runner", "found", "runs"),
    [
        (Told(PASSED), Found(batch_size=8, limit=8), 1),
        (Told(PASSED, confirmations=2), Found(batch_size=8, limit=8), 2),
        (Told(PASSED, FAILED, confirmations=2), Found(batch_size=None), 2),
        (Told(FAILED), Found(batch_size=None), 2),
        (Told(FAILED, PASSED), Found(batch_size=8, limit=8), 2),  # which varies
        (
            Told(FAILED, PASSED, device={"on_host": True}),
            Found(batch_size=8, limit=8, transient=(8,)),
            2,
        ),
        (Told(FULL, available=(20, 19)), Found(batch_size=8, limit=8), 1),
        (Told(FULL, available=(20, 18)), Found(batch_size=8, limit=8), 2),  # 16.2 GiB are left
        (Told(FULL, available=(20, 20)), Found(batch_size=8, limit=8), 1),
        (
            Told({"peak_reserved_bytes": 19 * GIB}, available=(20, 20)),
            Found(batch_size=8, limit=8),
            1,
        ),
    ],
)
def test_a_check_runs_again_what_failed_and_what_no_longer_fits_the_budget(runner, found, runs):
    session = runner.session()
    assert session.confirm_only(8) == found
    assert [(request.batch_size, request.phase, request.fresh) for request in runner.requests] == [
        (8, Phase.CONFIRM, True)
    ] * runs


@pytest.mark.parametrize(
    ("phase", "known", "calls", "fresh", "exact"),
    [
        (Phase.GROW, False, 2, False, False),
        (Phase.GROW, True, 5, False, False),
        (Phase.BISECT, False, 5, False, False),
        (Phase.RECHECK, False, 5, True, False),
        (Phase.CONFIRM, False, 6, True, True),
        (Phase.CONFIRM, True, 6, True, True),
    ],
)
def test_a_request_of_the_search_depends_on_its_phase(phase, known, calls, fresh, exact):
    runner = Told(PASSED, failure_cost_s=1.0, starts_anew=True)
    session = runner.session()
    session.program.affordable = lambda size, **_: 5
    session.run(session.program.growing(4))
    if known:
        session._known = Reply(passed=True)
    request = session.requested(8, phase, 7)
    assert (len(request.calls), request.fresh, request.must_run, request.cap_bytes) == (
        calls,
        fresh,
        exact,
        7,
    )


def test_each_request_carries_what_has_passed_and_what_was_learned():
    runner = Told({"learned": {"step": (0,)}}, FAILED, {"replayed": True}, PASSED, PASSED)
    session = runner.session()
    for size in (4, 8, 2, 4, 6):
        session.run(session.requested(size, Phase.GROW, None))
    assert [request.passed for request in runner.requests] == [(), (4,), (4,), (4,), (4,)]
    assert [request.learned for request in runner.requests] == [{}] + [{"step": (0,)}] * 4


def test_what_belongs_to_the_probe_adds_up():
    holders = {"holders": ("a list", "a cache"), "gradients_hold_graphs": True, "in_steps_s": 1.5}
    session = Told(holders, {"in_steps_s": 2.0}).session()
    for size in (4, 8):
        session.run(session.requested(size, Phase.GROW, None))
    assert (session.in_steps_s, session.gradients_hold_graphs) == (3.5, True)
    assert session.held_by_step.endswith("held a list, a cache, which was not there before")


def test_the_budget_is_taken_once_kernels_are_loaded():
    measured = [{"measured": Measured(available_bytes=n * GIB, outside_bytes=GIB)} for n in (10, 5)]
    session = Told(PASSED, *measured).session()
    for size in (2, 4, 8):
        session.run(session.requested(size, Phase.GROW, None))
    assert (session.budget.total_bytes, session.neighbours.held_bytes) == (9 * GIB, [GIB])


@pytest.mark.parametrize(
    ("runner", "noted", "warns"),
    [
        (Told(PASSED, FAILED), "the step varies: batch 8 ended differently in two trials of 0 calls under the same cap (fits, then", True),
        (Told(PASSED, FAILED, world_size=2), "two trials of batch 8 on groups of ranks differ (fits, then", False),
        (Told(PASSED, FAILED, device={"on_host": True}), None, False),
        (Told({"replayed": True}, FAILED), None, False),
        (Told(PASSED, {"replayed": True, "verdict": OOM}), None, False),
        (Told(PASSED, PASSED), None, False),
    ],
)  # fmt: skip
def test_a_size_that_ends_in_two_ways_varies(runner, noted, warns):
    runner.ends[1] = {**runner.ends[1], "steps": 0}
    session = runner.session()
    replies = [session.try_size(8, phase, capped=True) for phase in (Phase.BISECT, Phase.RECHECK)]
    assert [reply.varies for reply in replies] == [False, noted is not None]
    said = [note for note in session.notes if "differ" in note.text]
    assert [note.text.startswith(noted) for note in said] == [True] * (noted is not None)
    assert [note.warns for note in said] == [warns] * (noted is not None)


def test_beside_others_that_kept_memory_nothing_varies():
    session = Told(PASSED, FAILED).session()
    session.neighbours.contaminated = True
    replies = [session.try_size(8, phase, capped=True) for phase in (Phase.BISECT, Phase.RECHECK)]
    assert not replies[1].varies


LONGER = {"records": records(50, served=[1000 * number for number in range(50)])}


@pytest.mark.parametrize("end", [PASSED, LONGER, FAILED])
def test_a_look_tells_whether_later_calls_need_more(end):
    session = Told(PASSED, end).session()
    session.run(session.requested(2, Phase.GROW, None))
    reply = session.look(1)
    assert (reply.passed, reply.varies) == (end is not FAILED, end is LONGER)


def test_without_time_nothing_is_looked_at():
    session = Told(PASSED).session()
    session.run(session.requested(2, Phase.GROW, None))
    session.has_time_to_grow = False
    assert session.look(1) == Reply(passed=True)
    assert len(session.runner.requests) == 1


SAME = {"peak_allocated_bytes": GIB, "records": records(2, served=(5, 5))}


def grow(runner, most, **options):
    session = runner.session(**options)
    session.searches = True
    for number in range(most):
        reply = session.try_size(2**number, Phase.GROW, capped=False)
    return session, reply


def test_the_same_memory_at_every_size_is_no_answer():
    with pytest.raises(UnreliableError, match="batch 1024 needs no more memory than batch 1,"):
        grow(Told(SAME), 11)
    # The trials from which it was predicted may have differed, so it runs.
    replayed, ran = SAME | {"replayed": True}, Told(*[SAME | {"replayed": True}] * 11, SAME)
    with pytest.raises(UnreliableError, match="batch 1024 needs no more memory than batch 1,"):
        grow(ran, 11)
    assert (len(ran.requests), ran.requests[-1].must_run) == (12, True)
    contradicts = replayed | {"replayed": False, "contradicts_replay": True}
    with pytest.raises(ContradictedError):
        grow(Told(*[replayed] * 11, contradicts), 11)


@pytest.mark.parametrize(("options", "splits"), [({}, True), ({"max_batch": 64}, False)])
def test_a_step_that_splits_its_batch_is_not_limited(options, splits):
    ends = [
        {
            "peak_allocated_bytes": GIB,
            "records": tuple(replace(one, blocks=10 * 2**n) for one in records(2)),
        }
        for n in range(4)
    ]
    session, reply = grow(Told(*ends), 4, **options)
    assert session.splits is reply.grows_no_further is splits
    assert [note.sizes for note in session.notes] == [(1, 8)] * splits
    assert all("from batch 1 to 8 its peak" in text for text in texts(session.notes))


def test_a_refusal_of_the_runner_ends_the_probe():
    with pytest.raises(UnreliableError, match="too large a leak"):
        grow(Told({"refusal": "too large a leak"}), 1)


def test_a_contradiction_drops_what_was_predicted():
    grow(Told(PASSED, {"contradicts_replay": True}), 2)
    ends = {"replayed": True}, {"contradicts_replay": True}
    with pytest.raises(ContradictedError):
        grow(Told(*ends), 2)
    session, _ = grow(Told(*ends), 1)
    session.searches = False  # what ran stands
    assert session.run(session.requested(2, Phase.CONFIRM, None)).passed


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        (
            [PASSED, FAILED, UnreliableError("no")],
            "after batch 1 ran for 2 steps and batch 2 failed, no",
        ),
        ([PASSED, StepFailedError("no", batch_size=2)], "after batch 1 ran for 2 steps, no"),
    ],
)
def test_an_error_says_what_is_known(ends, said):
    with pytest.raises((UnreliableError, StepFailedError)) as caught:
        Told(*ends).session().find()
    assert str(caught.value).startswith(said)


def test_a_bug_says_itself_what_ran():
    bug = StepFailedError("a bug", batch_size=2)
    bug.__cause__ = KeyError("labels")
    with pytest.raises(StepFailedError, match=r"^a bug"):
        Told(PASSED, bug).session().find()


@pytest.mark.parametrize(("peak", "left"), [(12, 8), (19, 2), (None, 2)])
def test_the_answer_leaves_at_least_the_margin(peak, left):
    session = Told(PASSED).session()
    session.budget.take(session.runner.measure())
    session.trials.append(a_trial(8, step_leaked_bytes=3, peak_reserved_bytes=peak and peak * GIB))
    assert session.leak_of_step(8) == (3, left * GIB)


@pytest.mark.parametrize(
    ("left_s", "size", "is_over"),
    [(None, 8, False), (2300, 8, False), (2140, 8, True), (3020, 16, False), (2860, 16, True)],
)
def test_bisecting_stops_where_the_time_left_is_for_confirming(left_s, size, is_over):
    """A call of one sample takes 10 s, and a group takes 500 s to start; a recheck and two confirmations start one each."""
    session = Told(PASSED, failure_cost_s=500.0, confirmations=2).session()
    session.trials.append(a_trial(4, step_s=40.0))
    session.program.affordable = lambda *_, **__: 0
    session.clock.end_s = None if left_s is None else session.clock._started_s + left_s
    assert session.out_of_time(size, 20) is is_over
    assert [note.sizes for note in session.notes] == [(size, 20)] * is_over


@pytest.mark.parametrize(("left_s", "grows"), [(2550, True), (2250, False)])
def test_growing_stops_without_time_to_run_and_confirm_twice_the_size(left_s, grows):
    """Calls of 100 s: twice the two of a trial that grows, and twice six to confirm; with half of that in hand, 2400 s."""
    session = Told({"step_s": 100.0}).session()
    session.clock.end_s = session.clock._started_s + left_s
    reply = session.try_size(1, Phase.GROW, capped=False)
    assert reply.grows_no_further is not grows
