import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomprobe.errors import InvalidArgumentError
from oomprobe.records import plan as plans
from oomprobe.records.plan import plan

shapes = st.tuples(st.integers(1, 5000), st.integers(1, 16), st.integers(1, 300), st.integers(1, 9))


def entries(shape, **options):
    global_batch, world_size, largest, multiple_of = shape
    return plan(
        global_batch,
        world_size=world_size,
        max_micro_batch=largest,
        multiple_of=multiple_of,
        **options,
    )


@given(shapes, st.just(1) | st.integers(1, 300))
def test_entries_are_possible_correct_and_unique(shape, smallest):
    global_batch, world_size, max_micro_batch, multiple_of = shape
    listed = entries(shape, min_micro_batch=smallest)
    assert len(set(listed)) == len(listed)
    assert bool(listed) == any(
        micro % multiple_of == 0 for micro in range(smallest, max_micro_batch + 1)
    )
    for entry in listed:
        assert entry.micro_batch * entry.accumulation_steps * entry.world_size == entry.global_batch
        assert entry.world_size == world_size
        assert smallest <= entry.micro_batch <= max_micro_batch
        assert entry.micro_batch % multiple_of == 0
        assert entry.accumulation_steps >= 1
        assert entry.exact == (entry.global_batch == global_batch)


@given(shapes)
def test_the_exact_entry_has_the_largest_possible_micro_batch(shape):
    global_batch, world_size, max_micro_batch, multiple_of = shape
    sizes = range(multiple_of, max_micro_batch + 1, multiple_of)
    scan = [micro for micro in sizes if global_batch % (micro * world_size) == 0]
    exact = [entry.micro_batch for entry in entries(shape) if entry.exact]
    assert max(exact, default=None) == max(scan, default=None)


@pytest.mark.parametrize("name", ["global_batch", "world_size"])
def test_a_size_that_is_not_a_positive_integer_is_named(name):
    sizes = {"global_batch": 8, "world_size": 1, "max_micro_batch": 4, name: 0}
    with pytest.raises(
        InvalidArgumentError, match=f"{name} must be an integer of at least 1, not 0"
    ):
        plan(sizes.pop("global_batch"), **sizes)


def test_sizes_of_a_file_end(monkeypatch):
    monkeypatch.setattr(plans, "MOST_TRIED", 60)
    assert [entry.exact for entry in plan(1009, world_size=1, max_micro_batch=64)] == [False, False]
    assert [entry.exact for entry in plan(1009, world_size=1, max_micro_batch=60)][-1]
