"""Simulated GPUs: the step runs in Python on tensors without data, against a model of CUDA's caching allocator.

The memory of a step follows from the lifetimes of its storages and the allocator's rules. What only the card knows, such as
cuDNN workspaces, is not guessed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import FakeTensor

from oomprobe.allocator.caching import AllocatorOutOfMemory, CachingAllocator, oom_message
from oomprobe.allocator.segments import SMALL_SEGMENT
from oomprobe.allocator.settings import AllocatorSettings
from oomprobe.devices.base import Counters, Device, History, Usage
from oomprobe.errors import InvalidArgumentError, NothingFitsError
from oomprobe.ground.torch_versions import half_of
from oomprobe.ground.units import format_bytes
from oomprobe.records.trials import UNSIMULATED
from oomprobe.simulation.card_mode import CardMode
from oomprobe.simulation.cards import Card, leave
from oomprobe.simulation.catalogue import card_of
from oomprobe.simulation.fakes import SEEN
from oomprobe.simulation.memory import CardMemory
from oomprobe.simulation.patches import building, simulated
from oomprobe.simulation.ranks import first_of, with_nccl
from oomprobe.simulation.sharding import Sharding
from oomprobe.simulation.unknown import refuse_address, wants_data
from oomprobe.tape.calls import LiveBlocks, RecordedCall, ReplayedTrial
from oomprobe.tape.record import TapedTrial
from oomprobe.tape.recording import Recording
from oomprobe.tape.snapshot import Snapshot

TOO_LARGE = (
    "the model alone (parameters, buffers, and gradients and optimizer state where they exist) takes {needed}, and {card} has "
    "{size} for the allocator: {missing} too little, even before the first step. Use a larger card or a smaller dtype, or shard "
    "the model"
)
REFUSED = (
    "building the model ran out of memory at {line}, although what it leaves fits: {card} has {size} for the allocator. Build "
    "in host memory, in the dtype that you train in, and move the result to the card"
)


class SimulatedDevice(Device):
    """A simulated card. Each object is one card, empty at first.

    Args:
        card: Name in the catalogue (``"H100-80GB"``, see ``oomprobe devices``), a size in bytes or as text (``"24GiB"``),
            all of which the allocator may use, or a `Card` of your own.
        settings: Settings of the allocator; None: those in ``PYTORCH_ALLOC_CONF``.
        available_bytes: What it leaves to the allocator, 1 to its total memory; None: what is left
            beside the context and the kernels of one process.
        world_size: Ranks of which the step is the first; each then keeps back memory for NCCL. Only `probe_target` and
            `check_target`, with ``nproc_per_node``, make the process group.

    Raises:
        NoDeviceError: the catalogue has no such card.
        InvalidArgumentError: the settings are invalid or not simulated; the card has less memory.

    Examples:
        >>> import torch, oomprobe
        >>> model = torch.nn.Linear(256, 256)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> def step(model, batch_size):
        ...     optimizer.zero_grad()
        ...     model(torch.randn(batch_size, 256, device="cuda")).square().mean().backward()
        ...     optimizer.step()
        >>> card = oomprobe.SimulatedDevice("1GiB")
        >>> result = oomprobe.find_max_batch(model, step, device=card, multiple_of=1024, progress="off")
        >>> result.device, result.batch_size % 1024
        ('simulated GPU, 1.0 GiB', 0)
    """

    counts_bytes = is_simulated = True
    not_covered: tuple[str, ...] = UNSIMULATED

    def __init__(
        self,
        card: str | int | Card,
        *,
        settings: AllocatorSettings | None = None,
        world_size: int = 1,
        available_bytes: int | None = None,
    ) -> None:
        self.card = card_of(card)
        if available_bytes is not None:
            self.card = leave(self.card, available_bytes)
        SEEN.forget()
        self.world_size, self.half = world_size, half_of(self.card.compute_capability)
        self.torch_device = torch.device("cpu")  # where the model stays
        self.name = f"simulated {self.card.full_name}"
        self.total_bytes = self.card.total_bytes
        self._assumed: dict[str, None] = {}
        if world_size > 1:
            self.card, note = with_nccl(self.card, world_size)
            self._assumed[note] = None
        self._memory = CardMemory(
            self.card, AllocatorSettings.from_environment() if settings is None else settings
        )
        self._has_built = False
        self._full = False  # whether the cap is below what is already on the card
        self._card_mode = CardMode(self._memory)
        self._card_mode.is_rank = world_size > 1
        self._sharding = Sharding()
        # The state before the trial's first call.
        self._cold: tuple[CachingAllocator, LiveBlocks] | None = None
        self._calls = list[RecordedCall]()
        self._recordings: list[Recording] | None = None  # of trials; None: they are not recorded

    @contextmanager
    def session(self) -> Iterator[None]:
        if self._full:
            raise torch.OutOfMemoryError(oom_message(self._memory.allocator, SMALL_SEGMENT))
        if self._cold is None:
            self._cold = self._memory.allocator.copy(), self._memory.live_blocks
            if self._recordings is not None:
                self._recordings.append(Recording(self._memory.allocator))
        self._memory.tape.start()
        self._card_mode.start_call()
        passed = False
        with simulated(self._card_mode):
            try:
                yield
                passed = True
            except RuntimeError as error:
                if wants_data(error):  # in a kernel that torch does not dispatch
                    refuse_address(error)
                raise
            finally:
                self._memory.threads.end_call(passed=passed)
            gc.collect(0)  # free this call's cycles now, not during the next call
        self._calls.append(self._memory.finish_call())
        self.not_covered = (*UNSIMULATED, *self._card_mode.not_covered)

    @contextmanager
    def building(self) -> Iterator[None]:
        """Let code build a model and move it to ``"cuda"``; it stays in host memory and is counted on the card.

        Examples:
            >>> import torch, oomprobe
            >>> card = oomprobe.SimulatedDevice("24GiB")
            >>> with card.building():
            ...     model = torch.nn.Linear(1024, 1024).cuda()
            >>> card.live_bytes()
            4198400
        """
        self._has_built = True
        with building(self._card_mode):
            yield

    def first_rank(self, variables: Mapping[str, str]) -> AbstractContextManager[None]:
        """Let code inside be the first of the card's ranks; `variables` are those of its environment."""
        return first_of(self.world_size, variables, self._assumed, self._sharding)

    def begin_probe(self, poll: Callable[[], None]) -> None:
        self._card_mode.poll, self._card_mode.counts_values = poll, False
        self._card_mode.notes.clear()
        self._card_mode.not_covered.clear()

    def place(self, tensors: Iterable[torch.Tensor]) -> None:
        """Put parameters, buffers, gradients and optimizer state on the card.

        Raises:
            InvalidArgumentError: a tensor is on a real accelerator.
            NothingFitsError: they exceed the card's memory.
        """
        tensors = _in_host_memory(tensors)
        if self._has_built and any(map(self._card_mode.fakes.holds, tensors)):
            # Building has left the others in host memory.
            tensors = list(filter(self._card_mode.is_on_card, tensors))
        try:
            for tensor in tensors:
                self._card_mode.fakes.put_on_card(tensor)
        except AllocatorOutOfMemory:
            storages = {tensor.untyped_storage() for tensor in tensors}
            needed_bytes = sum(storage.nbytes() for storage in storages)
            size_bytes = self.card.available_bytes
            figures = {
                "needed": format_bytes(needed_bytes),
                "size": format_bytes(size_bytes),
                "missing": format_bytes(max(0, needed_bytes - size_bytes)),
            }
            raise NothingFitsError(TOO_LARGE.format(card=self.name, **figures)) from None
        if self._card_mode.refused_building is not None:
            size = format_bytes(self.card.available_bytes)
            raise NothingFitsError(
                REFUSED.format(line=self._card_mode.refused_building, card=self.name, size=size)
            )

    # --- what each device must tell and do ---

    def available_bytes(self) -> int:
        return self._memory.allowed(None)

    @contextmanager
    def cap(self, limit_bytes: int | None) -> Iterator[None]:
        memory, allowed_bytes = self._memory, self._memory.allowed(limit_bytes)
        if memory.allocator.reserved_bytes > allowed_bytes:
            memory.defragment()  # as if the process had started under this cap
        memory.set_limit(limit_bytes)
        self._full = memory.allocator.reserved_bytes > allowed_bytes
        try:
            yield
        finally:
            self._full = False
            memory.set_limit(None)

    def start_trial(self) -> None:
        self._memory.start_trial()
        self._card_mode.start_trial()
        self._sharding.start_trial()
        self._cold = None
        self._calls = []

    def usage(self) -> Usage:
        memory = self._memory
        allocated, reserved = memory.peaks
        allowed_bytes = memory.allowed(memory.limit_bytes)
        return Usage(
            peak_allocated_bytes=allocated,
            peak_reserved_bytes=reserved,
            peak_upper_bytes=_with_workspace(
                reserved, memory.largest_workspace_bytes, allowed_bytes
            ),
            alloc_retries=memory.alloc_retries,
            pinned_bytes=memory.host.peak_pinned_bytes,
            host_bytes=memory.host.peak_bytes,
            under_pressure=memory.alloc_retries > 0,
        )

    def live_bytes(self) -> int:
        # Not the blocks, whose sizes may vary between calls.
        return self._memory.allocator.requested_bytes

    def counters(self) -> Counters:
        allocator = self._memory.allocator
        peak_bytes, _ = self._memory.peaks
        return Counters(
            served_bytes=allocator.served_bytes,
            blocks=allocator.served,
            live_bytes=allocator.requested_bytes,
            peak_bytes=peak_bytes,
        )

    def cached_bytes(self) -> int:
        stats = self._memory.allocator.stats()
        reserved, *in_use = (
            stats[f"{name}_bytes.all.current"]
            for name in ("reserved", "allocated", "inactive_split")
        )
        return reserved - sum(in_use)

    def release(self) -> None:
        self._memory.clear_workspaces()
        self._memory.let_go()

    def healthy(self) -> bool:
        return True

    @property
    def notes(self) -> tuple[str, ...]:
        """Assumptions made while simulating."""
        return (*self._assumed, *self._card_mode.notes)

    @property
    def not_compared(self) -> str:
        return self._memory.uncompared.note(self._memory.peaks[0])

    @contextmanager
    def history(self) -> Iterator[History]:
        """Record every allocation and free; calls inside must run, not be repeated."""
        allocator = self._memory.allocator
        events: list[tuple[int, int]] = []
        allocator.log = events
        try:
            yield History(
                base=allocator.requested(),
                events=events,
                count=lambda: allocator.served,
                address=self._card_mode.fakes.block_of,
            )
        finally:
            allocator.log = None
            events[:] = [event for event in events if event[0]]  # those that were not refused

    @contextmanager
    def recorded(self) -> Iterator[list[Snapshot]]:
        snapshots = list[Snapshot]()
        self._recordings = recordings = list[Recording]()
        try:
            yield snapshots
        finally:
            self._recordings = None
            snapshots += [recording.end() for recording in recordings[-1:]]

    # --- what trials asked of the allocator, and their replay ---

    @property
    def calls(self) -> Sequence[RecordedCall]:
        """What each call of the last trial asked for."""
        return self._calls

    def taped_trial(self) -> TapedTrial | None:
        """Return what the last trial asked for, and how it began; None if no call was made."""
        if self._cold is None:
            return None
        allocator, live = self._cold
        return TapedTrial(calls=tuple(self._calls), allocator=allocator, live=live)

    @property
    def counts_values(self) -> bool:
        """Whether a size has depended on values of tensors."""
        return self._card_mode.counts_values

    @property
    def workspace_bytes(self) -> int:
        """The largest workspace that a convolution of the last trial may want."""
        return self._memory.largest_workspace_bytes

    def begin_with(self, calls: Sequence[RecordedCall], workspace_bytes: int) -> None:
        """Take over what another process recorded, which began on such a card."""
        if self._cold is None:
            self._cold = self._memory.allocator.copy(), {}
        self._calls, self._memory.largest_workspace_bytes = [*calls], workspace_bytes

    def begin_as(self, card: SimulatedDevice) -> bool:
        """Begin each trial with what another card held; return False if that is more than fits here."""
        if card._cold is None:
            return False
        cold, live = card._cold
        if cold.reserved_bytes > self.available_bytes():
            return False
        allocator = cold.copy()
        allocator.capacity_bytes = self.card.available_bytes
        allocator.total_bytes = self.card.total_bytes
        self._cold = allocator, live
        return True

    def replay(
        self, calls: Sequence[RecordedCall], cap_bytes: int | None, workspace_bytes: int
    ) -> ReplayedTrial | None:
        """Replay a cold trial on a copy of the allocator; None if no trial has shown how one begins."""
        if self._cold is None:
            return None
        cold, live = self._cold
        allowed_bytes = self._memory.allowed(cap_bytes)
        if cold.reserved_bytes > allowed_bytes:
            return None
        allocator = cold.copy()
        allocator.limit_bytes = self._memory.allocator_limit(cap_bytes)
        trial = ReplayedTrial.of(allocator, calls, live)
        upper = _with_workspace(trial.peak_reserved_bytes, workspace_bytes, allowed_bytes)
        return replace(trial, peak_upper_bytes=upper)


ON_META = (
    "a tensor of the model is on the meta device and has no memory: call "
    'model.to_empty(device="cuda") in build(), or model.to_empty(device="cpu") for a model that no '
    "target builds; then initialise it and make its optimizer"
)


def _in_host_memory(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that are not fakes, which are on the card already; raise InvalidArgumentError if one is on a real accelerator."""
    real = [tensor for tensor in tensors if not isinstance(tensor, FakeTensor)]
    for tensor in real:
        if tensor.is_meta:
            raise InvalidArgumentError(ON_META)
        if tensor.device.type != "cpu":
            raise InvalidArgumentError(
                f"a tensor of the model is on {tensor.device}: a simulated card needs the model in host memory: "
                "build it there, or call model.cpu() before probing"
            )
    return real


def _with_workspace(reserved_bytes: int, workspace_bytes: int, allowed_bytes: int) -> int:
    """Return the peak reserved if a convolution takes the workspace that it may want, as far as that is allowed."""
    return max(reserved_bytes, min(reserved_bytes + workspace_bytes, allowed_bytes))
