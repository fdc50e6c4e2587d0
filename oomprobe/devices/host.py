"""Host memory: steps run for real, in a process that the operating system holds to a budget.

Each trial is a child process of its own (`oomprobe.isolation`), and ``RLIMIT_AS`` limits the address space of that child,
so torch's own CPU allocator fails with its own error and no OOM killer comes.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

import torch

from oomprobe.devices import linux
from oomprobe.devices.base import Usage, stated_name
from oomprobe.errors import NoDeviceError

with suppress(ImportError):  # not on Windows
    import resource

MAPS = Path("/proc/self/maps")
# A text such as "could not create a primitive" is about memory only if the trial had used this share of its cap.
PRESSURE_SHARE = 0.5
APPROXIMATE = "host memory is approximate: near the limit, fragmentation of malloc's heap decides; step times are those of one thread"


class HostDevice:
    """The memory of this machine, or a stated part: address space that a trial may take beside the model's process."""

    on_host = True

    def __init__(self, stated_bytes: int | None = None) -> None:
        free_bytes = linux.free_bytes()
        if sys.platform != "linux" or free_bytes is None:
            raise NoDeviceError(
                f"host memory can be probed on Linux only, and this is {sys.platform}: only there can the system hold "
                "a process to a budget (RLIMIT_AS). Use device='cuda' or 'mps'"
            )
        self.torch_device = torch.device("cpu")
        # Above what is free allocations succeed, and the system's OOM killer ends the process.
        self.name = stated_name("host memory", stated_bytes, _free_beside_copies(free_bytes))
        self.total_bytes = linux.machine_bytes("MemTotal") or free_bytes
        self.notes = (APPROXIMATE, *_other_malloc())
        self._stated_bytes = stated_bytes
        self._cap_bytes = self._start_bytes = self._start_anonymous_bytes = 0

    def session(self) -> AbstractContextManager[None]:
        return nullcontext()

    def available_bytes(self) -> int:
        free_bytes = self._stated_bytes
        if free_bytes is None:  # now: the snapshot of the model has been taken since the device was opened
            free_bytes = _free_beside_copies(linux.free_bytes() or 0)
        limits = [(resource.getrlimit(kind)[0], used) for kind, used in _limited_bytes().items()]
        return min([free_bytes, *(max(0, soft - used) for soft, used in limits if soft != resource.RLIM_INFINITY)])

    @contextmanager
    def cap(self, limit_bytes: int | None) -> Iterator[None]:
        self.release()
        self._cap_bytes = self.available_bytes() if limit_bytes is None else limit_bytes
        # The arenas that malloc has for other threads, 64 MiB of address space each, are counted as they become writable.
        used_bytes = _limited_bytes()
        before = {kind: resource.getrlimit(kind) for kind in used_bytes}
        for kind, (soft, hard) in before.items():
            limit = used_bytes[kind] + self._cap_bytes
            resource.setrlimit(kind, (limit if soft == resource.RLIM_INFINITY else min(limit, soft), hard))
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
        """Peaks since this process was forked, for one trial: the kernel resets them then.

        Allocated is what was resident, without the pages of libraries; reserved is the address space, which is limited.
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

    def outside_bytes(self) -> None:
        return None

    def synchronize(self) -> None:
        """Steps on the host are done when they return."""

    def release(self) -> None:
        """Give free memory of malloc's heap back to the system, where the C library can."""
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)

    def healthy(self) -> bool:
        return True  # a library that a failure has poisoned goes with the process of the trial


def _limited_bytes() -> dict[int, int]:
    """What this process uses of what ``ulimit -v`` and ``ulimit -d`` limit, by the number of the limit."""
    return {
        resource.RLIMIT_AS: linux.process_bytes("VmSize"),
        resource.RLIMIT_DATA: linux.process_bytes("VmData"),
    }


def _free_beside_copies(free_bytes: int) -> int:
    """Keep room for the copy-on-write pages of a forked child, which RLIMIT_AS does not count."""
    return max(0, free_bytes - linux.process_bytes("RssAnon"))


def _other_malloc() -> tuple[str, ...]:
    mapped = MAPS.read_text()
    found = next((name for name in ("jemalloc", "tcmalloc", "mimalloc") if f"lib{name}" in mapped), None)
    return () if found is None else (f"malloc is {found}'s here: train with it too, for its fragmentation is another",)
