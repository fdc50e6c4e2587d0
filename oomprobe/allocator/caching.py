"""Model of CUDA's caching allocator: the same blocks, segments and out-of-memory errors, without CUDA.

The allocator reserves *segments* from the driver and hands out *blocks*. It caches free blocks, splits them for smaller
requests and merges free neighbours; only an unsplit segment goes back to the driver. Driver refusals are pure arithmetic,
so a recorded step can be replayed against any capacity.

Each stream has free blocks of its own. Streams do all their work at once, but a block that another stream has used waits until
`synchronize`: a card may be as late. Not modelled: private pools (CUDA graphs), multiple processes.

Source: c10/cuda/CUDACachingAllocator.cpp of PyTorch; constants from c10/core/AllocatorConfig.h of torch 2.13.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from itertools import pairwise

from oomprobe.allocator.settings import AllocatorSettings
from oomprobe.ground.torch_versions import BlockOrder

MIB = 2**20
SMALLEST_BLOCK = 512  # kMinBlockSize
SMALL = MIB  # kSmallSize: the largest request of the small pool
SMALL_SEGMENT = 2 * MIB  # kSmallBuffer
LARGE_SEGMENT = (
    20 * MIB
)  # kLargeBuffer: for requests below `_OWN_SEGMENT`; page size of large expandable segments
_OWN_SEGMENT = (
    10 * MIB
)  # kMinLargeAlloc: requests of this size or more get a segment of their own size
_SEGMENT_STEP = 2 * MIB  # kRoundLarge
_FIRST_ADDRESS = 0x7F00_0000_0000  # resembles CUDA's addresses
_DEFAULTS = AllocatorSettings()


class AllocatorOutOfMemory(MemoryError):
    """The allocator refused a request; the message is as in ``torch.OutOfMemoryError``."""


class Block:
    """A piece of a segment. ``free``: mapped and in its pool; neither ``free`` nor ``mapped``: address space only."""

    __slots__ = (
        "address", "free", "is_shared", "mapped", "next", "order", "origin", "pool", "prev", "requested", "size",
    )  # fmt: skip

    def __init__(self, pool: Pool, address: int, size: int, order: int) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.order = order  # among free blocks of one size; before the address
        self.prev: Block | None = None
        self.next: Block | None = None
        self.free = False
        self.mapped = True
        self.origin = -1  # start of its expandable segment; -1: not in one
        self.requested = 0
        self.is_shared = False  # whether another stream than its own has used it

    @property
    def is_whole_segment(self) -> bool:
        """Whether it can go back to the driver."""
        return self.prev is None and self.next is None and self.origin < 0

    @property
    def is_in_use(self) -> bool:
        return self.mapped and not self.free

    @property
    def expandable_size(self) -> int:
        """Size that a free block can grow to by mapping the unmapped space after it."""
        following = self.next
        if following is None or following.mapped:
            return self.size
        return self.size + following.size

    def absorb(self, neighbour: Block) -> None:
        """Merge a neighbour into this block."""
        if self.prev is neighbour:
            self.address, self.prev = neighbour.address, neighbour.prev
        else:
            self.next = neighbour.next
        if self.prev is not None:
            self.prev.next = self
        if self.next is not None:
            self.next.prev = self
        self.size += neighbour.size

    def cut_after(self, nbytes: int) -> Block:
        """Shorten the block to `nbytes`; return the remainder, linked after it and in no pool."""
        remainder = Block(self.pool, self.address + nbytes, self.size - nbytes, self.order)
        remainder.origin = self.origin
        remainder.prev, remainder.next = self, self.next
        if remainder.next is not None:
            remainder.next.prev = remainder
        self.next = remainder
        self.size = nbytes
        return remainder

    def twin(self, pool: Pool) -> Block:
        """Return a copy for another allocator's pool, without links."""
        twin = Block(pool, self.address, self.size, self.order)
        twin.free, twin.mapped, twin.origin, twin.requested = (
            self.free,
            self.mapped,
            self.origin,
            self.requested,
        )
        twin.is_shared = self.is_shared
        return twin


class Pool:
    """Free small or large blocks of a stream, sorted by size, order and address for best fit."""

    __slots__ = ("free", "page", "smallest_remainder", "stream", "unmapped")

    def __init__(self, settings: AllocatorSettings, stream: int, *, is_small: bool) -> None:
        self.stream = stream
        expandable = settings.expandable_segments
        self.page = SMALL_SEGMENT if is_small else LARGE_SEGMENT
        # should_split: sizes are multiples of 512, so "more than 1 MiB" is "at least 1 MiB + 512"
        self.smallest_remainder = (
            SMALLEST_BLOCK if is_small or expandable else SMALL + SMALLEST_BLOCK
        )
        self.free: list[tuple[int, int, int, Block]] = []
        self.unmapped: list[tuple[int, Block]] = []

    def add(self, block: Block) -> None:
        block.free = True
        insort(self.free, (block.size, block.order, block.address, block))

    def discard(self, block: Block) -> None:
        block.free = False
        free = self.free
        del free[bisect_left(free, (block.size, block.order, block.address))]

    def add_unmapped(self, block: Block) -> None:
        block.mapped = False
        insort(self.unmapped, (block.address, block))

    def discard_unmapped(self, block: Block) -> None:
        block.mapped = True
        del self.unmapped[bisect_left(self.unmapped, (block.address,))]

    def find_expandable(self, size: int) -> Block | None:
        """find_expandable_block: the first block of the lowest run of free and unmapped blocks with room for `size`."""
        for _, block in self.unmapped:
            first = block
            if block.prev is not None and block.prev.free:
                first = block.prev
            room = 0
            following: Block | None = first
            while following is not None and not following.is_in_use:
                room += following.size
                if room >= size:
                    return first
                following = following.next
        return None


class CachingAllocator:
    """Caching allocator of one device for one process.

    Args:
        capacity_bytes: Memory that the driver can give this allocator, 0 or more: the card's memory less the context,
            the libraries and other processes.
        settings: Settings from ``PYTORCH_ALLOC_CONF``; the process's fraction is ignored, set `limit_bytes` instead.
        total_bytes: The card's total memory, for error messages; default: the capacity.

    Segments get falling addresses, as mostly on cards, which are never reused. A driver chooses others: up to torch
    2.11, that can decide among free blocks of one size.

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

    __slots__ = (  # make a replay a fifth faster
        "_last_order", "_live", "_next_address", "_of_stream", "_pools", "_settings", "_waiting", "alloc_retries", "allocated_bytes",
        "capacity_bytes", "limit_bytes", "log", "ooms", "peak_allocated_bytes", "peak_reserved_bytes", "requested_bytes",
        "reserved_bytes", "served", "served_bytes", "stream", "total_bytes",
    )  # fmt: skip

    def __init__(
        self,
        capacity_bytes: int,
        settings: AllocatorSettings = _DEFAULTS,
        *,
        total_bytes: int | None = None,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.total_bytes = capacity_bytes if total_bytes is None else total_bytes
        self.limit_bytes: int | None = None
        self._settings = settings
        self._pools: dict[int, tuple[Pool, Pool]] = {}  # of large and of small blocks, by stream
        self.use_stream(0)
        self._waiting: list[Block] = []  # freed, but perhaps still in use by another stream
        self._live: dict[int, Block] = {}
        self._last_order = self.served = 0  # blocks ever allocated; a block's handle is its number
        self._next_address = _FIRST_ADDRESS
        self.allocated_bytes = self.requested_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.alloc_retries = self.ooms = 0
        self.served_bytes = 0  # total of all requests
        self.log: list[tuple[int, int]] | None = None

    def use_stream(self, stream: int) -> None:
        """Serve later requests from the blocks of a stream; 0: the default one."""
        if stream not in self._pools:
            self._pools[stream] = _empty_pools(self._settings, stream)
        self.stream, self._of_stream = stream, self._pools[stream]

    def malloc(self, nbytes: int) -> int:
        """Allocate a block of the current stream; return a handle for `free`, never reused; 0 for no bytes."""
        if nbytes <= 0:
            return 0
        size = _rounded_up(nbytes, SMALLEST_BLOCK)  # round_size
        pool = self._of_stream[size <= SMALL]
        index = self._best_fit(pool, size)
        block = pool.free.pop(index)[-1] if index >= 0 else self._block_from_driver(pool, size)
        if block.size - size >= pool.smallest_remainder:
            pool.add(block.cut_after(size))
            if self._settings.block_order is BlockOrder.BLOCK:
                block.order = self._next_order()
        block.free = False
        block.requested = nbytes
        self.served = handle = self.served + 1
        self._live[handle] = block
        self.requested_bytes += nbytes
        self.served_bytes += nbytes
        self.allocated_bytes += block.size
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        if self.log is not None:
            self.log.append((handle, nbytes))
        return handle

    def free(self, handle: int) -> None:
        """Return a block to its pool, unless another stream has used it; ignore handle 0."""
        if handle == 0:
            return
        block = self._live.pop(handle)
        self.allocated_bytes -= block.size
        self.requested_bytes -= block.requested
        if self.log is not None:
            self.log.append((handle, -block.requested))
        if block.is_shared:
            self._waiting.append(block)
        else:
            self._return_to_pool(block)

    def record_stream(self, handle: int, stream: int) -> bool:
        """Take note that a stream uses a block; return whether it is another one than the block's own."""
        block = self._live.get(handle)
        if block is None or block.pool.stream == stream:
            return False
        block.is_shared = True
        return True

    def synchronize(self) -> None:
        """synchronize_and_free_events: return freed blocks to their pools that have waited for another stream."""
        for block in self._waiting:
            block.is_shared = False
            self._return_to_pool(block)
        self._waiting.clear()

    def serve(self, steps: Iterable[int], blocks: list[int]) -> None:
        """Allocate blocks of these bytes, added to those held; a step of -n frees the n-th last of them."""
        for step in steps:
            if step < 0:
                self.free(blocks.pop(step))
            else:
                blocks.append(self.malloc(step))

    def empty_cache(self) -> None:
        """release_cached_blocks: return every unused cached segment, or page of one, to the driver."""
        self.synchronize()
        for pool in self._all_pools():
            for *_, block in list(pool.free):
                if block.origin >= 0:
                    self._unmap(block)
                elif block.is_whole_segment:
                    self._release(block)

    def reset_peaks(self) -> None:
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    def requested(self) -> dict[int, int]:
        """Return the requested bytes of each block in use, by handle."""
        return {handle: block.requested for handle, block in self._live.items()}

    def layout(self, handles: Iterable[int]) -> object:
        """Return the places of these blocks and of free memory, and how often that was given back: these decide later requests."""
        places = [(block.address, block.size) for block in map(self._live.get, handles) if block]
        free = [entry[:3] for pool in self._all_pools() for entry in pool.free]
        return places, free, self.stream, self.reserved_bytes, self.alloc_retries

    def stats(self) -> dict[str, int]:
        """Return figures by their names in ``torch.cuda.memory_stats``, for all pools together."""
        split_bytes = 0
        for pool in self._all_pools():
            for *_, block in pool.free:
                if block.origin < 0 and not block.is_whole_segment:
                    split_bytes += block.size
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
            "inactive_split_bytes.all.current": split_bytes,
            "num_alloc_retries": self.alloc_retries,
            "num_ooms": self.ooms,
        }

    def empty_copy(self) -> CachingAllocator:
        """Return an allocator with the same capacity and settings, and no blocks."""
        return CachingAllocator(self.capacity_bytes, self._settings, total_bytes=self.total_bytes)

    def copy(self) -> CachingAllocator:
        """Return an independent allocator in the same state; handles are valid in both."""
        return _copied(self)

    def _all_pools(self) -> Iterator[Pool]:
        for pools in self._pools.values():
            yield from pools

    def _best_fit(self, pool: Pool, size: int) -> int:
        """get_free_block: the index of the block to use in the pool; -1: none fits."""
        free = pool.free
        index = bisect_left(free, (size,))
        if index == len(free):
            return -1
        if free[index][-1].origin >= 0:
            while (
                index + 1 < len(free)
                and free[index + 1][-1].expandable_size < free[index][-1].expandable_size
            ):
                index += 1
        return index

    def _return_to_pool(self, block: Block) -> None:
        """Merge a block with its free neighbours and add it to its pool."""
        pool = block.pool
        for neighbour in (block.prev, block.next):
            if neighbour is not None and neighbour.free:
                pool.discard(neighbour)
                block.absorb(neighbour)
        pool.add(block)

    def _block_from_driver(self, pool: Pool, size: int) -> Block:
        """Reserve a segment, releasing more and more of the cache until it fits."""
        segment = segment_size(size)
        block = self._new_segment(pool, size, segment)
        if block is None:
            self.empty_cache()
            self.alloc_retries += 1
            block = self._new_segment(pool, size, segment)
        if block is None:
            self.ooms += 1
            raise AllocatorOutOfMemory(oom_message(self, segment))
        return block

    def _new_segment(self, pool: Pool, size: int, segment: int) -> Block | None:
        """alloc_block: a block of at least `size` that is in no pool; None: refused."""
        if self.limit_bytes is not None and self.reserved_bytes + segment > self.limit_bytes:
            return None
        if self._settings.expandable_segments:
            return self._expanded(pool, size)
        if self.reserved_bytes + segment > self.capacity_bytes:
            return None
        self._reserve(segment)
        return Block(pool, self._next_range(segment), segment, self._next_order())

    def _next_range(self, nbytes: int) -> int:
        self._next_address -= nbytes
        return self._next_address

    def _next_order(self) -> int:
        self._last_order += self._settings.block_order is not BlockOrder.ADDRESS
        return self._last_order

    def _reserve(self, nbytes: int) -> None:
        self.reserved_bytes += nbytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _expanded(self, pool: Pool, size: int) -> Block | None:
        """try_allocate_expandable_block: map pages at the lowest address with room for the block.

        If a page is refused, the pages already mapped stay in the pool.
        """
        block = pool.find_expandable(size) or self._new_address_space(pool)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.next
            if following is None or not self._map(
                following, min(size - block.size, following.size)
            ):
                return None
            block = following  # has absorbed the previous block
        pool.discard(block)
        return block

    def _new_address_space(self, pool: Pool) -> Block:
        nbytes = _rounded_up(self.total_bytes + self.total_bytes // 8, pool.page)
        block = Block(pool, self._next_range(nbytes), nbytes, self._next_order())
        block.origin = block.address
        pool.add_unmapped(block)
        return block

    def _map(self, block: Block, nbytes: int) -> bool:
        """Map whole pages at the front of an unmapped block, which becomes free."""
        pool = block.pool
        mapped = _rounded_up(nbytes, pool.page)
        if self.reserved_bytes + mapped > self.capacity_bytes:
            return False
        pool.discard_unmapped(block)
        if mapped < block.size:
            pool.add_unmapped(block.cut_after(mapped))
        self._return_to_pool(block)
        self._reserve(mapped)
        return True

    def _unmap(self, block: Block) -> None:
        """Unmap the whole pages inside a free block."""
        pool, page, origin = block.pool, block.pool.page, block.origin
        begin = origin + _rounded_up(block.address - origin, page)
        end = block.address + block.size - (block.address + block.size - origin) % page
        if begin >= end:
            return
        pool.discard(block)
        if block.address + block.size > end:
            pool.add(block.cut_after(end - block.address))
        if block.address < begin:
            remainder = block.cut_after(begin - block.address)
            pool.add(block)
            block = remainder
        self.reserved_bytes -= block.size
        for neighbour in (block.prev, block.next):
            if neighbour is not None and not neighbour.mapped:
                pool.discard_unmapped(neighbour)
                block.absorb(neighbour)
        if block.prev is not None or block.next is not None:
            pool.add_unmapped(block)

    def _release(self, block: Block) -> None:
        block.pool.discard(block)
        self.reserved_bytes -= block.size


def segment_size(size: int) -> int:
    """get_allocation_size: the size of a new segment; what counts against a cap."""
    if size <= SMALL:
        return SMALL_SEGMENT
    if size < _OWN_SEGMENT:
        return LARGE_SEGMENT
    return _rounded_up(size, _SEGMENT_STEP)


def _empty_pools(settings: AllocatorSettings, stream: int) -> tuple[Pool, Pool]:
    return Pool(settings, stream, is_small=False), Pool(settings, stream, is_small=True)


def _copied(allocator: CachingAllocator) -> CachingAllocator:
    twin = CachingAllocator.__new__(CachingAllocator)
    for name in CachingAllocator.__slots__:
        setattr(twin, name, getattr(allocator, name))
    twin.log = None
    twin._pools = {stream: _empty_pools(allocator._settings, stream) for stream in allocator._pools}
    twin.use_stream(allocator.stream)
    pools = dict(zip(allocator._all_pools(), twin._all_pools(), strict=True))
    blocks: dict[Block | None, Block] = {}
    for block in _blocks_of(allocator):
        blocks[block] = block.twin(pools[block.pool])
    for block in _blocks_of(allocator):
        copied = blocks[block]
        copied.prev, copied.next = blocks.get(block.prev), blocks.get(block.next)
    for pool, twin_pool in pools.items():
        twin_pool.free = [(size, order, at, blocks[block]) for size, order, at, block in pool.free]
        twin_pool.unmapped = [(address, blocks[block]) for address, block in pool.unmapped]
    twin._live = {handle: blocks[block] for handle, block in allocator._live.items()}
    twin._waiting = [blocks[block] for block in allocator._waiting]
    return twin


def _blocks_of(allocator: CachingAllocator) -> Iterator[Block]:
    yield from allocator._live.values()
    yield from allocator._waiting
    for pool in allocator._all_pools():
        for *_, block in pool.free:
            yield block
        for _, block in pool.unmapped:
            yield block


def adopt(
    allocator: CachingAllocator, address: int, nbytes: int, blocks: list[tuple[int, int]], room: int
) -> list[int]:
    """Add a segment of the current stream that exists already, or the mapped pages of an expandable one; return the handles of its blocks.

    Args:
        allocator: Gets the segment.
        address: Of the segment.
        nbytes: Its size. Without a block in use, one of 2 MiB is for small blocks.
        blocks: Address and requested bytes of each block in use, ascending. What was too little to be split off counts as free: it serves nothing.
        room: Bytes of address space after it, for more pages of an expandable segment.

    Raises:
        ValueError: the blocks overlap, or are not inside the segment.
    """
    largest = max(dict(blocks).values(), default=nbytes // 2)
    pool = allocator._of_stream[largest <= SMALL]
    end = address + nbytes
    whole = Block(pool, address, nbytes, allocator._next_order())
    if room and allocator._settings.expandable_segments:
        whole.origin, whole.size = address, nbytes + room
        pool.add_unmapped(whole.cut_after(nbytes))
    rest: Block | None = whole
    handles = []
    for (start, requested), (next_start, _) in pairwise([*blocks, (end, 0)]):
        size = _rounded_up(requested, SMALLEST_BLOCK)
        if rest is None or not rest.address <= start < start + size <= next_start:
            raise ValueError(
                f"a block of {requested} bytes overlaps another, or the end of a segment of {nbytes}"
            )
        block = rest
        if start > block.address:
            block = rest.cut_after(start - rest.address)
            pool.add(rest)
        rest = None
        if start + size < end:
            rest = block.cut_after(size)
        block.requested = requested
        allocator.served += 1
        handles.append(allocator.served)
        allocator._live[allocator.served] = block
        allocator.allocated_bytes += block.size
        allocator.requested_bytes += requested
    if rest is not None:
        pool.add(rest)
    allocator._reserve(nbytes)
    allocator._next_address = min(allocator._next_address, address)
    return handles


def oom_message(allocator: CachingAllocator, segment: int) -> str:
    """Return the message of ``torch.OutOfMemoryError``, counting all memory outside the allocator as this process's.

    Source: strings in libc10_cuda.so of torch 2.13.0; their order is in CUDACachingAllocator.cpp.
    """
    reserved, allocated, total = (
        allocator.reserved_bytes,
        allocator.allocated_bytes,
        allocator.total_bytes,
    )
    free = allocator.capacity_bytes - reserved
    allowed = ""
    if allocator.limit_bytes is not None:
        allowed = f"{_size_text(allocator.limit_bytes)} allowed; "
    return (
        f"CUDA out of memory. Tried to allocate {_size_text(segment)}. GPU 0 has a total capacity of "
        f"{_size_text(total)} of which {_size_text(free)} is free. Including non-PyTorch memory, this process has "
        f"{_size_text(total - free)} memory in use. {allowed}Of the allocated memory {_size_text(allocated)} is "
        f"allocated by PyTorch, and {_size_text(reserved - allocated)} is reserved by PyTorch but unallocated. If "
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


def _rounded_up(nbytes: int, step: int) -> int:
    return -(-nbytes // step) * step
