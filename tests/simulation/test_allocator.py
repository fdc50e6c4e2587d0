"""Hand-computed cases; tests/cuda/test_simulated.py compares with torch's own allocator, test_recordings.py with cards."""

import contextlib
import re
from zlib import crc32

import pytest
from allocations import PINNED_SETTINGS, Modelled, operations, outcomes, pinned_outcomes
from hypothesis import given
from hypothesis import strategies as st

from oomprobe.allocator.caching import AllocatorOutOfMemory, CachingAllocator, adopt
from oomprobe.allocator.settings import AllocatorSettings, BlockOrder
from oomprobe.ground.torch_versions import VERSION

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
    "a block that begins with a page leaves its end": (EXPANDABLE, 1000, [20, 50, 5, -2, 0], 40, 0),
    "unmapped pages are mapped again": (EXPANDABLE, 1000, [15, 50, 5, -2, 0, 45], 80, 0),
    "unmapped pages with just enough room are mapped again": (EXPANDABLE, 1000, [15, 50, 15, -2, 0, 50], 80, 0),
    "a stream does not use another's free block": ("", 1000, [30, -1, "use 1", 30], 60, 0),
    "a stream uses its own free block again": ("", 1000, ["use 1", 30, -1, "use 0", 30, "use 1", 30], 60, 0),
    "a freed block returns to the stream that asked for it": ("", 1000, [30, "use 1", -1, 30, "use 0", 30], 60, 0),
    "streams have expandable segments of their own": (EXPANDABLE, 1000, [15, -1, "use 1", 15], 40, 0),
    "caches of all streams are released when memory runs out": ("", 100, [60, -1, "use 1", 80], 80, 1),
    "a block that another stream uses waits": ("", 1000, [30, "share 1", -1, 30], 60, 0),
    "a block that its own stream uses does not": ("", 1000, [30, "share 0", -1, 30], 30, 0),
    "a block beside one that another stream uses does not wait": ("", 1000, [30, "share 1", 30, -2, 30], 60, 0),
    "a block waits until streams are synchronized": ("", 1000, [30, "share 1", -1, "end", 30], 30, 0),
    "an unsplit block serves what is less than a large segment smaller": ("max_split_size_mb:24", 1000, [60, -1, 41], 60, 0),
    "an unsplit block does not serve what is smaller": ("max_split_size_mb:24", 1000, [60, -1, 40], 100, 0),
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
    assert has_no_empty_block(allocator)


def has_no_empty_block(allocator):
    _, free, *_ = allocator.layout([])
    return all(key >> 90 > 0 for key in free)  # its size, above its place


def operated(allocator, text, handles):
    kind, _, stream = text.partition(" ")
    if kind == "use":
        allocator.use_stream(int(stream))
    elif kind == "share":
        allocator.record_stream(handles[0], int(stream))
    else:
        allocator.synchronize()


@pytest.mark.parametrize(
    ("order", "is_split_again", "reused"),
    [(BlockOrder.ADDRESS, False, 1), (BlockOrder.BLOCK, False, 0), (BlockOrder.BLOCK, True, 1), (BlockOrder.SEGMENT, True, 0)],
)  # fmt: skip
def test_which_of_two_free_blocks_of_one_size_is_used(order, is_split_again, reused):
    allocator = CachingAllocator(GIB, AllocatorSettings(block_order=order))
    free = [allocator.malloc(4 * MIB)]
    allocator.malloc(16 * MIB)
    free.append(allocator.malloc(4 * MIB))  # of a second segment, whose address is lower
    allocator.malloc(16 * MIB)
    places = [allocator.layout([handle])[0] for handle in free]
    if is_split_again:
        allocator.free(free[0])
        free[0] = allocator.malloc(5 * MIB // 2)
    for handle in free:
        allocator.free(handle)
    assert allocator.layout([allocator.malloc(4 * MIB)])[0] == places[reused]


def test_a_block_of_torch_2_12_keeps_its_age_as_it_grows():
    allocator = CachingAllocator(GIB, AllocatorSettings(block_order=BlockOrder.BLOCK))
    first, large, other, _ = (allocator.malloc(size * MIB) for size in (2, 16, 4, 16))
    allocator.free(large)
    second, _ = (allocator.malloc(size * MIB) for size in (2, 16))
    oldest = allocator.layout([other])[0]
    for handle in (other, first, second):
        allocator.free(handle)
    assert allocator.layout([allocator.malloc(4 * MIB)])[0] == oldest


def test_a_layout_has_each_free_block():
    allocator = an_allocator()
    layouts = [allocator.layout([]) for _ in range(3) if allocator.malloc(5 * MIB)]
    assert layouts[0] != layouts[1] != layouts[2]


# Digests of what torch 2.14 answers to 1,500 operations: tests/cuda compares each answer with torch's.
ANSWERED = {
    "": 797_589_092,
    "expandable_segments:True": 2_672_395_896,
    "max_split_size_mb:24": 307_914_492,
    "max_split_size_mb:20,max_non_split_rounding_mb:40": 3_620_033_172,
    "roundup_power2_divisions:[1:8,4:2,32:4,>:1]": 2_825_728_062,
    "garbage_collection_threshold:0.6": 3_566_654_292,
    "per_process_memory_fraction:0.08": 3_401_239_297,
    "large_segment_size_mb:12": 4_102_142_438,
}
PINNED = (3_484_333_243, 701_831_473, 3_332_761_828, 220_600_444, 3_359_192_884)


@pytest.mark.skipif(VERSION < (2, 13), reason="earlier versions use another of equal blocks")
@pytest.mark.parametrize("text", ANSWERED)
def test_operations_on_pools_end_as_torchs(text):
    assert crc32(repr(outcomes(operations(1500, 0), Modelled(text))).encode()) == ANSWERED[text]


@pytest.mark.parametrize(("text", "answered"), [*zip(PINNED_SETTINGS, PINNED, strict=True)])
def test_operations_on_pinned_memory_end_as_torchs(text, answered):
    assert crc32(repr(pinned_outcomes(1500, text)).encode()) == answered


def test_statistics():
    allocator = an_allocator()
    assert {*allocator.stats().values()} == {0}
    allocator.serve(
        [5 * MIB, 5 * MIB - 100, 30 * MIB, -3, -1], []
    )  # a split segment with gaps, and a whole one
    assert allocator.stats() == {
        "allocation.all.allocated": 3,
        "requested_bytes.all.allocated": 40 * MIB - 100,
        "allocated_bytes.all.current": 5 * MIB,
        "allocated_bytes.all.peak": 40 * MIB,
        "active_bytes.all.current": 5 * MIB,
        "active_bytes.all.peak": 40 * MIB,
        "requested_bytes.all.current": 5 * MIB - 100,
        "reserved_bytes.all.current": 50 * MIB,
        "reserved_bytes.all.peak": 50 * MIB,
        "inactive_split_bytes.all.current": 15 * MIB,
        "num_alloc_retries": 0,
        "num_ooms": 0,
    }


@pytest.mark.parametrize("limit_bytes", [None, GIB])
def test_a_refusal_has_the_figures_of_torchs_message(limit_bytes):
    allocator = CachingAllocator(3 * GIB // 2, total_bytes=4 * GIB)
    allocator.limit_bytes = limit_bytes
    allocator.serve([GIB - 2 * MIB, MIB, MIB // 2], [])
    with pytest.raises(AllocatorOutOfMemory) as refused:
        allocator.malloc(2 * GIB)
    found = re.findall(r"[\d.]+ (?:[GMK]iB|bytes)", str(refused.value))
    # Requested, on the card, free, in use, allowed, allocated, reserved and free.
    allowed = [] if limit_bytes is None else ["1024.00 MiB"]
    assert found == [
        "2.00 GiB",
        "4.00 GiB",
        "512.00 MiB",
        "3.50 GiB",
        *allowed,
        "1023.50 MiB",
        "512.00 KiB",
    ]
    assert allocator.ooms == allocator.alloc_retries == 1


def test_a_refusal_tells_what_private_pools_keep():
    allocator = an_allocator(capacity_bytes=100 * MIB)
    allocator.pools.use(5)
    allocator.serve([20 * MIB, MIB // 2, -1, -1], [])
    allocator.pools.leave(5)
    with pytest.raises(AllocatorOutOfMemory, match=r"with 22.00 MiB allocated in private pools"):
        allocator.malloc(90 * MIB)


# Bytes of a segment, offset and requested bytes of its blocks, room after it, then a request, and where it goes.
ADOPTED = {
    "between blocks": (20, [(0, 5), (10, 5)], 0, 5, 5),
    "before a block": (20, [(5, 15)], 0, 5, 0),
    "after a block": (20, [(0, 5)], 0, 15, 5),
    "into an empty segment": (20, [], 0, 8, 0),
    "into an empty one of small blocks": (2, [], 0, 0.5, 0),
    "not into small blocks": (2, [(0, 0.5)], 0, 5, None),
    "not into a gap that is too small": (20, [(0, 15)], 0, 6, None),
    "into pages after a block": (20, [(0, 15)], 60, 45, 15),
    "not beyond the room after it": (20, [(0, 15)], 20, 45, None),
}


@pytest.mark.parametrize("name", ADOPTED)
def test_a_segment_that_exists_is_adopted(name):
    size, inside, room, request, offset = ADOPTED[name]
    allocator, start = an_allocator(EXPANDABLE if room else ""), 2**40
    blocks = [(start + at * MIB, int(nbytes * MIB)) for at, nbytes in inside]
    handles = adopt(allocator, start, size * MIB, blocks, room * MIB)
    assert allocator.requested() == dict(
        zip(handles, (nbytes for _, nbytes in blocks), strict=True)
    )
    assert allocator.layout(handles)[0] == blocks
    assert has_no_empty_block(allocator)
    used = sum(nbytes for _, nbytes in blocks)
    assert (allocator.allocated_bytes, allocator.requested_bytes, allocator.reserved_bytes) == (
        used,
        used,
        size * MIB,
    )
    [(address, _)] = allocator.layout([allocator.malloc(int(request * MIB))])[0]
    if offset is None:
        assert not start <= address < start + size * MIB
    else:
        assert address == start + offset * MIB
    for handle in handles:
        allocator.free(handle)
    assert allocator.requested_bytes == request * MIB


@pytest.mark.parametrize("blocks", [[(0, 5), (4, 5)], [(16, 5)], [(-1, 5)], [(0, 21)]])
def test_blocks_that_overlap_are_not_adopted(blocks):
    with pytest.raises(ValueError, match="overlaps another"):
        adopt(
            an_allocator(),
            GIB,
            20 * MIB,
            [(GIB + at * MIB, nbytes * MIB) for at, nbytes in blocks],
            0,
        )


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["malloc", "malloc", "malloc", "free", "free", "empty", "use", "share", "end"]
        ),
        st.one_of(
            st.integers(1, 4 * MIB),
            st.integers(1, 80 * MIB),
            st.sampled_from([MIB, MIB + 1, 10 * MIB]),
        ),
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
