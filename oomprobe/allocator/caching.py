"""Model of CUDA's caching allocator: the same blocks, segments and refusals, without CUDA.

The allocator reserves *segments* from the driver and hands out *blocks*. It caches free blocks,
splits them for smaller requests and merges free neighbours; only an unsplit segment goes back to the
driver. Driver refusals are pure arithmetic, so a recorded step can be replayed against any capacity.

Each stream has free blocks of its own. Streams do all their work at once, but a block that another
stream has used waits until `synchronize`: a card may be as late. Not modelled: multiple processes.
Docstrings name the functions of torch that do the same.

Source: c10/cuda/CUDACachingAllocator.cpp of PyTorch, and c10/core/AllocatorConfig.h of torch 2.13.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Protocol

from oomprobe.allocator.blocks import (
    BYTE_BITS,
    NEVER,
    OFFSET_BITS,
    OFFSETS,
    PLACE_BITS,
    SMALLEST_BLOCK,
)
from oomprobe.allocator.pools import Pools
from oomprobe.allocator.segments import MIB, SMALL, Segments
from oomprobe.allocator.settings import AllocatorSettings, BlockOrder


class Log(Protocol):
    """Notes what an allocator does."""

    def append(self, noted: tuple[int, int], /) -> None:
        """Note a block's handle and its bytes, negative before it is freed.

        Of a request that is refused, note 0 and the size of its block.
        """


_DEFAULTS = AllocatorSettings()
_SMALL_SIZE = SMALL << BYTE_BITS


class AllocatorOutOfMemory(MemoryError):
    """The allocator refused a request; the message is as in ``torch.OutOfMemoryError``."""


def _of_segments(name: str, meaning: str) -> Any:
    """Return a property of the allocator that its segments have."""

    def read(allocator: CachingAllocator) -> Any:
        return getattr(allocator.segments, name)

    def write(allocator: CachingAllocator, value: Any) -> None:
        setattr(allocator.segments, name, value)

    return property(read, write, doc=meaning)


class CachingAllocator:
    """Caching allocator of one device for one process.

    Args:
        capacity_bytes: Memory that the driver can give this allocator, 0 or more: the card's memory
            less the context, the libraries and other processes.
        settings: Settings from ``PYTORCH_ALLOC_CONF``; the process's fraction is ignored, set
            `limit_bytes` instead.
        total_bytes: The card's total memory, for error messages; default: the capacity.

    Segments get falling addresses, as mostly on cards, which are never reused. A driver chooses
    others: up to torch 2.11, that can decide among free blocks of one size.

    Example:
        >>> allocator = CachingAllocator(64 * 2**20)
        >>> handle = allocator.malloc(8_519_680)
        >>> allocator.allocated_bytes, allocator.reserved_bytes
        (8519680, 20971520)
        >>> allocator.free(handle)
        >>> allocator.empty_cache()
        >>> allocator.reserved_bytes, allocator.peak_reserved_bytes
        (0, 20971520)
    """

    __slots__ = (  # makes single requests a third faster
        "_ages", "_allocated", "_collects", "_least", "_live", "_odd", "_orders_blocks", "_peak",
        "_requested", "_rounds_up", "_searches", "_shared", "_waiting", "alloc_retries", "log", "ooms",
        "pools", "segments", "served", "served_bytes", "settings",
    )  # fmt: skip
    capacity_bytes = _of_segments("capacity_bytes", "Memory that the driver can give.")
    total_bytes = _of_segments("total_bytes", "The card's total memory.")
    limit_bytes = _of_segments("limit_bytes", "Most to reserve; None: no limit.")
    reserved_bytes = _of_segments("reserved_bytes", "What the driver has given.")
    peak_reserved_bytes = _of_segments("peak_reserved_bytes", "The most of it.")

    def __init__(
        self,
        capacity_bytes: int,
        settings: AllocatorSettings = _DEFAULTS,
        *,
        total_bytes: int | None = None,
    ) -> None:
        self.segments = Segments(settings, capacity_bytes, total_bytes or capacity_bytes)
        self.pools = Pools(self.segments.blocks)
        self._shared = set[int]()  # blocks that another stream than their own has used
        self._waiting: list[int] = []  # those of them that are freed, but perhaps still in use
        self._live: dict[int, int] = {}  # blocks by handle
        self._requested: dict[int, int] = {}
        self.served = 0  # blocks ever allocated; a block's handle is its number
        self._allocated = self._peak = 0  # as sizes
        self.alloc_retries = self.ooms = 0
        self.served_bytes = 0  # total of all requests
        self.log: Log | None = None
        self._searches = 0  # for large blocks while garbage is collected
        self._ages: dict[int, int] = {}  # searches before a free large block became one, by key
        self.set(settings)

    def set(self, settings: AllocatorSettings) -> None:
        """Follow these settings from now on; blocks stay where they are."""
        self.settings = self.segments.settings = settings
        self.segments.max_split = NEVER
        if settings.max_split_size_mb is not None:
            self.segments.max_split = settings.max_split_size_mb * MIB << BYTE_BITS
        # Free blocks from this size on are looked at by `_best_fit`.
        self._odd = self.segments.max_split
        if self.segments.blocks.expandable and not settings.expandable_segments:
            self._odd = 0
        # should_split: what must remain of a large and of a small block, and in a pool that splits
        # none. Sizes are whole blocks.
        smallest = SMALLEST_BLOCK << BYTE_BITS
        large = smallest + _SMALL_SIZE * (not settings.expandable_segments)
        self._least = (large, smallest), (NEVER, NEVER)
        self._rounds_up = any(settings.roundup_power2_divisions)
        self._orders_blocks = settings.block_order is BlockOrder.BLOCK
        self._collects = settings.garbage_collection_threshold > 0

    def use_stream(self, stream: int) -> None:
        """Serve later requests from the blocks of a stream; 0: the default one."""
        self.pools.use_stream(stream)

    @property
    def stream(self) -> int:
        """The current stream."""
        return self.pools.stream

    def drop_pool(self, private: int) -> None:
        """~MemPool: let go of what `Pools.make` made."""
        self.pools.drop(private)
        self.empty_cache(private)

    def malloc(self, nbytes: int) -> int:
        """Allocate a block of the current stream.

        Returns a handle for `free`, which is never reused; 0 for no bytes.
        """
        if nbytes <= 0:
            return 0
        size = nbytes + 511 >> 9 << PLACE_BITS
        if self._rounds_up:
            size = self.settings.rounded(nbytes) << BYTE_BITS
        blocks: list[int] = []
        self.run((size,), blocks)
        self.served = handle = self.served + 1
        self._live[handle] = blocks[0]
        self._requested[handle] = nbytes
        self.served_bytes += nbytes
        if self.log is not None:
            self.log.append((handle, nbytes))
        return handle

    def free(self, handle: int) -> None:
        """Return a block to its pool, unless another stream has used it; ignore handle 0."""
        if handle == 0:
            return
        nbytes = self._requested.pop(handle)
        if self.log is not None:
            self.log.append((handle, -nbytes))
        self.run((-1,), [self._live.pop(handle)])

    def in_sizes(self, requests: Iterable[int]) -> list[int]:
        """round_size: return requests, of bytes or negative, as `run` takes them."""
        if self._rounds_up:
            rounded = self.settings.rounded
            return [n if n < 0 else rounded(n) << BYTE_BITS for n in requests]
        return [n if n < 0 else n + 511 >> 9 << PLACE_BITS for n in requests]

    def run(self, requests: Sequence[int], blocks: list[int]) -> None:
        """Make many requests: a size to allocate, or -n to free the n-th last of the blocks.

        New blocks are added to these.
        """
        if self._orders_blocks or (self._collects and self.limit_bytes is not None):
            for request in requests:
                self._run_noting(request, blocks)
        else:
            _make_requests(self, requests, blocks)

    def _run_noting(self, request: int, blocks: list[int]) -> None:
        """Make one request; note how old free blocks are, and order blocks as torch 2.12 does."""
        ages, now = self._ages, self._searches
        keys = [
            key
            for large in self.pools.of_streams()
            for key in self.segments.blocks.free[large][0][1:-1]
        ]
        self._ages = {key: ages.get(key, now) for key in keys}
        self._searches += request > _SMALL_SIZE and not self.pools.active
        by_block = self._orders_blocks
        place = self.segments.blocks.place
        if request > 0:
            _make_requests(self, (request,), blocks)
            block = blocks[-1]
            if (
                by_block and self.segments.blocks.is_free[self.segments.blocks.after[block]]
            ):  # it has been split off: a new one
                self.segments.reorder(block)
            return
        block = blocks[request]
        order = place[block] & ~OFFSETS
        _make_requests(self, (request,), blocks)
        if by_block and self.segments.blocks.is_free[block]:  # it has absorbed its neighbours
            self.segments.blocks.discard(block)
            place[block] = order | place[block] & OFFSETS
            self.segments.blocks.add(block)

    def named(self, blocks: Iterable[int], sizes: Iterable[int]) -> list[int]:
        """Return handles for blocks that `run` has added, of these requested bytes."""
        handles = []
        for block, nbytes in zip(blocks, sizes, strict=True):
            self.served += 1
            handles.append(self.served)
            self._live[self.served] = block
            self._requested[self.served] = nbytes
        return handles

    def unnamed(self, handles: Iterable[int]) -> list[int]:
        """Return the blocks behind handles, which are valid no more: `run` may free them."""
        for handle in handles:
            del self._requested[handle]
        return [self._live.pop(handle) for handle in handles]

    def record_stream(self, handle: int, stream: int) -> bool:
        """Note that a stream uses a block; return whether it is another than the block's own."""
        return handle in self._live and self.share(self._live[handle], stream)

    def share(self, block: int, stream: int) -> bool:
        """As `record_stream`, of a block that `run` has added."""
        if self.pools.stream_of(self.segments.blocks.pool_of[block]) == stream:
            return False
        self._shared.add(block)
        return True

    def synchronize(self) -> None:
        """synchronize_and_free_events: make blocks free that have waited for another stream."""
        waiting, self._waiting = self._waiting, []
        self._shared.difference_update(waiting)
        for block in waiting:
            self.segments.blocks.give_back(block)

    def serve(self, steps: Iterable[int], blocks: list[int]) -> None:
        """Allocate blocks of these bytes, added to those held; -n frees the n-th last of them."""
        for step in steps:
            if step < 0:
                self.free(blocks.pop(step))
            else:
                blocks.append(self.malloc(step))

    def empty_cache(self, private: int = 0) -> None:
        """release_cached_blocks: give the driver back every unused segment, or page of one.

        Of a private pool only its own; 0: all but those of private pools that have users.
        """
        if not self.pools.captures:
            self.synchronize()
        for pool in self.pools.releasable(private):
            for block in self.segments.blocks.free[pool][1][1:-1]:
                self.segments.release(block)

    def reset_peaks(self) -> None:
        self._peak = self._allocated
        self.segments.peak_reserved_bytes = self.reserved_bytes

    @property
    def allocated_bytes(self) -> int:
        return self._allocated >> BYTE_BITS

    @property
    def peak_allocated_bytes(self) -> int:
        return self._peak >> BYTE_BITS

    @property
    def requested_bytes(self) -> int:
        """Bytes requested for the blocks in use."""
        return sum(self._requested.values())

    def requested(self) -> dict[int, int]:
        """Return the requested bytes of each block in use, by handle."""
        return dict(self._requested)

    def block(self, handle: int) -> int:
        """Return the block behind a handle."""
        return self._live[handle]

    def private_of(self, handle: int) -> int:
        """Return the private pool of a block in use; 0: it is in none."""
        return self.pools.private_of(self.segments.blocks.pool_of[self._live.get(handle, 0)])

    def address(self, handle: int) -> int:
        """Return where a block in use begins."""
        return self.segments.blocks.address(self._live[handle])

    def layout(self, handles: Iterable[int]) -> object:
        """Return what decides later requests: the places of these blocks and of free memory."""
        blocks = [self._live[handle] for handle in handles if handle in self._live]
        places = [
            (self.segments.blocks.address(block), self.segments.blocks.size[block] >> BYTE_BITS)
            for block in blocks
        ]
        free = [key for keys, _ in self.segments.blocks.free for key in keys[1:-1]]
        figures = self.stream, self.settings, self.reserved_bytes, self.alloc_retries
        return places, free, self.pools.active.copy(), *figures

    def stats(self) -> dict[str, int]:
        """Return figures by their names in ``torch.cuda.memory_stats``, for all pools together."""
        split, blocks = 0, self.segments.blocks
        for _, numbers in blocks.free:
            for block in numbers[1:-1]:
                if not (blocks.is_expandable(block) or blocks.is_whole_segment(block)):
                    split += blocks.size[block] >> BYTE_BITS
        return {
            "allocation.all.allocated": self.served,
            "requested_bytes.all.allocated": self.served_bytes,
            "allocated_bytes.all.current": self.allocated_bytes,
            "allocated_bytes.all.peak": self.peak_allocated_bytes,
            "active_bytes.all.current": self.allocated_bytes,
            "active_bytes.all.peak": self.peak_allocated_bytes,
            "requested_bytes.all.current": self.requested_bytes,
            "reserved_bytes.all.current": self.reserved_bytes,
            "reserved_bytes.all.peak": self.peak_reserved_bytes,
            "inactive_split_bytes.all.current": split,
            "num_alloc_retries": self.alloc_retries,
            "num_ooms": self.ooms,
        }

    def empty_copy(self) -> CachingAllocator:
        """Return an allocator with the same capacity and settings, and no blocks."""
        return CachingAllocator(self.capacity_bytes, self.settings, total_bytes=self.total_bytes)

    def copy(self) -> CachingAllocator:
        """Return an independent allocator in the same state; handles are valid in both."""
        twin = CachingAllocator.__new__(CachingAllocator)
        for name in CachingAllocator.__slots__:
            value = getattr(self, name)
            if isinstance(value, (list, dict, set, Segments)):
                value = value.copy()
            setattr(twin, name, value)
        twin.pools = self.pools.copy(twin.segments.blocks)
        twin.log = None
        return twin

    # --- when no free block fits ---

    def _found(self, pool: int, at: int, wanted: int) -> tuple[int, int, int]:
        """malloc, where the first block that is large enough may not do, or there is none.

        Returns the pool, where the block to take is in it, and what must remain to be split off.
        """
        at = self.segments.best_fit(pool, at, wanted)
        if not at:
            pool, at = self._from_driver(pool, wanted)
        least = self.least(pool)
        if wanted >= self.segments.max_split and not self.settings.expandable_segments:
            least = NEVER
        return pool, at, least

    def least(self, pool: int) -> int:
        """should_split: return what must remain of a block of a pool."""
        return self._least[self.pools.private_of(pool) in self.pools.unsplit][pool & 1]

    def _from_driver(self, pool: int, wanted: int) -> tuple[int, int]:
        """Reserve a segment, releasing more and more of the cache until it fits.

        Returns the pool, and where its block is in it.
        """
        nbytes = self.segments.segment_bytes(wanted >> BYTE_BITS)
        if self._collects and self.limit_bytes is not None:
            free = self.segments.blocks.free
            ages = {}
            for large in self.pools.of_streams():
                for key, block in zip(*free[large], strict=True):
                    ages[block] = self._searches - self._ages.get(key, self._searches)
            del ages[0]  # stands at both ends of each pool
            self.segments.collect(ages)
        at = self.segments.new_segment(pool, wanted, nbytes)
        if not at:
            for fallback, first in self.pools.overflowing(pool, wanted):
                at = self.segments.best_fit(fallback, first, wanted)
                if at:
                    return fallback, at
        if not at and self.segments.release_oversized(pool, wanted):
            at = self.segments.new_segment(pool, wanted, nbytes)
        if not at and not self.pools.captures:
            self.empty_cache()
            self.alloc_retries += 1
            at = self.segments.new_segment(pool, wanted, nbytes)
        if not at:
            self.ooms += 1
            if self.log is not None:
                self.log.append((0, wanted >> BYTE_BITS))
            raise AllocatorOutOfMemory(oom_message(self, nbytes))
        return pool, at


def _make_requests(  # noqa: PLR0915
    allocator: CachingAllocator, requests: Iterable[int], blocks: list[int]
) -> None:
    """Malloc and free, in one loop without calls: a call takes as long as half a request."""
    all_blocks = allocator.segments.blocks
    size, place, before = all_blocks.size, all_blocks.place, all_blocks.before
    after, is_free, mapped = all_blocks.after, all_blocks.is_free, all_blocks.mapped
    pool_of, pools, spare = all_blocks.pool_of, all_blocks.free, all_blocks.spare
    large, small = allocator.pools.serving
    least_large, least_small = allocator._least[allocator.pools.is_unsplit]
    allocated, peak = allocator._allocated, allocator._peak
    shared, odd, push = allocator._shared, allocator._odd, blocks.append
    expands = allocator.settings.expandable_segments
    for wanted in requests:
        if wanted < 0:  # free_block
            block = blocks[wanted]
            length = size[block]
            allocated -= length
            if shared and block in shared:
                allocator._waiting.append(block)
                continue
            keys, numbers = pools[pool_of[block]]
            neighbour = after[block]
            if is_free[neighbour]:  # try_merge_blocks
                is_free[neighbour] = False
                more = size[neighbour]
                at = bisect_left(keys, more | place[neighbour])
                del keys[at], numbers[at]
                length += more
                after[block] = beyond = after[neighbour]
                before[beyond] = block
                spare.append(neighbour)
            neighbour = before[block]
            if is_free[neighbour]:
                is_free[neighbour] = False
                more = size[neighbour]
                place[block] = start = place[neighbour]
                at = bisect_left(keys, more | start)
                del keys[at], numbers[at]
                length += more
                before[block] = beyond = before[neighbour]
                after[beyond] = block
                spare.append(neighbour)
            size[block] = length
            is_free[block] = True
            key = length | place[block]
            at = bisect_left(keys, key)
            keys.insert(at, key)
            numbers.insert(at, block)
            continue
        if wanted > _SMALL_SIZE:
            pool, least = large, least_large
        else:
            pool, least = small, least_small
        keys, numbers = pools[pool]
        at = bisect_left(keys, wanted)  # get_free_block
        if keys[at] >= odd or (expands and not mapped[after[numbers[at]]]):
            allocator._allocated, allocator._peak = allocated, peak
            pool, at, least = allocator._found(pool, at, wanted)
            keys, numbers = pools[pool]
        block = numbers[at]
        rest = size[block] - wanted
        if rest < least:
            del keys[at], numbers[at]
            is_free[block] = False
            allocated += size[block]
        else:  # should_split: what remains keeps its number
            if not spare:
                all_blocks.make_spare()
            size[block] = rest
            start = place[block]
            place[block] = middle = start + (wanted >> PLACE_BITS)
            key = rest | middle
            if keys[at - 1] < key:
                keys[at] = key
            else:
                del keys[at], numbers[at]
                at = bisect_left(keys, key)
                keys.insert(at, key)
                numbers.insert(at, block)
            front = spare.pop()
            size[front], place[front], pool_of[front] = wanted, start, pool
            before[front] = beyond = before[block]
            after[beyond] = before[block] = front
            after[front] = block
            block = front
            allocated += wanted
        if allocated > peak:
            peak = allocated
        push(block)
    allocator._allocated, allocator._peak = allocated, peak


def adopt(
    allocator: CachingAllocator, address: int, nbytes: int, blocks: list[tuple[int, int]], room: int
) -> list[int]:
    """Add a segment of the current stream that exists already, or mapped pages of an expandable one.

    Args:
        allocator: Gets the segment.
        address: Of the segment.
        nbytes: Its size. Without a block in use, one of 2 MiB is for small blocks.
        blocks: Address and requested bytes of each block in use, ascending. What was too little to be
            split off counts as free: it serves nothing.
        room: Bytes of address space after it, for more pages of an expandable segment.

    Returns:
        The handles of its blocks.

    Raises:
        ValueError: the blocks overlap, are not inside the segment, or at no multiple of 512 bytes.
    """
    if any((start - address) % SMALLEST_BLOCK for start in (address + nbytes, *dict(blocks))):
        raise ValueError(
            f"a block or an end of a segment of {nbytes} bytes is at no multiple of 512"
        )
    largest = max(dict(blocks).values(), default=nbytes // 2)
    pool = allocator.pools.serving[largest <= SMALL]
    end = address + nbytes
    place = allocator.segments.new_order(address)
    whole = allocator.segments.blocks.new(pool, nbytes << BYTE_BITS, place)
    if room and allocator.settings.expandable_segments:
        allocator.segments.blocks.expandable.add(place >> OFFSET_BITS)
        allocator.segments.blocks.size[whole] += room << BYTE_BITS
        allocator.segments.blocks.add_unmapped(
            allocator.segments.blocks.cut_after(whole, nbytes << BYTE_BITS)
        )
    rest = whole
    handles = []
    for (start, requested), (next_start, _) in pairwise([*blocks, (end, 0)]):
        size = allocator.settings.rounded(requested)
        if (
            not rest
            or not allocator.segments.blocks.address(rest) <= start < start + size <= next_start
        ):
            raise ValueError(
                f"a block of {requested} bytes overlaps another, or the end of a segment of {nbytes}"
            )
        block = rest
        before = start - allocator.segments.blocks.address(rest)
        if before:
            block = allocator.segments.blocks.cut_after(rest, before << BYTE_BITS)
            allocator.segments.blocks.add(rest)
        rest = 0
        if start + size < end:
            rest = allocator.segments.blocks.cut_after(block, size << BYTE_BITS)
        handles += allocator.named([block], [requested])
        allocator._allocated += allocator.segments.blocks.size[block]
    if rest:
        allocator.segments.blocks.add(rest)
    allocator.segments.reserve(nbytes)
    allocator.segments.next_address = min(allocator.segments.next_address, address)
    return handles


def oom_message(allocator: CachingAllocator, segment: int) -> str:
    """Return the message of ``torch.OutOfMemoryError``, as if all other memory were this process's.

    Source: strings in libc10_cuda.so of torch 2.13.0; their order is in CUDACachingAllocator.cpp.
    """
    reserved, allocated, total = (
        allocator.reserved_bytes,
        allocator.allocated_bytes,
        allocator.total_bytes,
    )
    free = allocator.capacity_bytes - reserved
    private, private_bytes = "", allocator.pools.free_private_bytes()
    if private_bytes:  # as torch calls what is free there
        private = (
            f"with {_size_text(private_bytes)} allocated in private pools (e.g., CUDA Graphs), "
        )
        allocated += private_bytes
    allowed = ""
    if allocator.limit_bytes is not None:
        allowed = f"{_size_text(allocator.limit_bytes)} allowed; "
    return (
        f"CUDA out of memory. Tried to allocate {_size_text(segment)}. GPU 0 has a total capacity of "
        f"{_size_text(total)} of which {_size_text(free)} is free. Including non-PyTorch memory, this process has "
        f"{_size_text(total - free)} memory in use. {allowed}Of the allocated memory {_size_text(allocated)} is "
        f"allocated by PyTorch, {private}and {_size_text(reserved - allocated)} is reserved by PyTorch but unallocated. If "
        "reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid "
        "fragmentation.  See documentation for Memory Management  (https://docs.pytorch.org/docs/stable/notes/"
        "cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
    )


def _size_text(nbytes: int) -> str:
    """format_size in c10."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes > factor:
            return f"{nbytes / factor:.2f} {unit}"
    return f"{nbytes} bytes"
