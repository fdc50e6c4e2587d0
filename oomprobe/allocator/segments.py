"""Segments that the driver gives: how they are made, grow page by page, and go back."""

from __future__ import annotations

from bisect import bisect_left
from copy import copy

from oomprobe.allocator.blocks import (
    BYTE_BITS,
    NEVER,
    OFFSET_BITS,
    OFFSETS,
    SMALLEST_BLOCK,
    Blocks,
)
from oomprobe.allocator.settings import AllocatorSettings, BlockOrder

MIB = 2**20
SMALL = MIB  # kSmallSize: the largest request of the small pool
SMALL_SEGMENT = 2 * MIB  # kSmallBuffer
LARGE_SEGMENT = 20 * MIB  # kLargeBuffer; see `AllocatorSettings.large_segment_size_mb`
_OWN_SEGMENT = 10 * MIB  # kMinLargeAlloc: from here on requests get a segment of their own size
_SEGMENT_STEP = 2 * MIB  # kRoundLarge
_FIRST_ADDRESS = 0x7F00_0000_0000  # resembles CUDA's addresses


class Segments:
    """Segments of an allocator.

    Attributes:
        blocks: What they consist of.
        settings: What decides their sizes.
        max_split: Size from which on blocks are not split.
        capacity_bytes: Memory that the driver can give.
        total_bytes: The card's memory.
        limit_bytes: Most that may be reserved; None: no limit.
    """

    def __init__(self, settings: AllocatorSettings, capacity_bytes: int, total_bytes: int) -> None:
        self.blocks = Blocks()
        self.settings = settings
        self.max_split = NEVER
        self.capacity_bytes, self.total_bytes = capacity_bytes, total_bytes
        self.limit_bytes: int | None = None
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.last_order, self.next_address = 0, _FIRST_ADDRESS

    def copy(self) -> Segments:
        """Return the same segments, with blocks of their own."""
        twin = copy(self)
        twin.blocks = self.blocks.copy()
        return twin

    def is_refused(self, nbytes: int) -> bool:
        """Whether the limit leaves no room for as much."""
        return self.limit_bytes is not None and self.reserved_bytes + nbytes > self.limit_bytes

    def new_segment(self, pool: int, wanted: int, nbytes: int) -> int:
        """alloc_block: where a free block of at least this size is in its pool; 0: refused."""
        if self.is_refused(nbytes):
            return 0
        if self.settings.expandable_segments:
            return self.expanded(pool, wanted)
        if self.reserved_bytes + nbytes > self.capacity_bytes:
            return 0
        self.reserve(nbytes)
        place = self.new_order(self.next_range(nbytes))
        return self.blocks.add(self.blocks.new(pool, nbytes << BYTE_BITS, place))

    def segment_bytes(self, nbytes: int) -> int:
        """Return the size of a new segment for a request."""
        return segment_size(nbytes, self.settings.large_segment_size_mb * MIB)

    def new_order(self, address: int) -> int:
        """Return the place of a segment's first block; in torch 2.12 each block has an order."""
        order = 2**54 + address // SMALLEST_BLOCK  # more than 0 for any address
        if self.settings.block_order is not BlockOrder.ADDRESS:
            self.last_order = order = self.last_order + 1
        self.blocks.addresses[order] = address
        return order << OFFSET_BITS

    def reorder(self, block: int) -> None:
        """Give a block an order of its own, in the same segment."""
        blocks, place = self.blocks, self.blocks.place[block]
        offset = place & OFFSETS
        new_place = self.new_order(blocks.address(block) - offset * SMALLEST_BLOCK)
        if blocks.is_expandable(block):
            blocks.expandable.add(new_place >> OFFSET_BITS)
        blocks.place[block] = new_place | offset

    def next_range(self, nbytes: int) -> int:
        self.next_address -= nbytes
        return self.next_address

    def reserve(self, nbytes: int) -> None:
        self.reserved_bytes += nbytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def release(self, block: int) -> None:
        """Give back a free segment, or the whole pages in a free block of an expandable one."""
        if self.blocks.is_expandable(block):
            self.unmap(block)
        else:
            self.release_whole(block)

    def release_whole(self, block: int) -> int:
        """release_block: give back a free block if it is a segment; return the size of that.

        Blocks of an expandable segment never are: address space is left after them.
        """
        blocks = self.blocks
        if not blocks.is_whole_segment(block):
            return 0
        blocks.discard(block)
        blocks.spare.append(block)
        self.reserved_bytes -= blocks.size[block] >> BYTE_BITS
        return blocks.size[block]

    def release_one(self, nbytes: int) -> None:
        """Give back a free segment of this size, if there is one."""
        for _, numbers in self.blocks.free:
            for block in numbers[1:-1]:
                if self.blocks.size[block] >> BYTE_BITS == nbytes and self.release_whole(block):
                    return

    def release_oversized(self, pool: int, wanted: int) -> bool:
        """release_available_cached_blocks: give back as much as is wanted of unsplit blocks.

        Returns whether there was enough.
        """
        if self.max_split == NEVER:
            return False
        keys, numbers = self.blocks.free[pool]
        enough = max(wanted, self.max_split)
        at = bisect_left(keys, enough)
        if numbers[at]:
            return self.release_whole(numbers[at]) > 0
        released = 0
        while released < enough and keys[at - 1] >= self.max_split:
            at -= 1
            released += self.release_whole(numbers[at])
        return released >= enough

    def best_fit(self, pool: int, at: int, wanted: int) -> int:
        """get_free_block: where the block to use is in its pool, at `at` or later; 0: none fits."""
        blocks = self.blocks
        _, numbers = blocks.free[pool]
        expands = self.settings.expandable_segments
        while blocks.is_expandable(numbers[at]):
            if expands and blocks.room(numbers[at + 1]) >= blocks.room(numbers[at]):
                break
            at += 1
        length = blocks.size[numbers[at]]
        if wanted < self.max_split <= length:
            return 0
        rounding_mb = self.settings.max_non_split_rounding_mb or self.settings.large_segment_size_mb
        rounding = rounding_mb * MIB << BYTE_BITS
        if wanted >= self.max_split and length >= wanted + rounding:
            return 0
        return at

    def collect(self, ages: dict[int, int]) -> None:
        """garbage_collect_cached_blocks: release free segments that are older than average.

        As long as more than a fraction of the limit is reserved.
        """
        blocks, limit_bytes = self.blocks, self.limit_bytes or 0
        threshold_bytes = int(self.settings.garbage_collection_threshold * limit_bytes)
        excess = self.reserved_bytes - threshold_bytes << BYTE_BITS
        ages = {block: age for block, age in ages.items() if blocks.is_whole_segment(block)}
        while excess > 0 and ages:
            average = sum(ages.values()) / len(ages)
            for block in [block for block, age in ages.items() if age >= average]:
                del ages[block]
                excess -= self.release_whole(block)

    def page(self, pool: int) -> int:
        """Return the bytes of a page of an expandable segment; odd pools have small blocks."""
        return (self.settings.large_segment_size_mb * MIB, SMALL_SEGMENT)[pool & 1]

    def expanded(self, pool: int, wanted: int) -> int:
        """try_allocate_expandable_block: map pages at the lowest address with room for the block.

        If a page is refused, the pages already mapped stay in the pool.
        """
        blocks = self.blocks
        block = self.with_room(pool, wanted) or self.new_address_space(pool)
        size = blocks.size
        if not blocks.mapped[block] and not self.map(block, min(size[block], wanted)):
            return 0
        while size[block] < wanted:
            following = blocks.after[block]
            if not following or not self.map(following, min(wanted - size[block], size[following])):
                return 0
            block = following  # has absorbed the previous block
        return bisect_left(blocks.free[pool][0], size[block] | blocks.place[block])

    def with_room(self, pool: int, wanted: int) -> int:
        """find_expandable_block: the first of a run of free and unmapped blocks; 0: none has room."""
        blocks = self.blocks
        for _, block in blocks.unmapped[pool]:
            first = block
            if blocks.is_free[blocks.before[block]]:
                first = blocks.before[block]
            room, following = 0, first
            while following and (blocks.is_free[following] or not blocks.mapped[following]):
                room += blocks.size[following]
                if room >= wanted:
                    return first
                following = blocks.after[following]
        return 0

    def new_address_space(self, pool: int) -> int:
        blocks = self.blocks
        nbytes = rounded_up(self.total_bytes + self.total_bytes // 8, self.page(pool))
        place = self.new_order(self.next_range(nbytes))
        blocks.expandable.add(place >> OFFSET_BITS)
        block = blocks.new(pool, nbytes << BYTE_BITS, place)
        blocks.add_unmapped(block)
        return block

    def map(self, block: int, wanted: int) -> bool:
        """map_block: map whole pages at the front of an unmapped block, which becomes free."""
        blocks = self.blocks
        mapped = rounded_up(wanted >> BYTE_BITS, self.page(blocks.pool_of[block]))
        if self.reserved_bytes + mapped > self.capacity_bytes:
            return False
        blocks.discard_unmapped(block)
        if mapped << BYTE_BITS < blocks.size[block]:
            blocks.add_unmapped(blocks.cut_after(block, mapped << BYTE_BITS))
        blocks.give_back(block)
        self.reserve(mapped)
        return True

    def unmap(self, block: int) -> None:
        """unmap_block: unmap the whole pages inside a free block."""
        blocks = self.blocks
        page = self.page(blocks.pool_of[block])
        size, offset = blocks.size, (blocks.place[block] & OFFSETS) * SMALLEST_BLOCK
        begin = rounded_up(offset, page)
        end = (offset + (size[block] >> BYTE_BITS)) // page * page
        if begin >= end:
            return
        blocks.discard(block)
        kept = end - offset << BYTE_BITS
        if kept < size[block]:
            blocks.add(blocks.cut_after(block, kept))
        if offset < begin:
            inside = blocks.cut_after(block, begin - offset << BYTE_BITS)
            blocks.add(block)
            block = inside
        self.reserved_bytes -= end - begin
        for neighbour in (blocks.before[block], blocks.after[block]):
            if not blocks.mapped[neighbour]:
                blocks.discard_unmapped(neighbour)
                blocks.absorb(block, neighbour)
        if blocks.is_whole_segment(block):
            blocks.spare.append(block)
        else:
            blocks.add_unmapped(block)


def rounded_up(nbytes: int, step: int) -> int:
    """Return the next multiple of a step."""
    return -(-nbytes // step) * step


def segment_size(nbytes: int, large_bytes: int = LARGE_SEGMENT) -> int:
    """get_allocation_size: the size of a new segment for a request; what counts against a cap."""
    if nbytes <= SMALL:
        return SMALL_SEGMENT
    if nbytes < _OWN_SEGMENT:
        return large_bytes
    return rounded_up(nbytes, _SEGMENT_STEP)
