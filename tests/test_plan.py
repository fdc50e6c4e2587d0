import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomprobe.errors import InvalidArgumentError
from oomprobe.report.plan import GOOD_SHARE, plan

shapes = st.tuples(st.integers(1, 5000), st.integers(1, 16), st.integers(1, 300), st.integers(1, 9))


def entries(shape, **options):
    global_batch, world_size, max_micro_batch, multiple_of = shape
    return plan(
        global_batch,
        world_size=world_size,
        max_micro_batch=max_micro_batch,
        multiple_of=multiple_of,
        **options,
    )


@given(shapes)
def test_every_entry_is_possible_and_its_product_is_right(shape):
    global_batch, world_size, max_micro_batch, multiple_of = shape
    for entry in entries(shape):
        assert entry.micro_batch * entry.accumulation_steps * entry.world_size == entry.global_batch
        assert entry.world_size == world_size
        assert 1 <= entry.micro_batch <= max_micro_batch
        assert entry.micro_batch % multiple_of == 0
        assert entry.accumulation_steps >= 1
        assert entry.exact == (entry.global_batch == global_batch)


@given(shapes)
def test_the_exact_entry_is_the_largest_there_is(shape):
    global_batch, world_size, max_micro_batch, multiple_of = shape
    scan = [
        micro
        for micro in range(multiple_of, max_micro_batch + 1, multiple_of)
        if global_batch % (micro * world_size) == 0
    ]
    exact = [entry.micro_batch for entry in entries(shape) if entry.exact]
    assert exact[:1] == scan[-1:] or (exact and scan and max(exact) == scan[-1])
    assert bool(exact) == bool(scan)


@given(shapes)
def test_a_good_exact_split_comes_first(shape):
    global_batch, world_size, max_micro_batch, _ = shape
    listed = entries(shape)
    exact = [entry for entry in listed if entry.exact]
    if exact:
        best = max(exact, key=lambda entry: entry.micro_batch)
        good = best.micro_batch >= GOOD_SHARE * min(max_micro_batch, global_batch / world_size)
        good &= not one_by_one(best) or len(listed) == 1
        assert listed[0 if good else -1] == best


def one_by_one(entry):
    return entry.micro_batch == 1 and entry.accumulation_steps > 1


@given(shapes)
def test_one_sample_at_a_time_leads_only_where_no_more_fit(shape):
    listed = entries(shape)
    if listed and one_by_one(listed[0]):
        assert all(one_by_one(entry) for entry in listed)
        assert shape[2] == 1


@given(shapes, st.integers(1, 300))
def test_micro_batches_respect_the_smallest_wanted(shape, smallest):
    _, _, max_micro_batch, multiple_of = shape
    listed = entries(shape, min_micro_batch=smallest)
    assert all(smallest <= entry.micro_batch <= max_micro_batch for entry in listed)
    assert all(entry.micro_batch % multiple_of == 0 and entry.accumulation_steps >= 1 for entry in listed)
    assert bool(listed) == any(micro % multiple_of == 0 for micro in range(smallest, max_micro_batch + 1))


@given(shapes, st.integers(1, 300))
def test_the_first_of_an_unbounded_plan_stays_first(shape, smallest):
    for unbounded in entries(shape)[:1]:
        if unbounded.micro_batch >= smallest:
            assert entries(shape, min_micro_batch=smallest)[0] == unbounded


@pytest.mark.parametrize(
    ("global_batch", "smallest", "largest", "expected"),
    [
        (1009, 1, 2, (2, 505)),
        (1009, 2, 2, (2, 505)),
        (51, 48, 50, (50, 1)),
        (99, 48, 50, (49, 2)),
        (60, 48, 50, (50, 1)),
        (10, 48, 50, (48, 1)),
        (1, 1, 2, (1, 1)),
        (7, 1, 1, (1, 7)),
    ],
)
def test_the_first_entry_where_little_fits(global_batch, smallest, largest, expected):
    first = plan(global_batch, world_size=1, max_micro_batch=largest, min_micro_batch=smallest)[0]
    assert (first.micro_batch, first.accumulation_steps) == expected


@given(shapes)
def test_there_is_a_plan_unless_no_micro_batch_is_possible(shape):
    _, _, max_micro_batch, multiple_of = shape
    assert bool(entries(shape)) == (multiple_of <= max_micro_batch)


@given(shapes)
def test_no_entry_is_listed_twice(shape):
    listed = entries(shape)
    assert len(set(listed)) == len(listed)


@given(shapes)
def test_near_splits_are_within_half_a_micro_batch(shape):
    global_batch, world_size, _, multiple_of = shape
    near = [entry for entry in entries(shape) if not entry.exact]
    for entry in near:
        assert abs(entry.global_batch - global_batch) <= entry.accumulation_steps * world_size * multiple_of


def test_a_prime_is_not_split_into_ones_first():
    first, *_, last = plan(1009, world_size=1, max_micro_batch=64)
    assert (first.micro_batch, first.accumulation_steps, first.global_batch) == (63, 16, 1008)
    assert (last.micro_batch, last.accumulation_steps, last.exact) == (1, 1009, True)


def test_a_global_batch_that_fits_at_once_needs_no_accumulation():
    first = plan(48, world_size=1, max_micro_batch=64)[0]
    assert (first.micro_batch, first.accumulation_steps, first.exact) == (48, 1, True)


def test_fewer_samples_than_ranks_are_rounded_up():
    assert [entry.global_batch for entry in plan(3, world_size=8, max_micro_batch=4)] == [8]


@given(shapes, st.sets(st.tuples(st.integers(1, 300), st.integers(1, 3)), max_size=20))
def test_ran_is_said_of_sizes_that_ran_and_of_no_other(shape, ran):
    for entry in entries(shape, ran=ran):
        assert entry.ran == (entry.micro_batch in {size for size, _ in ran})
        assert entry.ran_accumulated == (entry.micro_batch in {size for size, steps in ran if steps > 1})


def test_without_trials_nothing_ran():
    assert not any(entry.ran or entry.ran_accumulated for entry in plan(512, world_size=1, max_micro_batch=64))


@pytest.mark.parametrize("bad", [0, -1, 1.0, True, "8", None])
@pytest.mark.parametrize("name", ["global_batch", "world_size", "max_micro_batch", "min_micro_batch", "multiple_of"])
def test_a_size_that_is_no_positive_integer_is_named(name, bad):
    sizes = {
        "global_batch": 8,
        "world_size": 1,
        "max_micro_batch": 4,
        "min_micro_batch": 1,
        "multiple_of": 1,
        name: bad,
    }
    with pytest.raises(InvalidArgumentError, match=f"{name} must be an integer of at least 1, not {bad!r}"):
        plan(sizes.pop("global_batch"), **sizes)


@given(*[st.integers(1, 2**2000)] * 4)
def test_huge_sizes_neither_raise_nor_hang(global_batch, world_size, max_micro_batch, multiple_of):
    start_s = time.perf_counter()
    entries((global_batch, world_size, max_micro_batch, multiple_of))
    assert time.perf_counter() - start_s < 5


def test_integers_beyond_a_float_are_split_without_rounding():
    odd = 2**60 + 1
    first = plan(4 * odd, world_size=1, max_micro_batch=odd)[0]
    assert (first.micro_batch, first.accumulation_steps) == (odd, 4)
