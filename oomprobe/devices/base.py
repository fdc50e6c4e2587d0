"""The `Device` protocol and its data types."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

import torch

from oomprobe.errors import InvalidArgumentError
from oomprobe.units import format_bytes

if TYPE_CHECKING:
    from oomprobe.devices.simulated import SimulatedDevice


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Memory use since `Device.start_trial`.

    Attributes:
        peak_allocated_bytes: Peak memory in live tensors; None if not measured.
        peak_reserved_bytes: Peak memory held by the allocator; None if not measured.
        peak_upper_bytes: Peak reserved if a convolution takes the largest workspace that fits; None unless simulated.
        alloc_retries: Number of times the allocator emptied its cache to serve a request.
        under_pressure: Whether a failure now may be an out-of-memory error: the allocator emptied its cache, or
            almost no memory was free.
    """

    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    peak_upper_bytes: int | None = None
    alloc_retries: int = 0
    under_pressure: bool = False


@runtime_checkable
class Device(Protocol):
    """A memory pool in which training steps run.

    Any object with these members can be passed as ``device=``. For each trial, a probe calls `start_trial`, enters `cap`,
    enters `session` around each call of the step, and reads `usage`. Between trials it calls `release` and compares
    `live_bytes` with the baseline.

    Attributes:
        name: Name shown to the user, such as ``"NVIDIA H100 80GB HBM3"``.
        torch_device: Device on which the model's parameters must be.
        total_bytes: Total memory of the device.
        on_host: Whether the device's memory is host memory.

    Optional members:
        edge_bytes: Memory that trials in the user's own process leave free while the batch size grows, to stay clear of
            the driver's limit. Without it, such trials run with ``cap(None)``.
        integrated: Whether the device shares the host's memory.
        notes: Sentences to add to the report.
        served_bytes(): Total that the allocator has ever handed out. Steps that allocate alike add equal amounts. Without
            it, a probe cannot look for calls that need more memory than others.
        allocations(): Number of blocks that the allocator has ever handed out.
        history(): A context manager that records allocations as a `History`, or None if the allocator cannot.
    """

    name: str
    torch_device: torch.device
    total_bytes: int
    on_host: bool

    def session(self) -> AbstractContextManager[None]:
        """Return the context for one call of the step. On a real device it does nothing."""
        ...

    def available_bytes(self) -> int:
        """Return the memory this process can use: free memory plus what its allocator has reserved."""
        ...

    def cap(self, limit_bytes: int | None) -> AbstractContextManager[None]:
        """Limit the allocator to `limit_bytes`, above which allocations really fail; None sets no extra limit."""
        ...

    def start_trial(self) -> None:
        """Reset peaks and counters."""
        ...

    def usage(self) -> Usage:
        """Return peaks and counters since `start_trial`."""
        ...

    def live_bytes(self) -> int:
        """Return the memory that live tensors use now."""
        ...

    def outside_bytes(self) -> int | None:
        """Return the used memory that this process's allocator does not hold; None if unknown."""
        ...

    def synchronize(self) -> None:
        """Wait until all queued work is done, and raise its errors."""
        ...

    def release(self) -> None:
        """Return cached memory to the device."""
        ...

    def healthy(self) -> bool:
        """Run a small kernel and report whether its result is correct. Must not raise."""
        ...


@dataclass(slots=True, kw_only=True)
class History:
    """A recording of an allocator: blocks by address, with the bytes requested for them."""

    base: dict[int, int]  # blocks in use when recording began
    events: list[tuple[int, int]] = field(default_factory=list)  # in order; negative bytes mean that a block was freed
    count: Callable[[], int]  # number of blocks ever allocated
    address: Callable[[torch.Tensor], int | None]  # None if the tensor is not on the device


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """Properties of a device that may be in another process, named as in `Device`."""

    name: str
    torch_device: str
    total_bytes: int
    on_host: bool
    integrated: bool = False
    edge_bytes: int = 0
    is_simulated: bool = False
    not_covered: tuple[str, ...] = ()  # what a simulated card leaves out


def describe(device: Device) -> DeviceInfo:
    """Return the properties of a device, with defaults for its optional members."""
    replay = replay_of(device)
    return DeviceInfo(
        name=device.name,
        torch_device=str(device.torch_device),
        total_bytes=device.total_bytes,
        on_host=device.on_host,
        integrated=bool(getattr(device, "integrated", False)),
        edge_bytes=int(getattr(device, "edge_bytes", 0)),
        is_simulated=replay is not None,
        not_covered=() if replay is None else replay.not_covered,
    )


def replay_of(device: object) -> SimulatedDevice | None:
    """Return the device if it is simulated, otherwise None."""
    # Importing the module takes a second, which probes of real devices should not spend.
    simulated = sys.modules.get("oomprobe.devices.simulated")
    is_simulated = simulated is not None and isinstance(device, simulated.SimulatedDevice)
    return cast("SimulatedDevice", device) if is_simulated else None


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


def raised_by(device: Device, error: BaseException) -> bool:
    """Return whether a method of the device, or code that it called, raised the error."""
    return any(frame.f_locals.get("self") is device for frame, _ in traceback.walk_tb(error.__traceback__))
