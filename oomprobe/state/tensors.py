"""Tensors kept in host memory and put back in place, byte for byte."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from oomprobe.state.compare import same_tensors
from oomprobe.state.shelf import Shelf
from oomprobe.state.storage import KeptStorage


def _is_wrapper(tensor: Any) -> bool:
    return bool(is_traceable_wrapper_subclass(tensor))


def keep_tensor(tensor: torch.Tensor, *, hold: bool) -> KeptTensor | KeptWhole | KeptParts:
    """Remember a tensor; `copy_storages` then takes its bytes."""
    if _is_wrapper(tensor):
        return KeptParts(tensor)
    hold = hold or isinstance(tensor, torch.nn.Parameter) or (tensor.is_leaf and tensor.requires_grad)
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return KeptWhole(tensor, hold=hold)
    return KeptTensor(tensor, hold=hold)


class KeptTensor:
    """One tensor as it was: which memory it looked at, how, and the bytes.

    A parameter or buffer is held: its own memory comes back to it. Gradients and optimizer state are only watched,
    so that a step which replaces them is not charged for the old ones; they are made anew when they have died.
    """

    def __init__(self, tensor: torch.Tensor, *, hold: bool) -> None:
        self.watch = _watching(tensor, hold=hold)
        self._held = (tensor, tensor.detach()) if hold else None
        self._geometry = (tensor.storage_offset(), tensor.size(), tensor.stride())
        self._dtype, self.device = tensor.dtype, tensor.device
        self._requires_grad = tensor.requires_grad and tensor.is_leaf
        self._storage: KeptStorage | None = None

    @property
    def held(self) -> bool:
        return self._held is not None

    @property
    def taken(self) -> bool:
        """Whether its bytes have been taken."""
        return self._storage is not None

    def take(self, storage: KeptStorage) -> None:
        """Remember the memory it looks at."""
        self._storage = storage

    @property
    def storage(self) -> KeptStorage:
        """What was taken."""
        assert self._storage is not None
        return self._storage

    def let_go(self) -> None:
        """Keep the bytes alone."""
        self.watch, self._held = _nothing, None

    def hold(self, tensor: torch.Tensor) -> None:
        """Hold it again, after it was let go."""
        self.watch, self._held = _watching(tensor, hold=True), (tensor, tensor.detach())

    def on_host(self) -> torch.Tensor:
        """The tensor as it was, in host memory."""
        return self._view_of(self.storage.on_host())

    def _view_of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        return torch.empty(0, dtype=self._dtype, device=storage.device).set_(storage, *self._geometry)

    def put_back(self) -> None:
        """Restore it, in place where it is still there."""
        with torch.no_grad():
            tensor, storage = self.watch(), self.storage.put_back()
            if tensor is None:
                tensor = self._view_of(storage)
                self.watch = lambda: tensor
            elif self._held is not None:
                tensor.data = self._held[1]
            elif not self._looks_same(tensor):
                tensor.data = self._view_of(storage)
            if tensor.is_leaf and tensor.requires_grad != self._requires_grad:
                tensor.requires_grad_(self._requires_grad)

    def recall(self) -> torch.Tensor:
        """The tensor, once it was put back."""
        tensor = self.watch()
        assert tensor is not None
        return tensor

    def _looks_same(self, tensor: torch.Tensor) -> bool:
        geometry = (tensor.storage_offset(), tensor.size(), tensor.stride())
        alike = geometry == self._geometry and tensor.dtype == self._dtype and tensor.device == self.device
        return alike and self.storage.is_under(tensor)

    def differs(self, tensor: Any) -> bool:
        """Whether a tensor is not, bit for bit, what was kept."""
        if not isinstance(tensor, torch.Tensor) or not self._looks_same(tensor):
            return True
        if (tensor.requires_grad and tensor.is_leaf) != self._requires_grad:
            return True
        return self.storage.differs(tensor.untyped_storage())


def _watching(tensor: torch.Tensor, *, hold: bool) -> Callable[[], torch.Tensor | None]:
    """Of what is held no weak reference, with which torch.utils.swap_tensors would refuse it."""
    return (lambda: tensor) if hold else weakref.ref(tensor)


def _nothing() -> None:
    return None


class KeptWhole:
    """A sparse or quantised tensor, kept and compared as a whole; made anew where it has died."""

    def __init__(self, tensor: torch.Tensor, *, hold: bool) -> None:
        self.device = tensor.device
        self.watch = _watching(tensor, hold=hold)
        self._held = tensor if hold else None
        self._requires_grad = tensor.requires_grad and tensor.is_leaf
        self._copy = tensor.detach().cpu().clone()

    @property
    def held(self) -> bool:
        return self._held is not None

    def put_back(self) -> None:
        tensor = self.watch()
        if tensor is None:
            tensor = self._copy.to(self.device, copy=True)
            self.watch = lambda: tensor
        elif not same_tensors(tensor, self._copy):
            tensor.data = self._copy.to(self.device, copy=True)
        if tensor.is_leaf and tensor.requires_grad != self._requires_grad:
            tensor.requires_grad_(self._requires_grad)

    def recall(self) -> torch.Tensor:
        tensor = self.watch()
        assert tensor is not None
        return tensor

    def on_host(self) -> torch.Tensor:
        return self._copy

    def differs(self, tensor: Any) -> bool:
        if not isinstance(tensor, torch.Tensor) or tensor.device != self.device:
            return True
        if (tensor.requires_grad and tensor.is_leaf) != self._requires_grad:
            return True
        return not same_tensors(tensor, self._copy)


class KeptParts:
    """A wrapper such as DTensor or a quantised weight: the tensors inside it are kept, the wrapper is held."""

    def __init__(self, tensor: Any) -> None:
        self.device: torch.device = tensor.device
        self._tensor = tensor
        names, _ = self._tensor.__tensor_flatten__()
        self.parts = {name: keep_tensor(getattr(tensor, name), hold=True) for name in names}

    def put_back(self) -> None:
        for part in self.parts.values():
            part.put_back()

    def recall(self) -> torch.Tensor:
        return self._tensor  # type: ignore[no-any-return]

    def on_host(self) -> dict[str, Any]:
        return {name: part.on_host() for name, part in self.parts.items()}

    def differs(self, tensor: Any) -> bool:
        return tensor is not self._tensor or any(p.differs(getattr(tensor, n)) for n, p in self.parts.items())


def plain_parts(kept: KeptTensor | KeptWhole | KeptParts) -> list[KeptTensor]:
    """The tensors with a storage of their own in what was kept."""
    if isinstance(kept, KeptParts):
        return [plain for part in kept.parts.values() for plain in plain_parts(part)]
    return [kept] if isinstance(kept, KeptTensor) else []


def storages_of(kept: Iterable[KeptTensor]) -> dict[int, tuple[torch.UntypedStorage, list[KeptTensor]]]:
    """Storages by identity, each with the tensors that look at it."""
    found: dict[int, tuple[torch.UntypedStorage, list[KeptTensor]]] = {}
    for one in kept:
        tensor = one.watch()
        if tensor is not None:
            storage = tensor.untyped_storage()
            found.setdefault(storage._cdata, (storage, []))[1].append(one)
    return found


def copy_storages(storages: dict[int, tuple[torch.UntypedStorage, list[KeptTensor]]], shelf: Shelf | None) -> None:
    """Take the bytes, each storage once however many tensors look at it."""
    for storage, lookers in storages.values():
        kept = KeptStorage(storage, shelf)
        for one in lookers:
            one.take(kept)
