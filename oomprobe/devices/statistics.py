"""The statistics of torch's caching allocators, with what resets have taken from them.

Many training loops reset the peaks at every call. Sources: torch/cuda/memory.py, torch/xpu/memory.py, torch/accelerator/memory.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from oomprobe.devices.base import Counters

# All of torch's functions that reset look one of these up when they are called, also those that a program has imported by name.
_RESETS = (
    "_cuda_resetPeakMemoryStats", "_cuda_resetAccumulatedMemoryStats", "_xpu_resetPeakMemoryStats",
    "_xpu_resetAccumulatedMemoryStats", "_accelerator_resetPeakStats", "_accelerator_resetAccumulatedStats",
)  # fmt: skip

_Key = tuple[
    int, tuple[str, ...]
]  # the index of a device, and the names of a statistic from the outermost in


class Statistics:
    """The statistics of every device of this process: peaks since the trial began, totals since the process began.

    `module` is ``torch.cuda`` or one like it; `index` is of the device that `total`, `current` and `peak` are about.
    """

    def __init__(self, module: Any, index: int) -> None:
        self._torch, self._index = module, index
        self._lost: dict[_Key, int] = defaultdict(int)  # what resets took from totals
        self._trial_peaks: dict[_Key, int] = {}  # before the last reset
        self._call_peaks: dict[_Key, int] = {}
        self._call_totals: dict[_Key, int] = {}  # when the call began

    def start_trial(self) -> None:
        """Begin a new count of peaks, on every device; the caller resets those of the allocator."""
        self._trial_peaks, self._call_peaks, self._call_totals = {}, {}, {}

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep what code inside resets; it sees itself what torch shows it."""
        with ExitStack() as stack:
            for name in filter(partial(hasattr, torch._C), _RESETS):
                reset = getattr(torch._C, name)
                stack.callback(setattr, torch._C, name, reset)
                setattr(torch._C, name, partial(self._keep, reset))
            yield

    def _keep(self, reset: Callable[[int], object], index: int) -> None:
        before = self._flat(index)
        reset(index)
        after = self._flat(index)
        for path, value in before.items():
            if path[-1] == "peak":
                self._keep_peak((index, path), value)
            elif path[-1] != "current":
                self._lost[index, path] += value - after.get(path, 0)

    def _keep_peak(self, key: _Key, value: int) -> None:
        for peaks in (self._trial_peaks, self._call_peaks):
            peaks[key] = max(value, peaks.get(key, 0))

    # --- of the device ---

    def read(self) -> dict[str, Any]:
        """Return the statistics that the allocator has now."""
        # `memory_stats` flattens and sorts them, which takes five times as long.
        return self._torch.memory_stats_as_nested_dict(self._index)  # type: ignore[no-any-return]

    def counters(self) -> Counters:
        """Return what the allocator has done until now, from one reading."""
        stats = self.read()
        served, blocks = ("allocated_bytes", "all", "allocated"), ("allocation", "all", "allocated")
        peak = ("allocated_bytes", "all", "peak")
        # Requested, not allocated: the block for the same gradient may be up to 1 MiB larger the next time.
        in_use = "requested_bytes" if "requested_bytes" in stats else "allocated_bytes"
        return Counters(
            served_bytes=_at(stats, *served) + self._lost[self._index, served],
            blocks=_at(stats, *blocks) + self._lost[self._index, blocks],
            live_bytes=_at(stats, in_use, "all", "current"),
            peak_bytes=max(_at(stats, *peak), self._trial_peaks.get((self._index, peak), 0)),
        )

    def current(self, name: str) -> int:
        """Return a statistic's present value over all pools; 0 if this process's allocator does not keep it."""
        return _at(self.read(), name, "all", "current")

    def peak(self, name: str) -> int:
        """Return the highest value since the trial began."""
        path = name, "all", "peak"
        return max(_at(self.read(), *path), self._trial_peaks.get((self._index, path), 0))

    def peaks(self) -> tuple[int, int]:
        """Return the most bytes allocated and reserved since somebody last reset the peaks, from one reading."""
        stats = self.read()
        return _at(stats, "allocated_bytes", "all", "peak"), _at(
            stats, "reserved_bytes", "all", "peak"
        )

    def total(self, *path: str) -> int:
        """Return a count of all that ever happened, such as ``total("num_alloc_retries")``."""
        return _at(self.read(), *path) + self._lost[self._index, path]

    # --- of a call ---

    def end_call(self, index: int) -> Iterator[int]:
        """Yield what is in use on a device, the peaks of the call, and by how much it moved each total. The next call begins."""
        for path, value in self._flat(index).items():
            key = index, path
            if path[-1] == "current":
                yield value
            elif path[-1] == "peak":
                self._keep_peak(key, value)
                yield self._call_peaks.pop(key)
            else:
                total = value + self._lost[key]
                yield total - self._call_totals.get(key, 0)
                self._call_totals[key] = total
        self._torch.reset_peak_memory_stats(index)

    def _flat(self, index: int) -> dict[tuple[str, ...], int]:
        return dict(_flat(self._torch.memory_stats_as_nested_dict(index)))


def _at(stats: Any, *path: str) -> int:
    for name in path:
        stats = stats.get(name, {})
    return stats if isinstance(stats, int) else 0


def _flat(
    stats: Mapping[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], int]]:
    for name, value in stats.items():
        if isinstance(value, Mapping):
            yield from _flat(value, (*path, name))
        elif isinstance(value, int):
            yield (*path, name), value
