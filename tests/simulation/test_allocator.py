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
    EXPANDABLE: ("235388416 281018368 235311939 201 197 0 0 0", "a8868478f3fc9c0c"),
    "max_split_size_mb:32": ("185562624 209715200 172676791 208 202 15 24152576 40", "0a801b121105785b"),
    COLLECTING: ("229116928 255852544 216383128 208 208 13 26735616 37", "18140e3560a58c74"),
    "roundup_power2_divisions:[1:8,4:2,64:4,>:16]": (
        "247632896 272629760 210744839 201 194 12 24996864 40", "f0456a6631df01a3"
    ),
    "expandable_segments:True,max_split_size_mb:32": ("220652544 281018368 220576354 200 194 0 0 0", "bb68b6b151613db8"),
    "large_segment_size_mb:40": ("234224128 249561088 224909909 185 184 11 15336960 39", "d61b4dccf0a6b1f8"),
}  # fmt: skip


@pytest.mark.parametrize("text", TORCH_DID)
def test_does_what_torch_does(text):
    allocator = an_allocator(text, 290 * MIB, total_bytes=300 * MIB)
    if text == COLLECTING:
        allocator.limit_bytes = 240 * MIB
    lines = list(outcomes(allocator, operations(7, 3000)))
    assert (lines[-1], hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]) == TORCH_DID[text]


# The rules, by hand. Source: c10/cuda/CUDACachingAllocator.cpp


@pytest.mark.parametrize(
    ("nbytes", "allocated_bytes", "reserved_bytes"),
    [
        (0, 0, 0),
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
    handle = allocator.malloc(nbytes)
    assert (allocator.requested_bytes, allocator.allocated_bytes) == (nbytes, allocated_bytes)
    assert (allocator.reserved_bytes, allocator.peak_reserved_bytes) == (reserved_bytes, reserved_bytes)
    allocator.free(handle)
    allocator.empty_cache()
    assert figures(allocator)[:3] == [0, 0, 0]


# Positive numbers allocate so many MiB, negative ones free the nth allocation, 0 empties the cache: what is reserved then,
# in MiB, and how often the cache was given back on the way.
RULES = {
    "a segment of 20 MiB serves several requests": ("", 1000, [5, 5, 5, 5], 20, 0),
    "small and large requests do not share segments": ("", 1000, [5, -1, 0.5], 22, 0),
    "freed neighbours become one block": ("", 1000, [5, 5, 5, 5, -2, -4, -3, 9], 20, 0),
    "a segment with a block in use stays": ("", 1000, [8, 8, -1, 0], 20, 0),
    "cached segments are given back when memory is short": ("", 100, [60, -1, 80], 80, 1),
    "below max_split_size a large block is kept whole": ("max_split_size_mb:32", 70, [50, -1, 5], 70, 0),
    "above it, it serves requests of about its size": ("max_split_size_mb:32", 70, [50, -1, 32], 50, 0),
    "a block 20 MiB too large does not": ("max_split_size_mb:32", 60, [60, -1, 40], 40, 0),
    "one large block is given back before everything is": (
        "max_split_size_mb:32", 110, [20, 40, 50, -1, -2, -3, 30], 100, 0
    ),
    "or several, the largest first": ("max_split_size_mb:32", 142, [20, 32, 40, 50, -1, -2, -3, -4, 76], 128, 0),
    "without a limit no garbage is collected": ("garbage_collection_threshold:0.1", 1000, [100, -1, 200, -2, 300], 600, 0),
    "an expandable segment grows by pages": (EXPANDABLE, 1000, [0.5, 15, 15], 42, 0),
    "only whole pages are unmapped": (EXPANDABLE, 1000, [15, 50, 5, -2, 0], 40, 0),
    "and a request goes back into the gap": (EXPANDABLE, 1000, [15, 50, 5, -2, 0, 45], 80, 0),
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


def test_a_block_can_be_freed_once():
    allocator = an_allocator()
    handle = allocator.malloc(100)
    allocator.free(handle)
    assert allocator.malloc(100) != handle  # at the same address
    with pytest.raises(KeyError):
        allocator.free(handle)


def test_a_refusal_leaves_the_allocator_usable():
    allocator = an_allocator(capacity_bytes=40 * MIB)
    with pytest.raises(AllocatorOutOfMemory):
        allocator.malloc(GIB)
    assert (allocator.alloc_retries, allocator.ooms) == (1, 1)
    assert (allocator.allocated_bytes, allocator.requested_bytes, allocator.peak_allocated_bytes) == (0, 0, 0)
    allocator.malloc(40 * MIB)


def test_the_limit_is_on_what_is_reserved():
    allocator = an_allocator()
    allocator.free(allocator.malloc(30 * MIB))
    allocator.limit_bytes = 20 * MIB
    assert allocator.reserved_bytes == 30 * MIB  # lowering it frees nothing
    allocator.free(allocator.malloc(30 * MIB))  # and what is cached may be used
    allocator.malloc(MIB + 1, stream=1)  # the cache is given back for it
    assert (allocator.reserved_bytes, allocator.alloc_retries) == (20 * MIB, 1)
    with pytest.raises(AllocatorOutOfMemory, match=r"20\.00 MiB allowed"):
        allocator.malloc(100)
    allocator.limit_bytes = None
    allocator.malloc(100)


@pytest.mark.parametrize(
    ("nbytes", "allocated_bytes"),
    [(2048, 2048), (1200, 1536), (2049, 2560), (5 * MIB + 1, 6 * MIB), (6 * MIB, 6 * MIB), (7 * MIB + 1, 8 * MIB)],
)
def test_power_of_two_steps(nbytes, allocated_bytes):
    allocator = an_allocator("roundup_power2_divisions:4")
    allocator.malloc(nbytes)
    assert allocator.allocated_bytes == allocated_bytes


def test_garbage_is_what_has_waited_longest():
    allocator = an_allocator(COLLECTING, 1000 * MIB)
    allocator.limit_bytes = 800 * MIB  # collects from 400 MiB on
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


def test_pages_move_to_where_they_are_needed():
    allocator = an_allocator(EXPANDABLE, 100 * MIB)
    first, _ = allocator.malloc(30 * MIB, stream=1), allocator.malloc(30 * MIB, stream=1)
    allocator.free(first)
    allocator.malloc(50 * MIB, stream=2)  # needs 3 pages: two are left, and one lies inside what was freed
    assert (allocator.reserved_bytes, allocator.alloc_retries) == (100 * MIB, 1)
    with pytest.raises(AllocatorOutOfMemory):
        allocator.malloc(30 * MIB, stream=1)


def test_the_limit_counts_segments_not_pages():
    allocator = an_allocator(EXPANDABLE)
    allocator.limit_bytes = 22 * MIB
    allocator.malloc(21 * MIB)
    assert allocator.reserved_bytes == 40 * MIB  # as in torch: 22 MiB were asked for, two pages of 20 MiB were mapped


# The text


ADVICE = (
    " If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid"
    " fragmentation.  See documentation for Memory Management  (https://docs.pytorch.org/docs/stable/notes/cuda.html"
    "#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
)


def refusal(allocator, nbytes):
    with pytest.raises(AllocatorOutOfMemory) as caught:
        allocator.malloc(nbytes)
    return str(caught.value)


def test_the_text_names_the_segment():
    allocator = an_allocator("", 9 * GIB, total_bytes=10 * GIB)
    allocator.malloc(9 * GIB - 10 * MIB)
    allocator.malloc(300 * KIB)
    assert refusal(allocator, 3 * MIB) == (
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 10.00 GiB of which 8.00 MiB is"
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
settings_texts = st.sampled_from(list(TORCH_DID))


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
        yield handles, refused, number


@given(STEPS, settings_texts)
def test_the_books_balance(steps, text):
    allocator = an_allocator(text, 200 * MIB)
    handles = []
    for handles, _, _ in played(allocator, steps):  # noqa: B007
        blocks = sorted(allocator._blocks(), key=lambda block: block.address)
        live = allocator._live.values()
        assert all(a.address + a.size <= b.address for a, b in itertools.pairwise(blocks))
        assert allocator.allocated_bytes == sum(block.size for block in live)
        assert allocator.requested_bytes == sum(block.requested for block in live)
        assert allocator.reserved_bytes == sum(block.size for block in blocks if block.mapped)
        assert allocator.requested_bytes <= allocator.allocated_bytes <= allocator.reserved_bytes <= 200 * MIB
        assert allocator.peak_allocated_bytes >= allocator.allocated_bytes
        assert allocator.peak_reserved_bytes >= allocator.reserved_bytes
        for block in blocks:  # linked in order, and merged where both are free
            if block.next is not None:
                assert block.next.prev is block
                assert block.next.address == block.address + block.size
                assert not (block.free and block.next.free)
                assert block.mapped or block.next.mapped
        for pool in allocator._pools.values():
            assert pool.free == sorted((block.size, block.address, block) for _, _, block in pool.free)
            assert all(block.free for _, _, block in pool.free)
    for handle in handles:
        allocator.free(handle)
    allocator.empty_cache()
    assert list(allocator._blocks()) == []
    assert figures(allocator)[:3] == [0, 0, 0]


@given(STEPS, st.sampled_from(["", "max_split_size_mb:32", "roundup_power2_divisions:4"]))
def test_a_refusal_is_the_last_resort(steps, text):
    allocator = an_allocator(text, 100 * MIB)
    allocator.limit_bytes = 90 * MIB
    for _, refused, nbytes in played(allocator, steps):
        assert allocator.reserved_bytes <= 90 * MIB
        if refused:
            size = allocator._rounded(nbytes)
            whole = [b for b in allocator._blocks() if b.free and b.prev is None and b.next is None]
            assert whole == []  # everything that could be given back was
            assert allocator.reserved_bytes + allocator._segment_size(size) > 90 * MIB


def test_fits_foretells_and_changes_nothing():
    allocator = an_allocator(capacity_bytes=100 * MIB)
    allocator.free(allocator.malloc(60 * MIB))
    before = figures(allocator)
    assert [allocator.fits(size * MIB) for size in (60, 40, 70, 101)] == [True, True, False, False]
    assert figures(allocator) == before


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
    for name in ("allocated", "active"):
        assert stats[f"{name}_bytes.all.peak"] == stats[f"{name}_bytes.all.current"] == 3 * MIB
    assert stats["reserved_bytes.all.peak"] == stats["reserved_bytes.all.current"] == 20 * MIB
    allocator.free(kept)
