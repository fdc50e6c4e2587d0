"""From storages that are born and die to an allocator, and to the tape of one call."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from oomprobe.simulation.allocator import SMALL_SEGMENT, AllocatorOutOfMemory, CachingAllocator, refusal
from oomprobe.simulation.replay import Alive, replay_call
from oomprobe.simulation.scratch import Launch
from oomprobe.simulation.tape import Call, Tape

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

    Args:
        allocator: Serves the requests; beyond its capacity it refuses them.

    Attributes:
        largest_workspace_bytes: The most that a convolution of this trial would have liked, and had room for.
    """

    def __init__(self, allocator: CachingAllocator) -> None:
        self.allocator = allocator
        self.largest_workspace_bytes = 0
        self.tape = Tape()
        self._held: dict[int, _Held] = {}
        self._workspaces: list[int] = []
        self._workspace_bytes = 0

    def begin(self) -> None:
        """A trial begins: peaks start anew, and so do the names of what is there."""
        self.allocator.reset_peaks()
        self.largest_workspace_bytes = 0
        for held, name in zip(self._held.values(), self.tape.begin(len(self._held)), strict=True):
            held.name = name

    def holds(self, storage: _Storage) -> bool:
        """Whether a storage is on the card."""
        return storage._cdata in self._held

    def block_of(self, storage: _Storage) -> int | None:
        """The allocator's handle of the block that a storage is in; None where it is not on the card."""
        held = self._held.get(storage._cdata)
        return None if held is None else held.block

    def take(self, storage: _Storage, nbytes: int | None = None) -> None:
        """Put a storage on the card, until it dies.

        Args:
            storage: What to put there.
            nbytes: What it really takes; None: its size.

        Raises:
            AllocatorOutOfMemory: there is no room.
        """
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

    def workspace(self, nbytes: int) -> None:
        """Memory that a library takes and keeps, until it is told to clear its workspaces."""
        self._workspaces.append(self.allocator.malloc(nbytes))
        self._workspace_bytes = nbytes
        self.tape.born(nbytes)

    def clear_workspaces(self) -> None:
        """Give the libraries' memory back."""
        for block in self._workspaces:
            self.allocator.free(block)
        self._workspaces.clear()

    @contextmanager
    def running(self, launch: Launch) -> Iterator[None]:
        """A kernel that takes memory for itself; inside, its results are made.

        Raises:
            AllocatorOutOfMemory: there is no room.
        """
        index = self.tape.started(launch.kernel, launch.numbers)
        needs = launch.kernel.needs(launch.numbers)
        with self._lent(needs.held):
            self._pass(needs.before)
            yield
            self._pass(needs.groups)
        self.tape.ended(launch.kernel, index)

    def _pass(self, groups: tuple[tuple[int, ...], ...]) -> None:
        for group in groups:
            with self._lent(group):
                pass

    @contextmanager
    def _lent(self, sizes: tuple[int, ...]) -> Iterator[None]:
        blocks: list[int] = []
        try:
            for nbytes in sizes:
                blocks.append(self.allocator.malloc(nbytes))
            yield
        finally:
            for block in blocks:
                self.allocator.free(block)

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
        fresh = self.allocator.emptied()
        self._workspaces = [fresh.malloc(self._workspace_bytes) for _ in self._workspaces]
        for held in self._held.values():
            held.block = fresh.malloc(held.nbytes)
        self.allocator = fresh

    def refusal(self) -> str:
        """What torch says of the smallest request now."""
        return refusal(self.allocator, SMALL_SEGMENT)

    # --- calls that are replayed ---

    @property
    def leftovers(self) -> Alive:
        """Blocks of storages alive now, as the next call would name them."""
        following = self.tape.call_number + 1
        return {(following - held.name[0], held.name[1]): held.block for held in self._held.values()}

    def repeat(self, call: Call) -> None:
        """Do to the allocator what this call would do once more; the storages alive get the blocks of that call.

        Raises:
            AllocatorOutOfMemory: there was no room; nothing was changed but peaks.
        """
        allocator = self.allocator.copy()
        try:
            after = replay_call(allocator, call, self.leftovers)
        except AllocatorOutOfMemory:
            self.allocator.take_counts(allocator)
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
