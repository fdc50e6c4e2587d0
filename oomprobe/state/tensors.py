"""Tensors copied to host memory and put back in place, byte for byte."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from oomprobe.devices import linux
from oomprobe.errors import UnreliableError
from oomprobe.state.compare import same_tensors
from oomprobe.state.reach import is_learnable
from oomprobe.units import format_bytes

PIECE_WORDS = 2**21  # 16 MiB
HOST_SHARE = 0.9  # of the free host memory: more than that for a copy leaves nothing for the steps' own host side


class StorageCopy:
    """The bytes of a storage. It is only watched, so that a step which lets go of it is not charged for it.

    Tensors that shared it share it again: where it has died it is made anew, once.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.device, self.nbytes = storage.device, storage.nbytes()
        self.find: Callable[[], torch.UntypedStorage | None] = weakref.ref(storage)  # one Python object a storage
        self.bytes = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.changed = self._taken = False

    def take(self, storage: torch.UntypedStorage) -> None:
        """Copy the bytes."""
        self.bytes, self._taken = _as_bytes(storage).to("cpu", copy=True), True

    def write(self) -> None:
        """Put the bytes back where they were.

        On the host only where they differ: memory that was never written may be read-only, such as a mapped file. On an
        accelerator always, for reading costs as much as writing.
        """
        storage = self.find()
        if storage is None or not self._taken or (self.device.type == "cpu" and self._is_in(storage)):
            return
        if storage.nbytes() != self.nbytes:
            storage.resize_(self.nbytes)
        _as_bytes(storage).copy_(self.bytes)

    def compare(self) -> None:
        """Look once whether the bytes have changed, for all the tensors that share them."""
        storage = self.find()
        self.changed = storage is not None and not self._is_in(storage)

    def there(self) -> torch.UntypedStorage:
        """The storage; a new one with the same bytes where it has died."""
        storage = self.find()
        if storage is None:
            storage = self.bytes.to(self.device, copy=True).untyped_storage()
            self.find = weakref.ref(storage)
        return storage

    def _is_in(self, storage: torch.UntypedStorage) -> bool:
        if storage.nbytes() != self.nbytes:
            return False
        now, end = _as_bytes(storage), self.nbytes - self.nbytes % 8
        # Words compare seven times as fast as bytes; pieces need no copy of the whole storage on the host.
        words, before = (whole[:end].view(torch.int64).split(PIECE_WORDS) for whole in (now, self.bytes))  # type: ignore[no-untyped-call]
        pieces = zip(words, before, strict=True)
        return torch.equal(now[end:].cpu(), self.bytes[end:]) and all(torch.equal(a.cpu(), b) for a, b in pieces)


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """A storage seen as a tensor of bytes, without a copy."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class TensorCopy:
    """One tensor as it was: which memory it looked at, how, and the bytes.

    A parameter or buffer is held: its own memory comes back to it. Gradients and optimizer state are only watched,
    so that a step which replaces them is not charged for the old ones; they are made anew when they have died.
    """

    def __init__(self, tensor: torch.Tensor, storage: StorageCopy, *, hold: bool) -> None:
        self.find = _watching(tensor, hold=hold)
        self.storage, self.device = storage, tensor.device
        self._own = tensor.detach() if hold else None
        self._geometry = (tensor.storage_offset(), tensor.size(), tensor.stride())
        self._dtype, self._requires_grad = tensor.dtype, is_learnable(tensor)

    def restore(self) -> torch.Tensor:
        """The tensor, looking at its own memory again; the bytes in it are the storage's matter."""
        tensor = self.find()
        if tensor is None:
            tensor = self._view_of(self.storage.there())
            self.find = weakref.ref(tensor)
        elif not self._looks_same(tensor):
            tensor.data = self._view_of(self.storage.there()) if self._own is None else self._own
        return _with_requires_grad(tensor, self._requires_grad)

    def differs(self, now: object) -> bool:
        """Whether a value is not this tensor's equal, bit for bit and in the same memory."""
        if not isinstance(now, torch.Tensor) or not self._looks_same(now):
            return True
        return is_learnable(now) != self._requires_grad or self.storage.changed

    def on_host(self) -> torch.Tensor:
        """The tensor as it was, in host memory, to be read only."""
        return self._view_of(self.storage.bytes.untyped_storage())

    def anew(self) -> torch.Tensor:
        """Another tensor with the same values, where it was."""
        return self.on_host().to(self.device, copy=True)

    def _view_of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        return torch.empty(0, dtype=self._dtype, device=storage.device).set_(storage, *self._geometry)

    def _looks_same(self, tensor: torch.Tensor) -> bool:
        if not _is_strided(tensor) or tensor.dtype != self._dtype or tensor.device != self.device:
            return False
        geometry = (tensor.storage_offset(), tensor.size(), tensor.stride())
        return geometry == self._geometry and tensor.untyped_storage() is self.storage.find()


class WholeCopy:
    """A tensor without a storage of its own, such as a sparse or quantised one: copied and compared as a whole."""

    def __init__(self, tensor: torch.Tensor, *, hold: bool) -> None:
        self.find = _watching(tensor, hold=hold)
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

    def anew(self) -> torch.Tensor:
        return self._copy.to(self.device, copy=True)


class WrapperCopy:
    """A wrapper around tensors, such as DTensor or a quantised weight: held, with copies of the tensors inside."""

    def __init__(self, tensor: Any, parts: dict[str, TensorCopy | WholeCopy | WrapperCopy]) -> None:
        self.find: Callable[[], torch.Tensor] = lambda: tensor
        self.device: torch.device = tensor.device
        self._parts = parts

    def restore(self) -> torch.Tensor:
        for part in self._parts.values():
            part.restore()
        return self.find()

    anew = restore

    def differs(self, now: object) -> bool:
        return now is not self.find() or any(part.differs(getattr(now, name)) for name, part in self._parts.items())

    def on_host(self) -> dict[str, Any]:
        """The tensors inside, by the names that the wrapper gives them."""
        return {name: part.on_host() for name, part in self._parts.items()}


AnyCopy = TensorCopy | WholeCopy | WrapperCopy


def _watching(tensor: torch.Tensor, *, hold: bool) -> Callable[[], torch.Tensor | None]:
    """Of what is held no weak reference, with which torch.utils.swap_tensors would refuse it."""
    return (lambda: tensor) if hold else weakref.ref(tensor)


def _with_requires_grad(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    if tensor.is_leaf and tensor.requires_grad != requires_grad:
        tensor.requires_grad_(requires_grad)
    return tensor


def _is_strided(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


class HostCopies:
    """Copies of tensors in host memory: each tensor once, and each storage once however many tensors look at it."""

    def __init__(self) -> None:
        # Keyed by id, which Python may reuse: each copy knows whose it is. Copies that nobody wants any more go: a step may
        # make its model anew on each call.
        self._tensors: weakref.WeakValueDictionary[int, AnyCopy] = weakref.WeakValueDictionary()
        self._storages: weakref.WeakValueDictionary[int, StorageCopy] = weakref.WeakValueDictionary()
        self.storages: weakref.WeakSet[StorageCopy] = weakref.WeakSet()
        self.held: list[AnyCopy] = []
        self._to_take: list[tuple[StorageCopy, torch.UntypedStorage]] = []

    def keep(self, tensor: Any, *, hold: bool = False) -> AnyCopy:
        """Remember a tensor; `take` then copies it. One that is held is kept alive, and its memory with it."""
        known = self._tensors.get(id(tensor))
        if known is not None and known.find() is tensor:
            return known
        copy: AnyCopy
        if is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            copy = WrapperCopy(tensor, {name: self.keep(getattr(tensor, name), hold=True) for name in names})
        elif _is_strided(tensor):
            copy = TensorCopy(tensor, self._storage(tensor.untyped_storage()), hold=hold)
        else:
            copy = WholeCopy(tensor, hold=hold)
        self._tensors[id(tensor)] = copy
        if hold:
            self.held.append(copy)
        return copy

    def _storage(self, storage: torch.UntypedStorage) -> StorageCopy:
        known = self._storages.get(storage._cdata)
        if known is None or known.find() is not storage:
            known = self._storages[storage._cdata] = StorageCopy(storage)
            self.storages.add(known)
            self._to_take.append((known, storage))
        return known

    def take(self) -> None:
        """Copy what was remembered since the last time; raise where that does not fit in host memory."""
        needed_bytes = sum(copy.nbytes for copy, _ in self._to_take)
        free_bytes = linux.free_bytes()
        if free_bytes is not None and needed_bytes > HOST_SHARE * free_bytes:
            raise UnreliableError(
                f"giving the model back as it was needs a copy of {format_bytes(needed_bytes)} in host memory, and "
                f"{format_bytes(free_bytes)} is free: nothing was run. Free host memory, or probe a target that can be "
                "built anew (oomprobe run path/to/train.py:build)"
            )
        for copy, storage in self._to_take:
            copy.take(storage)
        self._to_take = []

    def restore_held(self) -> None:
        """Restore what is held alone: parameters and buffers."""
        for storage in {one.storage for one in self.held if isinstance(one, TensorCopy)}:
            storage.write()
        for one in self.held:
            one.restore()
