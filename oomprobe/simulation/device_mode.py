"""Device identity: simulated tensors report ``cuda:0``, and torch's functions accept ``"cuda"``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ContextDecorator
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from oomprobe.ground.frames import user_line
from oomprobe.simulation.card_mode import CardMode
from oomprobe.simulation.cuda_api import LEGACY_TYPES, legacy_type
from oomprobe.simulation.fakes import CARD, EXPLICIT_HOST, HOST, SEEN, requested_device
from oomprobe.simulation.unknown import refuse_address, refuse_quantized, use_guesses
from oomprobe.simulation.values import KEPT

_T = torch.Tensor
RECURRENT = (
    "recurrent networks are simulated one time step at a time, as CUDA runs them without cuDNN; with cuDNN they take less "
    "memory"
)
NOT_A_LEAF = (
    "{line}: only leaf tensors can be copied by copy.deepcopy; copy tensor.detach() instead"
)
_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}


class Ones(np.ndarray[Any, Any]):
    """An array that stands for values of a simulated tensor, as do those computed of it."""

    def __array_wrap__(self, array: Any, context: Any = None, *_: Any) -> Any:
        """Return numbers as numpy does for arrays of its own class."""
        return super().__array_wrap__(array, context)[()]


class DeviceMode(TorchFunctionMode, ContextDecorator):
    """Function mode that answers questions about devices and maps "cuda" to the simulated card.

    It is off while a torch function runs; what that calls, such as a hook, runs in it if decorated with it.
    """

    def __init__(self, card_mode: CardMode) -> None:
        super().__init__()
        self._card_mode, self._host = card_mode, card_mode.memory.host
        self._handlers: dict[Any, Any] = {
            _T.to: self._to,
            torch._C._nn._parse_to: _parse_to,
            torch.device: lambda *args, **kwargs: torch.device(*_named(args), **kwargs),
            _T.cuda: lambda tensor, *_, memory_format=None, **__: self._move(
                tensor, CARD, memory_format=memory_format
            ),
            _T.cpu: lambda tensor, memory_format=None: self._move(
                tensor, EXPLICIT_HOST, memory_format=memory_format
            ),
            _T.item: self.to_number,
            _T.numpy: self._numpy,
            _T.__array__: lambda tensor, dtype=None: np.asarray(self._numpy(tensor), dtype=dtype),
            _T.tolist: self.to_list,
            _T.pin_memory: self._pin,
            _T.is_pinned: lambda tensor, *_, **__: self._host.pins(tensor.untyped_storage()),
            _T.get_device: lambda tensor: SEEN.device.index if card_mode.is_on_card(tensor) else -1,
            _T.__format__: lambda tensor, spec: format(
                tensor.item() if tensor.dim() == 0 and spec else str(tensor), spec
            ),
            _T.type: self._type,
            _T.data_ptr: lambda tensor: (
                tensor.data_ptr() if self._has_values(tensor) else refuse_address()
            ),
            _T.__deepcopy__: self._deepcopy,
            torch.quantize_per_tensor: refuse_quantized,
            torch.quantize_per_channel: refuse_quantized,
            torch.tensor: self._from_data,
            torch.as_tensor: self._from_data,
            torch.asarray: self._from_data,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        handler = self._handlers.get(func)
        if handler is not None:
            return handler(*args, **kwargs)
        if func.__name__ == "__get__":
            return self._property(func, args[0])
        if func.__name__ == "__set__" and getattr(func.__self__, "__name__", "") == "data":
            return self._set_data(func, *args)
        if self._card_mode.facts.has_guessed:
            use_guesses((args, *kwargs.values()))
        if func.__name__ in _RECURRENT:
            self._card_mode.notes[RECURRENT] = None
        device = requested_device(kwargs.get("device"))
        if device is not None:
            kwargs = {**kwargs, "device": device}
        return func(*args, **kwargs)

    def _property(self, getter: Any, tensor: torch.Tensor) -> Any:
        name = getattr(getter.__self__, "__name__", "")
        if name not in ("device", "is_cuda", "is_cpu"):
            return getter(tensor)
        if tensor.is_meta and not isinstance(tensor, FakeTensor):
            return getter(tensor)
        on_card = self._card_mode.is_on_card(tensor)
        if name == "device":
            return SEEN.device if on_card else HOST
        return on_card is (name == "is_cuda")

    def _set_data(self, setter: Any, tensor: torch.Tensor, value: torch.Tensor) -> None:
        if isinstance(tensor, FakeTensor):
            setter(tensor, self._card_mode.fakes.fake(value))
            return
        before = tensor.untyped_storage()
        setter(tensor, value)
        if tensor.untyped_storage()._cdata != before._cdata:
            self._card_mode.fakes.take_off_card(before)

    # --- moving ---

    def _to(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and isinstance(args[0], torch.Tensor):
            kwargs["other"], args = args[0], args[1:]
        target = kwargs.pop("other", None)
        if target is not None:
            device = SEEN.device if self._card_mode.is_on_card(target) else HOST
            return self._to(tensor, device, target.dtype, *args, **kwargs)
        copy = bool(kwargs.pop("copy", False))
        device, dtype, non_blocking, memory_format = _parse_to(*args, **kwargs)
        return self._move(
            tensor, requested_device(device), dtype, copy=copy, memory_format=memory_format,
            non_blocking=non_blocking,
        )  # fmt: skip

    def _move(
        self, tensor: torch.Tensor, device: torch.device | None, dtype: torch.dtype | None = None, *, copy: bool = False,
        memory_format: Any = None, non_blocking: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        current = self._device_of(tensor)
        if device in (None, current):
            return tensor.to(dtype or tensor.dtype, copy=copy, memory_format=memory_format)
        moved: torch.Tensor = torch.ops.aten._to_copy(
            tensor,
            dtype=dtype,
            device=device,
            memory_format=memory_format,
            non_blocking=non_blocking,
        )
        return moved

    def _pin(self, tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Answer `pin_memory` with a copy, unless it is pinned already."""
        if self._card_mode.is_on_card(tensor) or self._host.pins(tensor.untyped_storage()):
            return tensor
        pinned = tensor.clone()
        self._host.pin(pinned.untyped_storage())
        return pinned

    def _device_of(self, tensor: torch.Tensor) -> torch.device:
        return CARD if self._card_mode.is_on_card(tensor) else EXPLICIT_HOST

    def _type(self, tensor: torch.Tensor, dtype: Any = None, *_: Any, **__: Any) -> Any:
        device = self._device_of(tensor)
        if dtype is None:
            return legacy_type(tensor.dtype, on_card=device == CARD)
        if not isinstance(dtype, torch.dtype):  # such as torch.cuda.FloatTensor, or its name
            name = dtype if isinstance(dtype, str) else f"{dtype.__module__}.{dtype.__name__}"
            device = CARD if name.startswith("torch.cuda.") else EXPLICIT_HOST
            dtype = LEGACY_TYPES[name.rpartition(".")[2]]
        return self._move(tensor, device, dtype)

    def _from_data(
        self, data: Any, dtype: Any = None, device: Any = None, **kwargs: Any
    ) -> torch.Tensor:
        if isinstance(data, torch.Tensor):
            created = self._move(data, requested_device(device), dtype)
        else:
            device = torch.get_default_device() if device is None else _parse_to(device)[0]
            place = HOST if device.type != "meta" else device
            created = self._move(
                torch.as_tensor(data, dtype=dtype, device=place), requested_device(device)
            )
        if kwargs.get("pin_memory"):
            self._host.pin(created.untyped_storage())
        if kwargs.get("requires_grad"):
            created.requires_grad_()
        return created

    # --- values ---

    def to_number(self, tensor: torch.Tensor) -> Any:
        """Answer `item`."""
        if tensor.dtype in KEPT and tensor.numel() == 1 and self._values_of(tensor) is None:
            return self._card_mode.facts.guess(tensor)
        return tensor.item()

    def _numpy(self, tensor: torch.Tensor, **kwargs: Any) -> Any:
        values = self._values_of(tensor)
        return self._array(tensor) if values is None else values.numpy(**kwargs)

    def to_list(self, tensor: torch.Tensor) -> Any:
        """Answer `tolist`; for a fake, torch would read one value at a time."""
        values = self._values_of(tensor)
        return self._array(tensor).tolist() if values is None else values.tolist()

    def _has_values(self, tensor: torch.Tensor) -> bool:
        return self._card_mode.fakes.has_values(tensor)

    def _values_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return self._card_mode.fakes.values.of(tensor)

    def _array(self, tensor: torch.Tensor) -> Any:
        value = self._card_mode.facts.read(tensor)
        dtype = torch.float32 if tensor.dtype is torch.bfloat16 else tensor.dtype
        numpy_dtype = torch.empty(0, dtype=dtype).numpy().dtype
        return np.broadcast_to(numpy_dtype.type(value), tuple(tensor.shape)).view(
            Ones
        )  # any size, no memory

    def _deepcopy(self, tensor: torch.Tensor, memo: dict[Any, Any]) -> Any:
        """Copy a tensor with its whole storage, once for all its views, as torch does; it would read the address of the data."""
        if self._card_mode.fakes.has_values(tensor):
            return tensor.__deepcopy__(memo)  # type: ignore[no-untyped-call]
        if id(tensor) in memo:
            return memo[id(tensor)]
        if not tensor.is_leaf:
            raise RuntimeError(NOT_A_LEAF.format(line=user_line()))
        storage = tensor.untyped_storage()
        key = "oomprobe", storage._cdata
        with self, torch.no_grad():
            if key not in memo:
                count = storage.nbytes() // tensor.element_size()
                memo[key] = tensor.detach().as_strided((count,), (1,), 0).clone()
            tensor.new_empty(())  # torch makes the copy of it
            copied = memo[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            if isinstance(tensor, torch.nn.Parameter):
                copied = torch.nn.Parameter(copied, tensor.requires_grad)
            copied.requires_grad_(tensor.requires_grad)
            memo[id(tensor)] = copied
            added = {
                name: value for name, value in vars(tensor).items() if name not in vars(copied)
            }  # by the user
            vars(copied).update(copy.deepcopy(added, memo))
            if tensor.grad is not None:
                copied.grad = copy.deepcopy(tensor.grad, memo)
        return copied


def _parse_to(*args: Any, **kwargs: Any) -> Any:
    """Parse the arguments of ``.to``."""
    if "device" in kwargs:
        args = (kwargs.pop("device"), *args)
    return torch._C._nn._parse_to(*_named(args), **kwargs)


def _named(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments with the card in place of its index.

    Torch refuses numbers on a machine without a card.
    """
    if args and isinstance(args[0], int):
        SEEN.claim(args[0])
        return SEEN.device, *args[1:]
    return args


class BuildingMode(DeviceMode):
    """Device mode while a model is built, whose tensors have values."""

    def wrap_load(self, load: Callable[..., Any]) -> Callable[..., Any]:
        """Make ``torch.load`` load into host memory and record tensors mapped to the card."""

        def wrapped(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
            result = load(f, map_location="cpu", **kwargs)
            if (
                isinstance(map_location, str | int | torch.device)
                and requested_device(map_location) == CARD
            ):
                tree_map_only(torch.Tensor, self._card_mode.put_on_card, result)
            return result

        return wrapped

    def _has_values(self, tensor: torch.Tensor) -> bool:
        return True

    def _values_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return tensor

    def _set_data(self, setter: Any, tensor: torch.Tensor, value: torch.Tensor) -> None:
        setter(tensor, value)
