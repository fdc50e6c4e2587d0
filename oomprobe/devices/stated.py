"""Budgets that are stated with a device, such as ``"cuda:1:8GiB"``."""

from __future__ import annotations

from oomprobe.errors import InvalidArgumentError
from oomprobe.units import byte_unit, format_bytes, parse_bytes

TYPED_SHARE = 3 / 4  # of what is free now, to be typed into a command: in a moment less is free


def split_budget(text: str) -> tuple[str, int | None]:
    """Part a device from the budget stated with it; a number without a unit is an index.

    Example:
        >>> split_budget("cuda:1:8GiB"), split_budget("xpu:2GiB"), split_budget("cuda:1")
        (('cuda:1', 8589934592), ('xpu', 2147483648), ('cuda:1', None))
    """
    device, colon, last = text.rpartition(":")
    if not colon or not last[:1].isdecimal() or not last.rstrip()[-1:].isalpha():
        return text, None
    return device, parse_bytes(last)


def check_stated(stated_bytes: int | None, total_bytes: int, name: str) -> None:
    """Refuse a budget that the device does not have."""
    if stated_bytes is not None and stated_bytes > total_bytes:
        raise InvalidArgumentError(
            f"{format_bytes(stated_bytes)} of {name} were asked for, and all of it is {format_bytes(total_bytes)}: "
            f"state less, such as {typed_size(total_bytes)!r}"
        )


def name_with(name: str, stated_bytes: int | None) -> str:
    """The name of a device of which only a part may be used."""
    return name if stated_bytes is None else f"{name}, {format_bytes(stated_bytes)} of it"


def typed_size(free_bytes: int) -> str:
    """Most of what is free, as one would type it.

    Example:
        >>> typed_size(16 * 2**30), typed_size(1000)
        ('12GiB', '750B')
    """
    share = max(1, int(free_bytes * TYPED_SHARE))
    unit, factor = byte_unit(share)
    return f"{share // factor}{unit}"
