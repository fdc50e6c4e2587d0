"""CUDA, ROCm and XPU devices, accessed through their torch module.

`torch.cuda` (which also serves ROCm) and `torch.xpu` use the same function names. Sources: torch/cuda/memory.py and
c10/cuda/CUDACachingAllocator.cpp, where `set_per_process_memory_fraction` limits the memory that this process's
allocator has *reserved* to ``fraction * total``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch

from oomprobe.devices import sharing
from oomprobe.devices.base import Counters, Device, History, Usage, stated_name, typed_budget
from oomprobe.devices.calls import CallHistory, MemoryHistory, fingerprint, user_records
from oomprobe.devices.statistics import Statistics
from oomprobe.errors import UnreliableError
from oomprobe.ground import linux
from oomprobe.ground.replaced import replaced
from oomprobe.ground.torch_versions import COUNTS_PINNED_CACHE, half_of
from oomprobe.ground.units import known
from oomprobe.records.trials import Verdict
from oomprobe.tape.snapshot import Snapshot
from oomprobe.verdicts import Evidence, classify_error

MIB = 2**20
NEARLY_NOTHING = 0.01  # a device with a smaller share of its memory free counts as full
# Memory that a probe in the user's own process leaves free while the batch size grows. At the driver's limit a failed
# mapping can break expandable segments for the whole process, libraries fail with unrelated errors, and other processes
# die; the allocator's own limit fails cleanly.
EDGE_BYTES, EDGE_SHARE = 256 * MIB, 0.01
UNCAPPED = (
    "{name}: this process's CUDA allocator (backend {backend}, without its cache or pluggable) neither counts nor limits "
    "allocations, so nothing can be measured. Use torch's default allocator: unset PYTORCH_NO_CUDA_MEMORY_CACHING, and do "
    "not call change_current_allocator"
)
NO_CAP = (
    "{name}: torch {version} cannot limit what this process allocates there, so a probe could keep no margin. Use torch 2.10 or "
    "later"
)
UNIFIED = (
    "every trial was capped: this device shares the host's memory, and without a cap the whole machine would swap or "
    "freeze before an allocation failed"
)
OWN_FRACTION = (
    "the step sets the allocator's share of the card to {fraction:.3g}: in trials the probe's cap holds, {most:.3g}, "
    "if it is smaller"
)
GRAPHS = (
    "not fully cold: a CUDA graph captured before the probe may use the cuBLAS workspaces, so they stayed allocated; the "
    "limit in a fresh process may differ slightly"
)


class AcceleratorDevice(Device):
    """One accelerator with a caching allocator.

    Every trial is capped if memory can spill to the host or is shared with it, or if the user stated a budget: without a
    cap, larger allocations would succeed.
    """

    counts_bytes = True

    def __init__(self, device: torch.device, stated_bytes: int | None = None) -> None:
        self._torch: Any = torch.get_device_module(device)
        index = self._torch.current_device() if device.index is None else device.index
        self.torch_device = torch.device(device.type, index)
        properties = self._torch.get_device_properties(self.torch_device)
        self.total_bytes = int(properties.total_memory)
        self.edge_bytes = max(EDGE_BYTES, int(EDGE_SHARE * self.total_bytes))
        self.uuid = str(getattr(properties, "uuid", ""))  # torch.cuda; of torch.xpu since 2.7
        if device.type == "cuda" and torch.version.cuda is not None:
            self.half = half_of((properties.major, properties.minor))
        self.name = stated_name(str(properties.name), stated_bytes, self.total_bytes)
        is_integrated = getattr(properties, "is_integrated", False)  # torch.cuda
        is_integrated |= getattr(properties, "is_integrated_gpu", False)  # torch.xpu
        self.integrated = bool(is_integrated)
        self._not_resident_bytes = 0
        why_spills = sharing.why_spills()
        if why_spills is not None:
            self._notes += (why_spills,)
            # The driver reports more free memory than stays on the card: using all of it makes kernels fail or crawl.
            self._not_resident_bytes = max(512 * MIB, self.total_bytes // 16)
        if self.integrated:
            self._notes += (UNIFIED,)
        self._stated_bytes = stated_bytes
        self._must_cap = stated_bytes is not None or bool(self._notes)
        self._has_released = False
        self._counts_pinned = self._torch is torch.cuda and COUNTS_PINNED_CACHE
        self._statistics = Statistics(self._torch, index)
        self._calls = CallHistory(self.torch_device, self._statistics, self._usable_bytes)
        self._retries_before = 0  # the current trial

    def _refuse_uncapped(self) -> None:
        """Raise UnreliableError if the allocator does not count an allocation, or cannot enforce a cap."""
        if not hasattr(self._torch, "set_per_process_memory_fraction"):  # torch.xpu before 2.10
            raise UnreliableError(NO_CAP.format(name=self.name, version=torch.__version__))
        if self._torch is not torch.cuda:
            return
        backend = torch.cuda.memory.get_allocator_backend()
        counts = backend != "pluggable"
        if counts:
            with suppress(torch.OutOfMemoryError):  # the trial will report a full card
                one_byte = torch.empty(1, dtype=torch.uint8, device=self.torch_device)
                counts = torch.cuda.memory_allocated(self.torch_device) >= one_byte.numel()
        if not counts:
            raise UnreliableError(UNCAPPED.format(name=self.name, backend=backend))

    def budget_to_state(self) -> str | None:
        """Return the ``device=`` text to suggest if host memory is shared without a limit; otherwise None."""
        if not self.integrated or self._stated_bytes is not None or self._fraction() < 1:
            return None
        free_bytes = linux.free_bytes()
        if free_bytes is None:
            free_bytes = self.total_bytes // 2
        largest = min(free_bytes, self.total_bytes)
        return f"{self.torch_device}:{typed_budget(largest)}"

    def available_bytes(self) -> int:
        self._refuse_uncapped()
        return self._usable_bytes()

    def _usable_bytes(self) -> int:
        free, _ = self._torch.mem_get_info(self.torch_device)
        own = int(self._torch.memory_reserved(self.torch_device))
        usable_bytes = min(
            max(0, free + own - self._not_resident_bytes), int(self._fraction() * self.total_bytes)
        )
        if self._stated_bytes is not None:
            usable_bytes = min(usable_bytes, self._stated_bytes)
        host_free = linux.free_bytes() if self.integrated else None
        if host_free is not None:
            usable_bytes = min(usable_bytes, host_free + own)
        return int(usable_bytes)

    @contextmanager
    def cap(self, limit_bytes: int | None) -> Iterator[None]:
        if self._must_cap:
            limit_bytes = min(known([limit_bytes, self._usable_bytes()]))
        if limit_bytes is None:
            yield
            return
        before = self._fraction()
        self._set_fraction(min(before, limit_bytes / self.total_bytes))
        try:
            with self._held_to(self._fraction()):
                yield
        except BaseException:
            # This fails on a poisoned device, and must not hide the step's error.
            with suppress(Exception):
                self._set_fraction(before)
            raise
        self._set_fraction(before)

    @contextmanager
    def _held_to(self, most: float) -> Iterator[None]:
        """Let the step set the allocator's fraction, but no larger one: the probe caps a trial."""
        set_fraction = getattr(torch._C, "_cuda_setMemoryFraction", None)  # below all names for it
        if set_fraction is None:
            yield
            return

        def set_smaller(fraction: float, index: int) -> None:
            if index == self.torch_device.index:
                note = OWN_FRACTION.format(fraction=fraction, most=most)
                self._notes = (*self._notes, *({note} - {*self._notes}))
                fraction = min(fraction, most)
            set_fraction(fraction, index)

        with replaced([(torch._C, "_cuda_setMemoryFraction", set_smaller)]):
            yield

    def _fraction(self) -> float:
        """Return the current fraction; cudaMallocAsync reports 2^33 until one is set, but accepts at most 1."""
        with self._torch.device(self.torch_device):  # torch 2.6 would leave it the current one
            fraction = self._torch.get_per_process_memory_fraction(self.torch_device)
        return min(1.0, float(fraction))

    def _set_fraction(self, fraction: float) -> None:
        # Torch rounds down to whole bytes: without the next float up, each cap would lower the user's limit by a byte.
        fraction = math.nextafter(fraction, 1.0)
        with self._torch.device(self.torch_device):
            self._torch.set_per_process_memory_fraction(fraction, self.torch_device)

    @contextmanager
    def session(self) -> Iterator[None]:
        """Keep what the step's own resets would take from peaks and counters."""
        with self._statistics.kept():
            yield
        self._calls.end_call()

    def start_trial(self) -> None:
        self._torch.reset_peak_memory_stats(self.torch_device)
        if self._counts_pinned:
            torch.cuda.reset_peak_host_memory_stats()
        self._statistics.start_trial()
        self._retries_before = self._statistics.total("num_alloc_retries")
        self._calls.start_trial()

    def usage(self) -> Usage:
        statistics = self._statistics
        # Includes one for each out-of-memory error.
        retries = statistics.total("num_alloc_retries") - self._retries_before
        free, _ = self._torch.mem_get_info(self.torch_device)
        pinned_bytes = None
        if self._counts_pinned:
            pinned_bytes = torch.cuda.host_memory_stats()["allocated_bytes.peak"]
        return Usage(
            peak_allocated_bytes=statistics.peak("allocated_bytes"),
            peak_reserved_bytes=statistics.peak("reserved_bytes"),
            alloc_retries=retries,
            pinned_bytes=pinned_bytes,
            under_pressure=retries > 0 or free < NEARLY_NOTHING * self.total_bytes,
        )

    def live_bytes(self) -> int:
        return self._statistics.counters().live_bytes

    def counters(self) -> Counters:
        return self._statistics.counters()

    def cached_bytes(self) -> int:
        """Return the memory that is reserved and free, without what blocks in use pin: about what `release` gives back."""
        current = self._statistics.current
        return (
            current("reserved_bytes") - current("allocated_bytes") - current("inactive_split_bytes")
        )

    def outside_bytes(self) -> int:
        free, total = self._torch.mem_get_info(self.torch_device)
        return int(total - free - self._statistics.current("reserved_bytes"))

    def synchronize(self) -> None:
        self._torch.synchronize(self.torch_device)

    def release(self) -> None:
        """Empty the caches, and free the cuBLAS workspaces unless a captured graph may use them."""
        self.synchronize()
        self._torch.empty_cache()
        getattr(torch._C, "_host_emptyCache", int)()  # of pinned memory
        if self._torch is not torch.cuda:
            return
        if not self.has_graphs():
            torch._C._cuda_clearCublasWorkspaces()
            self._torch.empty_cache()
        elif not self._has_released:
            # Graphs captured during a trial are freed with its compiled code.
            self._notes = (*self._notes, GRAPHS)
        self._has_released = True

    def has_graphs(self) -> bool:
        """Return whether CUDA graphs have pools of their own; only torch's native CUDA allocator tells."""
        if not self._is_native():
            return False
        pools = self._statistics.read().get("reserved_bytes_by_private_pools")
        if pools is not None:  # since torch 2.14
            return bool(pools)
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        # Graphs have their own pools.
        return any(tuple(segment["segment_pool_id"]) != (0, 0) for segment in segments)

    def call_recorder(self) -> CallHistory | None:
        return self._calls if self._is_native() else None

    def history(self) -> AbstractContextManager[History] | None:
        """Record each block that torch's native CUDA allocator hands out; None for other allocators.

        None too while the user records: there is one recording for each process.
        """
        return self._recorded() if self._can_record() else None

    def fingerprint(self) -> int | None:
        if not self._is_native():
            return None
        return fingerprint(self._statistics, self.torch_device.index)

    def _is_native(self) -> bool:
        if self._torch is not torch.cuda:
            return False
        return bool(torch.cuda.memory.get_allocator_backend() == "native")

    def _can_record(self) -> bool:
        return self._is_native() and not user_records()

    @contextmanager
    def _recorded(self) -> Iterator[History]:
        recording = MemoryHistory(self.torch_device)
        recording.start()
        entries: list[dict[str, Any]] = []
        try:
            history = History(
                base=recording.blocks(),
                count=lambda: self.counters().blocks,
                address=lambda tensor: (
                    tensor.untyped_storage().data_ptr()
                    if tensor.device == self.torch_device
                    else None
                ),
            )
            yield history
            self.synchronize()
        finally:
            entries = recording.stop()
        for event in entries:
            sign = {"alloc": 1, "free_completed": -1}.get(event["action"], 0)
            if sign:
                history.events.append((event["addr"], sign * event["size"]))

    @contextmanager
    def recorded(self) -> Iterator[list[Snapshot]]:
        """Record torch's memory history, unless the user does: there is one for each process."""
        snapshots = list[Snapshot]()
        if not self._can_record():
            yield snapshots
            return
        recording = MemoryHistory(self.torch_device)
        recording.start(stacks=True)
        try:
            yield snapshots
        except BaseException:
            recording.stop()
            raise
        snapshots += recording.end_with_stacks()

    def healthy(self) -> bool:
        return kernel_answers(self.torch_device, self.synchronize)


def kernel_answers(device: torch.device, synchronize: Callable[[], object]) -> bool:
    """Run a one-element kernel and return whether its result is correct, whatever torch's default dtype is.

    An out-of-memory error also counts as healthy: the device is full but works. It need not be a
    `torch.OutOfMemoryError`: the driver raises other classes if memory runs out while it loads the kernel.
    """
    try:
        synchronize()
        return float(torch.ones(1, dtype=torch.float32, device=device).add_(1).item()) == 2.0
    except Exception as error:
        # Ambiguous texts count as unhealthy.
        evidence = Evidence(smaller_size_passed=False, memory_pressure=False)
        return classify_error(error, evidence) in (Verdict.OOM, Verdict.HOST_OOM)
