"""Settings of CUDA's caching allocator, parsed from ``PYTORCH_ALLOC_CONF``."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from oomprobe.errors import InvalidArgumentError
from oomprobe.ground.allocator_settings import variables_of
from oomprobe.ground.torch_versions import BLOCK_ORDER, BlockOrder

_READERS: dict[str, Callable[[str], Any]] = {
    "expandable_segments": {"True": True, "False": False}.__getitem__,
    "per_process_memory_fraction": float,
}
# These change blocks or segments; all others do not matter to the memory of one stream.
_NOT_SIMULATED = {
    "backend", "garbage_collection_threshold", "large_segment_size_mb", "max_non_split_rounding_mb", "max_split_size_mb",
    "roundup_power2_divisions",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """Settings of the allocator; the defaults are CUDA's.

    Args:
        expandable_segments: Grow one segment page by page instead of reserving many.
        per_process_memory_fraction: Fraction of the card's total that this process may reserve, 0 to 1; 1: no limit.
        block_order: Which of several free blocks of one size is used; the default is as in this version of torch.

    Source: c10/core/AllocatorConfig.h and c10/cuda/CUDAAllocatorConfig.h of torch 2.13.
    """

    expandable_segments: bool = False
    per_process_memory_fraction: float = 1.0
    block_order: BlockOrder = BLOCK_ORDER

    @classmethod
    def from_text(cls, text: str) -> AllocatorSettings:
        """Parse settings such as ``"expandable_segments:True"``.

        The last of two equal keys wins; unknown keys are ignored.

        Raises:
            InvalidArgumentError: a value is invalid, or the setting is not simulated.
        """
        fields = {}
        for item in re.split(
            r",(?![^\[]*\])", "".join(text.split())
        ):  # but not at commas inside brackets
            name, _, value = item.partition(":")
            if name in _NOT_SIMULATED and item != "backend:native":
                raise InvalidArgumentError(
                    f"a simulated card does not support {item!r} in PYTORCH_ALLOC_CONF: leave it out, or probe on a real device"
                )
            if name in _READERS:
                try:
                    fields[name] = _READERS[name](value)
                except (ValueError, KeyError):
                    raise InvalidArgumentError(
                        f"{item!r} in PYTORCH_ALLOC_CONF cannot be read"
                    ) from None
        return cls(**fields)

    @classmethod
    def from_environment(cls) -> AllocatorSettings:
        """Parse the environment variable that torch would read.

        Raises:
            InvalidArgumentError: see `from_text`.
        """
        settings = [
            os.environ[name] for name in variables_of(torch.__version__) if name in os.environ
        ]
        return cls.from_text(next(iter(settings), ""))
