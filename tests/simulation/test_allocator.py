import contextlib
import hashlib
import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomprobe.simulation.allocator import AllocatorOutOfMemory, CachingAllocator
from oomprobe.simulation.settings import AllocatorSettings

KIB, MIB, GIB = 2**10, 2**20, 2**30
CUBLAS_WORKSPACE = 8_519_680
EXPANDABLE = "expandable_segments:True"
COLLECTING = "garbage_collection_threshold:0.5,per_process_memory_fraction:0.8"
TEXTS = [
    "",
    EXPANDABLE,
    "max_split_size_mb:32",
    COLLECTING,
    "roundup_power2_divisions:[1:8,4:2,64:4,>:16]",
    "expandable_segments:True,max_split_size_mb:32",
    "large_segment_size_mb:40",
]
STATS = [
    "allocated_bytes.all.current",
    "reserved_bytes.all.current",
    "requested_bytes.all.current",
    "num_alloc_retries",
    "num_ooms",
    "segment.all.current",
    "inactive_split_bytes.all.current",
    "inactive_split.all.current",
]


def an_allocator(text="", capacity_bytes=GIB, **options):
    return CachingAllocator(capacity_bytes, AllocatorSettings.from_text(text), **options)


def figures(allocator):
    stats = allocator.stats()
    return [stats[name] for name in STATS]


def ranges(allocator):
    return [(block.address, block.address + block.size) for block in allocator._live.values()]


# What torch itself does: its allocator (libc10_cuda.so of torch 2.13.0) was run on a driver that only counts bytes,
# through the operations below; after each the figures in STATS and the error's text went into the digest.


def operations(seed, count):
    """Allocations, frees, emptied caches and limits, drawn with ``random()`` alone: no other draw is the same forever."""
    draw = random.Random(seed).random
    sizes = [int(2 ** (draw() * 27)) for _ in range(30)]
    sizes += [1, 512, MIB, MIB + 1, 10 * MIB - 512, 10 * MIB, CUBLAS_WORKSPACE, 21 * MIB]
    live, grows = [], 0.6
    for number in range(count):
        if number % 150 == 0:
            grows = 0.4 + draw() * 0.25
        kind = draw()
        if kind < 0.006:
            yield ("empty",)
        elif kind < 0.01:
            yield "limit", 0.5 + int(draw() * 4) / 8
        elif not live or draw() < grows:
            live.append(number)
            nbytes = sizes[int(draw() * len(sizes))] + int(draw() * 2) * 5000
            yield "malloc", number, nbytes, int(draw() * 1.2)
        else:
            recent = int(draw() ** 3 * len(live)) + 1
            yield "free", live.pop(-recent)


def outcomes(allocator, steps):
    """One line of figures for each operation, with the error's text where there was one."""
    handles = {}
    for kind, *what in steps:
        refusal = ""
        if kind == "malloc":
            number, nbytes, stream = what
            try:
                handles[number] = allocator.malloc(nbytes, stream)
            except AllocatorOutOfMemory as error:
                refusal = str(error)
        elif kind == "free":
            allocator.free(handles.pop(what[0], 0))
        elif kind == "empty":
            allocator.empty_cache()
        else:  # torch takes a fraction of 1 for no limit
            allocator.limit_bytes = int(what[0] * allocator.total_bytes) if what[0] < 1 else None
        yield " ".join(map(str, [*figures(allocator), refusal])).strip()


TORCH_DID = {
    "": ("223815680 243269632 211123534 212 209 9 19453952 35", "6a7707ffdd5052f2"),
    "expandable_segments:True": ("235388416 281018368 235311939 201 197 0 0 0", "a8868478f3fc9c0c"),
    "max_split_size_mb:32": ("185562624 209715200 172676791 208 202 15 24152576 40", "0a801b121105785b"),
    "garbage_collection_threshold:0.5,per_process_memory_fraction:0.8": (
        "229116928 255852544 216383128 208 208 13 26735616 37",
        "18140e3560a58c74",
    ),
    "roundup_power2_divisions:[1:8,4:2,64:4,>:16]": (
        "247632896 272629760 210744839 201 194 12 24996864 40",
        "f0456a6631df01a3",
    ),
    "expandable_segments:True,max_split_size_mb:32": (
        "220652544 281018368 220576354 200 194 0 0 0",
        "bb68b6b151613db8",
    ),
    "large_segment_size_mb:40": ("234224128 249561088 224909909 185 184 11 15336960 39", "d61b4dccf0a6b1f8"),
}


@pytest.mark.parametrize("text", TEXTS)
def test_does_what_torch_does(text):
    allocator = an_allocator(text, 290 * MIB, total_bytes=300 * MIB)
    lines = list(outcomes(allocator, operations(7, 3000)))
    assert (lines[-1], hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]) == TORCH_DID[text]


# The rules, by hand. Source: c10/cuda/CUDACachingAllocator.cpp


@pytest.mark.parametrize(
    ("nbytes", "allocated_bytes", "reserved_bytes"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (CUBLAS_WORKSPACE, CUBLAS_WORKSPACE, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),  # 1 MiB + 512 are left: split
        (11 * MIB, 12 * MIB, 12 * MIB),  # 1 MiB is left: handed out whole
        (100 * MIB, 100 * MIB, 100 * MIB),
    ],
)
def test_what_a_first_request_costs(nbytes, allocated_bytes, reserved_bytes):
    allocator = an_allocator()
    allocator.malloc(nbytes)
    assert (allocator.requested_bytes, allocator.allocated_bytes) == (nbytes, allocated_bytes)
    assert (allocator.reserved_bytes, allocator.peak_reserved_bytes) == (reserved_bytes, reserved_bytes)


def test_a_small_block_is_split_until_nothing_is_left():
    allocator = an_allocator()
    for _ in range(2 * MIB // 512):
        allocator.malloc(512)
    assert allocator.reserved_bytes == allocator.allocated_bytes == 2 * MIB
    allocator.malloc(1)
    assert allocator.reserved_bytes == 4 * MIB


def test_a_segment_of_20_mib_serves_several_requests():
    allocator = an_allocator()
    for _ in range(4):
        allocator.malloc(5 * MIB)
    assert allocator.reserved_bytes == 20 * MIB
    allocator.malloc(5 * MIB)
    assert allocator.reserved_bytes == 40 * MIB


def test_the_best_fit_is_the_smallest_large_enough():
    allocator = an_allocator()
    handles = [allocator.malloc(size * MIB) for size in (40, 30, 20)]
    medium = allocator._live[handles[1]].address
    for handle in handles:
        allocator.free(handle)
    assert allocator._live[allocator.malloc(25 * MIB)].address == medium
    assert allocator.reserved_bytes == 90 * MIB


def test_of_equal_blocks_the_one_at_the_lowest_address_is_taken():
    allocator = an_allocator()
    handles = [allocator.malloc(30 * MIB) for _ in range(3)]
    first = allocator._live[handles[0]].address
    for handle in (handles[1], handles[2], handles[0]):
        allocator.free(handle)
    assert allocator._live[allocator.malloc(30 * MIB)].address == first


def test_freed_neighbours_become_one_block():
    allocator = an_allocator()
    handles = [allocator.malloc(5 * MIB) for _ in range(4)]
    for number in (1, 3, 2):
        allocator.free(handles[number])
    assert allocator.stats()["inactive_split.all.current"] == 1
    assert allocator.fits(9 * MIB)
    allocator.malloc(9 * MIB)
    assert allocator.reserved_bytes == 20 * MIB


def test_small_and_large_requests_do_not_share_segments():
    allocator = an_allocator()
    allocator.free(allocator.malloc(5 * MIB))
    allocator.malloc(1000)
    assert allocator.reserved_bytes == 22 * MIB


def test_streams_do_not_share_blocks():
    allocator = an_allocator()
    allocator.free(allocator.malloc(5 * MIB, stream=1))
    assert allocator.fits(5 * MIB, stream=1)
    allocator.malloc(5 * MIB, stream=2)
    assert allocator.reserved_bytes == 40 * MIB
    allocator.malloc(5 * MIB, stream=1)
    assert allocator.reserved_bytes == 40 * MIB


def test_the_workspace_of_cublas_stays_when_all_else_is_freed():
    allocator = an_allocator()
    allocator.malloc(CUBLAS_WORKSPACE)
    allocator.free(allocator.malloc(4))
    allocator.empty_cache()
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (8_519_680, 20 * MIB)


def test_no_bytes_are_no_memory():
    allocator = an_allocator(capacity_bytes=0)
    assert allocator.malloc(0) == 0
    assert allocator.fits(0)
    allocator.free(0)
    assert figures(allocator) == [0] * 8
    with pytest.raises(ValueError, match="-1"):
        allocator.malloc(-1)


def test_a_handle_can_be_freed_once():
    allocator = an_allocator()
    handle = allocator.malloc(100)
    allocator.free(handle)
    again = allocator.malloc(100)  # has the same address
    with pytest.raises(ValueError, match=f"handle {handle} is not allocated"):
        allocator.free(handle)
    with pytest.raises(ValueError, match="handle 99 is not allocated"):
        allocator.free(99)
    assert again != handle
    assert allocator.allocated_bytes == 512


# When memory is short


def test_cached_segments_are_given_back_when_memory_is_short():
    allocator = an_allocator(capacity_bytes=100 * MIB)
    allocator.free(allocator.malloc(60 * MIB))
    assert not allocator.fits(80 * MIB)
    allocator.malloc(80 * MIB)
    assert (allocator.reserved_bytes, allocator.peak_reserved_bytes) == (80 * MIB, 80 * MIB)
    assert (allocator.alloc_retries, allocator.ooms) == (1, 0)


def test_a_segment_in_use_cannot_be_given_back():
    allocator = an_allocator(capacity_bytes=40 * MIB)
    handles = [allocator.malloc(9 * MIB) for _ in range(3)]
    allocator.free(handles[0])
    allocator.free(handles[2])  # its segment is free now; that of the first is not
    with pytest.raises(AllocatorOutOfMemory) as caught:
        allocator.malloc(22 * MIB)
    assert caught.value.requested_bytes == 22 * MIB
    assert (allocator.alloc_retries, allocator.ooms) == (1, 1)
    assert allocator.reserved_bytes == 20 * MIB
    allocator.malloc(20 * MIB)


def test_a_refusal_leaves_the_allocator_usable():
    allocator = an_allocator(capacity_bytes=40 * MIB)
    with pytest.raises(AllocatorOutOfMemory):
        allocator.malloc(GIB)
    assert (allocator.allocated_bytes, allocator.requested_bytes, allocator.peak_allocated_bytes) == (0, 0, 0)
    allocator.malloc(40 * MIB)


def test_the_limit_is_on_what_is_reserved():
    allocator = an_allocator()
    allocator.free(allocator.malloc(30 * MIB))
    allocator.limit_bytes = 20 * MIB
    assert allocator.reserved_bytes == 30 * MIB  # lowering it frees nothing
    allocator.free(allocator.malloc(30 * MIB))  # and what is cached may be used
    assert not allocator.fits(MIB + 1, stream=1)
    allocator.malloc(MIB + 1, stream=1)  # the cache is given back for it
    assert (allocator.reserved_bytes, allocator.alloc_retries) == (20 * MIB, 1)
    with pytest.raises(AllocatorOutOfMemory, match=r"20\.00 MiB allowed"):
        allocator.malloc(100)
    allocator.limit_bytes = None
    allocator.malloc(100)


def test_the_fraction_of_the_settings_is_one_of_the_whole_card():
    allocator = an_allocator("per_process_memory_fraction:0.5", 700 * MIB, total_bytes=1000 * MIB)
    assert allocator.limit_bytes == 500 * MIB
    assert an_allocator("per_process_memory_fraction:1.0").limit_bytes is None


# Settings


@pytest.mark.parametrize(
    ("nbytes", "allocated_bytes"),
    [(2048, 2048), (1200, 1536), (2049, 2560), (5 * MIB + 1, 6 * MIB), (6 * MIB, 6 * MIB), (7 * MIB + 1, 8 * MIB)],
)
def test_power_of_two_steps(nbytes, allocated_bytes):
    allocator = an_allocator("roundup_power2_divisions:4")
    allocator.malloc(nbytes)
    assert allocator.allocated_bytes == allocated_bytes


def test_blocks_of_the_largest_split_size_are_kept_whole():
    allocator = an_allocator("max_split_size_mb:32", 70 * MIB)
    allocator.free(allocator.malloc(50 * MIB))
    allocator.malloc(5 * MIB)
    assert allocator.reserved_bytes == 70 * MIB
    assert not allocator.fits(31 * MIB)  # below the size nothing is taken from such a block
    assert allocator.fits(32 * MIB)
    allocator.malloc(32 * MIB)
    assert (allocator.reserved_bytes, allocator.allocated_bytes) == (70 * MIB, 55 * MIB)


def test_an_unsplit_block_is_under_20_mib_too_large():
    allocator = an_allocator("max_split_size_mb:32", 60 * MIB)
    allocator.free(allocator.malloc(60 * MIB))
    assert not allocator.fits(40 * MIB)
    assert allocator.fits(40 * MIB + 1)


def test_one_large_block_is_given_back_before_everything_is():
    allocator = an_allocator("max_split_size_mb:32", 110 * MIB)
    for handle in [allocator.malloc(size * MIB) for size in (20, 40, 50)]:
        allocator.free(handle)
    allocator.malloc(30 * MIB)
    assert (allocator.reserved_bytes, allocator.alloc_retries) == (100 * MIB, 0)


def test_several_large_blocks_are_given_back_the_largest_first():
    allocator = an_allocator("max_split_size_mb:32", 142 * MIB)
    for handle in [allocator.malloc(size * MIB) for size in (20, 32, 40, 50)]:
        allocator.free(handle)
    allocator.malloc(76 * MIB)
    assert (allocator.reserved_bytes, allocator.alloc_retries) == ((20 + 32 + 76) * MIB, 0)


def test_garbage_is_what_has_waited_longest():
    allocator = an_allocator(COLLECTING, 1000 * MIB)  # collects from 400 MiB on
    busy, old, young, _ = [allocator.malloc(size * MIB) for size in (20, 150, 160, 170)]
    allocator.free(busy)
    allocator.free(old)
    for _ in range(10):
        allocator.free(allocator.malloc(20 * MIB))
    allocator.free(young)
    for _ in range(100):
        allocator.malloc(512)  # searches in the small pool make nothing older
    allocator = allocator.copy()
    allocator.malloc(200 * MIB)
    assert (allocator.reserved_bytes, allocator.alloc_retries) == ((2 + 20 + 160 + 170 + 200) * MIB, 0)


def test_without_a_limit_no_garbage_is_collected():
    allocator = an_allocator("garbage_collection_threshold:0.1")
    for stream in range(5):
        allocator.free(allocator.malloc(100 * MIB, stream))
    assert allocator.reserved_bytes == 500 * MIB


# Expandable segments


def test_an_expandable_segment_grows_by_pages():
    allocator = an_allocator(EXPANDABLE)
    allocator.malloc(100)
    assert allocator.reserved_bytes == 2 * MIB
    allocator.malloc(15 * MIB)
    assert allocator.reserved_bytes == 22 * MIB
    allocator.malloc(15 * MIB)  # 5 MiB of it lie on the first page
    assert (allocator.reserved_bytes, allocator.allocated_bytes) == (42 * MIB, 30 * MIB + 512)
    assert allocator.stats()["segment.all.current"] == 0  # as in torch


def test_only_whole_pages_are_unmapped():
    allocator = an_allocator(EXPANDABLE)
    first, middle, last = (allocator.malloc(size * MIB) for size in (15, 50, 5))
    assert allocator.reserved_bytes == 80 * MIB
    allocator.free(middle)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 40 * MIB  # pages 2 and 3 of 4: no one else lies on them
    allocator.malloc(45 * MIB)  # goes back into the gap
    assert allocator.reserved_bytes == 80 * MIB
    allocator.free(first)
    allocator.free(last)


def test_fits_counts_only_the_pages_that_are_missing():
    allocator = an_allocator(EXPANDABLE, 80 * MIB)
    _, middle, last = (allocator.malloc(size * MIB) for size in (15, 50, 5))
    allocator.free(middle)
    allocator.empty_cache()
    allocator.free(last)
    assert allocator.fits(65 * MIB)  # from 15 to 80 MiB: two pages are missing between what is free
    allocator.malloc(65 * MIB)
    assert (allocator.reserved_bytes, allocator.alloc_retries) == (80 * MIB, 0)


def test_pages_move_to_where_they_are_needed():
    allocator = an_allocator(EXPANDABLE, 100 * MIB)
    first, _ = allocator.malloc(30 * MIB, stream=1), allocator.malloc(30 * MIB, stream=1)
    allocator.free(first)
    allocator.malloc(50 * MIB, stream=2)  # needs 3 pages: two are left, and one lies inside what was freed
    assert (allocator.reserved_bytes, allocator.alloc_retries) == (100 * MIB, 1)
    with pytest.raises(AllocatorOutOfMemory):
        allocator.malloc(30 * MIB, stream=1)


def test_pages_mapped_before_a_refusal_stay():
    allocator = an_allocator(EXPANDABLE, 50 * MIB)
    allocator.free(allocator.malloc(5 * MIB))
    with pytest.raises(AllocatorOutOfMemory):
        allocator.malloc(41 * MIB)
    assert allocator.reserved_bytes == 0  # mapped all at once or not at all where nothing is mapped


def test_the_limit_counts_segments_not_pages():
    allocator = an_allocator(EXPANDABLE)
    allocator.limit_bytes = 22 * MIB
    allocator.malloc(21 * MIB)
    assert allocator.reserved_bytes == 40 * MIB  # as in torch: 22 MiB were asked for, two pages of 20 MiB were mapped


def test_a_segment_without_pages_is_gone():
    allocator = an_allocator(EXPANDABLE)
    allocator.free(allocator.malloc(100 * MIB))
    allocator.empty_cache()
    assert list(allocator._blocks()) == []


# The text


ADVICE = (
    " If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid"
    " fragmentation.  See documentation for Memory Management  (https://docs.pytorch.org/docs/stable/notes/cuda.html"
    "#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
)


def refusal(allocator, nbytes):
    with pytest.raises(AllocatorOutOfMemory) as caught:
        allocator.malloc(nbytes)
    assert caught.value.requested_bytes == nbytes
    return str(caught.value)


def test_the_text_names_the_segment():
    allocator = an_allocator("", 9 * GIB, total_bytes=10 * GIB, device_index=3)
    allocator.malloc(9 * GIB - 10 * MIB)
    allocator.malloc(300 * KIB)
    assert refusal(allocator, 3 * MIB) == (
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 3 has a total capacity of 10.00 GiB of which 8.00 MiB is"
        " free. Including non-PyTorch memory, this process has 9.99 GiB memory in use. Of the allocated memory 8.99 GiB"
        " is allocated by PyTorch, and 1.71 MiB is reserved by PyTorch but unallocated." + ADVICE
    )


def test_the_text_names_the_limit():
    allocator = an_allocator(capacity_bytes=GIB)
    allocator.limit_bytes = 1
    assert refusal(allocator, 2 * GIB) == (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 1024.00 MiB of which 1024.00 MiB"
        " is free. Including non-PyTorch memory, this process has 0 bytes memory in use. 1 bytes allowed; Of the"
        " allocated memory 0 bytes is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated."
        + ADVICE
    )


def test_more_than_an_exabyte_has_a_text_of_its_own():
    allocator = an_allocator()
    assert refusal(allocator, 2**60) == "CUDA out of memory. Tried to allocate more than 1EB memory."
    assert allocator.ooms == 0


# Properties


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["malloc", "malloc", "malloc", "free", "free", "empty"]),
        st.one_of(st.integers(1, 4 * MIB), st.integers(1, 80 * MIB), st.sampled_from([MIB, MIB + 1, 10 * MIB])),
        st.integers(0, 1),
    ),
    max_size=60,
)
settings_texts = st.sampled_from(TEXTS)


def played(allocator, steps):
    """Yield after each step what it was and the handles alive; frees the handle that the size points at."""
    handles = []
    for kind, number, stream in steps:
        refused = False
        if kind == "malloc":
            try:
                handles.append(allocator.malloc(number, stream))
            except AllocatorOutOfMemory:
                refused = True
        elif kind == "free" and handles:
            allocator.free(handles.pop(number % len(handles)))
        elif kind == "empty":
            allocator.empty_cache()
        yield handles, refused, number, stream


@given(STEPS, settings_texts)
def test_the_books_balance(steps, text):
    allocator = an_allocator(text, 200 * MIB)
    for _ in played(allocator, steps):
        blocks = sorted(allocator._blocks(), key=lambda block: block.address)
        assert all(a.address + a.size <= b.address for a, b in itertools.pairwise(blocks))
        assert allocator.allocated_bytes == sum(end - start for start, end in ranges(allocator))
        assert allocator.requested_bytes == sum(block.requested for block in allocator._live.values())
        assert allocator.reserved_bytes == sum(block.size for block in blocks if block.mapped)
        assert allocator.requested_bytes <= allocator.allocated_bytes <= allocator.reserved_bytes <= 200 * MIB
        assert allocator.peak_allocated_bytes >= allocator.allocated_bytes
        assert allocator.peak_reserved_bytes >= allocator.reserved_bytes


@given(STEPS, settings_texts)
def test_blocks_are_linked_in_order_and_merged(steps, text):
    allocator = an_allocator(text, 200 * MIB)
    for _ in played(allocator, steps):
        for block in allocator._blocks():
            if block.next is not None:
                assert block.next.prev is block
                assert block.next.address == block.address + block.size
                assert not (block.free and block.next.free)
                assert block.mapped or block.next.mapped
        for pool in allocator._pools():
            assert pool.free == sorted(pool.free)
            assert all(
                block.free and (size, address) == (block.size, block.address) for size, address, block in pool.free
            )


@given(STEPS, settings_texts)
def test_nothing_is_left_when_all_is_freed(steps, text):
    allocator = an_allocator(text, 200 * MIB)
    handles = []
    for handles, _, _, _ in played(allocator, steps):  # noqa: B007
        pass
    for handle in handles:
        allocator.free(handle)
    allocator.empty_cache()
    assert list(allocator._blocks()) == []
    assert figures(allocator)[:3] == [0, 0, 0]


@given(STEPS, st.sampled_from(["", "max_split_size_mb:32", "roundup_power2_divisions:4"]))
def test_a_refusal_is_the_last_resort(steps, text):
    allocator = an_allocator(text, 100 * MIB)
    allocator.limit_bytes = 90 * MIB
    for _, refused, nbytes, stream in played(allocator, steps):
        assert allocator.reserved_bytes <= 90 * MIB
        if refused:
            size = allocator._rounded(nbytes)
            whole = [b for b in allocator._blocks() if b.free and b.prev is None and b.next is None]
            assert whole == []  # everything that could be given back was
            assert allocator.reserved_bytes + allocator._segment_size(size) > 90 * MIB
            assert not allocator.fits(nbytes, stream)


@given(STEPS, st.sampled_from(["", EXPANDABLE, "roundup_power2_divisions:4", "large_segment_size_mb:40"]))
def test_fits_foretells_and_changes_nothing(steps, text):
    allocator = an_allocator(text, 100 * MIB)
    for _, _, nbytes, stream in played(allocator, steps):
        before, twin = figures(allocator), allocator.copy()
        fits = allocator.fits(nbytes, stream)
        assert figures(allocator) == before
        with contextlib.suppress(AllocatorOutOfMemory):
            twin.malloc(nbytes, stream)
        assert fits == (twin.alloc_retries == allocator.alloc_retries)


@given(STEPS, STEPS, settings_texts)
def test_a_copy_goes_on_the_same_way_and_alone(steps, more, text):
    allocator = an_allocator(text, 200 * MIB)
    for _ in played(allocator, steps):
        pass
    before, twin = figures(allocator), allocator.copy()
    assert figures(twin) == before
    alone = [figures(twin) for _ in played(twin, more)]
    assert figures(allocator) == before
    assert [figures(allocator) for _ in played(allocator, more)] == alone
    for handle in list(allocator._live):
        twin.free(handle)
    assert twin.allocated_bytes == twin.requested_bytes == 0


def test_peaks_start_anew():
    allocator = an_allocator()
    kept = allocator.malloc(3 * MIB)
    allocator.free(allocator.malloc(100 * MIB))
    allocator.empty_cache()
    assert (allocator.peak_allocated_bytes, allocator.peak_reserved_bytes) == (103 * MIB, 120 * MIB)
    allocator.reset_peaks()
    stats = allocator.stats()
    for name in ("allocated", "active", "requested"):
        assert stats[f"{name}_bytes.all.peak"] == stats[f"{name}_bytes.all.current"] == 3 * MIB
    assert stats["reserved_bytes.all.peak"] == stats["reserved_bytes.all.current"] == 20 * MIB
    allocator.free(kept)
