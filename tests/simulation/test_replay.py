import pytest

from oomprobe.simulation.allocator import AllocatorOutOfMemory, CachingAllocator
from oomprobe.simulation.replay import Replayer, replay_call, try_calls
from oomprobe.simulation.tape import BORN, DIED, RELEASED, Call

MIB = 2**20


def step(batch_size, dead=(2,)):
    """Two activations, and a gradient that stays until the next call."""
    events = (
        *((DIED, 1, index) for index in dead),
        (BORN, 0, 0),
        (BORN, 1, 0),
        (BORN, 2, 0),
        (DIED, 0, 0),
        (DIED, 0, 1),
    )
    return Call(events, (batch_size * MIB, 2 * batch_size * MIB, 4 * MIB))


def first(batch_size):
    """Cold: no gradient is there, and a workspace is taken."""
    call = step(batch_size, dead=())
    return Call((*call.events, (BORN, 3, 0)), (*call.sizes, 8 * MIB))


def cold(batch_size):
    return [first(batch_size), step(batch_size), step(batch_size)]


def taught(*sizes):
    replayer = Replayer()
    for size in sizes:
        replayer.learn(size, cold(size))
    return replayer


def test_a_call_is_done_to_an_allocator():
    allocator = CachingAllocator(1024 * MIB)
    alive = replay_call(allocator, step(8), {})
    assert set(alive) == {(1, 2)}
    assert (allocator.allocated_bytes, allocator.peak_allocated_bytes) == (4 * MIB, 28 * MIB)
    again = replay_call(allocator, step(8), alive)
    assert set(again) == {(1, 2)}
    assert allocator.allocated_bytes == 4 * MIB


def test_a_cache_that_the_step_gives_back():
    allocator = CachingAllocator(1024 * MIB)
    replay_call(allocator, Call(((BORN, 0, 0), (DIED, 0, 0), (RELEASED, 0, 0)), (64 * MIB,)), {})
    assert allocator.reserved_bytes == 0


def test_a_size_is_tried_on_a_copy():
    allocator = CachingAllocator(1024 * MIB)
    alive = replay_call(allocator, step(4), {})
    before = allocator.stats()
    tried = try_calls(allocator, [step(100)] * 3, alive)
    assert (tried.error, tried.peak_allocated_bytes) == (None, 304 * MIB)
    assert try_calls(allocator, [step(100)] * 3, {}).peak_allocated_bytes == 308 * MIB  # the old gradient is not freed
    assert "CUDA out of memory" in try_calls(allocator, [step(1000)] * 3, alive).error
    assert allocator.stats() == before
    allocator.limit_bytes = 200 * MIB
    assert "allowed" in try_calls(allocator, [step(100)] * 3, alive).error


def test_two_sizes_show_the_lines():
    assert taught(1).lines is None
    assert [line.at(100) for line in taught(1, 2).lines] == [first(100), step(100)]


def test_a_cold_trial_is_its_first_call_and_steady_ones():
    replayer, allocator = taught(1, 2), CachingAllocator(1024 * MIB)
    assert replayer.try_size(10, allocator, {}, calls=1).peak_allocated_bytes == 34 * MIB
    assert replayer.try_size(10, allocator, {}, calls=9).peak_allocated_bytes == 42 * MIB
    assert taught(1).try_size(10, allocator, {}, calls=9) is None


def test_the_last_sizes_count():
    """Batch 1 often goes another way: a transposed tensor of one row needs no copy."""
    replayer = Replayer()
    odd = Call((*step(1).events, (BORN, 3, 0), (DIED, 0, 3)), (*step(1).sizes, MIB))
    for size, calls in ((1, [first(1), odd, odd]), (2, cold(2))):
        assert replayer.learn(size, calls)
        assert replayer.lines is None
    assert replayer.learn(4, cold(4))
    assert replayer.lines is not None


def test_a_size_that_leaves_the_line_ends_it():
    replayer = taught(1, 2, 4)
    assert not replayer.learn(8, [first(8), *[Call(step(8).events, (1, 2, 3))] * 2])
    assert replayer.lines is None
    for size in (16, 32, 64):
        assert replayer.learn(size, cold(size))
    assert replayer.lines is None


def test_steady_is_what_came_twice_or_is_known():
    replayer = taught(1, 2, 4)
    fresh = Replayer()
    assert fresh.steady([step(8)]) is None
    assert fresh.steady([step(8), step(8)]) == step(8)
    assert fresh.steady([step(8), step(9)]) is None
    leaking = step(8, dead=())
    assert fresh.steady([leaking, leaking]) is None
    assert replayer.steady([step(8)]) == step(8)
    assert replayer.steady([leaking]) == step(8)  # after a failure the gradients were dropped: the same call


def test_a_refusal_is_raised():
    with pytest.raises(AllocatorOutOfMemory):
        replay_call(CachingAllocator(MIB), step(8), {})
