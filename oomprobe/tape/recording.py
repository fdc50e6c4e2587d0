"""Record what a simulated allocator does, as torch's memory history records a card's."""

from __future__ import annotations

import sys
from collections import deque
from types import CodeType, FrameType

from oomprobe.allocator.caching import CachingAllocator
from oomprobe.tape.snapshot import NO_POOL, Event, Frames, Segment, Snapshot

MOST_EVENTS = 500_000  # that are kept, the last ones


def mapped_by(allocator: CachingAllocator) -> dict[int, tuple[int, int, tuple[int, int]]]:
    """Return size, stream and private pool of each stretch of the driver's memory, by its address."""
    pools, mapped = allocator.pools, {}
    for address, nbytes, pool in allocator.segments.blocks.stretches():
        mapped[address] = nbytes, pools.stream_of(pool), (0, pools.private_of(pool))
    return mapped


class Recording:
    """The events of an allocator since this was made, with the stacks of its requests.

    Args:
        allocator: Notes each request here (`CachingAllocator.log`) until `end`.
    """

    def __init__(self, allocator: CachingAllocator) -> None:
        self._allocator = allocator
        self._events = deque[Event](maxlen=MOST_EVENTS)
        self._stacks: dict[int, Frames] = {}  # of the blocks in use, by address
        self._frames: dict[tuple[CodeType, int], dict[str, str | int]] = {}
        self._mapped = mapped_by(allocator)
        self._reserved_bytes = allocator.reserved_bytes
        self._next_address = allocator.segments.next_address
        allocator.log = self

    def append(self, noted: tuple[int, int]) -> None:
        """Record a request, one that was refused, or a free, as the allocator notes them."""
        handle, nbytes = noted
        allocator = self._allocator
        self._record_driver()
        if not handle:
            free_bytes = allocator.capacity_bytes - allocator.reserved_bytes
            self._add("oom", free_bytes, nbytes, *self._serving(), self._stack())
            return
        address, pools = allocator.address(handle), allocator.segments.blocks.pool_of
        stream = allocator.pools.stream_of(pools[allocator.block(handle)])
        private = 0, allocator.private_of(handle)
        if nbytes < 0:
            self._stacks.pop(address, None)
            self._add("free_completed", address, -nbytes, stream, private)
        else:
            frames = self._stacks[address] = self._stack()
            self._add("alloc", address, nbytes, stream, private, frames)

    def end(self) -> Snapshot:
        """Record no more, and return what was recorded, with the segments as they are now."""
        allocator = self._allocator
        self._record_driver()
        allocator.log = None
        in_use = sorted(
            (allocator.address(handle), nbytes) for handle, nbytes in allocator.requested().items()
        )
        is_expandable = allocator.settings.expandable_segments
        segments = []
        for start, (size, stream, private) in mapped_by(allocator).items():
            blocks = [
                (address, nbytes, self._stacks.get(address, ()))
                for address, nbytes in in_use
                if start <= address < start + size
            ]
            segments.append(Segment(start, size, stream, private, is_expandable, tuple(blocks)))
        settings = allocator.settings.to_snapshot()
        return Snapshot(0, tuple(self._events), tuple(segments), settings)

    def _record_driver(self) -> None:
        """Record what the driver has given and got back since the last event."""
        allocator = self._allocator
        before_bytes, self._reserved_bytes = self._reserved_bytes, allocator.reserved_bytes
        new_bytes = self._next_address - allocator.segments.next_address
        self._next_address = allocator.segments.next_address
        if allocator.settings.expandable_segments:
            grown = self._reserved_bytes - before_bytes
            if grown:
                self._add(
                    "segment_map" if grown > 0 else "segment_unmap", 0, abs(grown), 0, NO_POOL
                )
            return
        if before_bytes + new_bytes > self._reserved_bytes:
            now = mapped_by(allocator)
            for address in self._mapped.keys() - now.keys():
                self._add("segment_free", address, *self._mapped.pop(address))
        if new_bytes:
            self._mapped[self._next_address] = new_bytes, *self._serving()
            self._add("segment_alloc", self._next_address, new_bytes, *self._serving())

    def _serving(self) -> tuple[int, tuple[int, int]]:
        """Return the stream and the private pool that serve requests now."""
        pools = self._allocator.pools
        return pools.stream, (0, pools.private_of(pools.serving[0]))

    def _add(
        self,
        action: str,
        address: int,
        nbytes: int,
        stream: int,
        private: tuple[int, int],
        frames: Frames = (),
    ) -> None:
        self._events.append(Event(action, address, nbytes, stream, private, frames))

    def _stack(self) -> Frames:
        """Return the running stack, innermost first."""
        stack: list[dict[str, str | int]] = []
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            place = frame.f_code, frame.f_lineno
            if place not in self._frames:
                code, line = place
                self._frames[place] = {
                    "name": code.co_name,
                    "filename": code.co_filename,
                    "line": line,
                }
            stack.append(self._frames[place])
            frame = frame.f_back
        return stack
