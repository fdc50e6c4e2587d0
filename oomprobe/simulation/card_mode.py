"""The dispatch mode in which a real step runs on tensors without data.

It runs above torch's `FakeTensorMode` and passes it only fakes: each real argument of an operator, such as a parameter, is
replaced by a fake of its storage, so the user's tensors are never written to. Results go to the simulated card or to the
host. A host tensor used together with a tensor on the card moves there, because a step for a real card would have created
it there.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
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
from torch.utils._pytree import tree_leaves, tree_map_only

from oomprobe.errors import SimulationError
from oomprobe.ground import torch_versions
from oomprobe.ground.frames import user_line
from oomprobe.simulation import scratch
from oomprobe.simulation.allocator import AllocatorOutOfMemory
from oomprobe.simulation.fakes import CARD, EXPLICIT_HOST, HOST, Fakes, Results
from oomprobe.simulation.memory import CardMemory
from oomprobe.simulation.unknown import (
    KnownBools,
    lacks_cpu_kernel,
    propagate_bool,
    read_value,
    refuse_layout,
    refuse_missing_kernel,
    refuse_operator,
    wants_data,
)

# Host tensors up to these sizes are created for real, because steps read indices but not images.
MAX_REAL_NUMEL = {True: 2**16, False: 2**22}  # key: whether the dtype is floating point
_aten = torch.ops.aten
_COMPARISONS = {_aten.equal.default, _aten.allclose.default}
_READING = {*_COMPARISONS, _aten._local_scalar_dense.default}
_ZEROS = {_aten.new_zeros.default, _aten.zeros.default, _aten.zeros_like.default}
# Autograd formulas that write into zeros they created do so out of place for tensor subclasses.
# Source: torch/csrc/autograd/FunctionsManual.cpp, areAnyTensorSubclassLike.
_IN_PLACE_ON_CUDA = {
    _aten.scatter.src, _aten.scatter.value, _aten.scatter_add.default, _aten.index_put.default, _aten.index_add.default,
}  # fmt: skip
# Raised where the shape of a result depends on values, which building has, or where a result has no plain storage.
_NEEDS_VALUES = (
    DynamicOutputShapeException, DataDependentOutputException, UnsupportedOperatorException, SimulationError,
)  # fmt: skip
_LINEAR_ALGEBRA = {
    getattr(_aten, name).default
    for name in (
        "mm", "addmm", "_addmm_activation", "bmm", "baddbmm", "addmv", "mv", "dot", "addbmm", "_scaled_mm", "_int_mm",
    )
}  # fmt: skip
_ADDMM = {_aten.addmm.default, _aten._addmm_activation.default}
_RESIZING = {_aten.resize_.default, _aten.set_.source_Storage_storage_offset, _aten.set_.source_Tensor}


class CardMode(TorchDispatchMode):
    """Dispatch mode that runs operators on fakes and records the storages they create."""

    def __init__(self, memory: CardMemory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory = memory
        self.fake_mode = FakeTensorMode()
        self.fake_mode._allow_unsafe_data_ptr_access = False  # a custom kernel would crash on address 0
        self.depth = 0  # above 0 inside torch's code, which must see the fakes' own devices
        self.poll: Callable[[], None] = lambda: None
        self.notes: dict[str, None] = {}
        self._processors = memory.card.processors
        self.fakes = Fakes(self.fake_mode, memory)
        self._results = Results(self.fake_mode)
        self._known_bools: KnownBools = weakref.WeakKeyDictionary()
        self._last_zeros: Callable[[], torch.Tensor | None] = lambda: None
        self.is_building = False
        self.refused_building: str | None = None  # where building first asked for more than the card has

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # later versions of torch ask
        return False  # dynamo is off already, and turning it off at each dispatch takes long

    def start_call(self) -> None:
        """Reset what a failed call may have left."""
        self.depth = 0
        self.fake_mode.in_kernel_invocation = False

    @contextmanager
    def building(self) -> Iterator[None]:
        """Let tensors have values, in host memory, while a model is built."""
        self.is_building = self.fakes.keeps_parameters = True
        try:
            with self:
                yield
        finally:
            self.is_building = self.fakes.keeps_parameters = False

    def is_on_card(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor, real or fake, is on the card."""
        if isinstance(tensor, FakeTensor):
            return tensor.fake_device == CARD or self.memory.holds(tensor.untyped_storage())
        return self.fakes.on_card(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return HOST  # autograd checks gradients against their real parameters
        if self.is_building and any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a tensor that wraps others makes its own operators of theirs
        if not self.depth:
            self.poll()
        self.depth += 1
        try:
            if self.is_building:
                return self._build(func, args, kwargs or {})
            return self._run(func, args, kwargs or {})
        except AllocatorOutOfMemory as refusal:
            raise torch.OutOfMemoryError(str(refusal)) from None
        except (DynamicOutputShapeException, DataDependentOutputException):
            refuse_operator(func)
        except RuntimeError as error:
            if isinstance(error, UnsupportedOperatorException) or wants_data(error) or lacks_cpu_kernel(error):
                refuse_missing_kernel(func, error)
            raise
        finally:
            self.depth -= 1

    def put_on_card(self, tensor: torch.Tensor) -> None:
        """Put a tensor on the card, unless it is there."""
        if isinstance(tensor, FakeTensor):
            self.fakes.move_to_card(tensor)
        elif self.is_building:
            try:
                self.fakes.put_on_card(tensor)
            except AllocatorOutOfMemory:
                self._refuse_building()
        else:
            self.fakes.put_on_card(tensor)

    def _refuse_building(self) -> None:
        """Take note that the card is full; the device tells once it is known what the model alone takes."""
        self.refused_building = self.refused_building or user_line()

    def _build(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator for real, in host memory; if it concerns the card, simulate first what it asks of it."""
        operands = _Operands(self)
        operands.add(args)
        operands.add(kwargs.values())
        simulated, needs_values, device = None, False, kwargs.get("device")
        if (operands.on_card or device == CARD) and func not in _READING:
            try:
                simulated = self._run(func, args, kwargs)
            except AllocatorOutOfMemory:
                self._refuse_building()
            except _NEEDS_VALUES:
                needs_values = True
        if device is not None and device.type == "cpu":
            kwargs = {**kwargs, "device": HOST}
        if "pin_memory" in kwargs:
            kwargs = {**kwargs, "pin_memory": None}
        try:
            with torch._C._DisableTorchDispatch():
                result = func(*args, **kwargs)
        except RuntimeError as error:
            if simulated is None or not lacks_cpu_kernel(error):
                raise
            result = tree_map_only(FakeTensor, zeros_of, simulated)
        for real, fake in zip(tree_leaves(result), tree_leaves(simulated), strict=False):
            if isinstance(real, torch.Tensor) and isinstance(fake, FakeTensor):
                self.fakes.bind(real, fake)
        for real in tree_leaves(result) if needs_values else ():
            if isinstance(real, torch.Tensor) and real.layout is torch.strided:
                self.put_on_card(real)
        if func in _ZEROS:
            self._last_zeros = weakref.ref(result)
        return result

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if "pin_memory" in kwargs:  # host memory does not count
            kwargs = {**kwargs, "pin_memory": None}
        operands = _Operands(self)
        operands.add(args)
        operands.add(kwargs.values())
        requested = kwargs.get("device")
        if requested is not None and requested.type != "meta":
            kwargs = {**kwargs, "device": _target_device(requested, operands)}
        if func is _aten._local_scalar_dense.default:
            return self._scalar(args[0])
        if operands.on_card and _only_writes_lists(func):
            return None
        if func is _aten.copy_.default and operands.on_card and operands.on_host and operands.on_host[0] is args[1]:
            return args[0]  # from the host into an existing tensor on the card
        if func is _aten.histc.default and operands.on_card:  # CUDA accepts integers, the CPU does not
            func, args, kwargs = _aten.new_empty.default, (args[0], [args[1] if len(args) > 1 else 100]), {}
        if func in _COMPARISONS and (operands.fake or operands.on_card):
            return args[0].shape == args[1].shape  # simulated values are all equal
        if not operands.fake and not operands.on_card and (requested is None or kwargs["device"] == HOST):
            return self._run_on_host(func, args, kwargs, has_tensors=operands.any)
        if operands.on_card:
            for tensor in operands.on_host:
                self.fakes.move_to_card(tensor)
        accumulates = func is _aten.add.Tensor and _adds_in_place((*args,))
        in_place = func in _IN_PLACE_ON_CUDA and self._is_autograds_zeros(args[0])
        args = self._faked(args)
        kwargs = {name: self._faked(value) for name, value in kwargs.items()}
        to_card = operands.on_card and kwargs.get("device") != HOST
        launch = scratch.find_launch(self._processors, func, args, kwargs) if to_card else None
        with nullcontext() if launch is None else self.memory.running(launch):
            result = self._results.run(func, args, kwargs)
            propagate_bool(self._known_bools, func, args, result)
            if accumulates and self.memory.holds(args[0].untyped_storage()):
                result.fake_device = CARD
                self.memory.transfer(args[0].untyped_storage(), result.untyped_storage())
            result_bytes = launch.result_bytes if launch else None
            self._track(func, result, args, result_bytes, to_card=to_card, in_place=in_place)
            if to_card and scratch.is_convolution(func) and torch.backends.cudnn.benchmark:
                self._tune(func, args)
        if func in _LINEAR_ALGEBRA:
            is_lt = func in _ADDMM and torch_versions.uses_lt(args[0], args[1], args[2], kwargs.get("beta", 1))
            self.memory.use_workspace(is_lt=is_lt, in_backward=_in_backward())
        return result

    def _run_on_host(self, func: Any, args: Any, kwargs: dict[str, Any], *, has_tensors: bool) -> Any:
        """Run an operator for real, unless it creates a large tensor, which has no values."""
        if not has_tensors:
            with self.fake_mode:
                fake = func(*args, **kwargs)
            if isinstance(fake, torch.Tensor) and fake.numel() > MAX_REAL_NUMEL[fake.is_floating_point()]:
                return fake
        with torch._C._DisableTorchDispatch():
            return func(*args, **kwargs)

    def _scalar(self, tensor: torch.Tensor) -> Any:
        if not isinstance(tensor, FakeTensor) and not self.is_on_card(tensor):
            with torch._C._DisableTorchDispatch():
                return _aten._local_scalar_dense.default(tensor)
        if tensor.untyped_storage() in self._known_bools:
            return self._known_bools[tensor.untyped_storage()]
        return read_value(tensor, self.notes)

    def _track(
        self, func: Any, result: Any, args: Any, result_bytes: int | None, *, to_card: bool, in_place: bool
    ) -> None:
        if func in _RESIZING:
            if self.is_on_card(args[0]):
                self.memory.reallocate(args[0].untyped_storage())
            return
        memory, workspace_bytes = self.memory, scratch.convolution_workspace(func, args)
        memory.largest_workspace_bytes = max(memory.largest_workspace_bytes, workspace_bytes)
        if in_place:
            result.fake_device = CARD
            self.memory.transfer(args[0].untyped_storage(), result.untyped_storage())
            return
        results = result if isinstance(result, list | tuple) else (result,)
        if func is _aten.native_dropout.default:
            results = results[::-1]  # the mask is allocated first
        elif func is _aten._scaled_dot_product_cudnn_attention.default:
            results = (*results[6:8], *results[:2])  # the seed of its dropout is allocated first
        for value in results:
            if not isinstance(value, FakeTensor):
                continue
            if to_card and value.fake_device != CARD and not (args and value is args[0]):  # an in-place result stays
                value.fake_device = CARD
            if value.fake_device == CARD:
                refuse_layout(value)
                self.memory.allocate(value.untyped_storage(), result_bytes)
        if func in _ZEROS and isinstance(result, FakeTensor):
            self._last_zeros = weakref.ref(result)

    def _tune(self, func: Any, args: Any) -> None:
        """Empty the cache, as torch does once cuDNN has tried its kernels on a new convolution.

        Source: aten/src/ATen/native/cudnn/Conv_v8.cpp (run_single_conv).
        """
        key = (func, *((one.shape, one.dtype) if isinstance(one, torch.Tensor) else str(one) for one in args))
        if key not in self.memory.tuned:
            self.memory.tuned.add(key)
            self.memory.empty_cache(by_step=True)

    def _is_autograds_zeros(self, tensor: torch.Tensor) -> bool:
        """Whether autograd has just created the tensor to scatter gradients into it."""
        return _in_backward() and self._last_zeros() is tensor and self.is_on_card(tensor)

    def _faked(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.fakes.fake(value)
        if type(value) in (list, tuple):
            return type(value)(self._faked(one) for one in value)
        return value


def zeros_of(fake: FakeTensor) -> torch.Tensor:
    """Return a tensor in host memory that looks like a fake, whose values only the card could compute."""
    with torch._C._DisableTorchDispatch():
        return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=HOST).zero_()


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _adds_in_place(args: Sequence[Any]) -> bool:
    """Whether autograd adds two gradients in place on CUDA, because it holds the only reference to the first.

    Takes the sequence, not its items: once torch.compile has run, callers keep references to the arguments they pass.

    Source: torch/csrc/autograd/input_buffer.cpp (can_accumulate_inplace), which excludes tensor subclasses.
    """
    one, other = args[0], args[1]
    return (
        _in_backward()
        and isinstance(one, torch.Tensor)
        and isinstance(other, torch.Tensor)
        and one.shape == other.shape
        and one.dtype is other.dtype
        and _aten.is_non_overlapping_and_dense.default(one)
        and sys.getrefcount(one) <= torch_versions.HELD_BY_ENGINE.references
        and one._use_count() <= torch_versions.HELD_BY_ENGINE.uses  # type: ignore[attr-defined]
        and torch._C._storage_Use_Count(one.untyped_storage()._cdata) <= torch_versions.HELD_BY_ENGINE.storage_uses
    )


@functools.cache
def _only_writes_lists(func: Any) -> bool:
    """Whether an operator only writes to lists of tensors, as optimizers do: slow to fake, without results."""
    return not func._schema.returns and func._schema.name.startswith(("aten::_foreach_", "aten::_fused_"))


class _Operands:
    """The tensors among an operator's arguments."""

    def __init__(self, card_mode: CardMode) -> None:
        self._card_mode = card_mode
        self.any = self.fake = self.on_card = False
        self.on_host: list[torch.Tensor] = []

    def add(self, values: Any) -> None:
        for value in values:
            if type(value) in (list, tuple):
                self.add(value)
            elif isinstance(value, torch.Tensor):
                self.any = True
                self.fake = self.fake or isinstance(value, FakeTensor)
                if self._card_mode.is_on_card(value):
                    self.on_card = True
                    if isinstance(value, FakeTensor) and value.fake_device != CARD:
                        value.fake_device = CARD
                elif value.dim() > 0:
                    self.on_host.append(value)


def _target_device(requested: torch.device, operands: _Operands) -> torch.device:
    if requested == CARD or requested.type == "cuda":
        return CARD
    if requested == EXPLICIT_HOST:
        return HOST
    is_default = requested == HOST  # of functions such as zeros_like
    return CARD if is_default and operands.on_card else requested
