"""Pools of an allocator: of each stream one for large and one for small blocks, and private ones.

A private pool is what ``torch.cuda.MemPool`` and the capture of a CUDA graph allocate from. While a
graph is captured, the allocator neither releases its cache nor tries a refused request again.

Source: c10/cuda/CUDACachingAllocator.cpp of torch 2.14.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from copy import copy

from oomprobe.allocator.blocks import BYTE_BITS, Blocks


class Pools:
    """Which pools there are, and which serve requests. Private ones have any number but 0.

    Attributes:
        stream: The current one; 0: the default one.
        serving: The pools for large and for small blocks that serve requests now.
        is_unsplit: Whether these do not split blocks.
        active: Private pools in use, of which the last one serves requests.
        captures: The one into which a CUDA graph is captured; 0: none.
        users: How many use a private pool; without any, its free memory can go back to the driver.
        overflow: Private pools whose free blocks serve other requests that would be refused.
        unsplit: Private pools whose blocks are not split.
    """

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._pools: dict[tuple[int, int], tuple[int, int]] = {}  # by private pool and stream
        self._owners: list[tuple[int, int]] = []  # the same of each pair
        self.active: list[int] = []
        self.captures = 0
        self.users = Counter[int]()
        self.overflow: list[int] = []
        self.unsplit = set[int]()
        self.use_stream(0)

    def copy(self, blocks: Blocks) -> Pools:
        """Return the same pools of other blocks."""
        twin = copy(self)
        for name in ("_pools", "_owners", "active", "users", "overflow", "unsplit"):
            setattr(twin, name, getattr(self, name).copy())
        twin._blocks = blocks
        return twin

    def use_stream(self, stream: int) -> None:
        """Serve later requests from the blocks of a stream."""
        self.stream = stream
        private = self.active[-1] if self.active else 0
        self.serving, self.is_unsplit = self._of(private), private in self.unsplit

    def make(self, private: int, *, use_on_oom: bool = False, no_split: bool = False) -> None:
        """Make a private pool, as ``torch.cuda.MemPool``, which is its first user.

        Args:
            private: Its number.
            use_on_oom: Whether its free blocks serve other requests that would be refused.
            no_split: Whether its blocks are not split.
        """
        self.users[private] += 1
        if use_on_oom:
            self.overflow.append(private)
        if no_split:
            self.unsplit.add(private)

    def drop(self, private: int) -> None:
        """~MemPool: let go of what `make` made; what is free there stays for the time being."""
        if private in self.overflow:
            self.overflow.remove(private)
        self.release(private)
        if not self.users[private]:
            self.unsplit.discard(private)

    def use(self, private: int, *, captures: bool = False) -> None:
        """beginAllocateToPool: serve later requests from a private pool, which gets a user more.

        Args:
            private: Its number.
            captures: Whether a CUDA graph is captured until `leave`.
        """
        self.users[private] += 1
        self.active.append(private)
        if captures:
            self.captures = private
        self.use_stream(self.stream)

    def leave(self, private: int) -> None:
        """endAllocateToPool: serve later requests from what was used before."""
        self.active.remove(private)
        if self.captures == private:
            self.captures = 0
        self.use_stream(self.stream)

    def turn_to(self, *active: int) -> None:
        """Serve later requests from the last of these private pools in use, or from none."""
        self.active = [*active]
        self.use_stream(self.stream)

    def release(self, private: int) -> None:
        """releasePool: note that a user is gone."""
        self.users[private] -= 1

    def private_of(self, pool: int) -> int:
        """Return the private pool to which a pool belongs; 0: to none."""
        return self._owners[pool >> 1][0]

    def stream_of(self, pool: int) -> int:
        return self._owners[pool >> 1][1]

    def of_streams(self) -> Iterator[int]:
        """Yield the pools for large blocks that are not private."""
        for (private, _), (large, _) in self._pools.items():
            if not private:
                yield large

    def releasable(self, private: int) -> Iterator[int]:
        """Yield the pools that ``release_cached_blocks`` goes through; 0 stands for all."""
        for (owner, _), pools in self._pools.items():
            is_free = not self.captures if owner == 0 else not self.users[owner]
            if is_free and private in (0, owner):
                yield from pools

    def overflowing(self, pool: int, wanted: int) -> Iterator[tuple[int, int]]:
        """try_mempool_fallback: yield pools that may serve another's request, and from where on."""
        if self.active:
            return
        for private in self.overflow:
            fallback = self._of(private)[pool & 1]
            keys, numbers = self._blocks.free[fallback]
            at = bisect_left(keys, wanted)
            while self._blocks.is_expandable(numbers[at]):
                at += 1
            if numbers[at]:
                yield fallback, at

    def free_private_bytes(self) -> int:
        """Return what is free in private pools."""
        free_bytes = 0
        for (private, _), pools in self._pools.items():
            for pool in pools if private else ():
                numbers = self._blocks.free[pool][1][1:-1]
                free_bytes += sum(self._blocks.size[block] for block in numbers)
        return free_bytes >> BYTE_BITS

    def _of(self, private: int) -> tuple[int, int]:
        key = private, self.stream
        if key not in self._pools:
            self._pools[key] = self._blocks.add_pool(), self._blocks.add_pool()
            self._owners.append(key)
        return self._pools[key]
