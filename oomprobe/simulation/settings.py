"""The settings of CUDA's caching allocator, as ``PYTORCH_ALLOC_CONF`` writes them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from oomprobe.errors import InvalidArgumentError

_MIB = 2**20
_INTERVALS = 16  # kRoundUpPowerOfTwoIntervals: one for each power of two from 1 MiB
_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # torch's order: the first set


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """What the allocator may be told; the defaults are CUDA's.

    Args:
        expandable_segments: Grow one segment page by page instead of having many.
        max_split_size_bytes: Blocks of this size or more are kept whole; None: every block may be split.
        roundup_power2_divisions: Into how many steps powers of two are divided when a request is rounded up: one number
            for each power of two from 1 MiB (which serves smaller sizes too) to 32 GiB (and larger ones); 0 and 1: not
            rounded; empty: none is.
        garbage_collection_threshold: Share of the limit, 0 to 1, from which on old cached segments are given back
            before a new one is had; 0: never. Without a limit it does nothing.
        per_process_memory_fraction: Share of the card's total, 0 to 1, this process may reserve; 1: no limit.

    Source: c10/core/AllocatorConfig.h and c10/cuda/CUDAAllocatorConfig.h of torch 2.13.
    """

    expandable_segments: bool = False
    max_split_size_bytes: int | None = None
    roundup_power2_divisions: tuple[int, ...] = ()
    garbage_collection_threshold: float = 0.0
    per_process_memory_fraction: float = 1.0

    @classmethod
    def from_text(cls, text: str) -> AllocatorSettings:
        """Read a text such as ``"expandable_segments:True,max_split_size_mb:128"``; the last of two equal keys counts.

        Raises:
            InvalidArgumentError: a value cannot be read, or changes the allocator in a way that is not simulated. An
                unknown key is not an error.
        """
        fields = {}
        for item in re.split(r",(?![^\[]*\])", "".join(text.split())):  # not at commas inside brackets
            key, _, value = item.partition(":")
            if key in _NOT_SIMULATED and item != "backend:native":
                raise InvalidArgumentError(
                    f"a simulated card does not know {item!r} of PYTORCH_ALLOC_CONF: leave it out, or probe on a real device"
                )
            if key in _READERS:
                name, read = _READERS[key]
                try:
                    fields[name] = read(value)
                except (ValueError, KeyError):
                    raise InvalidArgumentError(f"{item!r} in PYTORCH_ALLOC_CONF cannot be read") from None
        return cls(**fields)

    @classmethod
    def from_environment(cls) -> AllocatorSettings:
        """Read what torch would: the first that is set of ``PYTORCH_CUDA_ALLOC_CONF``, ``_HIP_`` and without either.

        Raises:
            InvalidArgumentError: see `from_text`.
        """
        return cls.from_text(next((os.environ[name] for name in _VARIABLES if name in os.environ), ""))

    def divisions(self, nbytes: int) -> int:
        """Into how many steps the power of two below a size is divided; 0 or 1: it is not."""
        if not self.roundup_power2_divisions:
            return 0
        interval = max(nbytes.bit_length() - _MIB.bit_length(), 0)
        return self.roundup_power2_divisions[min(interval, _INTERVALS - 1)]


def _divisions(text: str) -> tuple[int, ...]:
    """One number for all sizes, or ``[256:1,512:2,>:4]``: for sizes of so many MiB, and above the last.

    As in torch the first number serves all smaller sizes too, and powers of two that are left out are not divided.
    """
    if not text.startswith("["):
        return (_power_of_two(text),) * _INTERVALS
    divisions, last = [0] * _INTERVALS, -1
    for item in text[1:-1].split(","):
        boundary, steps = item.split(":")
        if boundary == ">":
            first, last = last + 1, _INTERVALS - 1
        else:
            index = min(int(boundary).bit_length(), _INTERVALS) - 1
            first, last = (0 if last < 0 else index), index
        divisions[first : last + 1] = [_power_of_two(steps)] * (last + 1 - first)
    return tuple(divisions)


def _power_of_two(text: str) -> int:
    number = int(text)
    if number & (number - 1):  # blocks are multiples of 512 bytes
        raise ValueError(text)
    return number


_NOT_SIMULATED = {"backend", "large_segment_size_mb", "max_non_split_rounding_mb"}
_READERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "expandable_segments": ("expandable_segments", {"True": True, "False": False}.__getitem__),
    "max_split_size_mb": ("max_split_size_bytes", lambda text: int(text) * _MIB if int(text) > 0 else None),
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
    "garbage_collection_threshold": ("garbage_collection_threshold", float),
    "per_process_memory_fraction": ("per_process_memory_fraction", float),
}
