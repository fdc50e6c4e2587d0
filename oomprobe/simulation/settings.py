"""Settings of CUDA's caching allocator, parsed from ``PYTORCH_ALLOC_CONF``."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from oomprobe.errors import InvalidArgumentError

_MIB = 2**20
_INTERVALS = 16  # kRoundUpPowerOfTwoIntervals: one for each power of two from 1 MiB
_VARIABLES = (
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
)  # torch reads the first one set


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """Settings of the allocator; the defaults are CUDA's.

    Args:
        expandable_segments: Grow one segment page by page instead of reserving many.
        max_split_size_bytes: Blocks of this size or more are never split; None: every block may be split.
        roundup_power2_divisions: Number of steps between powers of two to which a request is rounded up: one number
            per power of two from 1 MiB (and smaller) to 32 GiB (and larger). 0 or 1: no rounding; empty: none at any size.
        garbage_collection_threshold: Fraction of the limit, 0 to 1, above which the allocator releases old cached
            segments before it reserves a new one; 0: never. No effect without a limit.
        per_process_memory_fraction: Fraction of the card's total that this process may reserve, 0 to 1; 1: no limit.

    Source: c10/core/AllocatorConfig.h and c10/cuda/CUDAAllocatorConfig.h of torch 2.13.
    """

    expandable_segments: bool = False
    max_split_size_bytes: int | None = None
    roundup_power2_divisions: tuple[int, ...] = ()
    garbage_collection_threshold: float = 0.0
    per_process_memory_fraction: float = 1.0

    @classmethod
    def from_text(cls, text: str) -> AllocatorSettings:
        """Parse settings such as ``"expandable_segments:True,max_split_size_mb:128"``.

        The last of two equal keys wins; unknown keys are ignored.

        Raises:
            InvalidArgumentError: a value is invalid, or the setting is not simulated.
        """
        fields = {}
        for item in re.split(r",(?![^\[]*\])", "".join(text.split())):  # but not at commas inside brackets
            key, _, value = item.partition(":")
            if key in _NOT_SIMULATED and item != "backend:native":
                raise InvalidArgumentError(
                    f"a simulated card does not support {item!r} in PYTORCH_ALLOC_CONF: leave it out, or probe on a real device"
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
        """Parse the environment variable that torch would read.

        Raises:
            InvalidArgumentError: see `from_text`.
        """
        return cls.from_text(next((os.environ[name] for name in _VARIABLES if name in os.environ), ""))

    def divisions(self, nbytes: int) -> int:
        """Return the number of rounding steps above the power of two below `nbytes`; 0 or 1: no rounding."""
        interval = max(nbytes.bit_length() - _MIB.bit_length(), 0)
        return self.roundup_power2_divisions[min(interval, _INTERVALS - 1)]


def _divisions(text: str) -> tuple[int, ...]:
    """Parse one number for all sizes, or one per size in MiB with ``>`` for larger sizes: ``[256:1,512:2,>:4]``.

    As in torch, the first number also applies to all smaller sizes, and sizes left out are not rounded.
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
