"""Hand-computed cases; tests/cuda/test_simulated.py compares with torch's own allocator, test_recordings.py with cards."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomprobe.simulation.allocator import AllocatorOutOfMemory, CachingAllocator
from oomprobe.simulation.settings import AllocatorSettings

from .bench import ALLOCATOR_SETTINGS, EXPANDABLE

MIB, GIB = 2**20, 2**30


def an_allocator(text="", capacity_bytes=GIB):
    settings = AllocatorSettings.from_text(text)
    allocator = CachingAllocator(capacity_bytes, settings)
    if settings.per_process_memory_fraction < 1:
        allocator.limit_bytes = int(settings.per_process_memory_fraction * capacity_bytes)
    return allocator


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
    """Return the figures after each step."""
    handles, figures = [], []
    for kind, number in steps:
        if kind == "malloc":
            with contextlib.suppress(AllocatorOutOfMemory):
                handles.append(allocator.malloc(number))
        elif kind == "free" and handles:
            allocator.free(handles.pop(number % len(handles)))
        elif kind == "empty":
            allocator.empty_cache()
        figures.append(allocator.stats())
    return figures


@given(STEPS, STEPS, st.sampled_from(ALLOCATOR_SETTINGS))
def test_a_copy_behaves_the_same_and_is_independent(steps, more, text):
    allocator = an_allocator(text, 200 * MIB)
    played(allocator, steps)
    before, twin = allocator.stats(), allocator.copy()
    assert twin.stats() == before
    alone = played(twin, more)
    assert allocator.stats() == before
    assert played(allocator, more) == alone
