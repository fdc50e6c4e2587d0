"""Fakes that stand for the user's real tensors, and the two places of a simulated world, as fakes know them.

A tensor on the simulated card is a fake tensor on ``cpu:0``, one on the host a fake tensor on ``cpu``: autograd treats
both as CPU tensors (backward through a fake ``cuda`` tensor ends the process on a machine without a GPU), and
`FakeTensorMode` keeps the two apart by itself. What code *sees* is ``cuda:0`` and ``cpu``.
"""

from __future__ import annotations

import weakref
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from oomprobe.simulation.memory import Memory
from oomprobe.simulation.unknown import refuse_layout

CARD = torch.device("cpu", 0)
HOST = torch.device("cpu")
STATED_HOST = torch.device("cpu", 1)  # the code said "cpu" itself; a plain one may be torch's own default
SEEN_CARD = torch.device("cuda", 0)


def place_of(device: Any) -> torch.device | None:
    """The place that code means with a device argument; None where it said nothing or names another device."""
    if device is None:
        return None
    if isinstance(device, int):
        return CARD
    if isinstance(device, str):
        device = torch.device(device)
    if device.type == "cuda":
        return CARD
    return STATED_HOST if device.type == "cpu" and device.index != 0 else None


class Fakes:
    """Fakes of real tensors, for as long as the real ones live."""

    def __init__(self, mode: FakeTensorMode, memory: Memory) -> None:
        self._mode, self._memory = mode, memory
        self._storages: WeakKeyDictionary[torch.UntypedStorage, torch.UntypedStorage] = WeakKeyDictionary()
        self._views: WeakKeyDictionary[torch.UntypedStorage, dict[tuple[Any, ...], FakeTensor]] = WeakKeyDictionary()
        self._copies: dict[int, tuple[weakref.ref[Any], torch.Tensor]] = {}  # of views that were moved to the card

    def on_card(self, tensor: torch.Tensor) -> bool:
        """Whether a real tensor is on the card."""
        storage = tensor.untyped_storage()
        if self._memory.holds(self._storages.get(storage, storage)):
            return True
        if isinstance(tensor, torch.nn.Parameter):  # nobody trains one on the host beside a card
            self.settle(tensor)
            return True
        return False

    def block_of(self, tensor: torch.Tensor) -> int | None:
        """The allocator's handle of the block that a tensor, real or fake, is in; None where it is not on the card."""
        storage = tensor.untyped_storage()
        return self._memory.block_of(self._storages.get(storage, storage))

    def settle(self, tensor: torch.Tensor) -> None:
        """Put a real tensor, with all of its storage, on the card."""
        refuse_layout(tensor)
        self._memory.allocate(self._storage_of(tensor))

    def forget(self, storage: torch.UntypedStorage) -> None:
        """Take a real storage off the card, which a tensor has left: what still looks at it goes back when it is used."""
        if storage in self._storages:
            self._memory.free(self._storages[storage])

    def move(self, tensor: torch.Tensor) -> None:
        """A host tensor meets the card: it, or a copy where it is only a part of a real data set, belongs there."""
        if isinstance(tensor, FakeTensor):
            tensor.fake_device = CARD
            self._memory.allocate(tensor.untyped_storage())
            return
        if tensor.numel() * tensor.element_size() >= tensor.untyped_storage().nbytes():
            self.settle(tensor)
            return
        with self._mode:
            copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=CARD)
        self._memory.allocate(copy.untyped_storage())
        key = id(tensor)
        self._copies[key] = (weakref.ref(tensor, lambda _: self._copies.pop(key, None)), copy)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake of a tensor; a fake is its own."""
        if isinstance(tensor, FakeTensor):
            return tensor
        watch, copy = self._copies.get(id(tensor), (None, None))
        if watch is not None and copy is not None and watch() is tensor:
            return copy
        refuse_layout(tensor)
        if _without_data(tensor):
            return self._made(tensor)
        views = self._views.setdefault(tensor.untyped_storage(), {})
        key = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        if key not in views:
            views[key] = self._made(tensor)
        fake = views[key]
        fake.fake_device = self._place_of(fake.untyped_storage())
        return fake

    def _place_of(self, storage: torch.UntypedStorage) -> torch.device:
        return CARD if self._memory.holds(storage) else HOST

    def _made(self, tensor: torch.Tensor) -> FakeTensor:
        storage = self._storage_of(tensor)
        with torch._C._DisableTorchDispatch():
            meta = torch.empty(0, dtype=tensor.dtype, device="meta")
            meta.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        return FakeTensor(self._mode, meta, self._place_of(storage))

    def _storage_of(self, tensor: torch.Tensor) -> torch.UntypedStorage:
        real = tensor.untyped_storage()
        if _without_data(tensor):
            return real
        if real not in self._storages:
            self._storages[real] = torch.UntypedStorage(real.nbytes(), device="meta")  # type: ignore[no-untyped-call]
        return self._storages[real]


def _without_data(tensor: torch.Tensor) -> bool:
    """Whether a tensor that is no fake has a fake's storage: a step has set a parameter's ``.data``."""
    return tensor.untyped_storage().device.type == "meta"
