"""Blocks, pools of free ones, and what can be done to a block among its neighbours.

Constants from c10/core/AllocatorConfig.h of torch 2.13; rules from c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from oomprobe.simulation.settings import AllocatorSettings

MIB = 2**20
SMALLEST_BLOCK = 512  # kMinBlockSize
SMALL = MIB  # kSmallSize: the largest request of the small pool
SMALL_SEGMENT = 2 * MIB  # kSmallBuffer
UNLIMITED = 2**63


class Block:
    """A piece of a segment. ``free``: mapped and in its pool; neither free nor mapped: address space only."""

    __slots__ = ("address", "born", "free", "mapped", "next", "origin", "pool", "prev", "requested", "size")

    def __init__(self, pool: Pool, address: int, size: int) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.prev: Block | None = None
        self.next: Block | None = None
        self.free = False
        self.mapped = True
        self.origin = -1  # where its expandable segment starts; -1: not in one
        self.requested = 0
        self.born = 0  # the clock when it was last freed, for the garbage collection


class Pool:
    """The free blocks of one stream, small or large: best fit is the first entry not below a size."""

    __slots__ = ("free", "is_small", "page", "smallest_rest", "split_below", "stream", "unmapped")

    def __init__(self, settings: AllocatorSettings, stream: int, *, is_small: bool) -> None:
        expandable = settings.expandable_segments
        self.stream = stream
        self.is_small = is_small
        self.page = SMALL_SEGMENT if is_small else settings.large_segment_size_bytes
        # should_split: sizes are multiples of 512, so "more than 1 MiB" is "at least 1 MiB + 512"
        self.smallest_rest = SMALLEST_BLOCK if is_small or expandable else SMALL + SMALLEST_BLOCK
        self.split_below = UNLIMITED if is_small or expandable else settings.max_split_size_bytes or UNLIMITED
        self.free: list[tuple[int, int, Block]] = []
        self.unmapped: list[tuple[int, Block]] = []

    def add(self, block: Block) -> None:
        block.free = True
        insort(self.free, (block.size, block.address, block))

    def discard(self, block: Block) -> None:
        block.free = False
        free = self.free
        del free[bisect_left(free, (block.size, block.address))]

    def add_unmapped(self, block: Block) -> None:
        block.mapped = False
        insort(self.unmapped, (block.address, block))

    def discard_unmapped(self, block: Block) -> None:
        block.mapped = True
        del self.unmapped[bisect_left(self.unmapped, (block.address,))]


def absorb(block: Block, other: Block) -> None:
    """Join a neighbour, which ends, to a block."""
    if block.prev is other:
        block.address = other.address
        block.prev = other.prev
        if block.prev is not None:
            block.prev.next = block
    else:
        block.next = other.next
        if block.next is not None:
            block.next.prev = block
    block.size += other.size


def cut_after(block: Block, nbytes: int) -> Block:
    """Shorten a block; what is cut off is returned, linked behind it and in no pool."""
    rest = Block(block.pool, block.address + nbytes, block.size - nbytes)
    rest.origin = block.origin
    rest.prev, rest.next = block, block.next
    if rest.next is not None:
        rest.next.prev = rest
    block.next = rest
    block.size = nbytes
    return rest


def twin_of(block: Block, pool: Pool) -> Block:
    """A copy for the pool of another allocator, without its links."""
    twin = Block(pool, block.address, block.size)
    twin.free = block.free
    twin.mapped = block.mapped
    twin.origin = block.origin
    twin.requested = block.requested
    twin.born = block.born
    return twin


def is_whole_segment(block: Block) -> bool:
    """Whether the driver can have it back as it is."""
    return block.prev is None and block.next is None and block.origin < 0


def whole_pages(nbytes: int, page: int) -> int:
    """Bytes rounded up to pages."""
    return -(-nbytes // page) * page


def expandable_size(block: Block) -> int:
    """What a free block could grow to: the unmapped space behind it is its own."""
    following = block.next
    return block.size + (following.size if following is not None and not following.mapped else 0)


def lowest_room(pool: Pool, size: int) -> Block | None:
    """find_expandable_block: the first of a run of free and unmapped blocks that is long enough."""
    for _, block in pool.unmapped:
        first = block.prev if block.prev is not None and block.prev.free else block
        room = 0
        following: Block | None = first
        while room < size and following is not None and (following.free or not following.mapped):
            room += following.size
            following = following.next
        if room >= size:
            return first
    return None


def bytes_to_map(pool: Pool, size: int) -> int:
    """What `lowest_room` lacks until the block can lie there."""
    first, mapped = lowest_room(pool, size), 0
    if first is None:
        return whole_pages(size, pool.page)
    block: Block | None = first
    while size > 0 and block is not None:
        if not block.mapped:
            mapped += whole_pages(min(size, block.size), pool.page)
        size -= block.size
        block = block.next
    return mapped
