"""Saved attributes of objects and contents of their containers, restored in place."""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Iterable
from operator import is_
from typing import Any

import numpy as np
import torch

from oomprobe.state.compare import same
from oomprobe.state.tensors import AnyCopy, HostCopies

MAX_ENTRIES = 10_000  # a longer container is data, which is not saved


class Attributes:
    """The saved attributes of one object.

    `restore` makes each attribute refer to its original value and removes later attributes. Containers, tensors and arrays
    among the values get their contents back; other objects are not looked into.
    """

    def __init__(self, owner: Any, copies: HostCopies, names: Iterable[str] | None = None) -> None:
        """Save all attributes; with `names`, save only the contents of these attributes."""
        kind, attributes = type(owner).__name__, vars(owner)
        self.name = f"state of {kind}"
        self._contents: list[Contents] = []
        queue = [("attributes", attributes)] if names is None else [(name, attributes[name]) for name in names]
        seen: set[int] = set()
        while queue:
            name, value = queue.pop()
            if id(value) in seen or not is_container(value):
                continue
            seen.add(id(value))
            self._contents.append(Contents(f"{name.strip('_')} of {kind}", value, copies))
            queue.extend(value.items() if value is attributes else ((name, part) for part in _parts(value).values()))

    def forget_with(self, owner: Any) -> None:
        """Drop the saved contents when the owner is deleted."""
        contents = self._contents
        self._owner = weakref.ref(owner, lambda _: contents.clear())

    @property
    def is_gone(self) -> bool:
        return not self._contents

    def restore(self) -> None:
        for one in self._contents:
            one.restore()

    def differences(self) -> list[str]:
        return list(dict.fromkeys(one.name for one in self._contents if one.differs()))


class Contents:
    """The saved contents of one container. Its tensors are copied, not kept alive."""

    def __init__(self, name: str, container: Any, copies: HostCopies) -> None:
        self.name, self._container = name, container
        self._is_copied = isinstance(container, set | np.ndarray)
        self._before: Any = (
            copy.copy(container)  # unlike set.copy(), this keeps the class
            if self._is_copied
            else {key: copies.keep(part) if has_bytes(part) else part for key, part in _parts(container).items()}
        )

    def restore(self) -> None:
        container, before = self._container, self._before
        if self._is_copied:
            is_unchanged = same(container, before)
        else:
            before = {key: part.restore() if isinstance(part, AnyCopy) else part for key, part in before.items()}
            is_unchanged = _are_identical(_parts(container), before)
        if is_unchanged:  # it may be read-only
            return
        if isinstance(container, np.ndarray):
            container[...] = before
            return
        container.clear()
        if isinstance(container, dict | set):
            container.update(before)
        else:
            container.extend(before.values())

    def differs(self) -> bool:
        if self._is_copied:
            return not same(self._container, self._before)
        now = _parts(self._container)
        tensors = {key: part for key, part in self._before.items() if isinstance(part, AnyCopy)}
        changed = any(part.differs(now.get(key)) for key, part in tensors.items())
        return changed or not _are_identical({**now, **tensors}, self._before)


def is_container(value: Any) -> bool:
    """Return whether the contents of a value are saved."""
    if isinstance(value, np.ndarray):
        return not isinstance(value, np.memmap)
    return isinstance(value, dict | list | tuple | set | deque) and len(value) <= MAX_ENTRIES


def has_bytes(value: Any) -> bool:
    """Return whether a value is a tensor with data to copy."""
    return isinstance(value, torch.Tensor) and value.device.type != "meta"


def _parts(container: Any) -> dict[Any, Any]:
    """Return the items of a container by key or index. Tuples cannot change, but their items can."""
    if isinstance(container, dict):
        return dict(container.items())
    return {} if isinstance(container, set | np.ndarray) else dict(enumerate(container))


def _are_identical(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    """Return whether both hold the same objects under the same keys, in the same order."""
    return one.keys() == other.keys() and all(map(is_, one.values(), other.values()))
