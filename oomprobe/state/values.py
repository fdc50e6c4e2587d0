"""What is remembered of values, each once; what is not looked into is kept as a reference."""

from __future__ import annotations

import copy
import enum
import gc
import types
import weakref
from collections import deque
from collections.abc import Container, Iterable
from typing import Any

import numpy as np
import torch

from oomprobe.state.attributes import KeptAttributes, attributes_of
from oomprobe.state.containers import entries
from oomprobe.state.kept import Kept
from oomprobe.state.nested import KeptContainer, KeptInside
from oomprobe.state.own import has_state, is_of_library
from oomprobe.state.tensors import KeptParts, KeptTensor, KeptWhole, keep_tensor

MAX_DEPTH = 100  # of containers in containers; deeper ones are linked lists, not training state
MAX_OBJECTS = 10_000  # that are looked into: a preconditioner a parameter, not a data set
MAX_ENTRIES = 1_000  # a longer list of anything but tensors and containers of them is data

_NONE = (None, None)
_CODE = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_TORCHS = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_PLAIN = (int, float, complex, str, bytes, type(None), np.generic, enum.Enum, *_CODE, *_TORCHS)


class Memory:
    """Remembers values; each tensor and container once, so shared and circular ones stay what they are."""

    def __init__(self) -> None:
        self.tensors: list[KeptTensor | KeptWhole | KeptParts] = []
        self.aliases: list[KeptTensor] = []
        self._known: dict[int, tuple[object, Kept]] = {}
        self._depth = self._objects = 0

    def keep(self, value: Any, *, hold: bool = False, inside: bool = False) -> Kept:
        """Remember a value. `hold` keeps tensors alive; otherwise they are watched. `inside` looks into objects too."""
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
        if self._depth < MAX_DEPTH:
            return self._keep_nested(value, hold=hold, inside=inside)
        return KeptReference(value)

    def _keep_nested(self, value: Any, *, hold: bool, inside: bool) -> Kept:
        self._depth += 1
        try:
            if isinstance(value, dict | list | tuple):
                container = KeptContainer(value)
                self._remember(value, container)
                container.parts = {k: self.keep(v, hold=hold, inside=inside) for k, v in entries(value).items()}
                container.attributes = self.keep_attributes(value, inside=attributes_of(value) if inside else ())
                return container
            if inside and is_looked_into(value) and self._objects < MAX_OBJECTS:
                self._objects += 1
                looked_into = KeptInside(value)
                self._remember(value, looked_into)
                looked_into.attributes = self.keep_attributes(value, inside=attributes_of(value))
                return looked_into
        finally:
            self._depth -= 1
        return KeptReference(value)

    def keep_attributes(self, value: Any, *, inside: Container[str] = ()) -> KeptAttributes:
        """Remember what an object holds by name; under the names in `inside` objects are looked into."""
        # First those: what is met again under another name is known then, and looked into as well.
        named = sorted(attributes_of(value).items(), key=lambda pair: pair[0] not in inside)
        return KeptAttributes({name: self.keep(part, inside=name in inside) for name, part in named})

    def alias(self, tensor: torch.Tensor) -> KeptTensor:
        """What a tensor holds, for a comparison: nothing is copied again where its storage is kept already."""
        kept = KeptTensor(tensor.detach(), hold=True)
        self.aliases.append(kept)
        return kept

    def _remember(self, value: object, kept: Kept) -> Kept:
        self._known[id(value)] = (value, kept)
        return kept

    def release(self, keys: Iterable[int]) -> set[int]:
        """Forget held tensors that nothing else refers to any more.

        Args:
            keys: Their ids.

        Returns:
            The ids of those that are gone.
        """
        loose = [(key, *self._loosened(key)) for key in keys if isinstance(self._known.get(key, _NONE)[1], KeptTensor)]
        gc.collect()
        gone = set()
        for key, reference, kept in loose:
            tensor = reference()
            if tensor is None:
                gone.add(key)
            else:
                kept.hold(tensor)
                self._known[key] = (tensor, kept)
        dead = {id(kept) for key, _, kept in loose if key in gone}
        self.tensors = [kept for kept in self.tensors if id(kept) not in dead]
        return gone

    def value(self, key: int) -> Any:
        """A held tensor, by its id."""
        return self._known[key][0]

    def _loosened(self, key: int) -> tuple[weakref.ref[Any], KeptTensor]:
        tensor, kept = self._known.pop(key)
        assert isinstance(kept, KeptTensor)
        kept.let_go()
        return weakref.ref(tensor), kept

    def let_go(self) -> None:
        """From here on what is only watched may die. What is held stays known, and is never kept a second time."""
        self._known = {key: entry for key, entry in self._known.items() if _is_held(entry[1])}
        for alias in self.aliases:
            alias.let_go()
        self.aliases = []


def _is_held(kept: Kept) -> bool:
    return isinstance(kept, KeptParts) or (isinstance(kept, KeptTensor | KeptWhole) and kept.held)


def is_looked_into(value: Any) -> bool:
    """Whether an object is some attributes and no more: what has state of its own is kept by itself."""
    if (
        has_state(value)
        or is_of_library(type(value))
        or isinstance(value, torch.nn.Module | torch.utils.data.DataLoader)
    ):
        return False
    return not isinstance(value, type) and (hasattr(value, "__dict__") or bool(attributes_of(value)))


def is_plain(value: Any, depth: int = 3) -> bool:
    """Whether a value, or all that a container holds, is a number, a text, a flag, a function: nothing with memory."""
    if isinstance(value, dict | list | tuple | set | frozenset | deque):
        if len(value) > MAX_ENTRIES or not depth:
            return False
        parts = [*dict.keys(value), *dict.values(value)] if isinstance(value, dict) else value
        return all(is_plain(part, depth - 1) for part in parts)
    return isinstance(value, _PLAIN)


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
        if isinstance(self._value, set):
            set.clear(self._value)
            set.update(self._value, self._copy)
        elif isinstance(self._value, deque):
            deque.clear(self._value)
            deque.extend(self._value, self._copy)
        else:  # an array of no dimensions has no slices
            self._value[... if isinstance(self._value, np.ndarray) else slice(None)] = self._copy
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
