"""An optimizer that shows itself only by stepping: kept without keeping it, or what it holds, alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from oomprobe.state.attributes import attributes_of, delete_attribute, set_attribute
from oomprobe.state.compare import same
from oomprobe.state.containers import entries, rebuilt, refill, same_keys
from oomprobe.state.nested import watching
from oomprobe.state.objects import OPTIMIZER_STATE
from oomprobe.state.tensors import KeptParts, KeptTensor, KeptWhole, keep_tensor
from oomprobe.state.values import KeptReference, is_looked_into

_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_NOT_KEPT = object()  # a hook, a patched method: it may lead back to the optimizer


class KeptLate:
    """The tensors, containers and plain values of an optimizer; nothing when it has died, for nothing is left then.

    Its parameters are not kept here: the keeper holds them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.watch: Callable[[], torch.optim.Optimizer | None] = weakref.ref(optimizer)
        self.tensors: list[KeptTensor | KeptWhole | KeptParts] = []
        self._met = {id(optimizer)}
        self._kept = {name: self._keep(part, name in OPTIMIZER_STATE) for name, part in vars(optimizer).items()}

    def _keep(self, value: Any, inside: bool) -> Any:
        return rebuilt(value, lambda leaf: self._keep_leaf(leaf, inside))

    def _keep_leaf(self, value: Any, inside: bool) -> Any:
        if isinstance(value, torch.Tensor):
            # A weak reference to a parameter would stand in the way of torch.utils.swap_tensors.
            return KeptReference(value) if value.is_leaf and value.requires_grad else self._keep_tensor(value)
        if isinstance(value, _PLAIN):
            return value
        if inside and is_looked_into(value) and id(value) not in self._met:
            self._met.add(id(value))
            return _Inside(value, {name: self._keep(part, inside) for name, part in attributes_of(value).items()})
        return _NOT_KEPT

    def _keep_tensor(self, tensor: torch.Tensor) -> KeptTensor | KeptWhole | KeptParts:
        self.tensors.append(keep_tensor(tensor, hold=False))
        return self.tensors[-1]

    @property
    def name(self) -> str:
        return f"state of {type(self.watch()).__name__}"

    def put_back(self) -> None:
        optimizer = self.watch()
        if optimizer is not None:
            for tensor in self.tensors:
                tensor.put_back()
            _put_attributes_back(optimizer, self._kept)

    def differences(self) -> list[str]:
        optimizer = self.watch()
        if optimizer is None or not _attributes_differ(optimizer, self._kept):
            return []
        return [f"state of {type(optimizer).__name__}"]


class _Inside:
    """An object that an optimizer keeps in its state, with what it holds."""

    def __init__(self, value: Any, parts: dict[str, Any]) -> None:
        self.watch, self.kind, self.parts = watching(value), type(value), parts


def _put_attributes_back(value: Any, kept: dict[str, Any]) -> None:
    now = attributes_of(value)
    for name in now.keys() - kept.keys():
        delete_attribute(value, name)
    for name, part in kept.items():
        if part is not _NOT_KEPT:
            before = _restored(part, now.get(name))
            if name not in now or now[name] is not before:
                set_attribute(value, name, before)


def _attributes_differ(value: Any, kept: dict[str, Any]) -> bool:
    now = attributes_of(value)
    unkept = {name for name, part in kept.items() if part is _NOT_KEPT}
    if now.keys() - unkept != kept.keys() - unkept:
        return True
    return any(_differs(part, now[name]) for name, part in kept.items() if name in now)


def _restored(kept: Any, now: Any) -> Any:
    if isinstance(kept, dict | list | tuple):
        return _restored_container(kept, now)
    if isinstance(kept, _Inside):
        return _restored_object(kept, now)
    if isinstance(kept, KeptReference | KeptTensor | KeptWhole | KeptParts):
        return kept.recall()
    return now if kept is _NOT_KEPT else kept


def _restored_container(kept: Any, now: Any) -> Any:
    there = entries(now) if type(now) is type(kept) else {}
    parts = {
        key: _restored(part, there.get(key))
        for key, part in entries(kept).items()
        if part is not _NOT_KEPT or key in there or not isinstance(kept, dict)
    }
    if type(now) is type(kept):
        return refill(now, parts)
    return refill(kept if isinstance(kept, tuple) else rebuilt(kept, lambda _: None), parts)


def _restored_object(kept: _Inside, now: Any) -> Any:
    value = kept.watch()
    if value is None:
        value = now if type(now) is kept.kind else object.__new__(kept.kind)
    _put_attributes_back(value, kept.parts)
    return value


def _differs(kept: Any, now: Any) -> bool:
    if kept is _NOT_KEPT:
        return False
    if isinstance(kept, dict | list | tuple):
        if type(now) is not type(kept) or not same_keys(entries(kept), entries(now)):
            return True
        return any(_differs(a, b) for a, b in zip(entries(kept).values(), entries(now).values(), strict=True))
    if isinstance(kept, _Inside):
        return type(now) is not kept.kind or _attributes_differ(now, kept.parts)
    if isinstance(kept, KeptReference | KeptTensor | KeptWhole | KeptParts):
        return kept.differs(now)
    return not same(kept, now)
