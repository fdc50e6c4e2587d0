"""Settings of CUDA's caching allocator, as ``PYTORCH_ALLOC_CONF`` writes them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from oomprobe.errors import InvalidArgumentError
from oomprobe.ground.allocator_settings import variables_of

_INTERVALS = (
    16  # of requests for `roundup_power2_divisions`: below 2 MiB, 4 MiB, ... and from 32 GiB
)
# These change no byte.
WITHOUT_EFFECT = frozenset({
    "graph_capture_record_stream_reuse", "pinned_free_catch_all", "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb", "pinned_use_background_threads",
    "pinned_use_cuda_host_register", "pinned_use_hip_host_register", "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
})  # fmt: skip


class BlockOrder(StrEnum):
    """Which of several free blocks of one size is used first: at the lowest address, or the oldest."""

    ADDRESS = "address"  # up to torch 2.11
    BLOCK = "block"  # 2.12: the oldest; splitting a block makes a new one in front
    SEGMENT = "segment"  # later: of the oldest segment, and in it the lowest address


def torch_version() -> str:
    """Return the installed torch's version, without importing it; without one, a new one's."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return "2.14"


_NUMBERS = tuple(int(part) for part in torch_version().split(".")[:2])
BLOCK_ORDER = BlockOrder.SEGMENT
if _NUMBERS < (2, 12):
    BLOCK_ORDER = BlockOrder.ADDRESS
elif _NUMBERS == (2, 12):
    BLOCK_ORDER = BlockOrder.BLOCK
# Before, `max_split_size_mb:20` was too small, and in `roundup_power2_divisions` the number of
# ``>`` was also that of the last size named.
_SINCE_2_10 = _NUMBERS >= (2, 10)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """Settings of the allocator; the defaults are CUDA's.

    Args:
        expandable_segments: Grow one segment page by page instead of reserving many.
        max_split_size_mb: MiB from which on blocks are not split; None: all are.
        max_non_split_rounding_mb: MiB by which such a block is too much larger than a request; None:
            those of a large segment.
        large_segment_size_mb: MiB of a segment for requests between 1 and 10 MiB, and of a page of an
            expandable one; more than 10. Both sizes above are no smaller.
        roundup_power2_divisions: Steps between two powers of two to which requests are rounded up,
            each a power of two, or 0 for multiples of 512 bytes: for requests below 2 MiB, below
            4 MiB, and so on; the sixteenth is for those from 32 GiB. Empty: all 0.
        garbage_collection_threshold: Fraction of the limit, above 0 and below 1, from which on blocks
            that have long been free go back to the driver; 0: never. It needs a limit.
        per_process_memory_fraction: Fraction of the card's total that this process may reserve,
            0 to 1; 1: no limit.
        pinned_max_round_threshold_mb: MiB up to which a request for pinned memory is rounded up to
            a power of two; None: any. Since torch 2.13, as the next.
        pinned_max_cached_size_mb: MiB up to which that is so, and up to which a freed block of
            pinned memory is kept; None: any.
        block_order: Which of several free blocks of one size is used; by default, as torch here does.

    Examples:
        >>> AllocatorSettings.from_text("roundup_power2_divisions:4").rounded(5_000_000)
        5242880

    Source: c10/core/AllocatorConfig.h and c10/cuda/CUDAAllocatorConfig.h of torch 2.13.
    """

    expandable_segments: bool = False
    max_split_size_mb: int | None = None
    max_non_split_rounding_mb: int | None = None
    large_segment_size_mb: int = 20
    roundup_power2_divisions: tuple[int, ...] = ()
    garbage_collection_threshold: float = 0.0
    per_process_memory_fraction: float = 1.0
    pinned_max_round_threshold_mb: int | None = None
    pinned_max_cached_size_mb: int | None = None
    block_order: BlockOrder = BLOCK_ORDER

    @classmethod
    def from_text(cls, text: str) -> AllocatorSettings:
        """Parse settings such as ``"expandable_segments:True"``; of two equal keys the last wins.

        Raises:
            InvalidArgumentError: a value is invalid, or the setting is not simulated.
        """
        return cls().updated(text)

    @classmethod
    def from_environment(cls) -> AllocatorSettings:
        """Parse the environment variable that torch would read.

        Raises:
            InvalidArgumentError: see `from_text`.
        """
        settings = [
            os.environ[name] for name in variables_of(torch_version()) if name in os.environ
        ]
        return cls.from_text(next(iter(settings), ""))

    @classmethod
    def from_snapshot(cls, recorded: Mapping[str, Any]) -> AllocatorSettings:
        """Read the ``allocator_settings`` of torch's memory snapshots, of which older ones have fewer.

        Raises:
            InvalidArgumentError: see `from_text`.
        """
        items = [recorded.get("PYTORCH_CUDA_ALLOC_CONF", "")]
        if recorded.get("max_split_size", -1) != -1:
            items.append(f"max_split_size_mb:{recorded['max_split_size'] // 2**20}")
        if recorded.get("garbage_collection_threshold", 0):
            items.append(f"garbage_collection_threshold:{recorded['garbage_collection_threshold']}")
        by_size = recorded.get("roundup_power2_divisions", {"1": 0}).items()
        divisions = ",".join(f"{size}:{number}" for size, number in by_size)
        items.append(f"roundup_power2_divisions:[{divisions}]")
        expands = bool(recorded.get("expandable_segments"))
        return replace(cls.from_text(",".join(items)), expandable_segments=expands)

    def to_snapshot(self) -> dict[str, Any]:
        """Return them as the ``allocator_settings`` of a snapshot, which `from_snapshot` reads."""
        by_size = {str(2**n): steps for n, steps in enumerate(self.roundup_power2_divisions)}
        divisions = ",".join(f"{size}:{steps}" for size, steps in by_size.items())
        written, defaults = {"roundup_power2_divisions": f"[{divisions}]"}, AllocatorSettings()
        changed = [name for name in _READERS if getattr(self, name) != getattr(defaults, name)]
        text = ",".join(f"{name}:{written.get(name, getattr(self, name))}" for name in changed)
        return {
            "PYTORCH_CUDA_ALLOC_CONF": text,
            "expandable_segments": self.expandable_segments,
            "roundup_power2_divisions": by_size or {"1": 0},
        }

    def updated(self, text: str) -> AllocatorSettings:
        """Return what ``torch.cuda.memory._set_allocator_settings(text)`` makes of these settings.

        Three that the text does not name go back to their defaults; the others stay.

        Raises:
            InvalidArgumentError: see `from_text`.
        """
        fields: dict[str, Any] = {}
        for item in re.split(r",(?![^\[]*\])", "".join(text.split())):  # not inside brackets
            name, _, value = item.partition(":")
            if item == "backend:cudaMallocAsync":
                raise InvalidArgumentError(
                    f"{item!r} in PYTORCH_ALLOC_CONF leaves memory to the driver, whose rules are not "
                    "known, so that a simulated card does not support it: leave it out, or probe on a "
                    "real device"
                )
            if name in WITHOUT_EFFECT or item in ("", "backend:native"):
                continue
            if name not in _READERS:
                raise InvalidArgumentError(
                    f"a simulated card does not support {item!r} in PYTORCH_ALLOC_CONF: leave it "
                    "out, or probe on a real device"
                )
            try:
                fields[name] = _READERS[name](value)
            except (ValueError, KeyError):
                raise InvalidArgumentError(
                    f"{item!r} in PYTORCH_ALLOC_CONF cannot be read"
                ) from None
        reset = replace(
            self,
            max_split_size_mb=None,
            roundup_power2_divisions=(),
            garbage_collection_threshold=0.0,
        )
        settings = replace(reset, **fields)
        least = settings.large_segment_size_mb + (not _SINCE_2_10)
        for name in ("max_split_size_mb", "max_non_split_rounding_mb"):
            if fields.get(name, least) < least:
                raise InvalidArgumentError(
                    f"{name}:{fields[name]} in PYTORCH_ALLOC_CONF is too small: torch takes "
                    f"{least} or more"
                )
        return settings

    def rounded(self, nbytes: int) -> int:
        """Return the size of the block for a request: round_size."""
        step = 512
        if self.roundup_power2_divisions:
            power = nbytes.bit_length() - 1
            divisions = self.roundup_power2_divisions[min(max(power - 20, 0), _INTERVALS - 1)]
            if divisions > 1 and nbytes > 512 * divisions:  # roundup_power2_next_division
                step = 2**power // divisions
        return -(-nbytes // step) * step


def _number_between(
    lowest: float, highest: float, kind: Callable[[str], Any]
) -> Callable[[str], Any]:
    def read(value: str) -> Any:
        number = kind(value)
        if not lowest <= number <= highest:
            raise ValueError(number)
        return number

    return read


def _power_of_two(value: str, *, least: int = 0) -> int:
    number = int(value)
    if number < least or number & (number - 1):
        raise ValueError(number)
    return number


def _divisions(value: str) -> tuple[int, ...]:
    """Read a number, or one for each size in MB; ``>`` stands for all sizes after the last."""
    if not value.startswith("["):
        return (_power_of_two(value, least=1),) * _INTERVALS
    divisions, last, is_first = [0] * _INTERVALS, 0, True
    for item in value.strip("[]").split(","):
        size, _, number = item.partition(":")
        if size == ">":
            first = last + _SINCE_2_10
            divisions[first:] = [_power_of_two(number)] * (_INTERVALS - first)
            continue
        last = min(_power_of_two(size, least=1).bit_length() - 1, _INTERVALS - 1)
        if is_first:
            divisions[:last] = [_power_of_two(number)] * last
            is_first = False
        divisions[last] = _power_of_two(number)
    return tuple(divisions)


_READERS: dict[str, Callable[[str], Any]] = {
    "expandable_segments": {"True": True, "False": False}.__getitem__,
    "garbage_collection_threshold": _number_between(1e-300, 1 - 1e-16, float),
    "large_segment_size_mb": _number_between(11, 2**40, int),
    "max_non_split_rounding_mb": _number_between(11, 2**40, int),
    "max_split_size_mb": _number_between(11, 2**40, int),
    "per_process_memory_fraction": _number_between(0, 1, float),
    "pinned_max_cached_size_mb": _number_between(0, 2**40, int),
    "pinned_max_round_threshold_mb": _number_between(0, 2**40, int),
    "roundup_power2_divisions": _divisions,
}
