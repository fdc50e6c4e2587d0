"""A device that only keeps accounts: steps take bytes from it, and it raises torch's own error when they run out.

For tests of the probe that need exact limits and no real memory.
"""

import weakref
from contextlib import contextmanager

import torch

import oomprobe
from oomprobe.devices import Usage

MIB = 2**20


class Log:
    """Notes what a step did. It belongs to this package, not to the user, so a probe does not put it back like a list."""

    __module__ = "oomprobe.tests"

    def __init__(self, items=()):
        self.items = [*items]
        self.append, self.extend, self.clear, self.count, self.pop = (
            self.items.append, self.items.extend, self.items.clear, self.items.count, self.items.pop,
        )  # fmt: skip

    def __iter__(self):
        return iter(self.items)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]

    def __setitem__(self, index, item):
        self.items[index] = item

    def __eq__(self, other):
        return self.items == list(other)

    __hash__ = None


class Box:
    """Holds something where a probe does not look: it belongs to this package, and has no ``__dict__``."""

    __module__ = "oomprobe.tests"
    __slots__ = ("held",)

    def __init__(self, held):
        self.held = held


class LedgerDevice(oomprobe.Device):
    """Runs steps in this process, on CPU tensors, so that tests can observe them."""

    name = "ledger"
    torch_device = torch.device("cpu")

    def __init__(self, total_bytes=1000 * MIB, *, measures_reserved=True):
        self.total_bytes = total_bytes
        self.live = self.peak = 0
        self.limit = total_bytes
        self.measures_reserved = measures_reserved
        self.is_healthy = True
        self.pressure = False
        self.caps = []

    def available_bytes(self):
        return self.total_bytes

    @contextmanager
    def cap(self, limit_bytes):
        self.caps.append(limit_bytes)
        self.limit = self.total_bytes if limit_bytes is None else limit_bytes
        try:
            yield
        finally:
            self.limit = self.total_bytes

    def start_trial(self):
        self.peak, self.pressure = self.live, False

    def usage(self):
        reserved = self.peak if self.measures_reserved else None
        return Usage(
            peak_allocated_bytes=self.peak,
            peak_reserved_bytes=reserved,
            under_pressure=self.pressure,
        )

    def live_bytes(self):
        return self.live

    def release(self):
        pass

    def healthy(self):
        return self.is_healthy

    # --- for steps ---

    def take(self, size_bytes):
        """Use memory until the step ends: only the peak remembers it."""
        if self.live + size_bytes > self.limit:
            self.pressure = True
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {size_bytes} bytes (ledger)"
            )
        self.peak = max(self.peak, self.live + size_bytes)

    def leak(self, size_bytes):
        self.take(size_bytes)
        self.live += size_bytes

    def lend(self, size_bytes, owner):
        """Use memory until the owner is gone."""
        self.live += size_bytes
        weakref.finalize(owner, self._free, size_bytes).atexit = False

    def _free(self, size_bytes):
        self.live -= size_bytes


HERE = LedgerDevice(2**40)  # for steps that take no memory from it and stop at max_batch


def taking(device, *, fixed=0, per_sample=MIB, then=lambda batch_size: None):
    """Return a step that takes memory for each sample, and then does something else."""

    def step(model, batch_size):
        device.take(fixed + batch_size * per_sample)
        then(batch_size)

    return step


def probe(model, step, **options):
    """Probe quietly, on a ledger of its own unless a device is given."""
    return oomprobe.find_max_batch(
        model, step, **{"device": LedgerDevice(), "progress": "off", **options}
    )
