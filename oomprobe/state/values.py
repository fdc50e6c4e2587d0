"""Python's own containers kept with what was in them; everything else is kept as a reference."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any, Protocol

import numpy as np
import torch

from oomprobe.state.tensors import KeptParts, KeptTensor, KeptWhole, keep_tensor


class Kept(Protocol):
    """Something remembered: it can be put back, and compared with what is there now."""

    def recall(self) -> Any: ...

    def differs(self, value: Any) -> bool: ...

    def on_host(self) -> Any: ...


class Memory:
    """Remembers values; each tensor and container once, so shared and circular ones stay what they are."""

    def __init__(self) -> None:
        self.tensors: list[KeptTensor | KeptWhole | KeptParts] = []
        self._known: dict[int, tuple[object, Kept]] = {}

    def keep(self, value: Any, *, hold: bool = False) -> Kept:
        """Remember a value. `hold` keeps tensors alive; otherwise they are watched."""
        if id(value) in self._known:
            return self._known[id(value)][1]
        if isinstance(value, torch.Tensor):
            kept_tensor = keep_tensor(value, hold=hold)
            self.tensors.append(kept_tensor)
            return self._remember(value, kept_tensor)
        if isinstance(value, dict | list | tuple):
            container = KeptContainer(value)
            self._remember(value, container)
            container.parts = {key: self.keep(part, hold=hold) for key, part in _parts(value).items()}
            return container
        if isinstance(value, set | deque | bytearray | np.ndarray):
            return self._remember(value, KeptContents(value))
        return KeptReference(value)

    def _remember(self, value: object, kept: Kept) -> Kept:
        self._known[id(value)] = (value, kept)
        return kept

    def let_go(self) -> None:
        """From here on what is only watched may die. What is held stays known, and is never kept a second time."""
        self._known = {key: entry for key, entry in self._known.items() if _is_held(entry[1])}

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A held tensor as it was, in host memory."""
        return self._known[id(tensor)][1].on_host()  # type: ignore[no-any-return]


def _is_held(kept: Kept) -> bool:
    return isinstance(kept, KeptParts) or (isinstance(kept, KeptTensor) and kept.held)


class KeptReference:
    """A value that is not looked into."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def recall(self) -> Any:
        return self._value

    def differs(self, value: Any) -> bool:
        return value is not self._value

    def on_host(self) -> Any:
        return self._value


class KeptContents:
    """A set, deque, bytearray or array, kept by a copy of its contents."""

    def __init__(self, value: Any) -> None:
        self._value, self._copy = value, copy.copy(value)

    def recall(self) -> Any:
        if isinstance(self._value, np.ndarray):
            self._value[...] = self._copy
        else:
            self._value.clear()
            fill = self._value.update if isinstance(self._value, set) else self._value.extend
            fill(self._copy)
        return self._value

    def differs(self, value: Any) -> bool:
        if isinstance(value, np.ndarray):
            return value is not self._value or value.tobytes() != self._copy.tobytes()
        return value is not self._value or value != self._copy

    def on_host(self) -> Any:
        return self._copy


class KeptContainer:
    """A dict, list or tuple and everything in it."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self.parts: dict[Any, Kept] = {}
        self._busy = False  # a container may contain itself

    def recall(self) -> Any:
        if self._busy:
            return self._value
        self._busy = True
        try:
            parts = {key: part.recall() for key, part in self.parts.items()}
        finally:
            self._busy = False
        self._value = _refill(self._value, parts)
        return self._value

    def differs(self, value: Any) -> bool:
        if self._busy:
            return False
        now = _parts(value) if type(value) is type(self._value) else {}
        if value is not self._value or list(now) != list(self.parts):
            return True
        self._busy = True
        try:
            return any(part.differs(now[key]) for key, part in self.parts.items())
        finally:
            self._busy = False

    def on_host(self) -> dict[Any, Any]:
        """Its parts by key or index (a container inside itself is left out)."""
        if self._busy:
            return {}
        self._busy = True
        try:
            return {key: part.on_host() for key, part in self.parts.items()}
        finally:
            self._busy = False


def _parts(value: Any) -> dict[Any, Any]:
    return dict(value) if isinstance(value, dict) else dict(enumerate(value))


def _refill(value: Any, parts: dict[Any, Any]) -> Any:
    """Give a container its old contents, keeping the container itself."""
    if isinstance(value, dict):
        value.clear()
        value.update(parts)
    elif isinstance(value, list):
        value[:] = parts.values()
    elif any(old is not new for old, new in zip(value, parts.values(), strict=True)):
        return type(value)(*parts.values()) if hasattr(value, "_fields") else type(value)(parts.values())
    return value
