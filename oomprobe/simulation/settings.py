"""The settings of CUDA's caching allocator, as ``PYTORCH_ALLOC_CONF`` writes them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from oomprobe.errors import InvalidArgumentError

_MIB = 2**20
_INTERVALS = 16  # kRoundUpPowerOfTwoIntervals: one for each power of two from 1 MiB
_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # torch's order: the first set
_ITEM = re.compile(r"([^\[\],:]+):([^\[\],:]+|\[[^\[\]]*\])(?:,|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """What the allocator may be told; the defaults are CUDA's.

    Args:
        expandable_segments: Grow one segment a stream page by page instead of having many.
        max_split_size_bytes: Blocks of this size or more are kept whole; None: every block may be split.
        max_non_split_rounding_bytes: By less than this such a block may be larger than the request.
        roundup_power2_divisions: Into how many steps powers of two are divided when a request is rounded up: one number
            for each power of two from 1 MiB (which serves smaller sizes too) to 32 GiB (and larger ones); 0 and 1: not
            rounded; empty: none is.
        garbage_collection_threshold: Share of the limit, 0 to 1, from which on old cached segments are given back
            before a new one is had; 0: never. Without a limit it does nothing.
        large_segment_size_bytes: The segment for requests from 1 to 10 MiB; the page of expandable segments.
        per_process_memory_fraction: Share of the card's total, 0 to 1, this process may reserve; 1: no limit.

    Source: c10/core/AllocatorConfig.h and c10/cuda/CUDAAllocatorConfig.h of torch 2.13.
    """

    expandable_segments: bool = False
    max_split_size_bytes: int | None = None
    max_non_split_rounding_bytes: int = 20 * _MIB
    roundup_power2_divisions: tuple[int, ...] = ()
    garbage_collection_threshold: float = 0.0
    large_segment_size_bytes: int = 20 * _MIB
    per_process_memory_fraction: float = 1.0

    @classmethod
    def from_text(cls, text: str) -> AllocatorSettings:
        """Read a text such as ``"expandable_segments:True,max_split_size_mb:128"``; the last of two equal keys counts.

        Raises:
            InvalidArgumentError: torch would refuse the value of a key, which is named, or the text has no such form.
                An unknown key is not an error.
        """
        values = dict(_items(text))

        def given(key: str, read: Callable[[str, str], Any], default: Any) -> Any:
            return read(key, values[key]) if key in values else default

        segment_bytes = given("large_segment_size_mb", _segment_size, 20 * _MIB)
        size = partial(_size_or_none, least_bytes=segment_bytes)
        return cls(
            expandable_segments=given("expandable_segments", _flag, False),
            max_split_size_bytes=given("max_split_size_mb", size, None),
            # for -1 torch's sum overflows, and no block is reused
            max_non_split_rounding_bytes=given("max_non_split_rounding_mb", size, segment_bytes) or 0,
            roundup_power2_divisions=given("roundup_power2_divisions", _divisions, ()),
            garbage_collection_threshold=given("garbage_collection_threshold", _threshold, 0.0),
            large_segment_size_bytes=segment_bytes,
            per_process_memory_fraction=given("per_process_memory_fraction", _share, 1.0),
        )

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
        return self.roundup_power2_divisions[min(interval, len(self.roundup_power2_divisions) - 1)]


def _items(text: str) -> Iterator[tuple[str, str]]:
    rest = "".join(text.split())
    while rest:
        match = _ITEM.match(rest)
        if match is None:
            key = re.split("[:,]", rest)[0]
            raise InvalidArgumentError(
                f"{key!r} is not followed by a value: write settings like 'key:value,key:[a:b,c:d]'"
            )
        yield match[1], match[2]
        rest = rest[match.end() :]


def _refuse(key: str, value: str, wanted: str) -> NoReturn:
    raise InvalidArgumentError(f"{key}:{value} is not a setting torch takes: it wants {wanted}")


def _flag(key: str, value: str) -> bool:
    if value not in ("True", "False"):
        _refuse(key, value, "True or False")
    return value == "True"


def _whole(key: str, value: str) -> int:
    """A number as C reads it: what follows its digits does not count."""
    match = re.match(r"[+-]?\d{1,19}", value)
    return int(match[0]) if match else _refuse(key, value, "a whole number")


def _share(key: str, value: str) -> float:
    match = re.match(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", value, re.IGNORECASE)
    share = float(match[0]) if match else -1.0
    if not 0 <= share <= 1:
        _refuse(key, value, "a number from 0 to 1")
    return share


def _threshold(key: str, value: str) -> float:
    threshold = _share(key, value)
    if threshold in (0.0, 1.0):
        _refuse(key, value, "a number between 0 and 1")
    return threshold


def _segment_size(key: str, value: str) -> int:
    size_mib = _whole(key, value)
    if size_mib <= 10:
        _refuse(key, value, "more than 10")
    return size_mib * _MIB


def _size_or_none(key: str, value: str, *, least_bytes: int) -> int | None:
    """A size in MiB that is no smaller than a segment; None: -1, without a bound."""
    size_bytes = _whole(key, value) * _MIB
    if 0 <= size_bytes < least_bytes:
        _refuse(key, value, f"{least_bytes // _MIB} or more: the size of a large segment")
    return None if size_bytes < 0 else size_bytes


def _divisions(key: str, text: str) -> tuple[int, ...]:
    """One number for all sizes, or ``[256:1,512:2,>:4]``: for sizes of so many MiB, and above the last.

    As in torch the first number serves all smaller sizes too, and powers of two that are left out are not divided.
    """
    if not text.startswith("["):
        return (_power_of_two(key, text),) * _INTERVALS
    divisions, last = [0] * _INTERVALS, -1
    for item in text[1:-1].split(","):
        boundary, colon, value = item.partition(":")
        if not colon:
            _refuse(key, item, "pairs such as [256:1,512:2,>:4]")
        steps = 0 if value == "0" else _power_of_two(key, value)
        if boundary == ">":
            after = max(last, 0) + 1
            divisions[after:] = [steps] * (_INTERVALS - after)
            continue
        index = min(_power_of_two(key, boundary).bit_length(), _INTERVALS) - 1
        if last < 0:
            divisions[:index] = [steps] * index
        divisions[index] = steps
        last = index
    return tuple(divisions)


def _power_of_two(key: str, value: str) -> int:
    number = _whole(key, value)
    if number < 1 or number & (number - 1):
        _refuse(key, value, "powers of two")
    return number
