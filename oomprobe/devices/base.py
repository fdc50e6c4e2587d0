"""The `Device` class and its data types."""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch

from oomprobe.errors import (
    DeviceLostError,
    InvalidArgumentError,
    OomProbeError,
    device_lost,
    text_of,
    unmeasured,
)
from oomprobe.ground.units import format_bytes
from oomprobe.records.trials import DeviceInfo
from oomprobe.tape.calls import RecordedCall
from oomprobe.tape.record import TapedTrial
from oomprobe.tape.snapshot import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Memory use since `Device.start_trial`.

    Attributes:
        peak_allocated_bytes: Peak memory in live tensors; None if not measured.
        peak_reserved_bytes: Peak memory held by the allocator; None if not measured.
        peak_upper_bytes: Peak reserved if convolutions take the largest workspaces they may want, as far as the cap allows;
            None unless simulated.
        alloc_retries: Number of times the allocator emptied its cache to serve a request.
        pinned_bytes, host_bytes: Most of the host's memory, as in `Trial`; None if not measured.
        under_pressure: Whether a failure now may be an out-of-memory error: the allocator emptied its cache, or
            almost no memory was free.
    """

    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    peak_upper_bytes: int | None = None
    alloc_retries: int = 0
    pinned_bytes: int | None = None
    host_bytes: int | None = None
    under_pressure: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """What an allocator has done until now; 0 where that is unknown."""

    served_bytes: int = 0  # that it has ever handed out
    blocks: int = 0  # that it has ever handed out
    live_bytes: int = 0  # in live tensors
    peak_bytes: int = 0  # the highest allocation since `Device.start_trial`


@dataclass(slots=True, kw_only=True)
class History:
    """A recording of an allocator: blocks by address, with the bytes requested for them."""

    base: dict[int, int]  # blocks in use when recording began
    events: list[tuple[int, int]] = field(
        default_factory=list
    )  # in order; negative bytes mean that a block was freed
    count: Callable[[], int]  # number of blocks ever allocated
    address: Callable[[torch.Tensor], int | None]  # None if the tensor is not on the device


class CallRecorder(Protocol):
    """Records what the calls of a trial ask of an allocator.

    Attributes:
        calls: What the first calls of the last trial asked for; empty if it was not recorded.
        reason: Why it was not; "" if it was.
    """

    calls: Sequence[RecordedCall]
    reason: str

    def recording(self, most_calls: int) -> AbstractContextManager[None]:
        """Return the context in which the first calls of a trial are recorded."""

    def taped_trial(self) -> TapedTrial | None:
        """Return what the last trial asked for, and how it began; None if it was not recorded."""


class Device(ABC):
    """A memory pool in which training steps run; a class of yours that extends this one can be passed as ``device=``.

    For each trial, a probe calls `start_trial`, enters `cap`, enters `session` around each call of the step, and reads `counters`
    after each call and `usage` at the end. Between trials it calls `release` and compares `live_bytes` with the baseline.

    Attributes:
        name: Name shown to the user, such as ``"NVIDIA H100 80GB HBM3"``.
        torch_device: Device on which the model's parameters must be.
        total_bytes: Total memory of the device.
        on_host: Whether the device's memory is host memory.
        integrated: Whether the device shares the host's memory.
        edge_bytes: Memory that trials in the user's own process leave free while the batch size grows, to stay clear of
            the driver's limit; 0: such trials run with ``cap(None)``.
        counts_bytes: Whether `counters` has the bytes and blocks that the allocator has handed out. Steps that allocate alike add equal
            amounts. Without it, a probe cannot look for calls that need more memory than others.
        not_covered: What trials on this device leave out.
        uuid: The same for one card in every process; "" if unknown.
        half: The 16-bit floats for which its attention kernels save memory, "bf16" or "fp16".
        world_size: Ranks of which the step is one, if the device simulates that.
        is_simulated: Whether it only counts what a step allocates, and may repeat calls without
            running them.

    Examples:
        >>> import oomprobe
        >>> card = oomprobe.SimulatedDevice("24GiB")
        >>> isinstance(card, oomprobe.Device), card.available_bytes() == card.total_bytes
        (True, True)
    """

    name: str
    torch_device: torch.device
    total_bytes: int
    on_host: bool = False
    integrated: bool = False
    edge_bytes: int = 0
    counts_bytes: bool = False
    not_covered: tuple[str, ...] = ()
    uuid: str = ""
    half: str = "bf16"
    world_size: int = 1
    is_simulated: bool = False
    _notes: tuple[str, ...] = ()

    # --- what each device must tell and do ---

    @abstractmethod
    def available_bytes(self) -> int:
        """Return the memory this process can use: free memory plus what its allocator has reserved."""

    @abstractmethod
    def cap(self, limit_bytes: int | None) -> AbstractContextManager[None]:
        """Limit the allocator to `limit_bytes`, above which allocations really fail; None sets no extra limit."""

    @abstractmethod
    def start_trial(self) -> None:
        """Reset peaks and counters."""

    @abstractmethod
    def usage(self) -> Usage:
        """Return peaks and counters since `start_trial`."""

    @abstractmethod
    def live_bytes(self) -> int:
        """Return the memory that live tensors use now."""

    @abstractmethod
    def release(self) -> None:
        """Return cached memory to the device."""

    @abstractmethod
    def healthy(self) -> bool:
        """Run a small kernel and report whether its result is correct. Must not raise."""

    # --- what some devices can tell or do beyond that ---

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences to add to the report."""
        return self._notes

    @property
    def not_compared(self) -> str:
        """What is not known of the memory of this trial; empty if nothing."""
        return ""

    def session(self) -> AbstractContextManager[None]:
        """Return the context for one call of the step. By default it does nothing, as on a real device."""
        return nullcontext()

    def synchronize(self) -> None:
        """Wait until all queued work is done, and raise its errors. By default it is done when the step returns."""
        return

    def counters(self) -> Counters:
        """Return what the allocator has done until now."""
        return Counters(
            live_bytes=self.live_bytes(), peak_bytes=self.usage().peak_allocated_bytes or 0
        )

    def outside_bytes(self) -> int | None:
        """Return the used memory that this process's allocator does not hold; None, the default, if unknown."""
        return None

    def cached_bytes(self) -> int:
        """Return the memory that the allocator has reserved and `release` would give back."""
        return 0

    def history(self) -> AbstractContextManager[History] | None:
        """Return a context manager that records allocations, or None if the allocator cannot."""
        return None

    def recorded(self) -> AbstractContextManager[list[Snapshot]]:
        """Record the trial that runs inside, with stacks; the list has the snapshot afterwards.

        It stays empty if there was nothing to record, as by default.
        """
        return nullcontext([])

    def call_recorder(self) -> CallRecorder | None:
        """Return what records the calls of a trial, or None if the allocator cannot."""
        return None

    def has_graphs(self) -> bool:
        """Return whether this process has captured CUDA graphs."""
        return False

    def fingerprint(self) -> int | None:
        """Return a number for what the last call did to the allocator and left in it; None if that cannot be seen.

        It decides how the next call ends if that makes the same requests.
        """
        return None

    # --- of devices that replay: they learn a step's allocations, and repeat or predict calls without running the step ---

    def building(self) -> AbstractContextManager[None]:
        """Return the context in which a target builds its model for this device."""
        return nullcontext()

    def begin_probe(self, poll: Callable[[], None]) -> None:
        """Forget earlier steps. While a step runs, call `poll`, which may raise."""
        return

    def place(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that exist before the first step."""
        return


def describe(device: Device) -> DeviceInfo:
    """Return the properties of a device."""
    return DeviceInfo(
        name=device.name,
        torch_device=str(device.torch_device),
        total_bytes=device.total_bytes,
        on_host=device.on_host,
        integrated=device.integrated,
        edge_bytes=device.edge_bytes,
        counts_bytes=device.counts_bytes,
        is_simulated=device.is_simulated,
        not_covered=device.not_covered,
        uuid=device.uuid,
        half=device.half,
    )


def stated_name(name: str, stated_bytes: int | None, usable_bytes: int) -> str:
    """Add the stated budget to a device's name; raise InvalidArgumentError if the budget exceeds `usable_bytes`."""
    if stated_bytes is None:
        return name
    if stated_bytes > usable_bytes:
        raise InvalidArgumentError(
            f"{format_bytes(stated_bytes)} of {name} requested, but only {format_bytes(usable_bytes)} can be used: state "
            f"less, such as {typed_budget(usable_bytes)!r}"
        )
    return f"{name}, {format_bytes(stated_bytes)} of it"


def typed_budget(free_bytes: int) -> str:
    """Format three quarters of the free memory as a budget to type; less may be free by then."""
    return f"{max(1, free_bytes * 3 // 4 // 2**20)}MiB"


def device_error(device: Device, error: BaseException) -> OomProbeError | None:
    """Return what an error outside a step says about the device: it is lost, or cannot report its memory; else None.

    An error is the device's own if one of its methods is in the traceback.
    """
    if isinstance(error, DeviceLostError) or not isinstance(error, Exception):
        return None
    if not device.healthy():
        return device_lost(device.name, f"{type(error).__name__}: {text_of(error)}")
    if isinstance(error, OomProbeError):
        return None
    is_devices = any(
        frame.f_locals.get("self") is device for frame, _ in traceback.walk_tb(error.__traceback__)
    )
    return unmeasured(device.name, error) if is_devices else None
