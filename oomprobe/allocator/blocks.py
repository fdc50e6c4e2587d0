"""Blocks of the allocator and the pools of free ones, as lists of numbers.

A block is a number, an index into lists of sizes, places and neighbours: a loop over these takes
half the time of one over objects, and a copy a tenth. All bytes of a segment are in one block.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

SMALLEST_BLOCK = 512  # kMinBlockSize

# A place is the order of a block's segment and, in the lowest 34 bits, its offset there in units
# of 512 bytes. A size is shifted above any place, so that `size | place` sorts free blocks as torch
# does: by size, then order, then address (BlockComparatorSize).
OFFSET_BITS, PLACE_BITS = 34, 90
BYTE_BITS = PLACE_BITS - 9  # nbytes << BYTE_BITS is a size
OFFSETS = (1 << OFFSET_BITS) - 1
NEVER = 1 << 200  # larger than any size


class Blocks:
    """All blocks of an allocator.

    Attributes:
        size, place, before, after, is_free, mapped, pool_of: Of each block; number 0 is none.
            One that is neither free nor mapped is address space only.
        spare: Numbers of no block.
        free: Of each pool, sorted keys (`size | place`) of its free blocks and their numbers,
            between two that are none.
        unmapped: Of each pool, addresses and numbers of address space.
        addresses: Where segments begin, by order.
        expandable: Orders of those that are.
    """

    __slots__ = (
        "addresses", "after", "before", "expandable", "free", "is_free", "mapped", "place", "pool_of",
        "size", "spare", "unmapped",
    )  # fmt: skip

    def __init__(self) -> None:
        self.size, self.place, self.before, self.after = [NEVER], [0], [0], [0]
        self.is_free, self.mapped, self.pool_of = [False], [True], [0]
        self.spare: list[int] = []
        self.free: list[tuple[list[int], list[int]]] = []
        self.unmapped: list[list[tuple[int, int]]] = []
        self.addresses: dict[int, int] = {}
        self.expandable = set[int]()

    def copy(self) -> Blocks:
        """Return the same blocks in lists of their own."""
        twin = Blocks()
        for name in Blocks.__slots__:
            setattr(twin, name, getattr(self, name).copy())
        twin.free = [(keys.copy(), numbers.copy()) for keys, numbers in self.free]
        twin.unmapped = [unmapped.copy() for unmapped in self.unmapped]
        return twin

    def add_pool(self) -> int:
        """Return the number of a new pool."""
        self.free.append(([-1, NEVER], [0, 0]))
        self.unmapped.append([])
        return len(self.free) - 1

    def make_spare(self) -> None:
        """Add numbers of blocks."""
        count, more = len(self.size), 256
        for of_each in (self.size, self.place, self.before, self.after, self.pool_of):
            of_each += [0] * more
        self.is_free += [False] * more
        self.mapped += [True] * more
        self.spare += range(count + more - 1, count - 1, -1)

    def new(self, pool: int, size: int, place: int) -> int:
        """Return a block without neighbours, mapped and in no pool."""
        if not self.spare:
            self.make_spare()
        block = self.spare.pop()
        self.size[block], self.place[block], self.pool_of[block] = size, place, pool
        self.before[block] = self.after[block] = 0
        return block

    def address(self, block: int) -> int:
        place = self.place[block]
        return self.addresses[place >> OFFSET_BITS] + (place & OFFSETS) * SMALLEST_BLOCK

    def stretches(self) -> Iterator[tuple[int, int, int]]:
        """Yield address, bytes and pool of neighbouring blocks that are mapped."""
        none = {0, *self.spare}
        for first in range(len(self.size)):
            if first in none or (self.before[first] and self.mapped[self.before[first]]):
                continue
            block, nbytes = first, 0
            while block and self.mapped[block]:
                nbytes += self.size[block] >> BYTE_BITS
                block = self.after[block]
            if nbytes:
                yield self.address(first), nbytes, self.pool_of[first]

    def is_expandable(self, block: int) -> bool:
        return self.place[block] >> OFFSET_BITS in self.expandable

    def is_whole_segment(self, block: int) -> bool:
        """Whether it can go back to the driver, unless it is expandable."""
        return self.before[block] == self.after[block] == 0

    def add(self, block: int) -> int:
        """insert_into_blocks: make a block free; return where it is among those of its pool."""
        keys, numbers = self.free[self.pool_of[block]]
        key = self.size[block] | self.place[block]
        at = bisect_left(keys, key)
        keys.insert(at, key)
        numbers.insert(at, block)
        self.is_free[block] = True
        return at

    def discard(self, block: int) -> None:
        keys, numbers = self.free[self.pool_of[block]]
        at = bisect_left(keys, self.size[block] | self.place[block])
        del keys[at], numbers[at]
        self.is_free[block] = False

    def give_back(self, block: int) -> None:
        """free_block: merge a block with its free neighbours and make it free."""
        for neighbour in (self.before[block], self.after[block]):
            if self.is_free[neighbour]:
                self.discard(neighbour)
                self.absorb(block, neighbour)
        self.add(block)

    def absorb(self, block: int, neighbour: int) -> None:
        """try_merge_blocks, where neither is in a pool."""
        if self.before[block] == neighbour:
            self.place[block] &= ~OFFSETS  # its own order
            self.place[block] |= self.place[neighbour] & OFFSETS
            self.link(self.before[neighbour], block)
        else:
            self.link(block, self.after[neighbour])
        self.size[block] += self.size[neighbour]
        self.spare.append(neighbour)

    def cut_after(self, block: int, size: int) -> int:
        """Shorten a block that is in no pool; return the remainder, in none either."""
        place = self.place[block] + (size >> PLACE_BITS)
        rest = self.new(self.pool_of[block], self.size[block] - size, place)
        self.size[block] = size
        self.link(rest, self.after[block])
        self.link(block, rest)
        return rest

    def link(self, block: int, following: int) -> None:
        self.after[block] = following
        self.before[following] = block

    def room(self, block: int) -> int:
        """Size that a free block can grow to by mapping the unmapped space after it."""
        following = self.after[block]
        return self.size[block] + (not self.mapped[following]) * self.size[following]

    def add_unmapped(self, block: int) -> None:
        self.mapped[block] = False
        insort(self.unmapped[self.pool_of[block]], (self.address(block), block))

    def discard_unmapped(self, block: int) -> None:
        self.mapped[block] = True
        self.unmapped[self.pool_of[block]].remove((self.address(block), block))
