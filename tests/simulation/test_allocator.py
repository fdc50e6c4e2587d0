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
# many MiB, negative ones free the nth allocation, 0 empties the cache, and texts name a method and its argument: the stream that
# becomes current, or that uses the first allocation.
RULES = {
    "a segment of 20 MiB serves several requests": ("", 1000, [5, 5, 5, 5], 20, 0),
    "small and large requests use different segments": ("", 1000, [5, -1, 0.5], 22, 0),
    "free neighbours merge": ("", 1000, [5, 5, 5, 5, -2, -4, -3, 9], 20, 0),
    "a segment with a live block stays reserved": ("", 1000, [8, 8, -1, 0], 20, 0),
    "cached segments are released when memory runs out": ("", 100, [60, -1, 80], 80, 1),
    "an expandable segment grows by pages": (EXPANDABLE, 1000, [0.5, 15, 15], 42, 0),
    "only whole pages are unmapped": (EXPANDABLE, 1000, [15, 50, 5, -2, 0], 40, 0),
    "unmapped pages are mapped again": (EXPANDABLE, 1000, [15, 50, 5, -2, 0, 45], 80, 0),
    "a stream does not use another's free block": ("", 1000, [30, -1, "use 1", 30], 60, 0),
    "a stream uses its own free block again": ("", 1000, ["use 1", 30, -1, "use 0", 30, "use 1", 30], 60, 0),
    "a freed block returns to the stream that asked for it": ("", 1000, [30, "use 1", -1, 30, "use 0", 30], 60, 0),
    "streams have expandable segments of their own": (EXPANDABLE, 1000, [15, -1, "use 1", 15], 40, 0),
    "caches of all streams are released when memory runs out": ("", 100, [60, -1, "use 1", 80], 80, 1),
    "a block that another stream uses waits": ("", 1000, [30, "share 1", -1, 30], 60, 0),
    "a block that its own stream uses does not": ("", 1000, [30, "share 0", -1, 30], 30, 0),
    "a block waits until streams are synchronized": ("", 1000, [30, "share 1", -1, "end", 30], 30, 0),
    "a block that waits is released when memory runs out": ("", 100, [60, "share 1", -1, 80], 80, 1),
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_rules(rule):
    text, capacity_mib, steps, reserved_mib, retries = RULES[rule]
    allocator, handles = an_allocator(text, capacity_mib * MIB), []
    for step in steps:
        if isinstance(step, str):
            operated(allocator, step, handles)
        elif step > 0:
            handles.append(allocator.malloc(int(step * MIB)))
        elif step < 0:
            allocator.free(handles[-step - 1])
        else:
            allocator.empty_cache()
    assert (allocator.reserved_bytes, allocator.alloc_retries) == (reserved_mib * MIB, retries)


def operated(allocator, text, handles):
    kind, _, stream = text.partition(" ")
    if kind == "use":
        allocator.use_stream(int(stream))
    elif kind == "share":
        allocator.record_stream(handles[0], int(stream))
    else:
        allocator.synchronize()


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["malloc", "malloc", "malloc", "free", "free", "empty", "use", "share", "end"]),
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
        elif kind == "use":
            allocator.use_stream(number % 3)
        elif kind == "share" and handles:
            allocator.record_stream(handles[number % len(handles)], 3)
        elif kind == "end":
            allocator.synchronize()
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


def test_a_copy_knows_which_blocks_wait_for_a_stream():
    allocator = an_allocator()
    handle = allocator.malloc(30 * MIB)
    allocator.record_stream(handle, 1)
    allocator.free(handle)
    twin = allocator.copy()
    twin.synchronize()
    twin.malloc(30 * MIB)
    assert twin.reserved_bytes == 30 * MIB
