"""Apple's GPU. `torch.mps` neither measures peaks nor reports the current limit (torch/mps/__init__.py)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from oomprobe.devices.accelerator import NEARLY_NOTHING, kernel_answers
from oomprobe.devices.base import Device, Usage
from oomprobe.ground.units import format_bytes

# Source: aten/src/ATen/mps/MPSAllocator.h
DEFAULT_HIGH_WATERMARK = 1.7


class MpsDevice(Device):
    """The Metal device of a Mac, limited to the working set that Metal recommends."""

    name, on_host = "Apple MPS", False

    def __init__(self) -> None:
        self.torch_device = torch.device("mps", 0)
        self.total_bytes = int(torch.mps.recommended_max_memory())
        self._notes = (
            "every trial was capped: this device shares the host's memory, so the allocator was limited to the working set "
            f"that Metal recommends, {format_bytes(self.total_bytes)}",
        )

    def available_bytes(self) -> int:
        self.release()
        return self.total_bytes

    @contextmanager
    def cap(self, limit_bytes: int | None) -> Iterator[None]:
        # Memory is unified: without a limit the whole machine would swap before an allocation fails.
        fraction = 1.0 if limit_bytes is None else min(1.0, limit_bytes / self.total_bytes)
        torch.mps.set_per_process_memory_fraction(fraction)
        try:
            yield
        finally:
            before = os.environ.get("PYTORCH_MPS_HIGH_WATERMARK_RATIO", DEFAULT_HIGH_WATERMARK)
            torch.mps.set_per_process_memory_fraction(float(before))

    def start_trial(self) -> None:
        """Do nothing: there are no peaks to reset."""

    def usage(self) -> Usage:
        free_bytes = self.total_bytes - torch.mps.driver_allocated_memory()
        return Usage(under_pressure=free_bytes < NEARLY_NOTHING * self.total_bytes)

    def live_bytes(self) -> int:
        return int(torch.mps.current_allocated_memory())

    def synchronize(self) -> None:
        torch.mps.synchronize()

    def release(self) -> None:
        self.synchronize()
        torch.mps.empty_cache()

    def healthy(self) -> bool:
        return kernel_answers(self.torch_device, self.synchronize)
