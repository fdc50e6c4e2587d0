"""The dispatch mode in which a real step runs on tensors without data.

It stands above torch's `FakeTensorMode` and shows it fakes only: a real tensor that an operator is given (a parameter
is one, and stays one) is replaced by a fake of the same storage, so nothing of the user's is ever written to. What an
operator makes is put on the simulated card or on the host; a tensor of the host that meets one of the card is moved
there, as the same code would have made it there in the first place.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode

from oomprobe.simulation import scratch
from oomprobe.simulation.allocator import AllocatorOutOfMemory
from oomprobe.simulation.fakes import CARD, HOST, STATED_HOST, Fakes
from oomprobe.simulation.memory import Memory
from oomprobe.simulation.unknown import (
    Truths,
    follow_truth,
    is_of_the_host,
    read_value,
    refuse_layout,
    refuse_missing_kernel,
    refuse_operator,
    wants_data,
)

# Tensors of the host up to these sizes are made for real, so that their values are there: indices are read, images not.
SMALL_NUMEL = {True: 2**16, False: 2**22}  # by whether they are of floating point
_aten = torch.ops.aten
_WRITERS = ("aten::_foreach_", "aten::_fused_")
_COMPARES_ALL = {_aten.equal.default, _aten.allclose.default}
_MAKES_ZEROS = {_aten.new_zeros.default, _aten.zeros.default, _aten.zeros_like.default}
# Formulas of autograd that write into zeros of their own do it out of place where they see a tensor's subclass.
# Source: torch/csrc/autograd/FunctionsManual.cpp, areAnyTensorSubclassLike.
_IN_PLACE_ON_CUDA = {
    _aten.scatter.src, _aten.scatter.value, _aten.scatter_add.default, _aten.index_put.default, _aten.index_add.default,
}  # fmt: skip
# To a gradient that only the engine holds, counted in `_is_engines_own`: in Python, in C++, and to its storage.
_ENGINES_REFERENCES, _ENGINES_USES, _ENGINES_STORAGE_USES = 5, 4, 2
_LINEAR_ALGEBRA = {
    getattr(_aten, name).default
    for name in ("mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot", "addbmm", "_scaled_mm", "_int_mm")
}
_RESIZING = {_aten.resize_.default, _aten.set_.source_Storage_storage_offset, _aten.set_.source_Tensor}


class World(TorchDispatchMode):
    """Runs operators on fakes, and tells the memory which storages they make."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory = memory
        self.fake_mode = FakeTensorMode()
        self.fake_mode._allow_unsafe_data_ptr_access = False  # a kernel of the user's own would crash on address 0
        self.depth = 0  # inside torch's own code, where a fake's device is what FakeTensorMode says
        self.poll: Callable[[], None] = lambda: None
        self.notes: dict[str, None] = {}
        self._processors = memory.card.processors
        self._fakes = Fakes(self.fake_mode, memory)
        self.settle, self.block_of, self.forget = self._fakes.settle, self._fakes.block_of, self._fakes.forget
        self._truths: Truths = weakref.WeakKeyDictionary()  # what is known of values, by storage
        self._fresh: Callable[[], FakeTensor | None] = lambda: None

    # --- what the device asks ---

    def begin(self) -> None:
        """A call begins, whatever became of the last one."""
        self.depth = 0
        self.fake_mode.in_kernel_invocation = False

    def is_on_card(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor, real or fake, is on the card."""
        if isinstance(tensor, FakeTensor):
            return tensor.fake_device == CARD or self.memory.holds(tensor.untyped_storage())
        return self._fakes.on_card(tensor)

    # --- what torch asks ---

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return HOST  # autograd checks gradients against their real parameters
        if not self.depth:
            self.poll()
        self.depth += 1
        try:
            return self._run(func, args, kwargs or {})
        except AllocatorOutOfMemory as refusal:
            raise torch.OutOfMemoryError(str(refusal)) from None
        except (DynamicOutputShapeException, DataDependentOutputException):
            refuse_operator(func)
        except RuntimeError as error:
            if isinstance(error, UnsupportedOperatorException) or wants_data(error) or is_of_the_host(error):
                refuse_missing_kernel(func, error)
            raise
        finally:
            self.depth -= 1

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if "pin_memory" in kwargs:  # where host memory lies is nobody's concern here
            kwargs = {**kwargs, "pin_memory": None}
        found = _Found(self)
        found.look(args)
        if kwargs:
            found.look(kwargs.values())
        stated = kwargs.get("device")
        if stated is not None and stated.type != "meta":
            kwargs = {**kwargs, "device": _settled(stated, found)}
        if func is _aten._local_scalar_dense.default:
            return self._scalar(args[0])
        if found.on_card and _only_writes(func):
            return None
        if func is _aten.copy_.default and found.on_card and found.on_host and found.on_host[0] is args[1]:
            return args[0]  # from the host to the card, where the copy is there already
        if func is _aten.histc.default and found.on_card:  # CUDA counts whole numbers, a CPU does not
            func, args, kwargs = _aten.new_empty.default, (args[0], [args[1] if len(args) > 1 else 100]), {}
        if func in _COMPARES_ALL and (found.fake or found.on_card):
            return args[0].shape == args[1].shape  # all values are the same here
        if not found.fake and not found.on_card and (stated is None or kwargs["device"] == HOST):
            return self._on_host(func, args, kwargs, found)
        if found.on_card and found.on_host:
            for tensor in found.on_host:
                self._fakes.move(tensor)
        args = self._lowered(args)
        kwargs = {name: self._lowered(value) for name, value in kwargs.items()}
        accumulates = func is _aten.add.Tensor and _is_engines_own(args)
        to_card = found.on_card and kwargs.get("device") != HOST
        launch = scratch.find_launch(self._processors, func, args, kwargs) if to_card else None
        with nullcontext() if launch is None else self.memory.running(launch):
            with self.fake_mode:
                result = func(*args, **kwargs)
            follow_truth(self._truths, func, args, result)
            if accumulates and self.memory.holds(args[0].untyped_storage()):
                result.fake_device = CARD
                self.memory.transfer(args[0].untyped_storage(), result.untyped_storage())
            self._track(func, result, args, launch.result_bytes if launch else None, to_card=to_card)
        if func in _LINEAR_ALGEBRA:
            self.memory.ensure_workspace(in_backward=_in_backward())
        return result

    def _on_host(self, func: Any, args: Any, kwargs: dict[str, Any], found: _Found) -> Any:
        """Real tensors of the host and small new ones keep their values; large new ones have none."""
        if not found.any:
            with self.fake_mode:
                fake = func(*args, **kwargs)
            if isinstance(fake, torch.Tensor) and fake.numel() > SMALL_NUMEL[fake.is_floating_point()]:
                return fake
        with torch._C._DisableTorchDispatch():
            return func(*args, **kwargs)

    def _scalar(self, tensor: torch.Tensor) -> Any:
        if not isinstance(tensor, FakeTensor) and not self.is_on_card(tensor):
            with torch._C._DisableTorchDispatch():
                return _aten._local_scalar_dense.default(tensor)
        if tensor.untyped_storage() in self._truths:
            return self._truths[tensor.untyped_storage()]
        if isinstance(tensor, FakeTensor) and tensor.constant is not None:
            return _aten._local_scalar_dense.default(tensor.constant)
        return read_value(tensor, self.notes)

    def _track(self, func: Any, result: Any, args: Any, result_bytes: int | None, *, to_card: bool) -> None:
        if func in _RESIZING:
            if self.is_on_card(args[0]):
                self.memory.reallocate(args[0].untyped_storage())
            return
        workspace_bytes = scratch.convolution_workspace(func, args)
        if workspace_bytes:
            self.memory.note_workspace(workspace_bytes)
        if func in _IN_PLACE_ON_CUDA and self._is_fresh(args[0]):
            result.fake_device = CARD
            self.memory.transfer(args[0].untyped_storage(), result.untyped_storage())
            return
        results = result if isinstance(result, list | tuple) else (result,)
        for value in reversed(results) if func is _aten.native_dropout.default else results:  # its mask is made first
            if not isinstance(value, FakeTensor):
                continue
            if to_card and not (args and value is args[0]):  # a number on the host that meets the card goes there
                value.fake_device = CARD
            if value.fake_device == CARD:
                refuse_layout(value)
                self.memory.allocate(value.untyped_storage(), result_bytes)
        if func in _MAKES_ZEROS and isinstance(result, FakeTensor):
            self._fresh = weakref.ref(result)

    def _is_fresh(self, tensor: torch.Tensor) -> bool:
        """Whether autograd has just made a tensor of zeros to scatter gradients into."""
        return _in_backward() and self._fresh() is tensor and self.memory.holds(tensor.untyped_storage())

    def _lowered(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._fakes.of(value)
        if type(value) in (list, tuple):
            return type(value)(self._lowered(one) for one in value)
        return value


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _is_engines_own(args: Sequence[Any]) -> bool:
    """Whether autograd adds up two gradients and holds the last reference to the first: then it adds in place on CUDA.

    It takes the sequence: once torch.compile has run, a caller keeps references of its own to what it hands over.

    Source: torch/csrc/autograd/input_buffer.cpp (can_accumulate_inplace), which leaves tensors' subclasses out.
    """
    one, other = args[0], args[1]
    return (
        _in_backward()
        and isinstance(one, FakeTensor)
        and isinstance(other, torch.Tensor)
        and one.shape == other.shape
        and one.dtype is other.dtype
        and torch._prims_common.is_non_overlapping_and_dense_or_false(one)
        and sys.getrefcount(one) <= _ENGINES_REFERENCES
        and one._use_count() <= _ENGINES_USES  # type: ignore[attr-defined]
        and torch._C._storage_Use_Count(one.untyped_storage()._cdata) <= _ENGINES_STORAGE_USES
    )


@functools.cache
def _only_writes(func: Any) -> bool:
    """Whether an operator writes to lists of tensors and returns nothing: of optimizers over all parameters, slow to fake."""
    return func.namespace == "aten" and not func._schema.returns and func._schema.name.startswith(_WRITERS)


class _Found:
    """What the arguments of an operator are."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.any = self.fake = self.on_card = False
        self.on_host: list[torch.Tensor] = []

    def look(self, values: Any) -> None:
        for value in values:
            if type(value) in (list, tuple):
                self.look(value)
            elif isinstance(value, torch.Tensor):
                self.any = True
                self.fake = self.fake or isinstance(value, FakeTensor)
                if self._world.is_on_card(value):
                    self.on_card = True
                    if isinstance(value, FakeTensor):
                        value.fake_device = CARD
                elif value.dim() > 0:
                    self.on_host.append(value)


def _settled(stated: torch.device, found: _Found) -> torch.device:
    if stated == CARD or stated.type == "cuda":
        return CARD
    if stated == STATED_HOST:
        return HOST
    return CARD if found.on_card and stated == HOST else stated  # torch's own default for a tensor like another
