"""Attributes of classes, modules and objects that are replaced for a while."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

ABSENT: Any = object()
Patch = tuple[Any, str, Any]  # the holder of an attribute, its name, and what stands there instead


@contextmanager
def replaced(patches: Iterable[Patch]) -> Iterator[None]:
    """Replace attributes: a simulated call has 200, and `unittest.mock.patch` takes 8 us for each.

    Examples:
        >>> from types import SimpleNamespace
        >>> class Interrupted(type):
        ...     def __delattr__(cls, name):
        ...         raise KeyboardInterrupt
        >>> first, last = SimpleNamespace(size=1), Interrupted("Last", (), {})
        >>> try:
        ...     with replaced([(first, "size", 2), (last, "size", 2)]):
        ...         print(first.size)
        ... except KeyboardInterrupt:
        ...     print(first.size)
        2
        1
    """
    before: list[Patch] = []
    try:
        for holder, name, value in patches:
            before.append((holder, name, vars(holder).get(name, ABSENT)))
            put(holder, name, value)
        yield
    finally:
        _put_all_back(before)


def _put_all_back(before: list[Patch]) -> None:
    """Put attributes back, the last first; what interrupts this, such as Ctrl-C, is raised once all are back."""
    try:
        while before:
            put(*before.pop())
    finally:
        if before:
            _put_all_back(before)


def put(holder: Any, name: str, value: Any) -> None:
    """Give a holder an attribute of its own, past what its class does about attributes; ABSENT: none."""
    if isinstance(holder, type):
        if value is ABSENT:
            delattr(holder, name)
        else:
            setattr(holder, name, value)
    elif value is ABSENT:
        vars(holder).pop(name, None)
    else:
        vars(holder)[name] = value
