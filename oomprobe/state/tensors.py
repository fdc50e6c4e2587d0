"""Copies of tensors in host memory, restored in place byte for byte."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from oomprobe import linux
from oomprobe.errors import UnreliableError
from oomprobe.state.compare import inner_tensors, same_tensors
from oomprobe.state.reach import is_learnable
from oomprobe.units import format_bytes

PIECE_WORDS = 2**21  # 16 MiB
HOST_SHARE = 0.9  # of the free host memory; the rest is for what the steps need on the host


class StorageCopy:
    """A copy of a storage's bytes, with a weak reference to the storage, so that a step can free it.

    `find_or_create` recreates a freed storage once, so tensors that shared it share it again; without a copy, with zeros.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.device, self.nbytes = storage.device, storage.nbytes()
        # Torch keeps one Python object per storage.
        self.find: Callable[[], torch.UntypedStorage | None] = weakref.ref(storage)
        self.bytes = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.changed = self.is_taken = False

    def take(self, storage: torch.UntypedStorage) -> None:
        """Copy the bytes."""
        self.bytes, self.is_taken = _as_bytes(storage).to("cpu", copy=True), True

    def write(self) -> None:
        """Write the bytes back in place.

        On the host, write only if they differ, because the memory may be read-only, such as a mapped file. On an
        accelerator always write, because reading costs as much.
        """
        storage = self.find()
        if storage is None or not self.is_taken or (self.device.type == "cpu" and self._is_in(storage)):
            return
        if storage.nbytes() != self.nbytes:
            storage.resize_(self.nbytes)
        _as_bytes(storage).copy_(self.bytes)

    def compare(self) -> None:
        """Set `changed`, once for all the tensors that share the storage."""
        storage = self.find()
        self.changed = storage is not None and self.is_taken and not self._is_in(storage)

    def is_intact(self, has_same_version: bool) -> bool:
        """Return whether the bytes are as saved; those that were not copied are judged by the tensor's version."""
        storage = self.find()
        return storage is None or (self._is_in(storage) if self.is_taken else has_same_version)

    def find_or_create(self) -> torch.UntypedStorage:
        """Return the storage, or a new one with the saved bytes if it was freed."""
        storage = self.find()
        if storage is None:
            saved = self.bytes if self.is_taken else torch.zeros(self.nbytes, dtype=torch.uint8, device=self.device)
            storage = saved.to(self.device, copy=True).untyped_storage()
            self.find = weakref.ref(storage)
        return storage

    def _is_in(self, storage: torch.UntypedStorage) -> bool:
        if storage.nbytes() != self.nbytes:
            return False
        now, end = _as_bytes(storage), self.nbytes - self.nbytes % 8
        # Words compare seven times as fast as bytes; pieces avoid a copy of the whole storage on the host.
        words, before = (whole[:end].view(torch.int64).split(PIECE_WORDS) for whole in (now, self.bytes))  # type: ignore[no-untyped-call]
        pieces = zip(words, before, strict=True)
        return torch.equal(now[end:].cpu(), self.bytes[end:]) and all(torch.equal(a.cpu(), b) for a, b in pieces)


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a view of a storage as a tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class TensorCopy:
    """A copy of a strided tensor: its storage, geometry and bytes.

    With ``hold=True``, for parameters and buffers, the tensor and its memory are kept alive. Gradients and optimizer state
    have weak references, so that a step which replaces them can free the old ones; `restore` recreates them.
    """

    def __init__(self, tensor: torch.Tensor, storage: StorageCopy, *, hold: bool) -> None:
        self.find = _reference(tensor, hold=hold)
        self.storage, self.device = storage, tensor.device
        self._own = tensor.detach() if hold else None
        self._geometry = (tensor.storage_offset(), tensor.size(), tensor.stride())
        self._dtype, self._requires_grad = tensor.dtype, is_learnable(tensor)

    def restore(self) -> torch.Tensor:
        """Return the tensor, viewing its original memory again; `StorageCopy.write` restores the bytes."""
        tensor = self.find()
        if tensor is None:
            tensor = self._view_of(self.storage.find_or_create())
            self.find = weakref.ref(tensor)
        elif not self._is_same_view(tensor):
            tensor.data = self._view_of(self.storage.find_or_create()) if self._own is None else self._own
        return _with_requires_grad(tensor, self._requires_grad)

    def differs(self, now: object) -> bool:
        """Return whether a value has other bits, another geometry or other memory than the tensor had."""
        if not isinstance(now, torch.Tensor) or not self._is_same_view(now):
            return True
        return is_learnable(now) != self._requires_grad or self.storage.changed

    def on_host(self) -> torch.Tensor:
        """Return the saved tensor in host memory; do not modify it."""
        return self._view_of(self.storage.bytes.untyped_storage())

    def clone(self) -> torch.Tensor:
        """Return a new tensor with the saved values, on the original device."""
        return self.on_host().to(self.device, copy=True)

    def _view_of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        return torch.empty(0, dtype=self._dtype, device=storage.device).set_(storage, *self._geometry)

    def _is_same_view(self, tensor: torch.Tensor) -> bool:
        if not _is_strided(tensor) or tensor.dtype != self._dtype or tensor.device != self.device:
            return False
        geometry = (tensor.storage_offset(), tensor.size(), tensor.stride())
        return geometry == self._geometry and tensor.untyped_storage() is self.storage.find()


class WholeCopy:
    """A copy of a tensor without a plain storage, such as a sparse or quantised one."""

    def __init__(self, tensor: torch.Tensor, *, hold: bool) -> None:
        self.find = _reference(tensor, hold=hold)
        self.device = tensor.device
        self._requires_grad = is_learnable(tensor)
        self._copy = tensor.detach().cpu().clone()

    def restore(self) -> torch.Tensor:
        tensor = self.find()
        if tensor is None:
            tensor = self._copy.to(self.device, copy=True)
            self.find = weakref.ref(tensor)
        elif not same_tensors(tensor, self._copy):
            tensor.data = self._copy.to(self.device, copy=True)
        return _with_requires_grad(tensor, self._requires_grad)

    def differs(self, now: object) -> bool:
        if not isinstance(now, torch.Tensor) or now.device != self.device:
            return True
        return is_learnable(now) != self._requires_grad or not same_tensors(now, self._copy)

    def on_host(self) -> torch.Tensor:
        return self._copy

    def clone(self) -> torch.Tensor:
        return self._copy.to(self.device, copy=True)


class WrapperCopy:
    """A tensor subclass that wraps tensors, such as DTensor: kept alive, with copies of the tensors inside."""

    def __init__(self, tensor: Any, parts: dict[str, TensorCopy | WholeCopy | WrapperCopy]) -> None:
        self.find: Callable[[], torch.Tensor] = lambda: tensor
        self.device: torch.device = tensor.device
        self._parts = parts

    def restore(self) -> torch.Tensor:
        for part in self._parts.values():
            part.restore()
        return self.find()

    clone = restore

    def differs(self, now: object) -> bool:
        return now is not self.find() or any(part.differs(getattr(now, name)) for name, part in self._parts.items())

    def on_host(self) -> dict[str, Any]:
        """Return the saved tensors inside, by the wrapper's names for them."""
        return {name: part.on_host() for name, part in self._parts.items()}


AnyCopy = TensorCopy | WholeCopy | WrapperCopy


def _reference(tensor: torch.Tensor, *, hold: bool) -> Callable[[], torch.Tensor | None]:
    # torch.utils.swap_tensors refuses tensors with weak references, so those that are held have none.
    return (lambda: tensor) if hold else weakref.ref(tensor)


def _with_requires_grad(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    if tensor.is_leaf and tensor.requires_grad != requires_grad:
        tensor.requires_grad_(requires_grad)
    return tensor


def _is_strided(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


class HostCopies:
    """Copies of tensors in host memory, one for each tensor and one for each storage."""

    def __init__(self) -> None:
        # Keys are ids, which Python may reuse: `find` tells whose copy it is. Weak, because a step may create its model on
        # each call.
        self._tensors: weakref.WeakValueDictionary[int, AnyCopy] = weakref.WeakValueDictionary()
        self._storages: weakref.WeakValueDictionary[int, StorageCopy] = weakref.WeakValueDictionary()
        self.storages: weakref.WeakSet[StorageCopy] = weakref.WeakSet()
        self.held: list[AnyCopy] = []
        self._to_take: list[tuple[StorageCopy, torch.UntypedStorage]] = []

    def keep(self, tensor: Any, *, hold: bool = False, take: bool = True) -> AnyCopy:
        """Register a tensor, with `take` for the next `take`; with `hold`, keep it and its memory alive."""
        known = self._tensors.get(id(tensor))
        if known is not None and known.find() is tensor:
            if take and isinstance(known, TensorCopy) and (storage := known.storage.find()) is not None:
                self._to_take.append((known.storage, storage))
            return known
        copy: AnyCopy
        if is_traceable_wrapper_subclass(tensor):
            parts = {name: self.keep(part, hold=True) for name, part in inner_tensors(tensor).items()}
            copy = WrapperCopy(tensor, parts)
        elif _is_strided(tensor):
            copy = TensorCopy(tensor, self._storage(tensor.untyped_storage(), take=take), hold=hold)
        else:
            copy = WholeCopy(tensor, hold=hold)
        self._tensors[id(tensor)] = copy
        if hold:
            self.held.append(copy)
        return copy

    def _storage(self, storage: torch.UntypedStorage, *, take: bool) -> StorageCopy:
        known = self._storages.get(storage._cdata)
        if known is None or known.find() is not storage:
            known = self._storages[storage._cdata] = StorageCopy(storage)
            self.storages.add(known)
        if take and not known.is_taken:
            self._to_take.append((known, storage))
        return known

    def take(self) -> None:
        """Copy the tensors registered since the last call; raise UnreliableError if they do not fit in host memory."""
        to_take = {id(copy): (copy, storage) for copy, storage in self._to_take if not copy.is_taken}.values()
        needed_bytes = sum(copy.nbytes for copy, _ in to_take)
        free_bytes = linux.free_bytes()
        if free_bytes is not None and needed_bytes > HOST_SHARE * free_bytes:
            raise UnreliableError(
                f"restoring the model afterwards needs a copy of {format_bytes(needed_bytes)} in host memory, but only "
                f"{format_bytes(free_bytes)} is free: nothing was run. Free host memory, or probe a target that each "
                "trial can build again (oomprobe run path/to/train.py:build)"
            )
        for copy, storage in to_take:
            copy.take(storage)
        self._to_take = []

    def restore_held(self) -> None:
        """Restore only the tensors that are held, which are parameters and buffers."""
        for storage in {one.storage for one in self.held if isinstance(one, TensorCopy)}:
            storage.write()
        for one in self.held:
            one.restore()
