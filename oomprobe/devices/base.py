"""The `Device` protocol and its data types."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from typing import Protocol, runtime_checkable

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
from oomprobe.records.trials import DeviceInfo, Request, Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Memory use since `Device.start_trial`.

    Attributes:
        peak_allocated_bytes: Peak memory in live tensors; None if not measured.
        peak_reserved_bytes: Peak memory held by the allocator; None if not measured.
        peak_upper_bytes: Peak reserved if convolutions take the largest workspaces they may want, as far as the cap allows;
            None unless simulated.
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

    Optional members (`extras_of` has their defaults):
        edge_bytes: Memory that trials in the user's own process leave free while the batch size grows, to stay clear of
            the driver's limit. Without it, such trials run with ``cap(None)``.
        integrated: Whether the device shares the host's memory.
        notes: Sentences to add to the report.
        served_bytes(): Total that the allocator has ever handed out. Steps that allocate alike add equal amounts. Without
            it, a probe cannot look for calls that need more memory than others.
        allocations(): Number of blocks that the allocator has ever handed out.
        cached_bytes(): Memory that the allocator has reserved and `release` would give back.
        history(): A context manager that records allocations as a `History`, or None if the allocator cannot.
        has_graphs(): Whether this process has captured CUDA graphs.
        fingerprint(): A number for what the last call did to the allocator and left in it, which decides how the next one ends if it
            makes the same requests; None if more than that decides.
        world_size: Ranks of which the step is one, if the device simulates that.
        replay: A `Replay`, which repeats and predicts calls of the step without running them.

    Examples:
        >>> import oomprobe
        >>> card = oomprobe.SimulatedDevice("24GiB")
        >>> isinstance(card, oomprobe.Device), card.available_bytes() == card.total_bytes
        (True, True)
    """

    name: str
    torch_device: torch.device
    total_bytes: int
    on_host: bool

    def session(self) -> AbstractContextManager[None]:
        """Return the context for one call of the step. By default it does nothing, as on a real device."""
        return nullcontext()

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
        """Return the used memory that this process's allocator does not hold; None, the default, if unknown."""
        return None

    def synchronize(self) -> None:
        """Wait until all queued work is done, and raise its errors. By default it is done when the step returns."""
        return

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


class Replay(Protocol):
    """What a device that learns a step's allocations can do without running the step; `SimulatedDevice` is one.

    The default bodies do nothing.
    """

    @property
    def not_covered(self) -> tuple[str, ...]:
        """What such trials leave out."""
        return ()

    def building(self) -> AbstractContextManager[None]:
        """Return the context in which a target builds its model for this device."""
        return nullcontext()

    def begin_probe(self, poll: Callable[[], None], *, replays: bool) -> None:
        """Forget earlier steps. While a step runs, call `poll`, which may raise."""
        return

    def place(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that exist before the first step."""
        return

    def predict_trial(self, request: Request) -> Trial | None:
        """Return the trial as it would end, or None if it cannot be predicted or must run."""
        return None

    def repeat(self, *, confirms: bool) -> bool:
        """Repeat the last call without running it; return False if the step must run, as it may not be steady."""
        return False

    def end_trial(self) -> None:
        """Exclude later calls from the trial."""
        return

    def learn(self, request: Request, trial: Trial) -> bool:
        """Learn from a trial that ran; return True if it contradicts earlier predictions."""
        return False


class NoReplay(Replay):
    """The `Replay` of a device that runs every call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """The optional members of a `Device` that trials use, each with a default."""

    replay: Replay = field(default_factory=NoReplay)
    served_bytes: Callable[[], int] = lambda: 0
    allocations: Callable[[], int] = lambda: 0
    cached_bytes: Callable[[], int] = lambda: 0
    history: Callable[[], AbstractContextManager[History] | None] = lambda: None
    has_graphs: Callable[[], bool] = lambda: False
    fingerprint: Callable[[], int | None] = lambda: None
    world_size: int = 1


def extras_of(device: object) -> Extras:
    """Return the optional members of a device, with defaults. A device that is not open yet, such as a name, has none."""
    names = (one.name for one in fields(Extras))
    return Extras(**{name: getattr(device, name) for name in names if hasattr(device, name)})


def replays(device: object) -> bool:
    """Return whether a device can repeat and predict calls, as simulated cards do."""
    return not isinstance(extras_of(device).replay, NoReplay)


def describe(device: Device) -> DeviceInfo:
    """Return the properties of a device, with defaults for its optional members."""
    return DeviceInfo(
        name=device.name,
        torch_device=str(device.torch_device),
        total_bytes=device.total_bytes,
        on_host=device.on_host,
        integrated=bool(getattr(device, "integrated", False)),
        edge_bytes=int(getattr(device, "edge_bytes", 0)),
        counts_bytes=hasattr(device, "served_bytes"),
        replays=replays(device),
        not_covered=extras_of(device).replay.not_covered,
        uuid=str(getattr(device, "uuid", "")),
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
    is_devices = any(frame.f_locals.get("self") is device for frame, _ in traceback.walk_tb(error.__traceback__))
    return unmeasured(device.name, error) if is_devices else None
