"""What a device answers for."""

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
    """Memory used since `Device.start_trial`.

    Attributes:
        peak_allocated_bytes: Most memory in live tensors; None where it is not measured.
        peak_reserved_bytes: Most memory held by the allocator; None where it is not measured.
        peak_upper_bytes: The same with the largest workspace that a convolution would take if there is room; None where
            the peak is not a simulated one.
        alloc_retries: Times the allocator gave its cache back to serve a request.
        under_pressure: Whether a failure now can be one of memory: the allocator gave its cache back,
            or next to nothing was free.
    """

    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    peak_upper_bytes: int | None = None
    alloc_retries: int = 0
    under_pressure: bool = False


@runtime_checkable
class Device(Protocol):
    """A place with memory where steps run. Tests and other packages may bring their own.

    Attributes:
        name: What people call it.
        torch_device: Where the model's parameters are expected.
        total_bytes: All of its memory.
        on_host: Whether its memory is the host's own.

    Optional members: ``edge_bytes``, memory that growing trials in the user's own process leave free, so that the
    driver is never at its edge (without it, `cap` is given None); ``integrated``, whether it shares the host's memory;
    ``notes``, sentences for the report; ``served_bytes()``, all that the allocator has ever handed out, so that steps
    that do the same add the same; ``history()``, a context in which that is recorded (`History`), or None.
    """

    name: str
    torch_device: torch.device
    total_bytes: int
    on_host: bool

    def session(self) -> AbstractContextManager[None]:
        """The world in which one call of a step runs; nothing on a real device."""
        ...

    def available_bytes(self) -> int:
        """Memory this process may use: what is free and what its allocator holds."""
        ...

    def cap(self, limit_bytes: int | None) -> AbstractContextManager[None]:
        """Hold the allocator to `limit_bytes`; beyond it allocations fail for real. None: all there is."""
        ...

    def start_trial(self) -> None:
        """Reset peaks and counters."""
        ...

    def usage(self) -> Usage:
        """Peaks and counters since `start_trial`."""
        ...

    def live_bytes(self) -> int:
        """Memory in live tensors now."""
        ...

    def outside_bytes(self) -> int | None:
        """Memory of the device that this process's allocator does not hold; None where it is not known."""
        ...

    def synchronize(self) -> None:
        """Wait until all work is done; errors of that work are raised here."""
        ...

    def release(self) -> None:
        """Give cached memory back."""
        ...

    def healthy(self) -> bool:
        """Run a small kernel and check its value. Never raises."""
        ...


@dataclass(slots=True, kw_only=True)
class History:
    """What an allocator did while it was recorded, by the addresses of blocks and the bytes that were requested."""

    base: dict[int, int]  # blocks that were in use when the recording began
    events: list[tuple[int, int]] = field(default_factory=list)  # in order; negative bytes: a block was given back
    count: Callable[[], int]  # how many blocks the allocator has ever handed out
    address: Callable[[torch.Tensor], int | None]  # None: it has no block on the device


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """What a session knows about a device, which may be in another process; the names are those of `Device`."""

    name: str
    torch_device: str
    total_bytes: int
    on_host: bool
    integrated: bool = False
    edge_bytes: int = 0
    is_simulated: bool = False  # steps are replayed on a card that need not be there
    not_covered: tuple[str, ...] = ()  # what it cannot know about training


def describe(device: Device) -> DeviceInfo:
    """Read what a session needs to know, with defaults for what a device of another package does not have."""
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
    """The device if it is simulated, otherwise None. Importing its module takes a second that others need not spend."""
    simulated = sys.modules.get("oomprobe.devices.simulated")
    is_simulated = simulated is not None and isinstance(device, simulated.SimulatedDevice)
    return cast("SimulatedDevice", device) if is_simulated else None


def stated_name(name: str, stated_bytes: int | None, usable_bytes: int) -> str:
    """The name of a device of which only a part may be used; refuse a budget that it does not have."""
    if stated_bytes is None:
        return name
    if stated_bytes > usable_bytes:
        raise InvalidArgumentError(
            f"{format_bytes(stated_bytes)} of {name} were asked for, and {format_bytes(usable_bytes)} can be used: state "
            f"less, such as {typed_budget(usable_bytes)!r}"
        )
    return f"{name}, {format_bytes(stated_bytes)} of it"


def typed_budget(free_bytes: int) -> str:
    """Three quarters of what is free now, as one would type it: in a moment less is free."""
    return f"{max(1, free_bytes * 3 // 4 // 2**20)}MiB"


def raised_by(device: Device, error: BaseException) -> bool:
    """Whether a method of the device raised it, or what that called."""
    return any(frame.f_locals.get("self") is device for frame, _ in traceback.walk_tb(error.__traceback__))
