"""Which calls each kind of trial makes, and how those go on that learn, or that may end once their calls repeat."""

import itertools
import time
from dataclasses import replace

import pytest
from helpers import ARunner

from oomprobe.records.options import Options
from oomprobe.records.patience import Clock
from oomprobe.records.trials import CallRecord, Outcome, Phase, Trial, Verdict
from oomprobe.rules.look import calls_since, checks_of, have_settled, marks_of, merged
from oomprobe.rules.program import Program, further, made_as_long, most_calls

NAMES = ("train", "eval")


def program(
    *,
    first=1,
    full=1,
    names=("step",),
    period=0,
    call_s=0.0,
    needed=0,
    row=0,
    is_simulated=False,
    ranks=1,
    **options,
):
    """Return the program of a probe whose trials have shown how many calls a full step takes."""
    options = Options(**{"steps": 2, "confirm_steps": 5, **options})
    facts = ARunner(step_names=names, world_size=ranks).facts
    facts = replace(facts, device=replace(facts.device, is_simulated=is_simulated))
    made = Program(facts, options, Clock(options), row)
    stepped = [*[None] * (first - 1), first, *[None] * (full - 1), full]
    shown = [
        CallRecord(step=name, stepped=calls, seconds=call_s) for name in names for calls in stepped
    ]
    passed = Trial(batch_size=8, verdict=Verdict.FITS, phase=Phase.GROW, steps=len(shown))
    assert [*made.learn(made.growing(8), Outcome(trial=passed, records=tuple(shown)))] == []
    made.needed = needed
    if period:
        made._settling_period = period
    return made


def steps_of(request):
    """Return the calls of a trial as pairs of a step and how often it is called in a row."""
    return [
        (name, len([*calls]))
        for name, calls in itertools.groupby(request.calls, lambda call: call.step)
    ]


@pytest.mark.parametrize(
    ("shown", "growing", "confirming"),
    [
        ({}, 3, 50),  # a first full step and 2 more; as many as there is time for
        ({"call_s": 2.0}, 3, 6),  # 5 fit in 10 s, but 1 + confirm_steps are needed
        ({"call_s": 1.0}, 3, 10),
        ({"first": 4, "full": 4}, 12, 50),  # accumulates over 4
        ({"first": 40, "full": 40}, 80, 80),  # one full step more is enough
        ({"needed": 7}, 7, 50),
        ({"call_s": 0.5, "trial_time_limit_s": 8.0}, 3, 8),  # half of the time that a trial has
        ({"call_s": 0.5, "time_limit_s": 8.9}, 3, 8),  # half of the time that is left
        ({"steps": 1, "confirm_steps": 1, "call_s": 9.0}, 2, 2),
    ],
)
def test_trials_are_as_long_as_full_steps_take(shown, growing, confirming):
    trials = program(**shown)
    assert len(trials.growing(8).calls) == growing
    assert len(trials.confirming(8).calls) == confirming


def test_several_steps_take_turns_twice():
    assert steps_of(program(names=NAMES).growing(8)) == [("train", 3), ("eval", 3)] * 2


@pytest.mark.parametrize(
    ("shown", "steady"),
    [
        ({"period": 1}, True),
        ({}, False),
        ({"period": 1, "needed": 9}, False),
        ({"period": 1, "ranks": 2}, False),
    ],
)
def test_calls_are_steady_where_a_look_of_one_rank_has_seen_them_repeat(shown, steady):
    assert program(**shown).is_steady is steady


@pytest.mark.parametrize(
    ("is_simulated", "calls"), [(False, [50, 10, 8, 1]), (True, [50, 10, 10, 10])]
)
def test_the_time_of_a_call_is_that_of_the_nearest_size(is_simulated, calls):
    made = program(call_s=0.005, is_simulated=is_simulated, names=NAMES)  # of batch 8
    larger = Trial(batch_size=64, verdict=Verdict.FITS, phase=Phase.GROW, steps=6)
    shown = tuple(CallRecord(step=name, stepped=1, seconds=0.5) for name in NAMES for _ in range(3))
    assert [*made.learn(made.growing(64), Outcome(trial=larger, records=shown))] == []
    assert [
        made.affordable(size) for size in (8, 60, 80, 640)
    ] == calls  # a simulated call takes as long at any size


def test_calls_of_a_confirmation_are_those_of_each_step():
    made = program(names=NAMES)
    passed = Trial(batch_size=8, verdict=Verdict.FITS, phase=Phase.CONFIRM, steps=24)
    assert [*made.learn(made.confirming(8), Outcome(trial=passed))] == []
    assert made.confirmed == 12


def test_a_plan_accumulates_after_a_full_step():
    request = program(first=4, full=4).accumulating(8, 6)
    assert [call.accumulates for call in request.calls] == [False] * 4 + [True] * 6
    assert request.accumulation_steps == 6


def test_a_breakdown_records_one_full_step_more():
    request = program(first=4, full=4).recording(8)
    assert [call.is_recorded for call in request.calls] == [False] * 8 + [True] * 4
    options = Options()
    without_optimizer = Program(ARunner().facts, options, Clock(options), 0).recording(8)
    assert [call.is_recorded for call in without_optimizer.calls] == [False, True]


def test_a_bug_ends_a_confirmation_only_in_calls_that_it_need_not_make():
    confirming, growing = program().confirming(8), program().growing(8)
    assert [call.is_extra for call in confirming.calls] == [False] * 3 + [True] * 47
    assert not any(call.is_extra for call in growing.calls)


def test_a_trial_is_made_as_long_as_the_shortest_data():
    request = program(call_s=0.1, period=1).confirming(8)
    assert len(made_as_long(request, 9).calls) == 9 > len(request.calls)
    assert made_as_long(request, 2).calls == request.calls[:2]
    assert made_as_long(request, 9).settles is None
    assert further(made_as_long(request, 9), [], 0.0) == []


def ran(phase, verdict, steps):
    return Outcome(trial=Trial(batch_size=8, verdict=verdict, phase=phase, steps=steps))


def test_a_look_that_failed_tells_nothing():
    made = program()
    failed = replace(
        ran(Phase.GROW, Verdict.OOM, 40),
        records=tuple(CallRecord(step="step", served_bytes=n) for n in range(40)),
    )
    assert [*made.learn(made.looking(8, 50), failed)] == []
    assert (made.needed, made.looked) == (0, failed.trial)


@pytest.mark.parametrize(
    ("shown", "made_calls", "needed"),
    [
        ({}, 1, 0),  # trials make two: they meet that call
        ({}, 2, 12),
        ({}, 6, 28),
        ({}, 20, 50),  # a confirmation makes no more
        ({"period": 1}, 4, 5),  # before any call can settle
        ({"period": 1}, 5, 6),
        ({"period": 1}, 6, 7),
        ({"period": 1}, 7, 32),
        ({"period": 3}, 4, 20),
        ({"needed": 7}, 8, 36),
        ({"names": NAMES}, 6, 28),
    ],
)
def test_a_confirmation_that_fails_in_a_late_call_makes_trials_longer(shown, made_calls, needed):
    made = program(**shown)
    notes = [*made.learn(made.confirming(8), ran(Phase.CONFIRM, Verdict.OOM, made_calls))]
    assert made.needed == needed
    assert len(notes) == (needed > 0)


def test_trials_that_make_all_calls_are_made_no_longer():
    """Though a confirmation has failed: as at a rank whose data have ended."""
    made, shown = program(), tuple([CallRecord(step="step", stepped=1)] * 4)
    ended = replace(ran(Phase.GROW, Verdict.FITS, 4), records=shown, ended_early="StopIteration")
    [note] = made.learn(made.growing(8), ended)
    assert "call 5 of batch 8" in note.text
    assert [*made.learn(made.confirming(8), ran(Phase.CONFIRM, Verdict.OOM, 4))] == []
    assert not made.is_long


@pytest.mark.parametrize(
    ("options", "phase", "notes"),
    [({}, "confirming", 1), ({}, "growing", 0), ({"needed": 9}, "confirming", 0)],
)
def test_a_confirmation_whose_calls_vary_is_noted_unless_trials_are_long_anyway(
    options, phase, notes
):
    made = program(**options)
    shown = tuple(
        CallRecord(step="step", stepped=1, served_bytes=2**20 * call) for call in (1, 1, 2, 1)
    )
    request = getattr(made, phase)(8)
    assert (
        len([*made.learn(request, replace(ran(request.phase, Verdict.FITS, 4), records=shown))])
        == notes
    )


# --- trials that go on ---


def trial(request, loop, seconds=None):
    """Return the records of a trial whose n-th call shows what a loop says."""
    shown, calls = [], request.calls
    while calls:
        for call in calls:
            record = CallRecord(step=call.step, seconds=seconds, **loop(len(shown) + 1, call.step))
            shown.append(replace(record, counted=None))
        if request.settles and calls_since(marks_of(shown), request.settles.period):
            shown[-1] = record  # as the runner, which checks what the user counts with only then
        calls = further(request, shown, time.monotonic())
    assert calls == []
    return shown


def made(request, loop, seconds=None):
    return [record.step for record in trial(request, loop, seconds)]


def stepping(every):
    return lambda number, step: {"stepped": None if number % every else every}


@pytest.mark.parametrize(("every", "calls"), [(4, 12), (40, 120)])
def test_a_first_trial_makes_full_steps_whatever_they_take(every, calls):
    options = Options(steps=2)
    request = Program(ARunner().facts, options, Clock(options)).growing(8)
    assert made(request, stepping(every)) == ["step"] * calls


def test_each_step_in_turn_makes_its_full_steps():
    options = Options(steps=2)
    request = Program(ARunner(step_names=NAMES).facts, options, Clock(options)).growing(8)
    assert made(request, lambda number, step: {"stepped": 1}) == (["train"] * 3 + ["eval"] * 3) * 2


@pytest.mark.parametrize(
    ("names", "seconds", "calls"),
    [
        (("step",), None, 50),
        (("step",), 0.5, 26),
        (("step",), 60.0, 6),
        (NAMES, None, 100),
        (NAMES, 0.5, 64),
    ],
)
def test_a_check_goes_on_while_there_is_time(names, seconds, calls):
    options = Options(steps=2)
    request = Program(ARunner(step_names=names).facts, options, Clock(options)).confirming(8)
    assert len(made(request, stepping(1), seconds)) == calls
    assert most_calls(request) == 50
    shown = [
        CallRecord(step=name, stepped=1, seconds=0.5)
        for name in names * (len(names))
        for _ in range(6)
    ]
    until_deadline = further(replace(request, deadline_s=104.9), shown, 100.0)
    assert len(until_deadline) == 4 * len(names)  # half of the time that is left


def test_a_plan_does_not_tell_how_many_calls_a_full_step_takes():
    options = Options(steps=2)
    made = Program(ARunner().facts, options, Clock(options))
    planned = Trial(
        batch_size=8, verdict=Verdict.FITS, phase=Phase.CONFIRM, steps=3, accumulation_steps=2
    )
    shown = tuple(CallRecord(step="step", stepped=1) for _ in range(3))
    assert [*made.learn(made.accumulating(8, 2), Outcome(trial=planned, records=shown))] == []
    assert made.growing(8).learns is not None


def repeating(after, length):
    """Return a loop whose calls repeat with a period once some have been made, and which counts nothing."""

    def loop(number, step):
        mark = -number if number <= after else (number - after) % length
        return {"stepped": 1, "mark": mark, "counted": 0}

    return loop


@pytest.mark.parametrize(
    ("after", "period", "calls"), [(1, 1, 6), (9, 1, 12), (1, 3, 8), (1, 7, 16), (60, 1, 50)]
)
def test_a_confirmation_ends_once_its_calls_have_repeated(after, period, calls):
    request = program(period=period, call_s=0.01).confirming(8)
    assert len(made(request, repeating(after, period))) == calls


@pytest.mark.parametrize("change", [{"counted": None}, {"mark": None}])
def test_what_cannot_be_seen_makes_all_calls(change):
    request = program(period=1, call_s=0.01).confirming(8)
    assert (
        len(made(request, lambda number, step: {**repeating(1, 1)(number, step), **change})) == 50
    )


def test_what_the_user_counts_makes_all_calls_and_is_checked_rarely():
    request = program(period=1, call_s=0.01).confirming(8)
    shown = trial(
        request, lambda number, step: {**repeating(1, 1)(number, step), "counted": number}
    )
    assert len(shown) == 50
    assert len(checks_of(shown)) <= 11


def test_ranks_settle_together():
    early, late = (
        [CallRecord(step="step", **repeating(after, 1)(n, "step")) for n in range(1, 9)]
        for after in (1, 6)
    )
    assert have_settled(early, 1)
    assert not have_settled(merged([early, late]), 1)
    assert have_settled(merged([early, early]), 1)


def test_the_defaults_make_short_trials():
    made = program(steps=Options().steps, confirm_steps=None)
    assert len(made.growing(8).calls) == len(made.bisecting(8, Phase.BISECT).calls) == 2


def test_a_look_makes_more_calls_than_a_trial_or_none():
    trials = program()
    for affordable, made in ((3, 0), (4, 4)):
        trials.affordable = lambda size, affordable=affordable, **_: affordable
        assert trials.for_look(8) == made


@pytest.mark.parametrize(("settles", "look_calls"), [(True, 0), (False, 50)])
def test_a_row_looks_unless_the_calls_of_another_have_repeated(settles, look_calls):
    row = program(row=1)
    row.follow(program(period=1), settles=settles)
    assert row.for_look(8) == look_calls
    assert (row.confirming(8).settles is not None) is settles
