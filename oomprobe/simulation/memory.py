"""Memory of a simulated card: storages, the allocator that serves them, and the tape of the current call."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any

from oomprobe.allocator.caching import CachingAllocator
from oomprobe.allocator.pools import Pools
from oomprobe.allocator.settings import AllocatorSettings
from oomprobe.ground.torch_versions import LT_BYTES, LtWorkspace, workspaces
from oomprobe.ground.units import known
from oomprobe.simulation.cards import Card
from oomprobe.simulation.host import HostMemory, freeing
from oomprobe.simulation.kernels.compared import Uncompared
from oomprobe.simulation.kernels.steps import Launch, afterwards
from oomprobe.simulation.threads import Threads
from oomprobe.tape.calls import (
    Kernel,
    LiveBlocks,
    RecordedCall,
    Tape,
    parts_of,
)

_Storage = Any  # torch.UntypedStorage, on the host or the meta device


@dataclass(slots=True)
class _Allocation:
    """A storage's block on the card, and its name on the tape."""

    nbytes: int
    block: int
    stream: int
    name: tuple[int, int]
    on_death: weakref.ref[_Storage]


def no_workspace() -> None:
    """Stand for the workspace of an operator that takes none."""


_POOL, _CAPTURE = 1, 2  # where streams have their priority
_HANDLES = 2**20


class Numbers:
    """Numbers for new streams and private pools. Each trial begins after those of building."""

    def __init__(self) -> None:
        self._made = Counter[int]()  # by priority
        self._built: Counter[int] | None = None

    def start_trial(self) -> None:
        """Begin as a fresh process does once it has built the model."""
        if self._built is None:
            self._built = self._made
        self._made = Counter(self._built)

    def next_pool(self) -> int:
        """Return a number for a pool that nobody uses yet, above those of all that are made."""
        self._made[_POOL] += 1
        return _HANDLES + self._made[_POOL]

    def of_captures(self) -> int:
        """Return the number of the stream in which graphs are captured by default."""
        if not self._made[_CAPTURE]:
            self._made[_CAPTURE] = self.next(0)
        return self._made[_CAPTURE]

    def next(self, priority: int) -> int:
        """Return the number of a new stream, as torch gives them out: 32 in turn for each priority.

        Priorities are 0 or less.
        """
        made = self._made[priority]
        self._made[priority] += 1
        return 1 - 32 * priority + made % 32


class CardMemory:
    """Memory of a simulated card: its storages and its allocator.

    Attributes:
        fraction: Fraction of the card's total that the process allows itself.
        limit_bytes: Cap set by oomprobe; None: none.
        largest_workspace_bytes: Largest workspace that a convolution of this trial may want.
        tuned: Convolutions of this trial for which cuDNN has tried its kernels.
        uncompared: Operators of this trial whose requests nobody has compared with torch's.
        host: What the step takes of the host beside it.
    """

    def __init__(self, card: Card, settings: AllocatorSettings) -> None:
        self.card = card
        self.allocator = CachingAllocator(
            card.available_bytes, settings, total_bytes=card.total_bytes
        )
        self.fraction = settings.per_process_memory_fraction
        self.set_limit(None)
        self.largest_workspace_bytes = 0
        self.tuned: set[Hashable] = set()
        self.uncompared = Uncompared()
        self.tape = Tape()
        self._peaks_before, self._retries_before = (
            (0, 0),
            0,
        )  # of this trial, before the step reset them
        self._allocations: dict[int, _Allocation] = {}
        self._policy = workspaces()
        self._cublas_bytes = card.cublas_workspace_bytes
        # Those kept, of cuBLASLt or cuBLAS, for each handle (-1: the backward thread's) and stream,
        # with their names on the tape.
        self._workspaces: dict[tuple[bool, int, int], tuple[int, tuple[int, int]]] = {}
        self.threads = Threads()
        self.host = HostMemory(settings, self.threads.lock)
        self.numbers = Numbers()
        self.captured = Counter[int]()  # how many graphs keep a private pool
        self.retained: list[int] | None = None  # pools that the graph keeps that is captured now

    def start_trial(self) -> None:
        """Reset peaks, counters and the names of existing blocks."""
        self.allocator.reset_peaks()
        self.allocator.alloc_retries = self.allocator.ooms = 0
        self._peaks_before, self._retries_before = (0, 0), 0
        self.largest_workspace_bytes = 0
        self.tuned.clear()
        self.uncompared.start_trial()
        self.numbers.start_trial()
        self.host.start_trial()
        names = self.tape.start_trial(len(self._allocations))
        for allocation, name in zip(self._allocations.values(), names, strict=True):
            allocation.name = name

    def keep_back(self, card: Card) -> None:
        """Leave less of the card to the allocator: `card` is the same one, of which something else takes more."""
        self.card = card
        self.allocator.capacity_bytes = card.available_bytes
        self.set_limit(self.limit_bytes)

    # --- limits and peaks ---

    def set_limit(self, limit_bytes: int | None) -> None:
        """Cap what the allocator may reserve; None: no cap."""
        self.limit_bytes = limit_bytes
        self.allocator.limit_bytes = self.allocator_limit(limit_bytes)

    def set_fraction(self, fraction: float) -> None:
        """Answer ``torch.cuda.set_per_process_memory_fraction``."""
        self.fraction = fraction
        self.set_limit(self.limit_bytes)

    def change_settings(self, text: str) -> None:
        """Answer ``torch._C._accelerator_setAllocatorSettings``."""
        settings = self.allocator.settings.updated(text)
        self.allocator.set(settings)
        self.host.pinned.settings = settings
        self.tape.changed(settings)
        if "per_process_memory_fraction" in text:
            self.set_fraction(settings.per_process_memory_fraction)

    def allowed(self, limit_bytes: int | None) -> int:
        """Return what the process may reserve under its own fraction, the card's memory and a cap."""
        card = self.card
        return min(
            known([limit_bytes, card.available_bytes, int(self.fraction * card.total_bytes)])
        )

    def allocator_limit(self, limit_bytes: int | None) -> int | None:
        """Return the allocator's own limit under a cap; None if only the card limits it."""
        allowed = self.allowed(limit_bytes)
        return None if allowed == self.card.available_bytes else allowed

    @property
    def peaks(self) -> tuple[int, int]:
        """Peak allocated and peak reserved bytes of this trial."""
        allocated, reserved = self._peaks_before
        return max(allocated, self.allocator.peak_allocated_bytes), max(
            reserved, self.allocator.peak_reserved_bytes
        )

    @property
    def alloc_retries(self) -> int:
        """How often the allocator has emptied its cache in this trial; once before each out-of-memory error."""
        return self._retries_before + self.allocator.alloc_retries

    def reset_peaks(self, _: object = None) -> None:
        """Answer the step's own reset; the trial keeps its earlier peaks."""
        self._peaks_before = self.peaks
        self.allocator.reset_peaks()

    def reset_counters(self, _: object = None) -> None:
        """Answer the step's own reset of accumulated statistics."""
        self._retries_before = self.alloc_retries
        self.allocator.alloc_retries = self.allocator.ooms = 0

    # --- storages on the card ---

    def holds(self, storage: _Storage) -> bool:
        return storage._cdata in self._allocations

    def block_of(self, storage: _Storage) -> int | None:
        """Return the allocator's handle of a storage's block; None if it is not on the card."""
        allocation = self._allocations.get(storage._cdata)
        return None if allocation is None else allocation.block

    def allocate(self, storage: _Storage, nbytes: int | None = None) -> None:
        """Put a storage on the card until it dies, with a block of `nbytes`; None: its own size."""
        key = storage._cdata
        if key in self._allocations:
            return
        nbytes = storage.nbytes() if nbytes is None else nbytes
        block = self.allocator.malloc(nbytes)
        on_death = freeing(storage, self, key)
        self._allocations[key] = _Allocation(
            nbytes, block, self.allocator.stream, self.tape.allocated(nbytes), on_death
        )

    def transfer(self, storage: _Storage, to: _Storage) -> None:
        """Move a block to another storage: the operator was faked out of place, but runs in place on the card."""
        allocation = self._allocations.pop(storage._cdata)
        key = to._cdata
        self._allocations[key] = replace(allocation, on_death=freeing(to, self, key))

    def free(self, storage: _Storage) -> None:
        """Take a storage off the card before it dies."""
        self._free(storage._cdata)

    def grow(self, storage: _Storage) -> None:
        """Give a storage a new block, if it has outgrown its old one."""
        allocation = self._allocations.get(storage._cdata)
        if allocation is None or allocation.nbytes < storage.nbytes():
            self.resize(storage)

    def resize(self, storage: _Storage) -> None:
        """Give a resized storage a new block, before it gives back its old one."""
        old = self._allocations.pop(storage._cdata, None)
        self.allocate(storage)
        if old is not None:
            self.allocator.free(old.block)
            self.tape.freed(old.name)

    def use_workspace(self, *, is_lt: bool, handle: int) -> None:
        """Provide the workspace of a matrix product, of cuBLASLt (`is_lt`) or cuBLAS, as this version of torch does."""
        policy = self._policy
        if policy.kept:
            self._keep_workspace(False, handle)
        lt = policy.lt if is_lt else LtWorkspace.SHARED
        if lt is LtWorkspace.KEPT:
            self._keep_workspace(True, handle)
        elif lt is LtWorkspace.EACH_CALL:
            self._borrow(LT_BYTES)
        elif not policy.kept:
            self._borrow(self._cublas_bytes)

    def _keep_workspace(self, is_lt: bool, handle: int) -> None:
        nbytes = self._workspace_bytes(is_lt)
        key = is_lt, handle, self.allocator.stream
        if nbytes and key not in self._workspaces:
            self._workspaces[key] = self.allocator.malloc(nbytes), self.tape.allocated(nbytes)

    def _workspace_bytes(self, is_lt: bool) -> int:
        return LT_BYTES if is_lt else self._cublas_bytes

    def _borrow(self, nbytes: int) -> None:
        with self.running(Launch(Kernel(afterwards, (nbytes,), 0), (), None)):
            pass

    def clear_workspaces(self, stream: int | None = None) -> None:
        """Give back those of a stream; None: of all."""
        for key in [*self._workspaces]:
            if stream in (None, key[-1]):
                block, name = self._workspaces.pop(key)
                self.allocator.free(block)
                self.tape.freed(name)

    @contextmanager
    def running(
        self, launch: Launch | None, use_workspace: Callable[[], None] = no_workspace
    ) -> Iterator[Callable[[], None]]:
        """Give a kernel its scratch memory until the context ends, then a workspace of cuBLAS.

        What is yielded must be called before each result is allocated.
        """
        if launch is None:
            yield lambda: None
            use_workspace()
            return
        kernel, blocks = launch.kernel, list[int]()
        index = self.tape.launched(launch.numbers)
        *before_results, after = enumerate(parts_of(kernel, launch.numbers))
        waiting = iter(before_results)

        def make(parts: Iterable[tuple[int, tuple[int, ...]]]) -> None:
            for part, steps in parts:
                self.allocator.serve(steps, blocks)
                self.tape.kernel(kernel, part, index)

        try:
            yield lambda: make(islice(waiting, 1))
            make([*waiting, after])
            use_workspace()
        finally:
            for block in blocks:
                self.allocator.free(block)

    def use_stream(self, stream: int) -> None:
        """Serve later requests from the blocks of a stream; 0: the default one."""
        if stream != self.allocator.stream:
            self.allocator.use_stream(stream)
            self.tape.switched(stream)

    def turn(self, act: Callable[..., None], *args: int, **options: bool) -> None:
        """Call a method of `Pools`."""
        act(self.allocator.pools, *args, **options)
        self.tape.pooled(act, args, **options)

    def new_pool(self) -> int:
        """Return the lowest number of no pool that is used or has blocks in use: calls can repeat."""
        allocator = self.allocator
        taken: set[int] = {*map(allocator.private_of, allocator.requested())}
        taken |= (+allocator.pools.users).keys()
        return next(number for number in count(1) if number not in taken)

    def drop_pool(self, private: int) -> None:
        """~MemPool: give back what is free in it, if it has no other user."""
        self.turn(Pools.drop, private)
        self.allocator.empty_cache(private)
        self.tape.cache_released(private)

    @contextmanager
    def outside_pools(self) -> Iterator[None]:
        """Serve another thread: a ``use_mem_pool`` of this one is not for it, but a capture is."""
        pools = self.allocator.pools
        inside, outside = [*pools.active], [pools.captures][: pools.captures > 0]
        if inside != outside:
            self.turn(Pools.turn_to, *outside)
        try:
            yield
        finally:
            if inside != outside:
                self.turn(Pools.turn_to, *inside)

    def record_stream(self, storage: _Storage, stream: int) -> bool:
        """Answer ``record_stream``; return whether the block will now wait, once it is free, until the call ends."""
        allocation = self._allocations.get(storage._cdata)
        if allocation is None or not self.allocator.record_stream(allocation.block, stream):
            return False
        self.tape.shared(allocation.name, stream)
        return True

    def finish_call(self) -> RecordedCall:
        """Let all streams end their work, and return what the call did."""
        self.allocator.synchronize()
        return self.tape.finish()

    def empty_cache(self, *, by_step: bool = False) -> None:
        self.allocator.empty_cache()
        if by_step:
            self.tape.cache_released()

    def let_go(self) -> None:
        """Give back what is free, in private pools too: their users may come from an earlier trial.

        Not what graphs need that have been captured.
        """
        pools = self.allocator.pools
        users, pools.users = pools.users, +self.captured
        self.empty_cache()
        pools.users = users

    def tune(self, problem: tuple[object, ...]) -> None:
        """Empty the cache, as torch does once cuDNN has tried its kernels on a new convolution.

        Source: aten/src/ATen/native/cudnn/Conv_v8.cpp (run_single_conv).
        """
        if problem not in self.tuned:
            self.tuned.add(problem)
            self.empty_cache(by_step=True)

    def defragment(self) -> None:
        """Move everything into fresh segments, so that no segment is reserved for one small block."""
        before, self.allocator = self.allocator, self.allocator.empty_copy()
        pools = self.allocator.pools
        pools.users, pools.overflow = before.pools.users, before.pools.overflow
        pools.unsplit = before.pools.unsplit

        def again(handle: int, nbytes: int, stream: int) -> int:
            private = before.private_of(handle)
            pools.turn_to(*[private][: private > 0])
            self.allocator.use_stream(stream)
            return self.allocator.malloc(nbytes)

        for key, (handle, name) in self._workspaces.items():
            is_lt, _, stream = key
            self._workspaces[key] = again(handle, self._workspace_bytes(is_lt), stream), name
        for allocation in self._allocations.values():
            allocation.block = again(allocation.block, allocation.nbytes, allocation.stream)
        pools.turn_to()
        self.allocator.use_stream(before.stream)

    # --- replay ---

    @property
    def live_blocks(self) -> LiveBlocks:
        """Blocks of live storages, named for the next call."""
        next_call = self.tape.call_number + 1
        live = {}
        for allocation in self._allocations.values():
            call_number, index = allocation.name
            live[next_call - call_number, index] = allocation.block
        return live

    def _free(self, key: int) -> None:
        with self.threads.lock:
            allocation = self._allocations.pop(key, None)
            if allocation is not None:
                self.allocator.free(allocation.block)
                self.tape.freed(allocation.name)
