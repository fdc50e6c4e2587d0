"""What small functions of records return, for samples of inputs written out once and read by hand."""

import itertools
from dataclasses import asdict

import pytest
from helpers import ARunner, a_trial, same_as_golden

from oomprobe.records import savings
from oomprobe.records.axis import is_larger, magnitude, text_of_value
from oomprobe.records.breakdown import ModuleMemory
from oomprobe.records.fit import fit_line
from oomprobe.records.notes import Note, NoteKind, Notes, remark
from oomprobe.records.plan import plan
from oomprobe.records.sizes import Sizes
from oomprobe.records.trials import (
    ALL_ROWS,
    Call,
    CallRecord,
    DeviceInfo,
    Phase,
    RankTrial,
    Request,
    Settling,
    Verdict,
    last_of,
)


def plans():
    """Yield the entries for batches, ranks and limits; ``!`` marks an exact one, ``ran`` and ``+`` what ran without and with accumulation."""
    limits = [(1, 64, 1), (1, 40, 1), (1, 2, 1), (1, 1, 1), (5, 20, 4), (48, 50, 1)]
    for batch, ranks, (low, high, step) in itertools.product(
        [1, 8, 51, 99, 1009, 1024, 2077, 2144], [1, 3], limits
    ):
        options = {
            "world_size": ranks,
            "max_micro_batch": high,
            "min_micro_batch": low,
            "multiple_of": step,
        }
        told = []
        for entry in plan(batch, **options, ran={(64, 1), (50, 2)}):
            marks = "!" * entry.exact + " ran" * entry.ran + "+" * entry.ran_accumulated
            told.append(
                f"{entry.micro_batch}x{entry.accumulation_steps}={entry.global_batch}{marks}"
            )
        yield f"plan {batch} on {ranks}, {low} to {high} by {step}: {', '.join(told) or 'none'}"


def sizes():
    for low, high, step in [(1, None, 1), (5, 100, 8), (3, 50, 1)]:
        some = Sizes.between_limits(low, high, step)
        yield f"sizes {low} to {high} by {step}: {some.first} to {some.last}"
        for size in (8, 24, 48):
            others = (
                some.up(size, 4 * step),
                some.up(size, 20 * step),
                some.down(size, 2),
                some.down(size, 5),
            )
            yield f"from {size} up {others[:2]}, down {others[2:]}, nearest {[some.nearest(size + more) for more in (-21, -3, 0, 5, 60)]}"
        for good, bad in [
            (None, 8),
            (None, 48),
            (1, 8),
            (8, 16),
            (8, 24),
            (16, 33),
            (16, 32),
            (8, 96),
            (24, 96),
        ]:
            ways = {}, {"geometric": True}, {"place": 0.1}, {"place": 0.8}
            yield f"middle of {good} and {bad}: {[some.middle(good, bad, **way) for way in ways]}"


def values():
    every = [
        512,
        1024,
        0,
        -2,
        2.5,
        True,
        "short",
        (),
        (640, 480),
        (640, 960),
        (320, 960),
        (640,),
        (640, "x"),
        (0, 4),
    ]
    for value in every:
        larger = [other for other in every if is_larger(value, other)]
        yield f"value {value!r}: {text_of_value(value)}, {magnitude(value)}, larger than {larger}"


def combinations_of_savings():
    singles = [(name,) for name in savings.ORDER[1:]]
    for pair in savings.pairs_of(singles):
        assert savings.names_in(savings.label(pair)) == pair
        yield f"pair {savings.label(pair)}: {savings.cost(pair)}, {savings.numbers_of(pair)}"
    for given in (singles, singles[::-1], singles[1:3], singles[:1], []):
        yield f"best pair of {[name for (name,) in given]}: {savings.best_pair(given)}"
    for given in (
        "all",
        "as is",
        "checkpoint,as is",
        "no_foreach+checkpoint,bf16_autocast",
        ["fp16_autocast"] * 2,
    ):
        yield f"chosen {given!r}: {savings.chosen(given)}"


def lines():
    for points, budget in [
        ([(1, 100), (2, 200), (4, 500)], 1000),
        ([(1, 0), (2, 0), (3, 0)], 5),
        ([(1, 0), (2, 0), (3, 6)], 9),
        ([(8, 30), (2, 40), (4, 10), (4, 30)], 100),
        ([(10, 7), (20, 5), (30, 3)], 100),
        ([(1, 10), (2, 20), (3, 30)], 0),
        (
            [(1, 100), (2, 100), (3, 100), (4, 200)],
            1000,
        ),  # slope 30, fixed 50: 140 at size 3, where 100 was measured
    ]:
        line = fit_line(points, budget)
        numbers = (
            f"{n:.4g}"
            for n in (
                line.fixed_bytes,
                line.bytes_per_sample,
                line.r_squared,
                line.max_relative_error,
            )
        )
        yield f"line {points}: {', '.join(numbers)}, {line.predicted_max_batch} in {budget}"


def test_samples_equal_their_golden_file():
    every = itertools.chain(plans(), sizes(), values(), combinations_of_savings(), lines())
    same_as_golden("\n".join(every) + "\n", "records.txt")


CALL = Call(step="step", batch_size=4)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (a_trial(), {"batch_size": 1, "verdict": "fits", "phase": "grow", "accumulation_steps": 1}),
        (CALL, {"step": "step", "batch_size": 4}),
        (CallRecord(step="step"), {"step": "step"}),
        (Settling(period=1, most_calls=9), {"period": 1, "most_calls": 9}),
        (ModuleMemory(name="a", kind="b", count=1, activation_bytes=2), {"name": "a", "kind": "b", "count": 1, "activation_bytes": 2}),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_a_record_says_nothing_that_it_was_not_told(record, said):
    assert {name: value for name, value in asdict(record).items() if value} == said


def test_a_runner_has_one_rank_and_confirms_once_unless_it_says_so():
    facts = ARunner().facts
    assert (facts.world_size, facts.confirmations, facts.device.edge_bytes) == (1, 1, 0)


@pytest.mark.parametrize(
    ("calls", "fields", "said"),
    [
        ([{}], {}, (4, 0, 1, False, False, False, None)),
        ([{"row": 1}, {"row": 1, "batch_size": 9}], {"passed": (4, 2)}, (9, 1, 1, False, False, True, 4)),
        ([{"row": 1}, {"row": 2}], {"passed": (4,), "looks": True}, (4, ALL_ROWS, 1, False, True, False, 4)),
        ([{"accumulates": True}] * 3 + [{}], {"fresh": True}, (4, 0, 3, False, True, False, None)),
        ([{}], {"phase": Phase.CONFIRM}, (4, 0, 1, True, False, False, None)),
    ],
)  # fmt: skip
def test_a_request_says_what_its_calls_have_in_common(calls, fields, said):
    made = tuple(Call(**{"step": "step", "batch_size": 4, **call}) for call in calls)
    request = Request(**{"phase": Phase.GROW, "calls": made, **fields})
    assert said == (
        request.batch_size, request.row, request.accumulation_steps, request.confirms, request.watches_growth,
        request.smaller_passed, request.largest_passed,
    )  # fmt: skip


def test_the_last_trial_of_a_size_is_no_plans():
    trials = [
        a_trial(4),
        a_trial(4, steps=2),
        a_trial(4, accumulation_steps=2),
        a_trial(4, Verdict.OOM),
        a_trial(5),
    ]
    assert last_of(trials, 4) is trials[1]
    assert last_of(trials, 4, passed=False) is trials[3]


@pytest.mark.parametrize(
    ("device", "is_simulated", "typed"),
    [("cuda:1", False, "cuda"), ("xpu", False, "xpu"), ("cpu", True, "cuda")],
)
def test_emptying_is_named_by_the_kind_of_the_device(device, is_simulated, typed):
    info = DeviceInfo(
        name="a", torch_device=device, total_bytes=1, on_host=False, is_simulated=is_simulated
    )
    assert info.emptying == f"torch.{typed}.empty_cache()"


@pytest.mark.parametrize(
    ("available", "peak", "left"), [(9, 4, 5), (None, 4, -4), (9, None, 9), (None, None, 0)]
)
def test_a_rank_leaves_what_its_peak_did_not_take(available, peak, left):
    rank = RankTrial(rank=0, verdict=None, available_bytes=available, peak_reserved_bytes=peak)
    assert rank.left_bytes == left


def test_of_kinds_that_grow_the_last_note_counts_and_only_warnings_warn():
    notes = Notes([Note(text=kind, kind=kind) for kind in NoteKind])
    growing = ("not compared", "written", "removed", "changed")
    again = {kind: f"{kind} again" for kind in growing}
    notes.extend(
        [remark("remark"), *(Note(text=again[kind], kind=NoteKind(kind)) for kind in growing)]
    )
    told = [(note.text, note.warns) for note in notes]
    warnings = ("warning", "not restored")
    assert told == [(again.get(kind, kind), kind in warnings) for kind in NoteKind]
