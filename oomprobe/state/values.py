"""Attributes of objects, and what the containers in them held, put back in place."""

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

MAX_ENTRIES = 10_000  # of a container that is looked into; a longer one is data


class Attributes:
    """The attributes of one object, which refer to the same values again; those that came later go.

    Of the values, containers, tensors and arrays come back with what was in them. Inside other objects nothing is kept.
    """

    def __init__(self, owner: Any, copies: HostCopies, names: Iterable[str] | None = None) -> None:
        """With `names`, keep what these attributes hold, but not which values the attributes refer to."""
        kind, own = type(owner).__name__, vars(owner)
        self.name = f"state of {kind}"
        self._contents: list[Contents] = []
        queue = [("attributes", own)] if names is None else [(name, own[name]) for name in names]
        seen: set[int] = set()
        while queue:
            name, value = queue.pop()
            if id(value) in seen or not is_container(value):
                continue
            seen.add(id(value))
            self._contents.append(Contents(f"{name.strip('_')} of {kind}", value, copies))
            parts = value.items() if value is own else ((name, part) for part in _parts(value).values())
            queue.extend(parts)

    def forget_with(self, owner: Any) -> None:
        """Let go of everything when the owner dies."""
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
    """What was in a container, which others may refer to too. Of its tensors only copies are kept, not the tensors."""

    def __init__(self, name: str, container: Any, copies: HostCopies) -> None:
        self.name, self._container = name, container
        self._is_whole = isinstance(container, set | np.ndarray)
        self._before: Any = (
            copy.copy(container)  # a set's own method forgets its class
            if self._is_whole
            else {key: copies.keep(part) if has_bytes(part) else part for key, part in _parts(container).items()}
        )

    def restore(self) -> None:
        place, before = self._container, self._before
        if self._is_whole:
            is_same = same(place, before)
        else:
            before = {key: part.restore() if isinstance(part, AnyCopy) else part for key, part in before.items()}
            is_same = _are(_parts(place), before)
        if is_same:  # what is unchanged may be read-only
            return
        if isinstance(place, np.ndarray):
            place[...] = before
            return
        place.clear()
        if isinstance(place, dict | set):
            place.update(before)
        else:
            place.extend(before.values())

    def differs(self) -> bool:
        if self._is_whole:
            return not same(self._container, self._before)
        now = _parts(self._container)
        tensors = {key: part for key, part in self._before.items() if isinstance(part, AnyCopy)}
        changed = any(part.differs(now.get(key)) for key, part in tensors.items())
        return changed or not _are({**now, **tensors}, self._before)


def is_container(value: Any) -> bool:
    """Whether what is in a value is kept with it."""
    if isinstance(value, np.ndarray):
        return not isinstance(value, np.memmap)
    return isinstance(value, dict | list | tuple | set | deque) and len(value) <= MAX_ENTRIES


def has_bytes(value: Any) -> bool:
    """Whether a value is a tensor with memory of its own to copy."""
    return isinstance(value, torch.Tensor) and value.device.type != "meta"


def _parts(container: Any) -> dict[Any, Any]:
    """What is in a container, by key or index; tuples cannot change, but what is in them can."""
    if isinstance(container, dict):
        return dict(container.items())
    return {} if isinstance(container, set | np.ndarray) else dict(enumerate(container))


def _are(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    """Whether the same objects are there under the same keys, in the same order."""
    return one.keys() == other.keys() and all(map(is_, one.values(), other.values()))
