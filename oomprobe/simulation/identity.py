"""What code sees: tensors that say they are on ``cuda:0``, and functions that take ``"cuda"`` for an answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from oomprobe.simulation.fakes import CARD, HOST, SEEN_CARD, STATED_HOST, place_of
from oomprobe.simulation.unknown import refuse_address
from oomprobe.simulation.world import World

_T = torch.Tensor
RECURRENT = (
    "recurrent nets are simulated one time step after the other, as CUDA computes them without cuDNN: with cuDNN they take "
    "less memory"
)
_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}


class Identity(TorchFunctionMode):
    """Answers questions about devices, and takes a "cuda" device for the simulated card."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self._handlers: dict[Any, Any] = {
            _T.to: self._to,
            _T.cuda: lambda tensor, *_, memory_format=None, **__: self._moved(
                tensor, CARD, memory_format=memory_format
            ),
            _T.cpu: lambda tensor, memory_format=None: self._moved(tensor, STATED_HOST, memory_format=memory_format),
            _T.numpy: self._numpy,
            _T.tolist: self.values_of,
            _T.pin_memory: lambda tensor, *_, **__: tensor,
            _T.get_device: lambda tensor: 0 if world.is_on_card(tensor) else -1,
            _T.backward: self._backward,
            _T.__format__: self._format,
            _T.type: self._type,
            _T.data_ptr: self._address,
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
        if func.__name__ in _RECURRENT:
            self._world.notes[RECURRENT] = None
        place = place_of(kwargs.get("device"))
        return func(*args, **kwargs) if place is None else self._made(func, args, kwargs, place)

    def _made(self, func: Any, args: Any, kwargs: dict[str, Any], place: torch.device) -> Any:
        return func(*args, **{**kwargs, "device": place})

    def _property(self, getter: Any, tensor: torch.Tensor) -> Any:
        name = getattr(getter.__self__, "__name__", "")
        if name not in ("device", "is_cuda", "is_cpu"):
            return getter(tensor)
        if tensor.is_meta and not isinstance(tensor, FakeTensor):
            return getter(tensor)
        on_card = self._world.is_on_card(tensor)
        if name == "device":
            return SEEN_CARD if on_card else HOST
        return on_card is (name == "is_cuda")

    def _set_data(self, setter: Any, tensor: torch.Tensor, value: torch.Tensor) -> None:
        before = tensor.untyped_storage()
        setter(tensor, value)
        if not isinstance(tensor, FakeTensor) and tensor.untyped_storage()._cdata != before._cdata:
            self._world.forget(before)

    # --- moving ---

    def _to(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        other = kwargs.pop("other", args[0] if args and isinstance(args[0], torch.Tensor) else None)
        if other is not None:
            rest = args[1:] if args and args[0] is other else args
            device = SEEN_CARD if self._world.is_on_card(other) else HOST
            return self._to(tensor, device, other.dtype, *rest, **kwargs)
        if isinstance(kwargs.get("device"), int):
            kwargs["device"] = SEEN_CARD
        if args and isinstance(args[0], int):
            args = (SEEN_CARD, *args[1:])
        copy = bool(kwargs.pop("copy", False))
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        return self._moved(tensor, place_of(device), dtype, copy=copy, memory_format=memory_format)

    def _moved(
        self, tensor: torch.Tensor, place: torch.device | None, dtype: torch.dtype | None = None, *, copy: bool = False,
        memory_format: Any = None,
    ) -> torch.Tensor:  # fmt: skip
        here = CARD if self._world.is_on_card(tensor) else STATED_HOST
        if place in (None, here):
            return tensor.to(tensor.dtype if dtype is None else dtype, copy=copy, memory_format=memory_format)
        made: torch.Tensor = torch.ops.aten._to_copy(tensor, dtype=dtype, device=place, memory_format=memory_format)
        return made

    def _type(self, tensor: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(dtype, torch.dtype):
            return self._moved(tensor, None, dtype)
        return tensor.type(dtype, *args, **kwargs)

    def _from_data(self, data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        place = place_of(kwargs.pop("device", None))
        if isinstance(data, torch.Tensor):
            made = self._moved(data, place, kwargs.get("dtype"))
        else:
            made = torch.as_tensor(data, *args, **{k: v for k, v in kwargs.items() if k == "dtype"})
            made = self._moved(made, place)
        return made.requires_grad_() if kwargs.get("requires_grad") else made

    # --- values that are not there ---

    def _address(self, tensor: torch.Tensor) -> int:
        if not self._has_values(tensor):
            refuse_address()
        return tensor.data_ptr()

    def _format(self, tensor: torch.Tensor, spec: str) -> str:
        if not spec:
            return str(tensor)
        return format(tensor.item() if tensor.dim() == 0 else str(tensor), spec)

    def _numpy(self, tensor: torch.Tensor, **kwargs: Any) -> Any:
        return tensor.numpy(**kwargs) if self._has_values(tensor) else self._array(tensor)

    def values_of(self, tensor: torch.Tensor) -> Any:
        """`tolist`, of a fake too, whose own would read one value after the other."""
        return tensor.tolist() if self._has_values(tensor) else self._array(tensor).tolist()

    def _has_values(self, tensor: torch.Tensor) -> bool:
        return not isinstance(tensor, FakeTensor) and not self._world.is_on_card(tensor)

    def _array(self, tensor: torch.Tensor) -> Any:
        one = self._world._scalar(torch.empty((), dtype=tensor.dtype, device="meta"))
        kind = torch.empty(0, dtype=tensor.dtype if tensor.dtype is not torch.bfloat16 else torch.float32).numpy().dtype
        return np.broadcast_to(kind.type(one), tuple(tensor.shape))  # of any size, without memory

    # --- what torch writes in Python, where a mode would be switched off inside ---

    def _backward(
        self, tensor: torch.Tensor, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False,
        inputs: Any = None,
    ) -> None:  # fmt: skip
        with self:
            torch.autograd.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)
