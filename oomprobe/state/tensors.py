"""Copies of tensors in host memory, restored in place byte for byte."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from oomprobe.errors import InvalidArgumentError, UnreliableError
from oomprobe.ground import linux
from oomprobe.ground.units import format_bytes
from oomprobe.state.compare import inner_tensors
from oomprobe.state.references import References, Saved, weak
from oomprobe.state.walk import has_data, is_learnable

PAGE_BYTES = 2**12
PIECE_WORDS = 2**21  # 16 MiB
NO_COPY = (
    "{name} is {kind}, whose values cannot be put back in this process. Probe the model with oomprobe run path/to/train.py:build "
    "or oomprobe.probe_target, on a real device: there each trial runs in a process that ends with what it changed"
)
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
        self.changed = self.is_taken = self.is_lost = False

    def take_zeros(self, storage: torch.UntypedStorage) -> bool:
        """Copy host memory of a page or more that holds only zeros: the copy takes no memory, like weights that were never written."""
        if self.device.type == "cpu" and self.nbytes >= PAGE_BYTES:
            self.bytes = torch.from_numpy(np.zeros(self.nbytes, np.uint8))
            self.is_taken = self._is_in(storage)
        return self.is_taken

    def take(self, storage: torch.UntypedStorage) -> None:
        """Copy the bytes."""
        self.bytes, self.is_taken = _as_bytes(storage).to("cpu", copy=True), True

    def write(self) -> None:
        """Write the bytes back in place.

        On the host, write only if they differ, because the memory may be read-only, such as a mapped file. On an
        accelerator always write, because reading costs as much.
        """
        storage = self.find()
        if storage is None or not self.is_taken:
            return
        if self.device.type == "cpu" and self._is_in(storage):
            return
        if storage.nbytes() != self.nbytes:
            storage.resize_(self.nbytes)
        _as_bytes(storage).copy_(self.bytes)

    def compare(self) -> None:
        """Set `changed`, once for all the tensors that share the storage."""
        self.changed = self.is_taken and not self.is_intact(has_same_version=True)

    def is_intact(self, has_same_version: bool) -> bool:
        """Return whether the bytes are as saved; those that were not copied are judged by the tensor's version."""
        storage = self.find()
        if storage is None:
            return True
        if self.is_taken:
            return self._is_in(storage)
        return has_same_version and not self.is_lost

    def find_or_create(self) -> torch.UntypedStorage:
        """Return the storage, or a new one with the saved bytes if it was freed."""
        storage = self.find()
        if storage is not None:
            return storage
        saved = self.bytes
        if not self.is_taken:
            self.is_lost = True
            saved = torch.zeros(self.nbytes, dtype=torch.uint8, device=self.device)
        storage = saved.to(self.device, copy=True).untyped_storage()
        self.find = weakref.ref(storage)
        return storage

    def _is_in(self, storage: torch.UntypedStorage) -> bool:
        if storage.nbytes() != self.nbytes:
            return False
        now, end = _as_bytes(storage), self.nbytes - self.nbytes % 8
        # Words compare seven times as fast as bytes; pieces avoid a copy of the whole storage on the host.
        words, before = (
            whole[:end].view(torch.int64).split(PIECE_WORDS)  # type: ignore[no-untyped-call]
            for whole in (now, self.bytes)
        )
        if not torch.equal(now[end:].cpu(), self.bytes[end:]):
            return False
        return all(
            torch.equal(piece.cpu(), saved) for piece, saved in zip(words, before, strict=True)
        )


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a view of a storage as a tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class TensorCopy(Saved):
    """A copy of a strided tensor: its storage, geometry and bytes.

    The tensor is not kept alive, so that a step which replaces it can free the old one; `restore` makes it anew.
    """

    def __init__(self, tensor: torch.Tensor, storage: StorageCopy) -> None:
        self.find: Callable[[], torch.Tensor | None] = weak(tensor)
        self.storage, self.device = storage, tensor.device
        self._kind = type(tensor)
        self._geometry = (tensor.storage_offset(), tensor.size(), tensor.stride())
        self._dtype, self._requires_grad = tensor.dtype, is_learnable(tensor)

    @property
    def has_bytes(self) -> bool:
        """Whether the bytes were copied."""
        return self.storage.is_taken

    @property
    def is_replaced(self) -> bool:
        """Whether the tensor was freed, or became another: its memory may be elsewhere, but must look the same."""
        tensor = self.find()
        return tensor is None or not self._looks_the_same(tensor)

    def restore(self) -> torch.Tensor:
        """Return the tensor, viewing its original memory again; `StorageCopy.write` restores the bytes."""
        tensor = self.find()
        if tensor is None:
            tensor = self._view_of(self.storage.find_or_create())
            if issubclass(self._kind, torch.nn.Parameter):
                tensor = torch.Tensor._make_subclass(self._kind, tensor, self._requires_grad)
            self.find = weak(tensor)
        elif not self._is_same_view(tensor):
            tensor.data = self._view_of(self.storage.find_or_create())
        if tensor.is_leaf and tensor.requires_grad != self._requires_grad:
            tensor.requires_grad_(self._requires_grad)
        return tensor

    def refers_to(self, value: object) -> bool:
        """Return whether a value is the tensor."""
        return value is not None and self.find() is value

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
        return torch.empty(0, dtype=self._dtype, device=storage.device).set_(
            storage, *self._geometry
        )

    def _looks_the_same(self, tensor: torch.Tensor) -> bool:
        kind = (tensor.dtype, tensor.device)  # first: a fake has no address to ask for
        if kind != (self._dtype, self.device) or not _is_strided(tensor):
            return False
        return (tensor.storage_offset(), tensor.size(), tensor.stride()) == self._geometry

    def _is_same_view(self, tensor: torch.Tensor) -> bool:
        return self._looks_the_same(tensor) and tensor.untyped_storage() is self.storage.find()


class WrapperCopy(Saved):
    """A tensor subclass that wraps tensors, such as DTensor: kept alive, with copies of the tensors inside."""

    is_replaced, has_bytes = False, True

    def __init__(self, tensor: Any, parts: dict[str, TensorCopy | WrapperCopy]) -> None:
        self.find: Callable[[], torch.Tensor] = lambda: tensor
        self.device: torch.device = tensor.device
        self._parts = parts

    @property
    def parts(self) -> list[TensorCopy | WrapperCopy]:
        """The copies of the tensors inside."""
        return list(self._parts.values())

    def restore(self) -> torch.Tensor:
        for part in self._parts.values():
            part.restore()
        return self.find()

    clone = restore

    def refers_to(self, value: object) -> bool:
        return self.find() is value

    def differs(self, now: object) -> bool:
        return any(part.differs(getattr(now, name, None)) for name, part in self._parts.items())

    def on_host(self) -> torch.Tensor:
        """Return the tensor itself: the bytes of those inside come back in place."""
        return self.find()


AnyCopy = TensorCopy | WrapperCopy


class GraphTensor(Saved):
    """A tensor that is not copied: it has a graph, no data or no plain storage. To keep it alive would keep a step's memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.find: Callable[[], torch.Tensor | None] = weakref.ref(tensor)

    def refers_to(self, value: object) -> bool:
        return value is not None and self.find() is value


def _is_strided(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a storage and views it by strides alone; what does not may lack any attribute."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return False
    # Some that wrap others claim memory that they do not have.
    return tensor.numel() == 0 or tensor.untyped_storage().nbytes() == 0 or tensor.data_ptr() != 0


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place; 0 for an inference tensor, which does not know."""
    return 0 if tensor.is_inference() else tensor._version


def kind_of_storage(tensor: torch.Tensor) -> str:
    """Return what a tensor without a copy is, such as ``"a sparse_coo tensor"``."""
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout is not torch.strided:
        return f"a {str(tensor.layout).removeprefix('torch.')} tensor"
    return (
        "a quantised tensor"
        if tensor.is_quantized
        else f"a {type(tensor).__name__} without a plain storage"
    )


def can_copy(tensor: Any) -> bool:
    """Return whether a tensor, or each tensor inside a wrapper, can be copied: sparse and quantised ones cannot."""
    if is_traceable_wrapper_subclass(tensor):
        return all(map(can_copy, inner_tensors(tensor).values()))
    return has_data(tensor) and _is_strided(tensor)


def addresses_of(tensor: Any) -> tuple[int, ...]:
    """Return where the storage of a tensor is, or those of the tensors inside a wrapper, as far as they can be copied.

    Examples:
        >>> from torch.testing._internal.two_tensor import TwoTensor
        >>> one, other = torch.ones(1), torch.zeros(1)
        >>> addresses_of(TwoTensor(one, other)) == (one.data_ptr(), other.data_ptr())
        True
    """
    if is_traceable_wrapper_subclass(tensor):
        return tuple(chain.from_iterable(map(addresses_of, inner_tensors(tensor).values())))
    return (tensor.untyped_storage().data_ptr(),) if can_copy(tensor) else ()


class HostCopies:
    """Copies of tensors in host memory, one for each tensor and one for each storage; references to what holds them."""

    def __init__(self) -> None:
        # Keys are ids, which Python may reuse: `find` tells whose copy it is. Weak, because a step may create its model on
        # each call.
        self._tensors: weakref.WeakValueDictionary[int, AnyCopy] = weakref.WeakValueDictionary()
        self._storages: weakref.WeakValueDictionary[int, StorageCopy] = (
            weakref.WeakValueDictionary()
        )
        self.references = References()
        self.storages: weakref.WeakSet[StorageCopy] = weakref.WeakSet()

    def keep(self, tensor: Any) -> AnyCopy:
        """Register a tensor; `take` copies its bytes."""
        copy = self._tensors.get(id(tensor))
        if copy is not None and copy.find() is tensor:
            return copy
        if is_traceable_wrapper_subclass(tensor):
            copy = WrapperCopy(
                tensor, {name: self.keep(part) for name, part in inner_tensors(tensor).items()}
            )
        elif can_copy(tensor):
            copy = TensorCopy(tensor, self._storage(tensor.untyped_storage()))
        else:
            raise InvalidArgumentError(
                NO_COPY.format(name="a tensor", kind=kind_of_storage(tensor))
            )
        self._tensors[id(tensor)] = copy
        return copy

    def _storage(self, storage: torch.UntypedStorage) -> StorageCopy:
        known = self._storages.get(storage._cdata)
        if known is None or known.find() is not storage:
            known = self._storages[storage._cdata] = StorageCopy(storage)
            self.storages.add(known)
        return known

    def take(self, copies: Iterable[AnyCopy]) -> None:
        """Copy the bytes of these tensors; raise UnreliableError if they do not fit in host memory."""
        to_take: dict[StorageCopy, torch.UntypedStorage] = {}
        for part in chain.from_iterable(map(_plain_parts, copies)):
            storage = part.storage.find()
            if storage is None or part.has_bytes:
                continue
            if not part.storage.take_zeros(storage):
                to_take[part.storage] = storage
        if not to_take:
            return
        needed_bytes = sum(storage_copy.nbytes for storage_copy in to_take)
        free_bytes = linux.free_bytes()
        if free_bytes is not None and needed_bytes > HOST_SHARE * free_bytes:
            raise UnreliableError(
                f"restoring the model afterwards needs a copy of {format_bytes(needed_bytes)} in host memory, but only "
                f"{format_bytes(free_bytes)} is free: nothing was run. Free host memory, or probe a target that each "
                "trial can build again (oomprobe run path/to/train.py:build)"
            )
        for storage_copy, storage in to_take.items():
            storage_copy.take(storage)


def _plain_parts(copy: AnyCopy) -> list[TensorCopy]:
    if isinstance(copy, TensorCopy):
        return [copy]
    return [*chain.from_iterable(map(_plain_parts, copy.parts))]


def write_back(copies: Iterable[AnyCopy]) -> None:
    """Restore tensors that are alive, bytes and all."""
    for copy in copies:
        if not copy.is_replaced:
            copy.restore()
            for part in _plain_parts(copy):
                part.storage.write()


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors with data in a value and its containers.

    Examples:
        >>> [*tensors_in({"a": [torch.tensor(1)], "b": (torch.tensor(2), 3)})]
        [tensor(1), tensor(2)]
    """
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        yield from chain.from_iterable(map(tensors_in, value))
    elif isinstance(value, torch.Tensor) and has_data(value):
        yield value
