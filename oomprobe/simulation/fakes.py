"""Fake tensors for the user's real tensors, and the devices of the simulation.

A tensor on the simulated card is a fake on ``cpu:0``, a host tensor a fake on ``cpu``. Autograd treats both as CPU tensors
(backward through a fake ``cuda`` tensor ends the process on a machine without a GPU), and `FakeTensorMode` keeps them
apart. The step *sees* ``cuda:0`` and ``cpu``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from operator import itemgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from oomprobe.errors import SimulationError
from oomprobe.ground.frames import user_line
from oomprobe.simulation.cuda_kernels import as_on_cuda
from oomprobe.simulation.memory import CardMemory
from oomprobe.simulation.unknown import refuse_layout
from oomprobe.simulation.values import Values

CARD = torch.device("cpu", 0)
HOST = torch.device("cpu")
EXPLICIT_HOST = torch.device("cpu", 1)  # the step named "cpu"; a plain "cpu" may be torch's default
# To remember: a number that differs at each call, such as Adam's, makes them many.
MOST_RESULTS = 2**16
_PLAIN = {
    bool,
    int,
    float,
    str,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
}
_UntypedStorage: Any = torch.UntypedStorage
OTHER_CARD = (
    "{line} uses cuda:{other}, and this process is on cuda:{index}: one simulated card stands for each process. Start a process for each "
    "card (torchrun), or probe on real devices"
)


class SeenCard:
    """The device that the card is called, once the user's code has named its index."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Let the next index that is named be that of the card."""
        self.device, self._is_claimed = torch.device("cuda", 0), False

    def claim(self, index: int) -> None:
        """Take the first index; refuse others."""
        if not self._is_claimed:
            self.device, self._is_claimed = torch.device("cuda", index), True
        elif index != self.device.index:
            raise SimulationError(
                OTHER_CARD.format(line=user_line(), other=index, index=self.device.index)
            )


SEEN = SeenCard()


def requested_device(device: Any) -> torch.device | None:
    """Translate a device argument; None if it is None or names neither the card nor the host."""
    if device is None:
        return None
    if isinstance(device, int):
        device = f"cuda:{device}"
    device = torch.device(device)
    if device.type == "cuda":
        if device.index is not None:
            SEEN.claim(device.index)
        return CARD
    if device.type == "cpu" and device.index != 0:
        return EXPLICIT_HOST
    return None


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor; another tensor is returned as it is."""
    if hasattr(type(tensor), "_local_tensor"):
        return tensor._local_tensor  # type: ignore[attr-defined, no-any-return]
    return tensor


class Views:
    """Makes fakes: views of storages on the meta device."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._attributes: dict[torch.device, dict[str, Any]] = {}  # of a new fake, by its device

    def make(
        self,
        storage: torch.UntypedStorage,
        shape: Any,
        stride: Any,
        offset: Any,
        dtype: torch.dtype,
        device: torch.device,
    ) -> FakeTensor:
        """Return a fake, without the checks that its class repeats for each."""
        with torch._C._DisableTorchDispatch():
            meta = torch.empty(0, dtype=dtype, device="meta")
            meta.set_(storage, offset, shape, stride)
        if device not in self._attributes:
            self._attributes[device] = {**vars(FakeTensor(self._mode, meta, device))}
        fake: FakeTensor = torch.Tensor._make_subclass(
            FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device
        )
        torch._C._set_throw_on_mutable_data_ptr(fake)
        vars(fake).update(self._attributes[device])
        return fake


class Fakes:
    """Fakes of real tensors, kept while the real ones live."""

    def __init__(self, mode: FakeTensorMode, views: Views, memory: CardMemory) -> None:
        self._mode, self._make_view, self._memory = mode, views.make, memory
        self._storages: WeakKeyDictionary[torch.UntypedStorage, torch.UntypedStorage] = (
            WeakKeyDictionary()
        )
        self._views: WeakKeyDictionary[torch.UntypedStorage, dict[tuple[Any, ...], FakeTensor]] = (
            WeakKeyDictionary()
        )
        # Card copies of views, by id of the view.
        self._copies: dict[int, tuple[weakref.ref[Any], torch.Tensor]] = {}
        self.values = Values(self.has_values, self.fake)
        self.keeps_parameters = False  # whether parameters in host memory stay there

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on the card already; one without a plain storage never is."""
        tensor = local(tensor)
        return tensor.layout is torch.strided and self._memory.holds(self._simulated(tensor))

    def on_card(self, tensor: torch.Tensor) -> bool:
        """Whether a real tensor is on the card, or goes there; one without a plain storage never is."""
        if tensor.layout is not torch.strided:
            return False
        if self.holds(tensor):
            return True
        if self.keeps_parameters or not isinstance(tensor, torch.nn.Parameter):
            return False
        self.put_on_card(tensor)  # a step that uses a card trains no parameter on the host
        return True

    def has_values(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a real one in host memory."""
        if isinstance(tensor, FakeTensor) or self.on_card(tensor):
            return False
        return tensor.layout is not torch.strided or not _has_fake_storage(tensor)

    def block_of(self, tensor: torch.Tensor) -> int | None:
        """Return the allocator's handle of a real or fake tensor's block; None if it is not on the card."""
        return self._memory.block_of(self._simulated(tensor))

    def record_stream(self, tensor: torch.Tensor, stream: int) -> bool:
        """Let a stream use a real or fake tensor; return whether its block will wait for that once it is free."""
        return self._memory.record_stream(self._simulated(tensor), stream)

    def on_its_card(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Return what stands for a storage on the card; itself if it is not there."""
        simulated = self._storages.get(storage, storage)
        return simulated if self._memory.holds(simulated) else storage

    def _simulated(self, tensor: torch.Tensor) -> torch.UntypedStorage:
        storage = tensor.untyped_storage()
        return self._storages.get(storage, storage)

    def bind(self, tensor: torch.Tensor, fake: FakeTensor) -> None:
        """Let a new real tensor stand for a fake that an operator has put on the card."""
        storage, simulated = tensor.untyped_storage(), fake.untyped_storage()
        if storage not in self._storages and self._memory.holds(simulated):
            self._storages[storage] = simulated

    def put_on_card(self, tensor: torch.Tensor) -> None:
        """Put a real tensor on the card, with its whole storage."""
        tensor = local(tensor)
        if isinstance(tensor, FakeTensor):
            return
        refuse_layout(tensor)
        self._memory.allocate(self._storage_of(tensor))

    def take_off_card(self, storage: torch.UntypedStorage) -> None:
        """Free the card's copy of a real storage; another tensor that uses the storage puts it back."""
        if storage in self._storages:
            self._memory.free(self._storages[storage])

    def move_to_card(self, tensor: torch.Tensor) -> None:
        """Put a host tensor on the card; of a view into a larger real tensor, only a copy."""
        if isinstance(tensor, FakeTensor):
            tensor.fake_device = CARD
            self._memory.allocate(tensor.untyped_storage())
            return
        if tensor.numel() * tensor.element_size() >= tensor.untyped_storage().nbytes():
            self.put_on_card(tensor)
            return
        with self._mode:
            copy = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=CARD
            )
        self.values.learn(copy, tensor)
        self._memory.allocate(copy.untyped_storage())
        key = id(tensor)
        self._copies[key] = (weakref.ref(tensor, lambda _: self._copies.pop(key, None)), copy)

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the fake of a tensor; a fake is returned as it is."""
        if isinstance(tensor, FakeTensor):
            return tensor
        copied = self._copies.get(id(tensor))
        if copied is not None and copied[0]() is tensor:
            return copied[1]
        refuse_layout(tensor)
        if _has_fake_storage(tensor):
            return self._make_fake(tensor)
        views = self._views.setdefault(tensor.untyped_storage(), {})
        key = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        if key not in views:
            views[key] = self._make_fake(tensor)
        fake = views[key]
        fake.fake_device = self._device_of(fake.untyped_storage())
        return fake

    def _device_of(self, storage: torch.UntypedStorage) -> torch.device:
        return CARD if self._memory.holds(storage) else HOST

    def _make_fake(self, tensor: torch.Tensor) -> FakeTensor:
        storage = self._storage_of(tensor)
        shape, stride, offset = tensor.shape, tensor.stride(), tensor.storage_offset()
        return self._make_view(
            storage, shape, stride, offset, tensor.dtype, self._device_of(storage)
        )

    def _storage_of(self, tensor: torch.Tensor) -> torch.UntypedStorage:
        real = tensor.untyped_storage()
        if _has_fake_storage(tensor):
            return real
        if real not in self._storages:
            self._storages[real] = _UntypedStorage(real.nbytes(), device="meta")
            self.values.stands_for(self._storages[real], real)
        return self._storages[real]


class Results:
    """Runs operators on fakes, and remembers what they return: torch's own cache takes several times as long."""

    def __init__(self, mode: FakeTensorMode, views: Views) -> None:
        self._mode, self._make_view = mode, views.make
        # By an operator and its arguments: what makes each result, and what puts the results together.
        self._known: dict[
            tuple[Any, ...], tuple[Callable[[list[Any]], Any], list[Callable[[list[Any]], Any]]]
        ] = {}

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return what an operator returns for fakes."""
        values = (*args, *kwargs.values())
        key, tensors = [func, torch.get_default_dtype(), *kwargs], list[Any]([None])
        # ``set_`` moves a tensor to another's storage.
        packet = getattr(func, "overloadpacket", None)
        may_know = func.namespace == "aten" and packet is not torch.ops.aten.set_
        is_plain = may_know and _describe(values, key, tensors)
        if not is_plain or len(tensors) == 1:
            return self._compute(func, args, kwargs)
        known = self._known.get(tuple(key))
        if known is not None:
            combine, makers = known
            return combine([make(tensors) for make in makers])
        result = self._compute(func, args, kwargs)
        after = key[: 2 + len(kwargs)]
        if _describe(values, after, []) and after == key:  # it resized no argument
            self._remember(tuple(key), result, tensors)
        return result

    def _compute(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        with self._mode:
            return as_on_cuda(func, args, func(*args, **kwargs))

    def _remember(self, key: tuple[Any, ...], result: Any, tensors: list[Any]) -> None:
        if len(self._known) >= MOST_RESULTS:
            return
        combine: Callable[[list[Any]], Any]
        results, combine = (result,), itemgetter(0)
        if isinstance(result, list | tuple):
            results, combine = tuple(result), type(result)
        makers = []
        for value in results:
            make = self._learn(value, tensors)
            if make is None:
                return
            makers.append(make)
        self._known[key] = combine, makers

    def _learn(self, result: Any, tensors: list[Any]) -> Callable[[list[Any]], Any] | None:
        """Return what makes such a result, given None, the arguments and the results before it; None if it is unusual."""
        for index, tensor in enumerate(tensors):
            if tensor is result:
                return itemgetter(index)
        if type(result) in _PLAIN:
            return lambda _: result
        geometry: list[Any] = []
        if type(result) is not FakeTensor or not _describe([result], geometry, tensors):
            return None
        nbytes = result.untyped_storage().nbytes()
        keys = [tensor.untyped_storage()._cdata for tensor in tensors[1:]]
        # The first with the same storage; it may be the only one itself.
        source = 1 + keys.index(keys[-1])

        def make(tensors: list[Any]) -> Any:
            if source == len(tensors):
                storage = _UntypedStorage(nbytes, device="meta")
            else:
                storage = tensors[source].untyped_storage()
            tensors.append(self._make_view(storage, *geometry))
            return tensors[-1]

        return make


def _describe(values: Any, parts: list[Any], tensors: list[Any]) -> bool:
    """Add what decides about an operator's result to `parts`, and fakes to `tensors`; return False for unusual values."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if (
                value.layout is not torch.strided
                or value.dtype.is_complex
                or value.is_neg()
                or value.constant is not None
            ):
                return False
            parts += (
                value.shape,
                value.stride(),
                value.storage_offset(),
                value.dtype,
                value.fake_device,
            )
            tensors.append(value)
        elif kind in _PLAIN:
            parts += (kind, value)
        elif kind in (list, tuple) and _describe(value, parts, tensors):
            parts.append(len(value))
        else:
            return False
    return True


def _has_fake_storage(tensor: torch.Tensor) -> bool:
    """Whether a real tensor has a fake's storage, because the step assigned a fake to its ``.data``."""
    return tensor.untyped_storage().device.type == "meta"
