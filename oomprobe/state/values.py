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


MAX_DEPTH = 100  # of containers in containers; deeper ones are linked lists, not training state
MAX_ENTRIES = 1_000  # a longer list of anything but tensors and containers of them is data


class Memory:
    """Remembers values; each tensor and container once, so shared and circular ones stay what they are."""

    def __init__(self) -> None:
        self.tensors: list[KeptTensor | KeptWhole | KeptParts] = []
        self.aliases: list[KeptTensor] = []
        self._known: dict[int, tuple[object, Kept]] = {}
        self._depth = 0

    def keep(self, value: Any, *, hold: bool = False) -> Kept:
        """Remember a value. `hold` keeps tensors alive; otherwise they are watched."""
        if id(value) in self._known:
            return self._known[id(value)][1]
        if isinstance(value, torch.Tensor):
            kept_tensor = keep_tensor(value, hold=hold)
            self.tensors.append(kept_tensor)
            return self._remember(value, kept_tensor)
        if _is_read_only_file(value):
            return KeptReference(value)
        if isinstance(value, set | deque | bytearray | np.ndarray) or _is_data(value):
            return self._remember(value, KeptContents(value))
        if isinstance(value, dict | list | tuple) and self._depth < MAX_DEPTH:
            return self._keep_container(value, hold=hold)
        return KeptReference(value)

    def _keep_container(self, value: Any, *, hold: bool) -> KeptContainer:
        container = KeptContainer(value)
        self._remember(value, container)
        self._depth += 1
        try:
            container.parts = {key: self.keep(part, hold=hold) for key, part in _parts(value).items()}
        finally:
            self._depth -= 1
        return container

    def alias(self, tensor: torch.Tensor) -> KeptTensor:
        """What a tensor holds, for a comparison: nothing is copied again where its storage is kept already."""
        kept = KeptTensor(tensor.detach(), hold=True)
        self.aliases.append(kept)
        return kept

    def _remember(self, value: object, kept: Kept) -> Kept:
        self._known[id(value)] = (value, kept)
        return kept

    def let_go(self) -> None:
        """From here on what is only watched may die. What is held stays known, and is never kept a second time."""
        self._known = {key: entry for key, entry in self._known.items() if _is_held(entry[1])}
        for alias in self.aliases:
            alias.let_go()
        self.aliases = []


def _is_held(kept: Kept) -> bool:
    return isinstance(kept, KeptParts) or (isinstance(kept, KeptTensor | KeptWhole) and kept.held)


def _is_read_only_file(value: Any) -> bool:
    return isinstance(value, np.memmap) and not value.flags.writeable


def _is_data(value: Any) -> bool:
    """A long list of plain values or samples: kept by its entries, which are not looked into."""
    if type(value) is not list or len(value) <= MAX_ENTRIES:
        return False
    return not any(isinstance(part, torch.Tensor) or _leads_to_tensors(part) for part in value)


def _leads_to_tensors(part: Any) -> bool:
    if isinstance(part, dict):
        return any(isinstance(one, torch.Tensor | dict | list) for one in part.values())
    return isinstance(part, list | tuple) and any(isinstance(one, torch.Tensor | dict | list) for one in part)


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
    """A set, deque, bytearray, array or long list, kept by a copy of its contents."""

    def __init__(self, value: Any) -> None:
        self._value, self._copy = value, copy.copy(value)

    def recall(self) -> Any:
        if not self.differs(self._value):  # what is unchanged may be read-only
            return self._value
        if isinstance(self._value, np.ndarray):
            self._value[...] = self._copy
        else:
            self._value.clear()
            fill = self._value.update if isinstance(self._value, set) else self._value.extend
            fill(self._copy)
        return self._value

    def differs(self, value: Any) -> bool:
        if value is not self._value:
            return True
        if isinstance(value, np.ndarray):
            return bool(value.tobytes() != self._copy.tobytes())
        if isinstance(value, list | deque):
            return len(value) != len(self._copy) or any(a is not b for a, b in zip(value, self._copy, strict=True))
        return bool(value != self._copy)

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
