"""Attributes, and the containers in them, as they were: put back in place, and compared with what is there now."""

from __future__ import annotations

import copy
import enum
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable
from operator import is_
from typing import Any

import numpy as np
import torch

from oomprobe.state.compare import same
from oomprobe.state.tensors import AnyCopy, HostCopies

MAX_DEPTH = 10  # of containers in containers; deeper ones are linked lists, not training state
MAX_ENTRIES = 10_000  # of a container that is looked through; a longer one is data

_TORCHS = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_PLAIN = (int, float, complex, str, bytes, type(None), type, np.generic, enum.Enum, *_TORCHS)
_CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)


def is_plain(value: Any, depth: int = MAX_DEPTH) -> bool:
    """Whether a value, or all that a container holds, is a number, a text, a flag, a function or a tensor.

    Example:
        >>> is_plain({"sizes": [1, (2, "b")], "table": torch.ones(2)}), is_plain([object()])
        (True, False)
    """
    if isinstance(value, dict | list | tuple | set | deque):
        if len(value) > MAX_ENTRIES or not depth:
            return False
        return all(is_plain(part, depth - 1) for part in (value.values() if isinstance(value, dict) else value))
    if isinstance(value, np.ndarray):
        return not isinstance(value, np.memmap)
    return isinstance(value, (torch.Tensor, *_PLAIN, *_CODE))


def keep_value(value: Any, copies: HostCopies, *, hold: bool, depth: int = MAX_DEPTH) -> Kept:
    """Remember a value: tensors by a copy, containers by what is in them, anything else as itself.

    With `hold`, containers and objects are kept alive, so that the same ones come back. Tensors are not.
    """
    if isinstance(value, torch.Tensor) and value.device.type != "meta":
        return copies.keep(value)
    if isinstance(value, dict | list | tuple) and depth:
        parts = {key: keep_value(one, copies, hold=hold, depth=depth - 1) for key, one in entries(value).items()}
        return Container(value, parts, hold=hold)
    if isinstance(value, set | deque | np.ndarray):
        return Contents(value)
    return Reference(value, hold=hold)


class Reference:
    """A value that is not looked into. What is not held is left as it is where it has died."""

    def __init__(self, value: Any, *, hold: bool) -> None:
        self._is_held = hold or isinstance(value, _PLAIN) or type(value).__weakrefoffset__ == 0
        self._find = (lambda: value) if self._is_held else weakref.ref(value)

    def restore(self, now: Any) -> Any:
        before = self._find()
        return before if self._is_held or before is not None else now

    def differs(self, now: Any) -> bool:
        before = self._find()
        if before is now or (before is None and not self._is_held):
            return False
        return not (isinstance(before, _PLAIN) and same(before, now))


class Contents:
    """A set, deque or array, kept by a copy of what is in it."""

    def __init__(self, value: Any) -> None:
        self._value, self._copy = value, copy.copy(value)

    def restore(self, now: Any) -> Any:
        if same(self._value, self._copy):  # what is unchanged may be read-only
            return self._value
        if isinstance(self._value, np.ndarray):
            self._value[...] = self._copy
        else:
            self._value.clear()
            (self._value.update if isinstance(self._value, set) else self._value.extend)(self._copy)
        return self._value

    def differs(self, now: Any) -> bool:
        return now is not self._value or not same(now, self._copy)


class Container:
    """A dict, list or tuple and what is in it, by key or index."""

    def __init__(self, value: Any, parts: dict[Any, Kept], *, hold: bool) -> None:
        self._kind: Any = type(value)
        self._parts = parts
        self._factory = value.default_factory if isinstance(value, defaultdict) else None
        self._value = value if hold and not isinstance(value, tuple) else None  # a tuple would hold its tensors

    def restore(self, now: Any) -> Any:
        place = now if self._value is None else self._value
        there = entries(place) if type(place) is self._kind else None
        parts = {key: part.restore(None if there is None else there.get(key)) for key, part in self._parts.items()}
        if there is not None and _same_keys(there, parts) and all(map(is_, there.values(), parts.values())):
            return place  # what is unchanged may refuse to be written
        if issubclass(self._kind, tuple):
            return getattr(self._kind, "_make", self._kind)(parts.values())
        if there is None:
            place = defaultdict(self._factory) if self._kind is defaultdict else self._kind()
        place.clear()
        place.update(parts) if isinstance(place, dict) else place.extend(parts.values())
        return place

    def differs(self, now: Any) -> bool:
        if type(now) is not self._kind or (self._value is not None and now is not self._value):
            return True
        there = entries(now)
        if not _same_keys(self._parts, there):
            return True
        return any(part.differs(one) for part, one in zip(self._parts.values(), there.values(), strict=True))


Kept = (
    Reference | Contents | Container | AnyCopy
)  # each has ``restore(now)``, what was there before, and ``differs(now)``


def entries(value: Any) -> dict[Any, Any]:
    """What a dict, list or tuple holds, by key or index."""
    return dict(value.items() if isinstance(value, dict) else enumerate(value))


def _same_keys(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    """In the same order; keys may be tensors, which do not answer to ``==``."""
    return len(one) == len(other) and all(
        a is b or (not isinstance(a, torch.Tensor) and a == b) for a, b in zip(one, other, strict=True)
    )


class Attributes:
    """Attributes of one object as they were; those that came later go.

    With `hold`, the owner and what its attributes refer to are kept alive. `others` are neither kept nor taken away.
    """

    def __init__(self, owner: Any, copies: HostCopies, *, hold: bool, others: Iterable[str] = ()) -> None:
        self._kind, self._others = type(owner).__name__, set(others)
        self.name = f"state of {self._kind}"
        self._find = (lambda: owner) if hold else weakref.ref(owner)
        kept = {name: value for name, value in vars(owner).items() if name not in self._others}
        self._parts = {name: keep_value(value, copies, hold=hold) for name, value in kept.items()}

    @property
    def is_gone(self) -> bool:
        """Whether the owner has died: then nothing is left to put back."""
        return self._find() is None

    def restore(self) -> None:
        owner = self._find()
        if owner is None:
            return
        now = vars(owner)
        for name in now.keys() - self._parts.keys() - self._others:
            del now[name]
        for name, part in self._parts.items():
            before = part.restore(now.get(name))
            if name not in now or now[name] is not before:
                now[name] = before

    def differences(self) -> list[str]:
        owner = self._find()
        if owner is None:
            return []
        now = {name: one for name, one in vars(owner).items() if name not in self._others}
        changed = now.keys() ^ self._parts.keys()
        changed |= {name for name in now.keys() & self._parts.keys() if self._parts[name].differs(now[name])}
        return [f"{name.strip('_')} of {self._kind}" for name in sorted(changed)]
