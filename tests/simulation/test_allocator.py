"""Hand-computed cases and invariants; tests/cuda/test_simulated.py compares with torch's own allocator."""

import contextlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomprobe.simulation.allocator import AllocatorOutOfMemory, CachingAllocator
from oomprobe.simulation.settings import AllocatorSettings

from .bench import ALLOCATOR_SETTINGS, EXPANDABLE

MIB, GIB = 2**20, 2**30
CUBLAS_WORKSPACE = 8_519_680


def an_allocator(text="", capacity_bytes=GIB):
    settings = AllocatorSettings.from_text(text)
    allocator = CachingAllocator(capacity_bytes, settings)
    if settings.per_process_memory_fraction < 1:
        allocator.limit_bytes = int(settings.per_process_memory_fraction * capacity_bytes)
    return allocator


@pytest.mark.parametrize(
    ("nbytes", "allocated_bytes", "reserved_bytes"),
    [
        (0, 0, 0),
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (CUBLAS_WORKSPACE, CUBLAS_WORKSPACE, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),  # remainder of 1 MiB + 512: split
        (11 * MIB, 12 * MIB, 12 * MIB),  # remainder of 1 MiB: not split
    ],
)
def test_first_request(nbytes, allocated_bytes, reserved_bytes):
    allocator = an_allocator()
    handle = allocator.malloc(nbytes)
    assert (allocator.requested_bytes, allocator.allocated_bytes) == (nbytes, allocated_bytes)
    assert (allocator.reserved_bytes, allocator.peak_reserved_bytes) == (reserved_bytes, reserved_bytes)
    allocator.free(handle)
    allocator.empty_cache()
    assert (allocator.requested_bytes, allocator.allocated_bytes, allocator.reserved_bytes) == (0, 0, 0)


# Settings, capacity in MiB, operations, then reserved MiB and retries. Of the operations, positive numbers allocate that
# many MiB, negative ones free the nth allocation, and 0 empties the cache.
RULES = {
    "a segment of 20 MiB serves several requests": ("", 1000, [5, 5, 5, 5], 20, 0),
    "small and large requests use different segments": ("", 1000, [5, -1, 0.5], 22, 0),
    "free neighbours merge": ("", 1000, [5, 5, 5, 5, -2, -4, -3, 9], 20, 0),
    "a segment with a live block stays reserved": ("", 1000, [8, 8, -1, 0], 20, 0),
    "cached segments are released when memory runs out": ("", 100, [60, -1, 80], 80, 1),
    "an expandable segment grows by pages": (EXPANDABLE, 1000, [0.5, 15, 15], 42, 0),
    "only whole pages are unmapped": (EXPANDABLE, 1000, [15, 50, 5, -2, 0], 40, 0),
    "unmapped pages are mapped again": (EXPANDABLE, 1000, [15, 50, 5, -2, 0, 45], 80, 0),
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_rules(rule):
    text, capacity_mib, steps, reserved_mib, retries = RULES[rule]
    allocator, handles = an_allocator(text, capacity_mib * MIB), []
    for step in steps:
        if step > 0:
            handles.append(allocator.malloc(int(step * MIB)))
        elif step < 0:
            allocator.free(handles[-step - 1])
        else:
            allocator.empty_cache()
    assert (allocator.reserved_bytes, allocator.alloc_retries) == (reserved_mib * MIB, retries)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["malloc", "malloc", "malloc", "free", "free", "empty"]),
        st.one_of(st.integers(1, 4 * MIB), st.integers(1, 80 * MIB), st.sampled_from([MIB, MIB + 1, 10 * MIB])),
    ),
    max_size=60,
)


def played(allocator, steps):
    """Yield the live handles after each step."""
    handles = []
    for kind, number in steps:
        if kind == "malloc":
            with contextlib.suppress(AllocatorOutOfMemory):
                handles.append(allocator.malloc(number))
        elif kind == "free" and handles:
            allocator.free(handles.pop(number % len(handles)))
        elif kind == "empty":
            allocator.empty_cache()
        yield handles


@given(STEPS, st.sampled_from(ALLOCATOR_SETTINGS))
def test_invariants_hold_after_every_step(steps, text):
    allocator = an_allocator(text, 200 * MIB)
    handles = []
    for handles in played(allocator, steps):  # noqa: B007
        blocks = sorted(allocator._blocks(), key=lambda block: block.address)
        live = allocator._live.values()
        assert all(a.address + a.size <= b.address for a, b in itertools.pairwise(blocks))
        assert allocator.allocated_bytes == sum(block.size for block in live)
        assert allocator.requested_bytes == sum(block.requested for block in live)
        assert allocator.reserved_bytes == sum(block.size for block in blocks if block.mapped)
        assert allocator.requested_bytes <= allocator.allocated_bytes <= allocator.reserved_bytes <= 200 * MIB
        for block in blocks:  # linked in order, free neighbours merged
            if block.next is not None:
                assert block.next.prev is block
                assert block.next.address == block.address + block.size
                assert not (block.free and block.next.free)
                assert block.mapped or block.next.mapped
        for pool in allocator._pools.values():
            assert pool.free == sorted((block.size, block.order, block.address, block) for *_, block in pool.free)
            assert all(block.free for *_, block in pool.free)
    for handle in handles:
        allocator.free(handle)
    allocator.empty_cache()
    assert list(allocator._blocks()) == []


@given(STEPS, STEPS, st.sampled_from(ALLOCATOR_SETTINGS))
def test_a_copy_behaves_the_same_and_is_independent(steps, more, text):
    allocator = an_allocator(text, 200 * MIB)
    for _ in played(allocator, steps):
        pass
    before, twin = allocator.stats(), allocator.copy()
    assert twin.stats() == before
    alone = [twin.stats() for _ in played(twin, more)]
    assert allocator.stats() == before
    assert [allocator.stats() for _ in played(allocator, more)] == alone
    for handle in list(allocator._live):
        twin.free(handle)
    assert twin.allocated_bytes == twin.requested_bytes == 0
