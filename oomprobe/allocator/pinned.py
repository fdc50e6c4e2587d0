"""Model of torch's allocator of pinned memory: how much of the host it takes, without CUDA.

It rounds each request up to a power of two, splits and merges nothing, and keeps what is freed. A
block that a copy on a stream has used waits until that stream has come so far, and so do all freed
after it. Docstrings name the functions of torch that do the same.

Source: aten/src/ATen/core/CachingHostAllocator.h of torch 2.14.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque

from oomprobe.allocator.segments import MIB
from oomprobe.allocator.settings import AllocatorSettings

_DEFAULTS = AllocatorSettings()


class PinnedAllocator:
    """Allocator of pinned host memory for one process.

    Args:
        settings: Settings from ``PYTORCH_ALLOC_CONF``, of which those of pinned memory count.

    Attributes:
        reserved_bytes, peak_reserved_bytes: Pinned, in use or kept, now and at most.
        active_bytes: Of blocks in use, or that wait for a stream.
        pins, unpins: How often the driver was asked to pin and unpin memory.

    Example:
        >>> allocator = PinnedAllocator()
        >>> handle = allocator.malloc(12_582_912)
        >>> allocator.reserved_bytes
        16777216
        >>> allocator.record_stream(handle, 0)  # a copy that does not block
        >>> allocator.free(handle)
        >>> allocator.malloc(12_582_912) == handle
        False
        >>> allocator.synchronize()
        >>> allocator.malloc(12_582_912) == handle
        True
    """

    def __init__(self, settings: AllocatorSettings = _DEFAULTS) -> None:
        self.settings = settings
        self.reserved_bytes = self.peak_reserved_bytes = self.active_bytes = 0
        self.pins = self.unpins = 0
        self._sizes: dict[int, int] = {}  # of all blocks, by handle
        self._kept = defaultdict[int, list[int]](
            list
        )  # free blocks, by the logarithm of their size
        self._streams = defaultdict[int, set[int]](set)  # that have used a block in use
        # When a block was freed, and the stream that it waits for. Torch asks them in this order.
        self._events = deque[tuple[int, int, int]]()
        self._pending = Counter[int]()  # events of a block
        self._now = 0
        self._reached = defaultdict[int, int](int)  # how far each stream has come

    def malloc(self, nbytes: int) -> int:
        """Return the handle of a block, a free one if there is one as large; 0 for no bytes."""
        if nbytes <= 0:
            return 0
        self._process_events()
        size = 1 << (nbytes - 1).bit_length()
        settings = self.settings
        for most_mb in (settings.pinned_max_round_threshold_mb, settings.pinned_max_cached_size_mb):
            if most_mb is not None and nbytes > most_mb * MIB:
                size = nbytes
        kept = self._kept[(size - 1).bit_length()]
        for handle in reversed(kept):  # get_free_block: without rounding, some are too small
            if self._sizes[handle] >= size:
                kept.remove(handle)
                self.active_bytes += self._sizes[handle]
                return handle
        self.pins += 1
        self._sizes[self.pins] = size
        self.active_bytes += size
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return self.pins

    def free(self, handle: int) -> None:
        """Keep a block, or let it wait for the streams that have used it; ignore handle 0."""
        if handle == 0:
            return
        streams = self._streams.pop(handle, ())
        for stream in streams:
            self._events.append((self._now, stream, handle))
            self._pending[handle] += 1
        if not streams:
            self._keep(handle)

    def record_stream(self, handle: int, stream: int) -> None:
        """record_event: note that a copy on a stream uses a block."""
        self._streams[handle].add(stream)

    def synchronize(self, stream: int | None = None) -> None:
        """Let a stream end what it was given until now; None: all streams."""
        self._now += 1
        for _, waited_for, _ in self._events:
            if stream in (None, waited_for):
                self._reached[waited_for] = self._now

    def empty_cache(self) -> None:
        """Unpin what is free, as ``torch._C._host_emptyCache``; ``empty_cache`` of CUDA does not."""
        self._process_events()
        for kept in self._kept.values():
            for handle in kept:
                self._unpin(handle)
            kept.clear()

    def reset_peaks(self) -> None:
        self.peak_reserved_bytes = self.reserved_bytes

    def stats(self) -> dict[str, int]:
        """Return figures by their names in ``torch.cuda.host_memory_stats``."""
        return {
            "active_bytes.current": self.active_bytes,
            "allocated_bytes.current": self.reserved_bytes,
            "allocated_bytes.peak": self.peak_reserved_bytes,
            "num_host_alloc": self.pins,
            "num_host_free": self.unpins,
        }

    def _process_events(self) -> None:
        """Keep blocks whose streams have come so far, up to the first that has not."""
        while self._events and self._events[0][0] < self._reached[self._events[0][1]]:
            _, _, handle = self._events.popleft()
            self._pending[handle] -= 1
            if not self._pending[handle]:
                self._keep(handle)

    def _keep(self, handle: int) -> None:
        """maybe_cache_block."""
        size, most_mb = self._sizes[handle], self.settings.pinned_max_cached_size_mb
        self.active_bytes -= size
        if most_mb is not None and size > most_mb * MIB:
            self._unpin(handle)
        else:
            self._kept[(size - 1).bit_length()].append(handle)

    def _unpin(self, handle: int) -> None:
        self.unpins += 1
        self.reserved_bytes -= self._sizes.pop(handle)
