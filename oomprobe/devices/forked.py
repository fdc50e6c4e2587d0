"""Host memory for a process that was forked to run one trial: it has no history, and leaves none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from oomprobe.devices import heap, linux
from oomprobe.devices.accelerator import kernel_answers
from oomprobe.devices.base import Usage
from oomprobe.devices.host import HostDevice
from oomprobe.devices.limits import address_space
from oomprobe.devices.plain import PlainDevice
from oomprobe.devices.resident import ResidentPeak
from oomprobe.scope import scope


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """What the first step adds to a process and later steps find there: threads, libraries, optimizer state.

    Attributes:
        space_bytes: Of address space, without the holes that the step left in malloc's heap.
        resident_bytes: Of memory in use.
        live_bytes: Handed out by malloc and not given back, but for gradients and optimizer state.
    """

    space_bytes: int = 0
    resident_bytes: int = 0
    live_bytes: int = 0


class ForkedHostDevice(PlainDevice):
    """Host memory as a `HostDevice` has it, for one trial in a process of its own.

    The budget begins at the *warm* process. A trial here is the first step of its process, so that nothing it frees
    comes from an earlier size; what a warm process would have grown by is granted beside the budget.

    Args:
        host: The device.
        growth: By the first step, measured in another process; None: not known yet.
        available_bytes: Beyond the warm process; None: not known yet.
        state_bytes: Tells what gradients and optimizer state hold now: it comes with the first step, and is no leak.
    """

    on_host = True

    def __init__(
        self,
        host: HostDevice,
        *,
        growth: Growth | None = None,
        available_bytes: int | None = None,
        state_bytes: Callable[[], int],
    ) -> None:
        self.torch_device, self.name, self.total_bytes = host.torch_device, host.name, host.total_bytes
        self._growth = growth or Growth()
        self._available_bytes = host.available_bytes() if available_bytes is None else available_bytes
        self._state_bytes = state_bytes
        self._cap_bytes = self._limit_bytes = self._resident_base = 0
        self._peak = ResidentPeak()

    def grown_by(self, step: Callable[[], object]) -> Growth:
        """Run a step in this cold process, and say what it added."""
        before, live_before = _Footprint.now(), self.live_bytes()
        step()
        self.release()
        after = _Footprint.now()
        # What was put into old holes needs no space beside the cap: the next process has those holes too.
        new_holes = max(0, after.hole_bytes - before.hole_bytes)
        return Growth(
            space_bytes=max(0, after.space_bytes - before.space_bytes - new_holes),
            resident_bytes=max(0, after.resident_bytes - before.resident_bytes),
            live_bytes=max(0, self.live_bytes() - live_before),
        )

    def available_bytes(self) -> int:
        return self._available_bytes

    @scope
    def cap(self, limit_bytes: int | None) -> Iterator[None]:
        self._cap_bytes = self._available_bytes if limit_bytes is None else limit_bytes
        room = self._growth.space_bytes + self._cap_bytes
        self._limit_bytes = (linux.process_bytes("VmSize") or 0) + room
        with address_space(self._limit_bytes, room):
            yield

    def start_trial(self) -> None:
        self._resident_base = (linux.process_bytes("VmRSS") or 0) + self._growth.resident_bytes
        self._peak.start()

    def usage(self) -> Usage:
        return self._peak.usage(
            base_bytes=self._resident_base, limit_bytes=self._limit_bytes, cap_bytes=self._cap_bytes
        )

    def live_bytes(self) -> int:
        return (heap.malloced_bytes() or linux.process_bytes("VmRSS") or 0) - self._state_bytes()

    def holes_bytes(self) -> int:
        return heap.free_in_heap_bytes()

    def outside_bytes(self) -> None:
        return None

    def synchronize(self) -> None:
        """Steps on the host are done when they return."""

    def release(self) -> None:
        heap.trim_heap()

    def healthy(self) -> bool:
        return kernel_answers(torch.device("cpu"), self.synchronize)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Footprint:
    """Address space of this process, what of it are holes in malloc's heap, and resident memory."""

    space_bytes: int
    hole_bytes: int
    resident_bytes: int

    @classmethod
    def now(cls) -> _Footprint:
        return cls(
            space_bytes=linux.process_bytes("VmSize") or 0,
            hole_bytes=heap.free_in_heap_bytes(),
            resident_bytes=linux.process_bytes("VmRSS") or 0,
        )
