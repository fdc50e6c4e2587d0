"""Epochs without a card: what an order draws, what a tape predicts at other shapes, and what replayed orders show."""

import json
import random
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest

from oomprobe import Epoch, EpochRecord, InvalidArgumentError
from oomprobe.allocator.caching import CachingAllocator
from oomprobe.probing.epochs import EpochSearch, hardest_of
from oomprobe.records.axis import NO_AXIS, Axis
from oomprobe.records.epoch import (
    NO_EPOCH,
    Curve,
    TokenBudget,
    read_numbers,
    shuffle,
    token_options,
    tokens_of,
)
from oomprobe.records.options import named_steps
from oomprobe.records.sizes import Sizes
from oomprobe.results import facts
from oomprobe.rules.epoch import BucketOrders, StepOrders, call_of, shape_of
from oomprobe.tape.calls import ALLOCATED, FREED, RecordedCall
from oomprobe.tape.epochs import OrderEnd, replay_order, replay_orders
from oomprobe.tape.record import Beginning, TapedTrial
from oomprobe.tape.reductions import Processors
from oomprobe.tape.shapes import Growth, ShapedTape, features, share_alike

LENGTHS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


# --- what an order draws ---


def test_each_example_comes_once_before_any_comes_again():
    epoch = Epoch({"length": range(1, 8)}, draw="sum", calls=7)
    for order in range(5):
        batches = [*epoch.batches(order, 3)]
        assert [batch["batch_size"] for batch in batches] == [3, 3, 1, 3, 3, 1, 3]
        assert sum(batch["length"] for batch in batches[:3]) == sum(range(1, 8))
        assert sum(batch["length"] for batch in batches[3:6]) == sum(range(1, 8))


def test_an_order_is_drawn_by_its_number_and_goes_on_alike():
    epoch = Epoch({"length": LENGTHS}, calls=9)
    assert [*epoch.batches(4, 2)] == [*replace(epoch, seed=4).batches(0, 2)]
    assert [*epoch.batches(4, 2)] != [*epoch.batches(5, 2)]
    assert [*replace(epoch, calls=90).batches(4, 2)][:9] == [*epoch.batches(4, 2)]


def test_ranks_share_each_batch():
    epoch = Epoch({"length": LENGTHS}, draw="sum", calls=2)
    whole = [*epoch.batches(0, 4)]
    parts = [[*epoch.batches(0, 2, rank, world_size=2)] for rank in (0, 1)]
    for batch, *of_ranks in zip(whole, *parts, strict=True):
        assert batch["length"] == sum(part["length"] for part in of_ranks)
        assert [part["batch_size"] for part in of_ranks] == [2, 2]


def test_no_rank_waits_for_one_without_examples():
    epoch = Epoch({"length": range(1, 8)}, calls=6)
    whole = [[*epoch.batches(0, 2, rank, world_size=3)] for rank in range(3)]
    assert [len(of_rank) for of_rank in whole] == [6, 6, 6]
    assert [of_rank[1]["batch_size"] for of_rank in whole] == [1, 1, 1]
    assert whole[0][1] == whole[1][1] == whole[2][1]  # the last of seven examples


@pytest.mark.parametrize(("draw", "reduce"), [("longest", max), ("sum", sum)])
def test_numbers_of_one_example_stay_together(draw, reduce):
    pairs = [(n, 100 - n) for n in range(1, 100)]
    epoch = Epoch(dict(zip("ab", zip(*pairs, strict=True), strict=True)), draw=draw, calls=5)
    drawn = shuffle(random.Random(0), 99)
    for batch in epoch.batches(0, 10):
        examples = [pairs[at] for at in islice(drawn, 10)]
        expected = [reduce(column) for column in zip(*examples, strict=True)]
        assert [batch["a"], batch["b"]] == expected


def test_a_function_draws_in_turn_for_ranks():
    epoch = Epoch(draw=lambda drawn, size: ({"side": size * n} for n in range(1, 100)), calls=3)
    assert [batch["side"] for batch in epoch.batches(0, 2)] == [2, 4, 6]
    assert [batch["side"] for batch in epoch.batches(0, 2, 1, 2)] == [4, 8, 12]
    assert epoch.drawing.usual(2) == {"batch_size": 2, "side": 100}
    assert epoch.drawing.names == ("side",)


@pytest.mark.parametrize("packed", [False, True])
def test_a_budget_of_tokens_is_kept_and_nearly_filled(packed):
    lengths = tuple(random.Random(0).choices(range(1, 40), k=500))
    epoch = Epoch(draw=TokenBudget(lengths, packed=packed), calls=200)
    drawn, budget = [lengths[at] for at in shuffle(random.Random(0), 500)], 100

    def tokens(examples):
        return sum(examples) if packed else len(examples) * max(examples)

    for batch in islice(epoch.batches(0, budget), 20):
        count = batch["batch_size"]
        assert batch["length"] == (sum(drawn[:count]) if packed else max(drawn[:count]))
        assert tokens(drawn[:count]) <= budget < tokens(drawn[: count + 1])
        del drawn[:count]
    assert epoch.drawing.most == (sum(lengths) if packed else 500 * 39)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "values must map an argument"),
        ({"length": []}, "no values of length"),
        ({"length": [1, 0]}, "value 1 of length is 0"),
        ({"length": [1, float("inf")]}, "positive finite number"),
        ({"length": [True]}, "value 0 of length is True"),
        ({"length": [1, 2], "width": [1]}, "as many"),
        ({"batch_size": [1]}, "not an extra argument"),
        ({"length": "12"}, "value 0 of length is '1'"),
        ({"length": 12}, "must be a list"),
        ([1, 2], "values must map an argument"),
    ],
)
def test_values_that_are_no_lengths_are_refused(given, said):
    with pytest.raises(InvalidArgumentError, match=said):
        Epoch(given)


@pytest.mark.parametrize(
    "numbers", [{"calls": 0}, {"orders": 0}, {"draw": "shortest"}, {"draw": [1]}, {"seed": "x"}]
)
def test_other_wrong_arguments_are_refused(numbers):
    with pytest.raises(InvalidArgumentError):
        Epoch({"length": LENGTHS}, **numbers)


def test_numbers_are_read_from_files(tmp_path):
    np.save(tmp_path / "a.npy", np.array(LENGTHS))
    (tmp_path / "a.json").write_text(json.dumps(LENGTHS))
    (tmp_path / "a.txt").write_text("\n".join(map(str, LENGTHS)))
    for name in ("a.npy", "a.json", "a.txt"):
        assert read_numbers(tmp_path / name) == LENGTHS
    for name, text in {"no.txt": "1\nx", "no.json": '{"a": 1}', "no.npy": "1"}.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(InvalidArgumentError):
            read_numbers(tmp_path / name)


def test_the_longest_example_is_the_least_budget():
    epoch = tokens_of(LENGTHS)
    assert token_options(epoch, {}) == {"min_batch": 9}
    assert token_options(epoch, {"min_batch": 20}) == {"min_batch": 20}
    for given in ({"max_batch": 8}, {"global_batch": 4}):
        with pytest.raises(InvalidArgumentError):
            token_options(epoch, given)


# --- orders ---


def test_several_steps_take_turns():
    epoch = Epoch({"length": LENGTHS}, calls=4)
    orders = StepOrders({"train": epoch, "eval": NO_EPOCH})
    made = [(call.step, shape_of(call)) for call in orders.order(0, 2)]
    assert [step for step, _ in made] == ["train"] * 2 + ["eval"] * 2 + ["train"] * 2 + ["eval"] * 2
    expected = [tuple(batch.values()) for batch in epoch.batches(0, 2)]
    assert [shape for step, shape in made if step == "train"] == expected
    assert {shape for step, shape in made if step == "eval"} == {(2,)}
    recorded = orders.to_record(8)
    assert {call.step for call in recorded} == {"train", "eval"}
    assert {shape_of(call)[0] for call in recorded} >= {4, 8}


def test_each_rank_makes_its_own_calls():
    epoch = Epoch({"length": LENGTHS}, calls=4)
    for call, *of_ranks in zip(
        StepOrders({"step": epoch}, 2).order(1, 3),
        *(epoch.batches(1, 3, rank, 2) for rank in range(2)),
        strict=True,
    ):
        made = [dict(call.on_rank(rank).arguments) for rank in range(2)]
        assert made == of_ranks
    recorded = StepOrders({"step": epoch}, 2).to_record(4)
    assert [call.on_rank(1) for call in recorded] == recorded


def test_ranks_take_batches_of_buckets_in_turn():
    axis = Axis("length", (4, 9)).drawing(Epoch({"length": LENGTHS * 10}, calls=30))
    sizes = Sizes(first=1, last=None, step=1)
    alone, both = (BucketOrders.of(axis, ["step"], {0: 8, 1: 3}, sizes, n) for n in (1, 2))
    of_ranks = [call.on_rank(rank) for call in both.order(0, 128) for rank in range(2)]
    assert [call.arguments for call in of_ranks[:30]] == [
        call.arguments for call in alone.order(0, 128)
    ]


def test_buckets_hold_what_is_no_longer_than_they_are():
    epoch = Epoch({"length": LENGTHS * 10}, calls=60)
    axis = Axis("length", (2, 5, 9)).drawing(epoch)
    allowed = Sizes(first=3, last=None, step=3)
    orders = BucketOrders.of(axis, ["step"], {0: 12, 1: 6, 2: 3}, allowed)
    assert orders.share(128) == {0: 12, 1: 6, 2: 3}
    assert orders.share(64) == {0: 6, 1: 3, 2: 3}
    calls = [*orders.order(0, 128)]
    assert len(calls) == 60
    for call in calls:
        size, longest = shape_of(call)
        below = [0, 2, 5][call.row]
        assert below < longest <= (2, 5, 9)[call.row]
        assert size == call.batch_size <= (12, 6, 3)[call.row]
    with pytest.raises(InvalidArgumentError, match="the largest row that fits is 5"):
        BucketOrders.of(axis, ["step"], {0: 12, 1: 6}, allowed)
    steps = dict.fromkeys(["train", "eval"], lambda model, batch_size, length: None)
    with pytest.raises(InvalidArgumentError, match="one step"):
        named_steps(steps, axis)


def test_a_function_that_draws_nothing_or_no_numbers_is_refused():
    with pytest.raises(InvalidArgumentError, match="no call at batch_size 9"):
        Epoch(draw=lambda drawn, size: []).drawing.usual(9)
    with pytest.raises(InvalidArgumentError, match="numbers by argument"):
        Epoch(draw=lambda drawn, size: [{"side": "large"}]).drawing.usual(9)


def test_floats_are_fitted_as_they_are():
    assert features((2, 0.5)) != features((2, 0.9))
    assert Epoch({"seconds": [np.float32(0.5), 2]}).values["seconds"] == (0.5, 2)


def test_an_epoch_of_a_step_that_is_not_there_is_refused():
    axis = Axis().drawing({"trian": Epoch({"length": LENGTHS})})
    with pytest.raises(InvalidArgumentError, match="epoch names trian, and the steps are step"):
        named_steps(lambda model, batch_size: None, axis)


@pytest.mark.parametrize(
    ("axis", "values"),
    [
        (Axis("length", ("short", "long")), {"length": LENGTHS}),
        (Axis("length", (2, 8)), {"length": LENGTHS}),  # 9 has no row
        (Axis("length", (2, 16)), {"width": LENGTHS}),
    ],
)
def test_a_table_whose_rows_hold_no_examples_is_refused(axis, values):
    with pytest.raises(InvalidArgumentError):
        axis.drawing(Epoch(values))
    with pytest.raises(InvalidArgumentError):
        Axis("length", (2, 16)).drawing(Epoch({"length": LENGTHS}, draw="sum"))


# --- a tape over shapes ---


def call_at(size, length, *, is_first=False, offset=0):
    """Return a call that asks for sizes as steps do, and leaves a gradient; the first one leaves optimizer state too."""
    sizes = [
        4096,
        4 * size * length + offset,
        2 * size * length**2,
        4 * size * (-(-length // 32) * 32),
    ]
    events = [(FREED, 1, 0)] if not is_first else []
    events += [(ALLOCATED, 0, 0), (ALLOCATED, 1, 0), (ALLOCATED, 2, 0), (ALLOCATED, 3, 0)]
    events += [(FREED, 0, 3), (FREED, 0, 2), (FREED, 0, 1)]
    if is_first:
        sizes.append(8192)
        events.append((ALLOCATED, 4, 0))
    return RecordedCall(tuple(events), tuple(sizes))


def a_tape(shapes):
    tape = ShapedTape(None)
    calls = [call_at(*shape, is_first=not number) for number, shape in enumerate(shapes)]
    tape.learn([("step", shape) for shape in shapes], calls)
    return tape


SHAPES = [
    (8, 100),
    (4, 30),
    (8, 55),
    (4, 77),
    (8, 33),
    (4, 64),
    (8, 97),
    (4, 110),
    (8, 70),
    (4, 12),
    (8, 100),
    (8, 1),
]


@pytest.mark.parametrize("shape", [(8, 100), (6, 41), (31, 500), (1, 2)])
@pytest.mark.parametrize("is_first", [False, True])
def test_sizes_follow_from_a_dozen_shapes(shape, is_first):
    predicted = a_tape(SHAPES).call("step", shape, int(not is_first))
    alike, asked = share_alike(call_at(*shape, is_first=is_first), predicted)
    assert alike == asked == 4 + is_first


def test_each_call_of_a_period_asks_for_its_own():
    def made(number, shape):
        return call_at(*shape, is_first=number % 3 == 2)  # the third leaves something

    shapes = SHAPES * 2
    tape = ShapedTape(None, 3)
    calls = [made(number, shape) for number, shape in enumerate(shapes)]
    tape.learn([("step", shape) for shape in shapes], calls)
    for number in range(12):
        alike, asked = share_alike(made(number, (6, 41)), tape.call("step", (6, 41), number))
        assert alike == asked == 4 + (number % 3 == 2)


def test_the_simplest_polynomial_is_taken_whatever_it_rounds():
    growth = Growth()
    for size, length in SHAPES[:6]:
        growth.known[size, length] = (size * (-(-length // 64) * 64) * 1025,)
    growth.fit()
    assert growth.at((6, 387)) == (6 * 448 * 1025,)


def test_few_shapes_are_not_taken_for_polynomials():
    predicted = a_tape(SHAPES[:4]).call("step", (31, 500), 1)
    alike, asked = share_alike(call_at(31, 500), predicted)
    assert alike < asked


def test_requests_that_differ_are_counted():
    predicted = a_tape(SHAPES).call("step", (6, 41), 1)
    assert share_alike(call_at(6, 41, offset=512), predicted) == (3, 4)
    longer = call_at(6, 41)
    longer = RecordedCall((*longer.events, (ALLOCATED, 4, 0)), (*longer.sizes, 99))
    assert share_alike(longer, predicted) == (4, 5)


# --- replays ---


def a_start(capacity_bytes=64 * 2**20):
    return TapedTrial(calls=(), allocator=CachingAllocator(capacity_bytes), live={})


def test_a_replay_ends_in_the_call_that_is_too_large():
    tape = a_tape(SHAPES)
    shapes = [(8, 100), (8, 300), (8, 4000), (8, 10)]
    calls = [tape.call("step", shape, at) for at, shape in enumerate(shapes)]
    end = replay_order(a_start(), None, calls)
    assert end.died == 3
    end = replay_order(a_start(2**30), None, calls)
    assert (end.died, end.hardest) == (None, 3)
    assert end.peak_reserved_bytes > 8 * 2 * 4000**2
    assert replay_order(a_start(2**30), 100 * 2**20, calls).died == 3


def test_what_a_call_leaves_is_freed_by_the_next_whatever_its_shape():
    tape = a_tape(SHAPES)
    start = a_start()
    calls = [tape.call("step", (8, 10 + at % 7), at) for at in range(500)]
    assert replay_order(start, None, calls).peak_reserved_bytes == 2 * 2**20
    assert start.allocator.reserved_bytes == 0  # a copy was replayed on


def test_what_was_there_before_the_trial_is_not_freed_by_a_later_call():
    allocator = CachingAllocator(64 * 2**20)
    before = allocator.malloc(30 * 2**20)
    start = TapedTrial(calls=(), allocator=allocator, live={(1, 0): before})
    frees_two_calls_ago = RecordedCall(((FREED, 2, 0), (ALLOCATED, 0, 0)), (40 * 2**20,))
    small = RecordedCall(((ALLOCATED, 0, 0), (FREED, 0, 0)), (512,))
    assert replay_order(start, None, [small, frees_two_calls_ago, small]).died == 2


def test_the_curve_of_an_order_keeps_what_each_call_reserves():
    start = TapedTrial(calls=(), allocator=CachingAllocator(64 * 2**20), live={})
    sizes = [2**20, 30 * 2**20, 2**20, 30 * 2**20, 80 * 2**20]
    calls = [RecordedCall(((ALLOCATED, 0, 0), (FREED, 0, 0)), (size,)) for size in sizes]
    end = replay_order(start, None, calls)
    assert (end.died, end.hardest, end.peak_reserved_bytes) == (5, 2, 32 * 2**20)
    assert end.curve == Curve(calls=(1, 2, 5), reserved_bytes=(2 * 2**20, 32 * 2**20, 32 * 2**20))


def test_a_curve_falls_where_the_cache_went_back_to_the_driver():
    start = TapedTrial(calls=(), allocator=CachingAllocator(64 * 2**20), live={})
    halves = ((ALLOCATED, 0, 0), (ALLOCATED, 1, 0), (FREED, 0, 0), (FREED, 0, 1))
    whole = RecordedCall(((ALLOCATED, 0, 0), (FREED, 0, 0)), (40 * 2**20,))
    calls = [RecordedCall(halves, (30 * 2**20,) * 2), whole, whole]
    curve = replay_order(start, None, calls).curve
    assert curve == Curve(calls=(1, 3, 3), reserved_bytes=(60 * 2**20, 40 * 2**20, 40 * 2**20))


@pytest.mark.parametrize("calls", [1, 2, 199, 200, 201, 1000])
def test_a_curve_is_short_and_keeps_the_most(calls):
    peaks = [abs(random.Random(call).gauss(50, 20)) for call in range(calls)]
    curve = Curve.of(peaks)
    assert len(curve.calls) == len(curve.reserved_bytes) <= 201
    assert max(curve.reserved_bytes) == max(peaks)
    assert (curve.calls[0], curve.calls[-1]) == (1, calls)
    for call, most in zip(curve.calls, curve.reserved_bytes, strict=True):
        assert most >= peaks[call - 1] or call == calls


def an_end(died=None, peak=0, hardest=1):
    return OrderEnd(
        died=died,
        peak_allocated_bytes=0,
        peak_reserved_bytes=peak,
        hardest=hardest,
        curve=Curve.of([peak]),
    )


MIB_OF_RANKS = [(20, 20, 20), (20, 30, 40), (20, 90, 20), (90, 20, 20)]


def request_of(step, shape, number):
    """Return a call that makes one request, and frees it."""
    return RecordedCall(((ALLOCATED, 0, 0), (FREED, 0, 0)), (shape[1] * 2**20,))


def test_the_hardest_call_is_the_first_death_or_the_highest_peak():
    assert hardest_of({0: an_end(peak=5, hardest=3), 1: an_end(peak=9, hardest=7)}) == (1, 7)
    assert hardest_of({0: an_end(peak=5), 1: an_end(died=9), 2: an_end(died=4)}) == (2, 4)


def test_a_size_with_a_death_is_no_answer_though_its_hardest_calls_run_alone():
    search = EpochSearch.__new__(EpochSearch)
    search._session = SimpleNamespace(options=SimpleNamespace(resolution=0))
    search._sizes = Sizes(first=1, last=None, step=1)
    search.ends = lambda size, stops=False: {0: an_end(died=90 if size > 5 else None)}
    search._stretch, search._replay = lambda ends, size: [], lambda calls: an_end()
    assert search.largest(9)[0] == 5
    assert search.largest(4)[0] == 4


def test_the_first_rank_that_dies_ends_an_order():
    search, limit_bytes = EpochSearch.__new__(EpochSearch), 64 * 2**20
    search._session = SimpleNamespace(budget=SimpleNamespace(search_cap=lambda: limit_bytes))
    start = TapedTrial(calls=(), allocator=CachingAllocator(2**30), live={})
    search._starts, search._tapes = [start], [SimpleNamespace(call=request_of)]
    calls = [call_of("step", 1, *({"mib": mib} for mib in of_ranks)) for of_ranks in MIB_OF_RANKS]
    end = search._replay(calls)
    assert (end.died, end.rank) == (3, 1)
    end = search._replay([calls[0], calls[3], calls[2]])  # rank 1 would die later
    assert (end.died, end.rank) == (2, 0)
    end = search._replay(calls[:2])
    assert (end.died, end.rank, end.peak_reserved_bytes) == (None, 2, 60 * 2**20)


def test_orders_run_side_by_side_and_in_their_order():
    ends = dict(replay_orders([3, 1, 2], lambda order: order * 10))
    assert [*ends.items()] == [(3, 30), (1, 10), (2, 20)]


def test_a_recording_crosses_to_another_process():
    began = Beginning(
        segments=[(2**40, 2**21, 0, [(2**40, 512)])],
        settings={},
        most_bytes=2**30,
        total_bytes=2**30,
    )
    allocator, live = began.allocator()
    recording = TapedTrial(
        calls=(call_at(2, 3),), allocator=allocator, live=live, began=began,
        processors=Processors((8, 0), 108, 2048),
    )  # fmt: skip
    read = TapedTrial.read(json.loads(json.dumps(recording.plain())))
    assert (read.calls, read.processors, read.live) == (
        [*recording.calls],
        recording.processors,
        live,
    )
    assert read.allocator.reserved_bytes == allocator.reserved_bytes == 2**21


# --- what is said ---


@pytest.mark.parametrize(
    ("ends", "alone", "said"),
    [
        ((None,) * 40, (), "batch 18: 0 of 40 orders run out of memory, so at most 7.2 % of all orders do"),
        ((None,) * 459, (), "so at most 0.65 % of all orders do"),
        ((7, None), (), "1 of 2 orders run out of memory, in call 7"),
        ((9, 3, None, 4, 295), (), "4 of 5 orders run out of memory, the first in call 3, half of them by call 4, the last in 295"),
        ((None,) * 4, (5, None), "batch 20: 1 of 2 orders run out of memory, in call 5: it is the largest"),
    ],
)  # fmt: skip
def test_the_report_says_how_many_orders_die(ends, alone, said):
    record = EpochRecord(
        batch_size=18, ends=ends, deaths=sum(map(bool, ends)),
        longest_only_batch_size=20 if alone else 18, longest_only_ends=alone,
    )  # fmt: skip
    assert said in " ".join(fact.text for fact in facts.epoch(record))


def test_an_epoch_that_was_not_replayed_says_nothing_of_deaths():
    assert facts.epoch(EpochRecord(batch_size=18, reason="why")) == facts.epoch(None) == []


def test_an_epoch_is_an_epoch_of_the_step_or_of_named_ones():
    for wrong in (3, {}, {"train": 3}):
        with pytest.raises(InvalidArgumentError, match="must be an Epoch"):
            NO_AXIS.drawing(wrong)
