"""From storages that are born and die to an allocator, and to the tape of one call."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from oomprobe.simulation.allocator import SMALL_SEGMENT, AllocatorOutOfMemory, CachingAllocator, oom_message
from oomprobe.simulation.cards import Card
from oomprobe.simulation.scratch import Launch, needs_of
from oomprobe.simulation.settings import AllocatorSettings
from oomprobe.simulation.tape import Alive, Call, Tape, replay_call

_Storage = Any  # torch.UntypedStorage, or a stand-in of one on the meta device


@dataclass(slots=True)
class _Held:
    """A storage on the card: its block, and its name on the tape."""

    nbytes: int
    block: int
    name: tuple[int, int]
    watch: weakref.ref[_Storage]


class Memory:
    """The memory of a simulated card: which storages are on it, and the allocator that serves them.

    Attributes:
        fraction: Of the card's total, what the process allows itself.
        limit_bytes: What the process is held to besides; None: all there is.
        largest_workspace_bytes: The most that a convolution of this trial would have liked, and had room for.
    """

    def __init__(self, card: Card, settings: AllocatorSettings) -> None:
        self.card = card
        self.allocator = CachingAllocator(card.available_bytes, settings, total_bytes=card.total_bytes)
        self.fraction = settings.per_process_memory_fraction
        self.hold_to(None)
        self.largest_workspace_bytes = 0
        self.tape = Tape()
        self._peaks_before = (0, 0)  # of this trial, before the step itself reset them
        self._held: dict[int, _Held] = {}
        self._workspace_bytes = card.cublas_workspace_bytes
        self._workspaces: dict[bool, int] = {}  # of the main thread (False), and that of backward (True)

    def begin(self) -> None:
        """A trial begins: peaks start anew, and so do the names of what is there."""
        self.allocator.reset_peaks()
        self.allocator.alloc_retries = self.allocator.ooms = 0
        self._peaks_before = (0, 0)
        self.largest_workspace_bytes = 0
        for held, name in zip(self._held.values(), self.tape.begin(len(self._held)), strict=True):
            held.name = name

    # --- limits and peaks ---

    def hold_to(self, limit_bytes: int | None) -> None:
        """Let the allocator reserve no more than this; None: all there is."""
        self.limit_bytes = limit_bytes
        self.allocator.limit_bytes = self.allocators_limit(limit_bytes)

    def set_fraction(self, fraction: float) -> None:
        """The step's, or the target's, own ``torch.cuda.set_per_process_memory_fraction``."""
        self.fraction = fraction
        self.hold_to(self.limit_bytes)

    def allowed(self, limit_bytes: int | None) -> int:
        """The least of what the card has, the process's own fraction of its total, as torch has it, and a limit."""
        own = int(self.fraction * self.card.total_bytes)
        return min(own, self.card.available_bytes if limit_bytes is None else limit_bytes)

    def allocators_limit(self, limit_bytes: int | None) -> int | None:
        """What the allocator is told: nothing where the card itself is the limit."""
        allowed = self.allowed(limit_bytes)
        return None if allowed == self.card.available_bytes else allowed

    @property
    def peaks(self) -> tuple[int, int]:
        """The most bytes of this trial that were allocated, and reserved."""
        allocated, reserved = self._peaks_before
        return max(allocated, self.allocator.peak_allocated_bytes), max(reserved, self.allocator.peak_reserved_bytes)

    def reset_peaks(self) -> None:
        """The step's own reset: the trial keeps what it saw before."""
        self._peaks_before = self.peaks
        self.allocator.reset_peaks()

    # --- what is on the card ---

    def holds(self, storage: _Storage) -> bool:
        """Whether a storage is on the card."""
        return storage._cdata in self._held

    def block_of(self, storage: _Storage) -> int | None:
        """The allocator's handle of the block that a storage is in; None where it is not on the card."""
        held = self._held.get(storage._cdata)
        return None if held is None else held.block

    def take(self, storage: _Storage, nbytes: int | None = None) -> None:
        """Put a storage on the card, until it dies, where it takes so many bytes; None: its size."""
        key = storage._cdata
        if key in self._held:
            return
        nbytes = storage.nbytes() if nbytes is None else nbytes
        block = self.allocator.malloc(nbytes)
        watch = weakref.ref(storage, self._when_dead(key))
        self._held[key] = _Held(nbytes, block, self.tape.born(nbytes), watch)

    def hand_over(self, storage: _Storage, to: _Storage) -> None:
        """Give what a storage holds to another one: what was made anew here is changed in place on the card."""
        held = self._held.pop(storage._cdata)
        key = to._cdata
        self._held[key] = replace(held, watch=weakref.ref(to, self._when_dead(key)))

    def drop(self, storage: _Storage) -> None:
        """Take a storage off the card before it dies."""
        self._release(storage._cdata)

    def resized(self, storage: _Storage) -> None:
        """Serve a storage anew that changed its size."""
        self._release(storage._cdata)
        self.take(storage)

    def ensure_workspace(self, *, in_backward: bool) -> None:
        """Each thread has a cuBLAS handle, and so a workspace, until these are cleared."""
        if self._workspace_bytes and in_backward not in self._workspaces:
            self._workspaces[in_backward] = self.allocator.malloc(self._workspace_bytes)
            self.tape.born(self._workspace_bytes)

    def clear_workspaces(self) -> None:
        """Give the library's memory back."""
        for block in self._workspaces.values():
            self.allocator.free(block)
        self._workspaces.clear()

    @contextmanager
    def running(self, launch: Launch) -> Iterator[None]:
        """A kernel that takes memory for itself; inside, its results are made."""
        index = self.tape.started(launch.kernel, launch.numbers)
        needs = needs_of(launch.kernel, launch.numbers)
        held = self.allocator.malloc_all(needs.held)
        try:
            self.allocator.borrow(needs.before)
            yield
            self.allocator.borrow(needs.groups)
        finally:
            for block in held:
                self.allocator.free(block)
        self.tape.ended(launch.kernel, index)

    def transient(self, nbytes: int) -> None:
        """A workspace that a convolution may take where there is room, for the time of one kernel."""
        if nbytes > self.largest_workspace_bytes and self.allocator.fits(nbytes):
            self.largest_workspace_bytes = nbytes

    def empty_cache(self, *, by_step: bool = False) -> None:
        """Give cached memory back."""
        self.allocator.empty_cache()
        if by_step:
            self.tape.released()

    def lay_out_anew(self) -> None:
        """Put what is on the card into fresh segments, so that none is held for the sake of a small rest."""
        self.allocator = self.allocator.empty_copy()
        self._workspaces = {thread: self.allocator.malloc(self._workspace_bytes) for thread in self._workspaces}
        for held in self._held.values():
            held.block = self.allocator.malloc(held.nbytes)

    def refusal(self) -> str:
        """What torch says of the smallest request now."""
        return oom_message(self.allocator, SMALL_SEGMENT)

    # --- calls that are replayed ---

    @property
    def leftovers(self) -> Alive:
        """Blocks of storages alive now, as the next call would name them."""
        following = self.tape.call_number + 1
        return {(following - held.name[0], held.name[1]): held.block for held in self._held.values()}

    def repeat(self, call: Call) -> None:
        """Do to the allocator what this call would do once more; the storages alive get the blocks of that call.

        Where there is no room for it, nothing is changed but peaks and counts.
        """
        allocator = self.allocator.copy()
        try:
            after = replay_call(allocator, call, self.leftovers)
        except AllocatorOutOfMemory:
            for count in ("peak_allocated_bytes", "peak_reserved_bytes", "alloc_retries", "ooms"):
                setattr(self.allocator, count, getattr(allocator, count))
            raise
        self.allocator = allocator
        for held in self._held.values():
            if held.name[0] == self.tape.call_number:
                held.block = after[1, held.name[1]]

    def _when_dead(self, key: int) -> Callable[[object], None]:
        watched = weakref.ref(self)

        def died(_: object) -> None:
            memory = watched()
            if memory is not None:
                memory._release(key)

        return died

    def _release(self, key: int) -> None:
        held = self._held.pop(key, None)
        if held is None:
            return
        self.allocator.free(held.block)
        self.tape.died(held.name)
