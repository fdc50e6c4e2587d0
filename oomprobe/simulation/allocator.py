"""CUDA's caching allocator, without CUDA: the same blocks, the same segments, the same refusal.

Memory is had from the driver in *segments* and handed out in *blocks*. A free block is cached, split for a smaller
request, merged with free neighbours of its segment; only an unsplit segment goes back to the driver. What the driver
would refuse is a matter of arithmetic, so a step that was recorded can be replayed against any capacity.

Not modelled: blocks waiting for another stream (``record_stream``), private pools (CUDA graphs), several processes.

Source: c10/cuda/CUDACachingAllocator.cpp of PyTorch; constants from c10/core/AllocatorConfig.h of torch 2.13.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import chain

from oomprobe.simulation.blocks import (
    MIB,
    SMALL,
    SMALL_SEGMENT,
    SMALLEST_BLOCK,
    UNLIMITED,
    Block,
    Pool,
    absorb,
    bytes_to_map,
    cut_after,
    expandable_size,
    is_whole_segment,
    lowest_room,
    twin_of,
    whole_pages,
)  # fmt: skip
from oomprobe.simulation.refusal import AllocatorOutOfMemory, refusal
from oomprobe.simulation.settings import AllocatorSettings

_OWN_SEGMENT = 10 * MIB  # kMinLargeAlloc: from here on a request gets a segment of its own size
_SEGMENT_STEP = 2 * MIB  # kRoundLarge
_EXABYTE = 2**60
_FIRST_ADDRESS = 0x7F00_0000_0000  # looks like one of CUDA's; any multiple of 20 MiB's pages would do

__all__ = ["AllocatorOutOfMemory", "CachingAllocator"]

_DEFAULTS = AllocatorSettings()


class CachingAllocator:
    """One device's allocator, for one process.

    Args:
        capacity_bytes: What the driver may hand out to this process's allocator, 0 or more: the card's memory less the
            context, the libraries and other processes.
        settings: What ``PYTORCH_ALLOC_CONF`` says.
        total_bytes: The card's whole memory, for the text of the error; default: the capacity.
        device_index: For the text of the error.

    Segments get increasing addresses and none is used twice, so among free blocks of one size the one whose segment
    was had first is taken. The real driver reuses addresses: only the choice among equals may differ.

    Example:
        >>> allocator = CachingAllocator(64 * 2**20)
        >>> handle = allocator.malloc(8_519_680)
        >>> allocator.allocated_bytes, allocator.reserved_bytes
        (8519680, 20971520)
        >>> allocator.free(handle)
        >>> allocator.empty_cache()
        >>> allocator.reserved_bytes, allocator.peak_reserved_bytes
        (0, 20971520)

    Source: c10/cuda/CUDACachingAllocator.cpp.
    """

    __slots__ = (
        "_clock", "_divided", "_handles", "_large", "_live", "_max_split", "_next_address", "_segments", "_settings",
        "_small", "_threshold", "alloc_retries", "allocated_bytes", "capacity_bytes", "device_index", "limit_bytes", "log", "ooms",
        "peak_allocated_bytes", "peak_requested_bytes", "peak_reserved_bytes", "requested_bytes", "reserved_bytes",
        "total_bytes",
    )  # fmt: skip

    def __init__(
        self,
        capacity_bytes: int,
        settings: AllocatorSettings = _DEFAULTS,
        *,
        total_bytes: int | None = None,
        device_index: int = 0,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.total_bytes = capacity_bytes if total_bytes is None else total_bytes
        self.device_index = device_index
        self.limit_bytes: int | None = None
        if settings.per_process_memory_fraction < 1.0:
            self.limit_bytes = int(settings.per_process_memory_fraction * self.total_bytes)
        self._settings = settings
        self._threshold = settings.garbage_collection_threshold
        self._divided = any(settings.roundup_power2_divisions)
        self._max_split = settings.max_split_size_bytes or UNLIMITED
        self._small: dict[int, Pool] = {}
        self._large: dict[int, Pool] = {}
        self._live: dict[int, Block] = {}
        self._handles = 0
        self._segments = 0
        self._next_address = _FIRST_ADDRESS
        self._clock = 0  # counts the searches in the large pools: the age of a cached block is measured in them
        self.allocated_bytes = self.requested_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_requested_bytes = self.peak_reserved_bytes = 0
        self.alloc_retries = self.ooms = 0
        self.log: list[tuple[int, int]] | None = None

    def malloc(self, nbytes: int, stream: int = 0) -> int:
        """Hand out memory.

        Args:
            nbytes: What is asked for, 0 or more; 0 is no memory.
            stream: Whose free blocks may be used.

        Returns:
            A handle for `free`; never 0 but for 0 bytes, and never the same twice.

        Raises:
            AllocatorOutOfMemory: no block and, with every cache given back, no segment could be had.
        """
        if nbytes <= 0:
            return self._no_memory(nbytes)
        size = self._rounded(nbytes)
        pools = self._small if size <= SMALL else self._large
        pool = pools.get(stream) or self._new_pool(stream, size)
        if self._threshold and self.limit_bytes is not None and not pool.is_small:
            self._clock += 1
        index = self._best_fit(pool, size)
        block = pool.free.pop(index)[2] if index >= 0 else self._block_from_driver(pool, size, nbytes)
        rest = block.size - size
        if rest >= pool.smallest_rest and size < pool.split_below:
            block = self._front(block, size)
        else:
            size = block.size
        block.free = False
        block.requested = nbytes
        self._handles = handle = self._handles + 1
        self._live[handle] = block
        self.requested_bytes += nbytes
        if self.requested_bytes > self.peak_requested_bytes:
            self.peak_requested_bytes = self.requested_bytes
        self.allocated_bytes += size
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        if self.log is not None:
            self.log.append((handle, nbytes))
        return handle

    def free(self, handle: int) -> None:
        """Give a block back to its pool, merged with its free neighbours; the driver gets nothing. 0 is no memory.

        Raises:
            ValueError: the handle is unknown or was freed before.
        """
        block = self._live.pop(handle, None)
        if block is None:
            if handle == 0:
                return
            raise ValueError(f"handle {handle} is not allocated")
        self.allocated_bytes -= block.size
        self.requested_bytes -= block.requested
        if self.log is not None:
            self.log.append((handle, -block.requested))
        self._cache(block)

    def fits(self, nbytes: int, stream: int = 0) -> bool:
        """Whether `malloc` would succeed now without giving any cached memory back. Changes nothing."""
        if nbytes <= 0:
            return nbytes == 0
        size = self._rounded(nbytes)
        pool = (self._small if size <= SMALL else self._large).get(stream)
        if pool is None:
            pool = Pool(self._settings, stream, is_small=size <= SMALL)
        if self._best_fit(pool, size) >= 0:
            return True
        segment = self._segment_size(size)
        from_driver = bytes_to_map(pool, size) if self._settings.expandable_segments else segment
        return self._allowed(segment) and self.reserved_bytes + from_driver <= self.capacity_bytes

    def empty_cache(self) -> None:
        """Give every cached segment of which no part is in use back to the driver."""
        self._release_cached()

    def reset_peaks(self) -> None:
        """Start the peaks anew from what is held now."""
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_requested_bytes = self.requested_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    @property
    def served(self) -> int:
        """How many blocks were ever handed out."""
        return self._handles

    def requested(self) -> dict[int, int]:
        """What was asked for, by the handle of each block in use."""
        return {handle: block.requested for handle, block in self._live.items()}

    def stats(self) -> dict[str, int]:
        """Give the figures under the names of ``torch.cuda.memory_stats``; pools are not told apart."""
        split = [
            size
            for pool in self._pools()
            for size, _, block in pool.free
            if block.origin < 0 and (block.prev is not None or block.next is not None)
        ]
        return {
            "allocation.all.current": len(self._live),
            "allocation.all.allocated": self._handles,
            "allocated_bytes.all.current": self.allocated_bytes,
            "allocated_bytes.all.peak": self.peak_allocated_bytes,
            "active_bytes.all.current": self.allocated_bytes,  # nothing waits for another stream
            "active_bytes.all.peak": self.peak_allocated_bytes,
            "requested_bytes.all.current": self.requested_bytes,
            "requested_bytes.all.peak": self.peak_requested_bytes,
            "reserved_bytes.all.current": self.reserved_bytes,
            "reserved_bytes.all.peak": self.peak_reserved_bytes,
            "segment.all.current": self._segments,
            "inactive_split.all.current": len(split),
            "inactive_split_bytes.all.current": sum(split),
            "num_alloc_retries": self.alloc_retries,
            "num_ooms": self.ooms,
        }

    def take_counts(self, other: CachingAllocator) -> None:
        """The peaks, retries and refusals of a copy, whose blocks are given up."""
        for name in ("peak_allocated_bytes", "peak_reserved_bytes", "alloc_retries", "ooms"):
            setattr(self, name, getattr(other, name))

    def emptied(self) -> CachingAllocator:
        """One like it with nothing in it, whose counts go on from here."""
        fresh = CachingAllocator(
            self.capacity_bytes, self._settings, total_bytes=self.total_bytes, device_index=self.device_index
        )
        fresh.alloc_retries, fresh.ooms = self.alloc_retries, self.ooms
        return fresh

    def copy(self) -> CachingAllocator:
        """Make an independent allocator in the same state; the handles are valid in both."""
        twin = CachingAllocator.__new__(CachingAllocator)
        for name in CachingAllocator.__slots__:
            setattr(twin, name, getattr(self, name))
        twin.log = None
        pools = {pool: Pool(self._settings, pool.stream, is_small=pool.is_small) for pool in self._pools()}
        blocks = {block: twin_of(block, pools[block.pool]) for block in self._blocks()}
        for block, other in blocks.items():
            other.prev = None if block.prev is None else blocks[block.prev]
            other.next = None if block.next is None else blocks[block.next]
        for pool, twin_pool in pools.items():
            twin_pool.free = [(size, address, blocks[block]) for size, address, block in pool.free]
            twin_pool.unmapped = [(address, blocks[block]) for address, block in pool.unmapped]
        twin._small = {stream: pools[pool] for stream, pool in self._small.items()}
        twin._large = {stream: pools[pool] for stream, pool in self._large.items()}
        twin._live = {handle: blocks[block] for handle, block in self._live.items()}
        return twin

    def _pools(self) -> Iterator[Pool]:
        return chain(self._large.values(), self._small.values())

    def _blocks(self) -> Iterator[Block]:
        yield from self._live.values()
        for pool in self._pools():
            yield from (entry[2] for entry in pool.free)
            yield from (entry[1] for entry in pool.unmapped)

    def _no_memory(self, nbytes: int) -> int:
        if nbytes < 0:
            raise ValueError(f"cannot allocate {nbytes} bytes")
        return 0

    def _new_pool(self, stream: int, size: int) -> Pool:
        pool = Pool(self._settings, stream, is_small=size <= SMALL)
        (self._small if pool.is_small else self._large)[stream] = pool
        return pool

    def _rounded(self, nbytes: int) -> int:
        """round_size: what a request costs at least."""
        if self._divided:
            divisions = self._settings.divisions(nbytes)
            if divisions > 1 and nbytes > SMALLEST_BLOCK * divisions:
                return _next_division(nbytes, divisions)
        return (nbytes + 511) & -512

    def _segment_size(self, size: int) -> int:
        """get_allocation_size: what the driver is asked for."""
        if size <= SMALL:
            return SMALL_SEGMENT
        if size < _OWN_SEGMENT:
            return self._settings.large_segment_size_bytes
        return -(-size // _SEGMENT_STEP) * _SEGMENT_STEP

    def _best_fit(self, pool: Pool, size: int) -> int:
        """get_free_block: where the block to take is in the pool; -1: none will do."""
        free = pool.free
        index = bisect_left(free, (size,))
        if index == len(free):
            return -1
        if free[index][2].origin >= 0:
            while index + 1 < len(free) and expandable_size(free[index + 1][2]) < expandable_size(free[index][2]):
                index += 1
        if self._max_split < UNLIMITED:
            return index if self._may_serve(free[index][0], size) else -1
        return index

    def _may_serve(self, block_size: int, size: int) -> bool:
        """With a max_split_size large blocks are kept whole, for requests of about their own size."""
        if size < self._max_split:
            return block_size < self._max_split
        return block_size < size + self._settings.max_non_split_rounding_bytes

    def _front(self, block: Block, size: int) -> Block:
        """Split: the front is handed out, the rest goes back to the pool."""
        front = Block(block.pool, block.address, size)
        front.origin = block.origin
        front.prev = block.prev
        if front.prev is not None:
            front.prev.next = front
        front.next = block
        block.prev = front
        block.address += size
        block.size -= size
        block.pool.add(block)
        return front

    def _cache(self, block: Block) -> None:
        """Merge a block with its free neighbours and put it into its pool."""
        pool = block.pool
        for other in (block.prev, block.next):
            if other is not None and other.free:
                pool.discard(other)
                absorb(block, other)
        block.born = self._clock
        pool.add(block)

    def _block_from_driver(self, pool: Pool, size: int, nbytes: int) -> Block:
        """Get a segment, giving back more and more of the cache until there is room for it."""
        if nbytes >= _EXABYTE:
            message = "CUDA out of memory. Tried to allocate more than 1EB memory."
            raise AllocatorOutOfMemory(message, requested_bytes=nbytes)
        if self._threshold and self.limit_bytes is not None:
            self._collect_garbage(self.limit_bytes)
        segment = self._segment_size(size)
        block = self._new_segment(pool, size, segment)
        if block is None and self._release_oversize(pool, size):
            block = self._new_segment(pool, size, segment)
        if block is None:
            self._release_cached()
            self.alloc_retries += 1
            block = self._new_segment(pool, size, segment)
        if block is None:
            self.ooms += 1
            raise AllocatorOutOfMemory(refusal(self, segment), requested_bytes=nbytes)
        return block

    def _allowed(self, segment: int) -> bool:
        return self.limit_bytes is None or self.reserved_bytes + segment <= self.limit_bytes

    def _new_segment(self, pool: Pool, size: int, segment: int) -> Block | None:
        """alloc_block: a block of at least this size that is in no pool; None: refused."""
        if not self._allowed(segment):
            return None
        if self._settings.expandable_segments:
            return self._expanded(pool, size)
        if self.reserved_bytes + segment > self.capacity_bytes:
            return None
        self._reserve(segment)
        self._segments += 1
        return Block(pool, self._addresses(segment), segment)

    def _addresses(self, nbytes: int) -> int:
        address = self._next_address
        self._next_address += nbytes
        return address

    def _reserve(self, nbytes: int) -> None:
        self.reserved_bytes += nbytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _expanded(self, pool: Pool, size: int) -> Block | None:
        """try_allocate_expandable_block: map pages at the lowest address where the block can lie.

        Pages mapped before one is refused stay mapped, in the pool.
        """
        block = lowest_room(pool, size) or self._new_address_space(pool)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.next
            if following is None or not self._map(following, min(size - block.size, following.size)):
                return None
            block = following  # which has absorbed the block
        pool.discard(block)
        return block

    def _new_address_space(self, pool: Pool) -> Block:
        nbytes = whole_pages(self.total_bytes + self.total_bytes // 8, pool.page)
        block = Block(pool, self._addresses(nbytes), nbytes)
        block.origin = block.address
        pool.add_unmapped(block)
        return block

    def _map(self, block: Block, nbytes: int) -> bool:
        """Put whole pages under the front of an unmapped block, which then is a free one."""
        pool = block.pool
        mapped = whole_pages(nbytes, pool.page)
        if self.reserved_bytes + mapped > self.capacity_bytes:
            return False
        pool.discard_unmapped(block)
        if mapped < block.size:
            pool.add_unmapped(cut_after(block, mapped))
        self._cache(block)
        self._reserve(mapped)
        return True

    def _unmap(self, block: Block) -> None:
        """Take the whole pages inside a free block away from it."""
        pool, page, origin = block.pool, block.pool.page, block.origin
        begin = origin + whole_pages(block.address - origin, page)
        end = block.address + block.size - (block.address + block.size - origin) % page
        if begin >= end:
            return
        pool.discard(block)
        if block.address + block.size > end:
            pool.add(cut_after(block, end - block.address))
        if block.address < begin:
            rest = cut_after(block, begin - block.address)
            pool.add(block)
            block = rest
        self.reserved_bytes -= block.size
        for other in (block.prev, block.next):
            if other is not None and not other.mapped:
                pool.discard_unmapped(other)
                absorb(block, other)
        if block.prev is not None or block.next is not None:
            pool.add_unmapped(block)

    def _release_cached(self) -> None:
        """release_cached_blocks: everything that is not in use goes back to the driver."""
        for pool in self._pools():
            for _, _, block in list(pool.free):
                if block.origin >= 0:
                    self._unmap(block)
                elif block.prev is None and block.next is None:
                    self._release(block)

    def _release(self, block: Block) -> None:
        block.pool.discard(block)
        self.reserved_bytes -= block.size
        self._segments -= 1

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """release_available_cached_blocks: one block too large to split, or several, the largest first."""
        if self._max_split == UNLIMITED or self._settings.expandable_segments:
            return False
        wanted = max(size, self._max_split)
        index = bisect_left(pool.free, (wanted,))
        if index < len(pool.free):
            self._release(pool.free[index][2])
            return True
        released = 0
        while released < wanted and pool.free and pool.free[-1][0] >= self._max_split:
            released += pool.free[-1][0]
            self._release(pool.free[-1][2])
        return released >= wanted

    def _collect_garbage(self, allowed: int) -> None:
        """garbage_collect_cached_blocks: the large segments that have waited longest, until under the threshold."""
        target = self.reserved_bytes - int(self._threshold * allowed)
        blocks = [entry[2] for pool in self._large.values() for entry in pool.free if is_whole_segment(entry[2])]
        while target > 0 and blocks:
            mean_age = sum(self._clock - block.born for block in blocks) / len(blocks)
            for block in [block for block in blocks if self._clock - block.born >= mean_age]:
                target -= block.size
                blocks.remove(block)
                self._release(block)


def _next_division(nbytes: int, divisions: int) -> int:
    """roundup_power2_next_division: up to the next of the equal steps between two powers of two."""
    step = (1 << nbytes.bit_length() - 1) >> divisions.bit_length() - 1
    return -(-nbytes // step) * step
