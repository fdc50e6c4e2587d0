"""Memory of the host beside a simulated card: what a step pins, and what else it makes there."""

from __future__ import annotations

import weakref
from threading import RLock
from typing import Any

from oomprobe.allocator.pinned import PinnedAllocator
from oomprobe.allocator.segments import MIB
from oomprobe.allocator.settings import AllocatorSettings

_Storage = Any  # torch.UntypedStorage, on the host or the meta device


class HostMemory:
    """What a step takes of the host.

    Copies end at once, so that no pinned block waits for them. A card may be later: then a step
    that pins anew what it has just let go takes some blocks more.

    Attributes:
        pinned: Torch's allocator of pinned memory.
        peak_pinned_bytes: The most that it has held in this trial.
        peak_bytes: The same with all other tensors that the trial has made, of 1 MiB or more each.
    """

    def __init__(self, settings: AllocatorSettings, lock: RLock) -> None:
        self.pinned = PinnedAllocator(settings)
        self._lock = lock
        # By storage: its block, or None where it is not pinned; its bytes; what sees it die.
        self._held: dict[int, tuple[int | None, int, weakref.ref[_Storage]]] = {}
        self._pageable_bytes = 0
        self.peak_pinned_bytes = self.peak_bytes = 0

    def start_trial(self) -> None:
        """Begin as a fresh process does, with what is held now."""
        self.pinned.empty_cache()
        self.pinned.reset_peaks()
        self._pageable_bytes = self.peak_pinned_bytes = self.peak_bytes = 0
        self._held = {key: held for key, held in self._held.items() if held[0] is not None}
        self._note_peaks()

    def pins(self, storage: _Storage) -> bool:
        """Whether a storage is in pinned memory."""
        return storage._cdata in self._held and self._held[storage._cdata][0] is not None

    def pin(self, storage: _Storage) -> None:
        """Put a storage in pinned memory until it dies."""
        if not self.pins(storage):
            self._hold(storage, self.pinned.malloc(storage.nbytes()))

    def take(self, storage: _Storage) -> None:
        """Count a storage in other memory until it dies, if it is large."""
        if storage.nbytes() >= MIB and storage._cdata not in self._held:
            self._pageable_bytes += storage.nbytes()
            self._hold(storage, None)

    def _hold(self, storage: _Storage, block: int | None) -> None:
        key = storage._cdata
        self._free(key)
        on_death = freeing(storage, self, key)
        self._held[key] = block, storage.nbytes(), on_death
        self._note_peaks()

    def _note_peaks(self) -> None:
        pinned_bytes = self.pinned.reserved_bytes
        self.peak_pinned_bytes = max(self.peak_pinned_bytes, pinned_bytes)
        self.peak_bytes = max(self.peak_bytes, pinned_bytes + self._pageable_bytes)

    def _free(self, key: int) -> None:
        with self._lock:
            block, nbytes, _ = self._held.pop(key, (None, 0, None))
            if block is None:
                self._pageable_bytes -= nbytes
            else:
                self.pinned.free(block)


def freeing(storage: _Storage, owner: Any, key: int) -> weakref.ref[_Storage]:
    """Return a reference to a storage, at whose death its owner frees what it has by that key."""
    this = weakref.ref(owner)

    def died(_: object) -> None:
        alive = this()
        if alive is not None:
            alive._free(key)

    return weakref.ref(storage, died)
