"""A device whose memory is an account book: exact to the byte, and its true limit known by scanning it.

It can be sent to the processes of an isolated probe; in each of them `HERE` is the one that the steps draw from. It may
lie, and neighbours may take from it, where the faults of the run say so.
"""

from contextlib import nullcontext

import torch

from oomprobe.devices import Usage
from oomprobe.scope import scope
from soaking import faults

MIB = 2**20
HERE = None


def need_bytes(card, size):
    """What one step takes."""
    return card["fixed"] + card["per_sample"] * size + card["stair"] * (size // card["stride"])


def scan(card, limit_bytes, first, last, multiple_of):
    """The largest size whose need is within the limit, by trying every one; None: not even the first."""
    answer, size = None, -(-first // multiple_of) * multiple_of
    while (last is None or size <= last) and need_bytes(card, size) <= limit_bytes:
        answer, size = size, size + multiple_of
    return answer


class Card:
    name, on_host = "ledger", False
    torch_device = torch.device("cpu")

    def __init__(self, total_bytes):
        self.total_bytes = self.limit = total_bytes
        self.live = self.peak = self.retries = self.neighbours = 0
        self.pressure = False
        self._settle_in()

    def __getstate__(self):
        return {"total_bytes": self.total_bytes}

    def __setstate__(self, state):
        self.__init__(**state)

    def _settle_in(self):
        global HERE
        HERE = self

    def session(self):
        return nullcontext()

    def warm(self, step):
        pass

    def prime(self, step):
        pass

    def available_bytes(self):
        return faults.told("available_bytes", self.total_bytes - self.neighbours)

    @scope
    def cap(self, limit_bytes):
        self.limit = self.total_bytes if limit_bytes is None else min(limit_bytes, self.total_bytes)
        try:
            yield
        finally:
            self.limit = self.total_bytes

    def start_trial(self):
        self.peak, self.pressure = self.live, False

    def usage(self):
        peak = faults.told("usage", self.peak)
        return Usage(
            peak_allocated_bytes=peak,
            peak_reserved_bytes=peak,
            alloc_retries=self.retries,
            under_pressure=self.pressure,
        )

    def live_bytes(self):
        return faults.told("live_bytes", self.live)

    def outside_bytes(self):
        return faults.told("outside_bytes", self.neighbours)

    def synchronize(self):
        pass

    def release(self):
        pass

    def healthy(self):
        return True

    # --- for steps ---

    def take(self, size_bytes):
        """Use memory until the step ends."""
        room = min(self.limit, self.total_bytes - self.neighbours)
        if self.live + size_bytes > room:
            self.pressure = True
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size_bytes} bytes (ledger)")
        self.peak = max(self.peak, self.live + size_bytes)

    def leak(self, size_bytes):
        self.take(size_bytes)
        self.live += size_bytes
