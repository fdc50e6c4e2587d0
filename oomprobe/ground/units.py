"""Bytes and seconds, formatted for people; and figures without those that are unknown."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from fractions import Fraction
from typing import TypeVar

from oomprobe.errors import InvalidArgumentError

_FACTOR = {
    "": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
    "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40,
}  # fmt: skip
LARGEST_BYTES = 2**63 - 1  # the most that the kernel's limits and torch's sizes can represent
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", re.IGNORECASE)


Value = TypeVar("Value")


def known(values: Iterable[Value | None]) -> list[Value]:
    """Return the values that are known, without each None.

    Examples:
        >>> known([0, None, 2])
        [0, 2]
    """
    return [value for value in values if value is not None]


def parse_bytes(text: str) -> int:
    """Parse a size with an optional unit, a power of 1000 (B, kB, MB, GB, TB) or of 1024 (KiB, MiB, GiB, TiB).

    Examples:
        >>> parse_bytes("4GiB"), parse_bytes("1.5 MB")
        (4294967296, 1500000)
    """
    match = _SIZE.fullmatch(text)
    size_bytes = 0 if match is None else int(Fraction(match[1]) * _FACTOR.get(match[2].lower(), 0))
    if not 0 < size_bytes <= LARGEST_BYTES:
        raise InvalidArgumentError(
            f"{text!r} is not a size in memory: write it like '24GiB' or '800MB'"
        )
    return size_bytes


def byte_unit(size_bytes: float) -> tuple[str, int]:
    """Return the largest binary unit not larger than `size_bytes`, and its bytes."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size_bytes) >= factor:
            return unit, factor
    return "B", 1


def format_bytes(size_bytes: float) -> str:
    """Format a size in its largest binary unit.

    Examples:
        >>> format_bytes(8_519_680), format_bytes(512), format_bytes(-3 * 2**30)
        ('8.12 MiB', '512 B', '-3.00 GiB')
    """
    unit, factor = byte_unit(size_bytes)
    return f"{size_bytes / factor:.{2 if factor > 1 else 0}f} {unit}"


def format_seconds(duration_s: float) -> str:
    """Format a duration with three figures in a suitable unit.

    Examples:
        >>> format_seconds(0.00042), format_seconds(3.14159), format_seconds(754)
        ('0.42 ms', '3.14 s', '12 min 34 s')
    """
    if duration_s < 0.9995:  # larger values in milliseconds would print as 1e+03
        return f"{duration_s * 1000:.3g} ms"
    if not 120 <= duration_s < math.inf:
        return f"{duration_s:.3g} s"
    return f"{int(duration_s // 60)} min {int(duration_s % 60)} s"
