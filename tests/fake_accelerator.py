"""A fake graphics card: what `torch.cuda` reports about memory, on a simple model of its allocator.

For what the bed (tests/cuda) cannot show: other processes, memory that spills to or is the host's, XPU. `FakeModule`
replaces ``torch.get_device_module("cuda")``; names and arguments are those of torch/cuda/memory.py (tests/test_accelerator.py
compares them). No tensor lives on it: steps call `alloc` and keep what it returns for as long as a tensor would live.

The allocator: a request takes a cached segment of exactly its size, or a new one from the card. If that would exceed
``fraction * total`` or the free memory, it frees its whole cache and tries again before it is out of memory
(CUDACachingAllocator.cpp, malloc). The fraction is stored as whole bytes, rounded down, as in setMemoryFraction.
"""

import weakref
from types import SimpleNamespace
from unittest import mock

import torch

from oomprobe.devices.accelerator import AcceleratorDevice, kernel_answers

MIB = 2**20
CARD = torch.device("cuda", 0)
ILLEGAL_ADDRESS = "CUDA error: an illegal memory access was encountered"


class FakeModule:
    """The functions of `torch.cuda` that a probe may use.

    Args:
        total_bytes: Memory of the card.
        outside_bytes: Held by the context, libraries and other processes.
        spilled_bytes: Host memory that the driver, as on Windows, adds before a request fails.
        properties: Further device properties.
    """

    __module__ = "oomprobe.tests"  # no object of the user's, which a probe would put back

    def __init__(self, total_bytes=1024 * MIB, outside_bytes=0, spilled_bytes=0, **properties):
        self.total_bytes, self.outside_bytes, self.spilled_bytes = total_bytes, outside_bytes, spilled_bytes
        self.properties = SimpleNamespace(name="Fake Card", total_memory=total_bytes, **properties)
        self.poisoned = None
        self._allowed_bytes = None  # no fraction set
        self._cached, self._live_bytes = [], 0
        self._peak_allocated = self._peak_reserved = 0
        self._counters = {"num_alloc_retries": 0}

    # --- for steps ---

    def alloc(self, size_bytes):
        """Allocate memory, which returns to the cache when the returned block is dropped."""
        self._enter()
        if size_bytes in self._cached:
            self._cached.remove(size_bytes)
        elif not self._fits(size_bytes):
            self._cached.clear()
            self._counters["num_alloc_retries"] += 1
            if not self._fits(size_bytes):
                raise torch.OutOfMemoryError(
                    f"CUDA out of memory. Tried to allocate {size_bytes / MIB:.2f} MiB. GPU 0 has a total capacity of "
                    f"{self.total_bytes / MIB:.2f} MiB of which {self._free() / MIB:.2f} MiB is free."
                )
        self._live_bytes += size_bytes
        self._peak_allocated = max(self._peak_allocated, self._live_bytes)
        self._peak_reserved = max(self._peak_reserved, self._reserved())
        block = Block()
        weakref.finalize(block, self._freed, size_bytes).atexit = False
        return block

    def poison(self):
        """Make every further call raise, as after a sticky error."""
        self.poisoned = ILLEGAL_ADDRESS

    def _freed(self, size_bytes):
        self._live_bytes -= size_bytes
        self._cached.append(size_bytes)

    def _fits(self, size_bytes):
        reserved = self._reserved() + size_bytes
        usable_bytes = self.total_bytes - self.outside_bytes + self.spilled_bytes
        return reserved <= usable_bytes and (self._allowed_bytes is None or reserved <= self._allowed_bytes)

    def _reserved(self):
        return self._live_bytes + sum(self._cached)

    def _free(self):
        return max(0, self.total_bytes - self.outside_bytes - self._reserved())

    def _enter(self):
        if self.poisoned:
            raise torch.AcceleratorError(self.poisoned)

    # --- functions of torch.cuda ---

    def is_initialized(self):
        return True

    def current_device(self):
        self._enter()
        return 0

    def get_device_properties(self, device=None):
        self._enter()
        return self.properties

    def mem_get_info(self, device=None):
        self._enter()
        return self._free(), self.total_bytes

    def memory_allocated(self, device=None):
        self._enter()
        return self._live_bytes

    def memory_reserved(self, device=None):
        self._enter()
        return self._reserved()

    def reset_peak_memory_stats(self, device=None):
        self._enter()
        self._peak_allocated, self._peak_reserved = self._live_bytes, self._reserved()

    def memory_stats_as_nested_dict(self, device=None):
        self._enter()
        allocated = {"current": self._live_bytes, "peak": self._peak_allocated}
        reserved = {"current": self._reserved(), "peak": self._peak_reserved}
        return {**self._counters, "allocated_bytes": {"all": allocated}, "reserved_bytes": {"all": reserved}}

    def get_per_process_memory_fraction(self, device=None):
        self._enter()
        return 1.0 if self._allowed_bytes is None else self._allowed_bytes / self.total_bytes

    def set_per_process_memory_fraction(self, fraction, device=None):
        self._enter()
        self._allowed_bytes = None if fraction == 1 else int(fraction * self.total_bytes)

    def empty_cache(self):
        self._enter()
        self._cached.clear()

    def synchronize(self, device=None):
        self._enter()


class Block:
    """What `FakeModule.alloc` returns: lives as long as a tensor would."""


class FakeAccelerator(AcceleratorDevice):
    """A real `AcceleratorDevice` on the fake, so that a whole probe runs with tensors on the CPU."""

    def __init__(self, fake, stated_bytes=None):
        with mock.patch.object(torch, "get_device_module", return_value=fake):
            super().__init__(CARD, stated_bytes)
        self.fake = fake

    def healthy(self):
        """Run the kernel on the CPU; a poisoned fake raises in `release`."""
        return kernel_answers(torch.device("cpu"), self.release)
