"""Host memory, limited to a budget by the operating system.

Each trial runs in a child process (`oomprobe.runners.workers`) whose address space ``RLIMIT_AS`` limits, so torch's CPU
allocator raises its own error before the OOM killer acts.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from oomprobe.devices.base import Device, Usage, stated_name
from oomprobe.errors import NoDeviceError
from oomprobe.ground import linux

with suppress(ImportError):  # not on Windows
    import resource

# An ambiguous error such as "could not create a primitive" counts as out of memory only above this share of the cap.
PRESSURE_SHARE = 0.5
APPROXIMATE = "host memory is approximate: near the limit, heap fragmentation decides; step times are for one thread"


class HostDevice(Device):
    """Host memory, or a stated part of it, that a trial may allocate in addition to the model's process."""

    on_host = True

    def __init__(self, stated_bytes: int | None = None) -> None:
        free_bytes = linux.free_bytes()
        if sys.platform != "linux" or free_bytes is None:
            raise NoDeviceError(
                f"host memory can be probed only on Linux, where RLIMIT_AS limits a process, and this is {sys.platform}. "
                "Use device='cuda' or 'mps'"
            )
        self.torch_device = torch.device("cpu")
        # Allocations beyond the free memory succeed, and then the OOM killer ends the process.
        self.name = stated_name("host memory", stated_bytes, _without_copies(free_bytes))
        self.total_bytes = linux.machine_bytes("MemTotal") or free_bytes
        self._notes = (APPROXIMATE, *other_malloc(Path("/proc/self/maps").read_text()))
        self._stated_bytes = stated_bytes
        self._cap_bytes = self._start_bytes = self._start_anonymous_bytes = 0

    def available_bytes(self) -> int:
        free_bytes = self._stated_bytes
        if (
            free_bytes is None
        ):  # read again: the model's snapshot was taken after the device was opened
            free_bytes = _without_copies(linux.free_bytes() or 0)
        for kind, used_bytes in _limited_bytes().items():
            soft, _ = resource.getrlimit(kind)
            if soft != resource.RLIM_INFINITY:
                free_bytes = min(free_bytes, max(0, soft - used_bytes))
        return free_bytes

    @contextmanager
    def cap(self, limit_bytes: int | None) -> Iterator[None]:
        self.release()
        self._cap_bytes = self.available_bytes() if limit_bytes is None else limit_bytes
        # RLIMIT_DATA counts malloc's reserved arenas, 64 MiB of address space for each thread, as they become writable.
        used_bytes = _limited_bytes()
        before = {kind: resource.getrlimit(kind) for kind in used_bytes}
        for kind, (soft, hard) in before.items():
            limit = used_bytes[kind] + self._cap_bytes
            if soft != resource.RLIM_INFINITY:
                limit = min(limit, soft)
            resource.setrlimit(kind, (limit, hard))
        try:
            yield
        finally:
            for kind, limits in before.items():
                resource.setrlimit(kind, limits)

    def start_trial(self) -> None:
        self.release()
        self._start_bytes = linux.process_bytes("VmSize")
        self._start_anonymous_bytes = linux.process_bytes("RssAnon")

    def usage(self) -> Usage:
        """Return peaks since this process was forked for the trial, when the kernel reset them.

        Allocated counts resident pages without those of files; reserved counts the address space, which is what is limited.
        """
        resident = linux.process_bytes("VmHWM") - linux.process_bytes("RssFile")
        reserved = max(0, linux.process_bytes("VmPeak") - self._start_bytes)
        return Usage(
            peak_allocated_bytes=min(reserved, max(0, resident - self._start_anonymous_bytes)),
            peak_reserved_bytes=reserved,
            under_pressure=reserved >= PRESSURE_SHARE * self._cap_bytes,
        )

    def live_bytes(self) -> int:
        return linux.process_bytes("RssAnon")

    def release(self) -> None:
        """Return free memory of malloc's heap to the system, if the C library supports it."""
        with suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)

    def healthy(self) -> bool:
        return True  # a library that a failure has poisoned ends with the trial's process


def _limited_bytes() -> dict[int, int]:
    """Return this process's use of the resources that ``ulimit -v`` and ``ulimit -d`` limit."""
    return {
        resource.RLIMIT_AS: linux.process_bytes("VmSize"),
        resource.RLIMIT_DATA: linux.process_bytes("VmData"),
    }


def _without_copies(free_bytes: int) -> int:
    """Subtract the copy-on-write pages of a forked child, which RLIMIT_AS does not count."""
    return max(0, free_bytes - linux.process_bytes("RssAnon"))


def other_malloc(mapped: str) -> tuple[str, ...]:
    """Return a note if this process, whose mapped files are given, does not use the C library's malloc."""
    for name in ("jemalloc", "tcmalloc", "mimalloc"):
        if f"lib{name}" in mapped:
            return (
                f"this process uses {name}: train with it too, because it fragments differently",
            )
    return ()
