"""The dispatch mode in which a real step runs on tensors without data.

It runs above torch's `FakeTensorMode` and passes it only fakes: each real argument of an operator, such as a parameter, is
replaced by a fake of its storage, so the user's tensors are never written to. Results go to the simulated card or to the
host. A host tensor used together with a tensor on the card moves there, because a step for a real card would have created
it there.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

from oomprobe.allocator.caching import AllocatorOutOfMemory
from oomprobe.errors import SimulationError
from oomprobe.ground import torch_versions
from oomprobe.ground.frames import user_line
from oomprobe.simulation.cuda_api import replacements
from oomprobe.simulation.facts import Facts
from oomprobe.simulation.fakes import CARD, EXPLICIT_HOST, HOST, Fakes, Results, Views, local
from oomprobe.simulation.formulas import DeviceThread, Formulas, in_backward
from oomprobe.simulation.kernels import convolutions, table
from oomprobe.simulation.kernels.composites import composite_of
from oomprobe.simulation.memory import CardMemory, no_workspace
from oomprobe.simulation.unknown import (
    lacks_cpu_kernel,
    refuse_layout,
    refuse_missing_kernel,
    refuse_operator,
    wants_data,
)
from oomprobe.simulation.values import (
    COUNTED,
    MASKING,
    Geometry,
    is_constant,
    is_random,
    of_geometry,
    with_positions,
)

# Host tensors up to these sizes are created for real, because steps read indices but not images.
MAX_REAL_NUMEL = {True: 2**16, False: 2**22}  # key: whether the dtype is floating point
MAX_REAL_BYTES = 2**30  # of a tensor that a whole program makes there: its data sets
_aten = torch.ops.aten
_COMPARISONS = {_aten.equal.default, _aten.allclose.default}
_READING = {*_COMPARISONS, _aten._local_scalar_dense.default}
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
_META = torch.device("meta")
_DEVICE = torch.ops.prim.device.default  # two of three operators of a backward pass
_ADDMM = {_aten.addmm.default, _aten._addmm_activation.default}
_RESIZING = {
    _aten.resize_.default,
    _aten.set_.source_Storage_storage_offset,
    _aten.set_.source_Tensor,
}


class _Inside(threading.local):
    """How deep each thread is inside torch's code."""

    depth = 0


class CardMode(TorchDispatchMode):
    """Dispatch mode that runs operators on fakes and records the storages they create."""

    def __init__(self, memory: CardMemory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory = memory
        self.cuda_api = replacements(memory, lambda text: self.not_covered.setdefault(text))
        self.fake_mode = FakeTensorMode()
        # A custom kernel would crash on address 0.
        self.fake_mode._allow_unsafe_data_ptr_access = False
        self.threads, self._inside = memory.threads, _Inside()
        self.poll: Callable[[], None] = lambda: None
        self.notes, self.not_covered = dict[str, None](), dict[str, None]()
        self._processors = memory.card.processors
        views = Views(self.fake_mode)
        self.fakes = Fakes(self.fake_mode, views, memory)
        self._results = Results(self.fake_mode, views)
        self.facts = Facts(self.fakes.values, self.fakes.fake, self.notes)
        self._formulas = Formulas()
        self.device_thread = DeviceThread(self._formulas)
        # Whether a size has depended on values; whether the last operator was on the card.
        self.counts_values = self._was_on_card = False
        self.is_building = self.whole_program = self.is_rank = False  # is_rank: one of several
        self.host_is_card = False  # for floating-point tensors without a device
        # Where building first asked for more than the card has.
        self.refused_building: str | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # later versions of torch ask
        return False  # dynamo is off already, and turning it off at each dispatch takes long

    def start_trial(self) -> None:
        """Begin as a fresh process does, with the values that real tensors have now."""
        self.device_thread = DeviceThread(self._formulas)
        self.fakes.values.start_trial()

    def start_call(self) -> None:
        """Reset what a failed call may have left."""
        self._inside.depth = 0
        self.fake_mode.in_kernel_invocation = False

    @property
    def depth(self) -> int:
        """Above 0 where this thread is inside torch's code, which must see the fakes' devices."""
        return self._inside.depth

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
        tensor = local(tensor)
        if isinstance(tensor, FakeTensor):
            return tensor.fake_device == CARD or self.memory.holds(tensor.untyped_storage())
        return self.fakes.on_card(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:
            return HOST  # autograd checks gradients against their real parameters
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a tensor that wraps others makes its own operators of theirs
        self.threads.lock.acquire()
        kwargs, inside = kwargs or {}, self._inside
        inside.depth += 1
        try:
            if inside.depth == 1:
                self.threads.in_main(self.poll)
            with torch._C.DisableTorchFunction():  # on in a backward pass, for hooks
                if self.is_building:
                    result = self._build(func, args, kwargs)
                else:
                    result = self._run(func, args, kwargs)
                if isinstance(result, torch.Tensor):
                    _take_of_host(self, result, func, args, kwargs)
            return result
        except AllocatorOutOfMemory as refusal:
            raise torch.OutOfMemoryError(str(refusal)) from None
        except (DynamicOutputShapeException, DataDependentOutputException):
            refuse_operator(func)
        except UnsupportedOperatorException as error:
            refuse_missing_kernel(func, error)
        except RuntimeError as error:
            if wants_data(error) or lacks_cpu_kernel(error):
                refuse_missing_kernel(func, error)
            raise
        finally:
            inside.depth -= 1
            self.threads.lock.release()

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
        if self.refused_building is None:
            self.refused_building = user_line()

    def _build(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator for real, in host memory; if it concerns the card, simulate first what it asks of it."""
        simulated, needs_values = None, False
        asks_card = kwargs.get("device") == CARD or _Operands(self, args, kwargs).on_card
        if asks_card and func not in _READING:
            try:
                simulated = self._run(func, args, kwargs)
            except AllocatorOutOfMemory:
                self._refuse_building()
            except _NEEDS_VALUES:
                needs_values = True
        if self.is_rank and simulated is not None and _only_writes_numbers(func, args):
            # Weights of a shard, which nobody reads: memory that is never written takes none.
            return args[0]
        result = _run_for_real(func, args, kwargs, simulated)
        for real, fake in zip(tree_leaves(result), tree_leaves(simulated), strict=False):
            if isinstance(fake, FakeTensor):
                self.fakes.bind(real, fake)
        if (
            needs_values
        ):  # the real operator has them: what it returns is what it takes from the card
            for real in tree_leaves(result):
                if isinstance(real, torch.Tensor) and real.layout is torch.strided:
                    self.put_on_card(real)
        self._formulas.ran(func, result)
        return result

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Simulate an operator, unless it is known what it does, or it runs in host memory."""
        operands = _Operands(self, args, kwargs)
        kwargs = _redirected(kwargs, operands)
        if func is _aten._local_scalar_dense.default:
            return self._scalar(args[0])
        if self._was_on_card and _makes_number(func, args, kwargs):
            # Torch makes it beside the tensor that it is about to use.
            kwargs = {**kwargs, "device": CARD}
        if self.host_is_card and getattr(kwargs.get("dtype"), "is_floating_point", False):
            kwargs = {**kwargs, "device": CARD}
        self._was_on_card = operands.on_card
        if not operands.are_simulated:
            if kwargs.get("device", HOST) in (None, HOST, _META):
                return self._run_on_host(func, args, kwargs, operands)
        elif func in _COMPARISONS or (
            func is _aten._to_copy.default and kwargs.get("device") == HOST
        ):
            if operands.known:
                return self.fakes.values.compute(func, args, kwargs)
            if func in _COMPARISONS:
                return args[0].shape == args[1].shape  # simulated values are all equal
        known = operands.determine(func)
        if not operands.on_card:
            return self._simulate(func, args, kwargs, on_card=False, known=known)
        return self._run_on_card(func, args, kwargs, operands.on_host, known=known)

    def _run_on_card(
        self,
        func: Any,
        args: Any,
        kwargs: dict[str, Any],
        on_host: list[torch.Tensor],
        *,
        known: bool,
    ) -> Any:
        """Simulate an operator with tensors on the card, and perhaps others in host memory."""
        if _only_writes_lists(func):
            self.fakes.values.forget(func, args, kwargs)
            return None
        if func is _aten.copy_.default and on_host and self._is_transfer(args[0], on_host):
            with self.memory.running(
                table.find_launch(self._processors, func, self._faked(args), kwargs)
            ):
                self._keep_values(func, args, kwargs, args[0], known=known)
            return args[0]
        if func is _aten.histc.default:  # CUDA accepts integers, the CPU does not
            (bins,) = args[1:2] or (100,)
            func, args, kwargs = _aten.new_empty.default, (args[0], [bins]), {}
        composite = composite_of(func)
        if composite is not None:
            with self:
                return composite(*args, **kwargs)
        for tensor in on_host:  # on a real card, the step would have created them there
            self.fakes.move_to_card(tensor)
        if func.overloadpacket in MASKING and not self.is_building:
            with self:
                positioned = with_positions(func, args)
                if positioned is not None:
                    func, args = positioned
                    return func(*args, **kwargs)
        return self._simulate(func, args, kwargs, on_card=True, known=known)

    def _is_transfer(self, target: torch.Tensor, on_host: list[torch.Tensor]) -> bool:
        """Whether a copy leaves both tensors where they are: a step may mean a card's by its target, as DDP does by its buckets."""
        if on_host[0] is not target or self.memory.host.pins(target.untyped_storage()):
            return True
        return self.whole_program and not in_backward()

    def _keep_values(
        self, func: Any, args: Any, kwargs: dict[str, Any], result: Any, *, known: bool
    ) -> None:
        if known and not self.is_building and func not in _RESIZING:
            self.fakes.values.keep(func, args, kwargs, result)
        else:
            self.facts.follow(func, args, kwargs, result)
            self.fakes.values.forget(func, args, kwargs)

    def _simulate(
        self, func: Any, args: Any, kwargs: dict[str, Any], *, on_card: bool, known: bool
    ) -> Any:
        """Run an operator on fakes, and take from the card what its kernel takes."""
        given = args, kwargs
        # Before anything else refers to the arguments.
        in_place = self._formulas.run_in_place(func, args)
        to_card = on_card and kwargs.get("device") != HOST
        args = self._faked(args)
        kwargs = {name: self._faked(value) for name, value in kwargs.items()}
        launch = None
        if on_card or kwargs.get("device") == CARD:
            self.threads.use_card()
            launch = table.find_launch(self._processors, func, args, kwargs)
        use_workspace = no_workspace
        if to_card and func in _LINEAR_ALGEBRA:
            use_workspace = self._workspace_user(func, args, kwargs)
        with self.memory.running(launch, use_workspace) as before_result:
            result = self._result(func, args, kwargs, known=known, to_card=to_card)
            self._formulas.ran(func, result)
            if in_place and self.memory.holds(args[0].untyped_storage()):
                if result.stride() != args[0].stride():
                    result = self._results.run(
                        _aten.as_strided.default, (result, args[0].shape, args[0].stride()), {}
                    )
                result.fake_device = CARD
                self.memory.transfer(args[0].untyped_storage(), result.untyped_storage())
            result_bytes = None if launch is None else launch.result_bytes
            self._track(func, result, args, result_bytes, before_result, to_card=to_card)
            self._keep_values(func, *given, result, known=known)
            if to_card:
                if torch.backends.cudnn.benchmark and convolutions.is_convolution(func):
                    self.memory.tune(convolutions.problem(func, args))
                self.memory.uncompared.ran(
                    func, self.memory.allocator.allocated_bytes, (args, result)
                )
        return result

    def _workspace_user(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Callable[[], None]:
        """Return what provides a matrix product with its workspace."""
        is_lt = func in _ADDMM and torch_versions.uses_lt(
            args[0], args[1], args[2], kwargs.get("beta", 1)
        )
        handle = -1 if in_backward() else self.threads.handle()
        return functools.partial(self.memory.use_workspace, is_lt=is_lt, handle=handle)

    def _result(
        self, func: Any, args: Any, kwargs: dict[str, Any], *, known: bool, to_card: bool
    ) -> Any:
        """Return what an operator returns for fakes, if it chooses elements: as many as it would, or as it could at most."""
        try:
            return self._results.run(func, args, kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            if self.is_building:
                raise
            if known:
                self.counts_values = True
                self.notes[COUNTED.format(line=user_line())] = None
                chosen: list[Geometry] | None = of_geometry(
                    self.fakes.values.compute(func, args, kwargs)
                )
            else:
                chosen = self.facts.most_elements(func, args, kwargs)
            if chosen is None:
                raise
            device = CARD if to_card else HOST
            with self.fake_mode:
                made = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in chosen]
            return made[0] if len(func._schema.returns) == 1 else tuple(made)

    def _run_on_host(
        self, func: Any, args: Any, kwargs: dict[str, Any], operands: _Operands
    ) -> Any:
        """Run an operator for real, unless it creates a large tensor, which has no values."""
        if not operands.any and kwargs.get("device") != _META:
            with self.fake_mode:
                fake = func(*args, **kwargs)
            if isinstance(fake, torch.Tensor):
                is_large = fake.numel() > MAX_REAL_NUMEL[fake.is_floating_point()]
                # An empty tensor is of weights, before they are initialised.
                if self.whole_program and "empty" not in func.__name__:
                    is_large = fake.numel() * fake.element_size() > MAX_REAL_BYTES
                if is_large:
                    return fake
        with torch._C._DisableTorchDispatch():
            return func(*args, **kwargs)

    def _scalar(self, tensor: torch.Tensor) -> Any:
        values = self.fakes.values.of(tensor)
        if values is not None:
            with torch._C._DisableTorchDispatch():
                return _aten._local_scalar_dense.default(values)
        return self.facts.read(tensor)

    def _track(
        self, func: Any, result: Any, args: Any, result_bytes: int | None, before_result: Callable[[], None], *,
        to_card: bool,
    ) -> None:  # fmt: skip
        """Allocate the results of an operator in its kernel's order, unless they are on the card."""
        memory = self.memory
        if func in _RESIZING:
            if self.is_on_card(args[0]):
                memory.grow(args[0].untyped_storage())
            return
        workspace_bytes = convolutions.convolution_workspace(func, args)
        memory.largest_workspace_bytes = max(memory.largest_workspace_bytes, workspace_bytes)
        results = table.in_order_of_allocation(func, args, result)
        first_argument = next(iter(args), None)
        for value in results:
            if not isinstance(value, FakeTensor):
                continue
            if value.fake_device != CARD:
                if not to_card or value is first_argument:  # an in-place result stays
                    continue
                value.fake_device = CARD
            refuse_layout(value)
            if not memory.holds(value.untyped_storage()):
                before_result()
                memory.allocate(value.untyped_storage(), result_bytes)

    def _faked(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.fakes.fake(value)
        if type(value) in (list, tuple):
            return type(value)(map(self._faked, value))
        return value


def _take_of_host(
    card_mode: CardMode, result: torch.Tensor, func: Any, args: Any, kwargs: dict[str, Any]
) -> None:
    """Count what an operator has made in host memory; what building leaves there moves on."""
    if result.layout is not torch.strided or card_mode.is_on_card(result):
        return
    host, storage = card_mode.memory.host, result.untyped_storage()
    if kwargs.get("pin_memory"):
        host.pin(storage)
    elif kwargs.get("non_blocking") and func is _aten._to_copy.default:
        if card_mode.is_on_card(args[0]):  # torch pins what such a copy makes
            host.pin(storage)
    elif not card_mode.is_building and func._schema.returns[0].alias_info is None:
        host.take(storage)


def _run_for_real(func: Any, args: Any, kwargs: dict[str, Any], simulated: Any) -> Any:
    """Run an operator in host memory; where only CUDA has its kernel, zeros stand for its simulated result."""
    kwargs, device = dict(kwargs), kwargs.get("device")
    if device is not None and device.type == "cpu":
        kwargs["device"] = HOST
    if "pin_memory" in kwargs:
        kwargs["pin_memory"] = None
    try:
        with torch._C._DisableTorchDispatch():
            return func(*args, **kwargs)
    except RuntimeError as error:
        if simulated is None or not lacks_cpu_kernel(error):
            raise
        return tree_map_only(FakeTensor, zeros_of, simulated)


def zeros_of(fake: FakeTensor) -> torch.Tensor:
    """Return a tensor in host memory that looks like a fake, whose values only the card could compute."""
    with torch._C._DisableTorchDispatch():
        return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=HOST).zero_()


def _makes_number(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether torch's own code, such as ``at::ones({}, grad.options())``, makes a tensor of one number; Python passes pin_memory."""
    is_one = func is _aten.scalar_tensor.default or (
        func in (_aten.zeros.default, _aten.ones.default) and not args[0]
    )
    return is_one and "pin_memory" not in kwargs and kwargs.get("device") == HOST


@functools.cache
def _only_writes_lists(func: Any) -> bool:
    """Whether an operator only writes to lists of tensors, as optimizers do: slow to fake, without results."""
    return not func._schema.returns and func._schema.name.startswith(
        ("aten::_foreach_", "aten::_fused_")
    )


def _only_writes_numbers(func: Any, args: Any) -> bool:
    """Whether an operator only writes floating-point numbers to its first argument, such as ``normal_``."""
    if (
        not func.overloadpacket.__name__.endswith("_")
        or func in _RESIZING
        or torch.Tag.inplace_view in func.tags
    ):
        return False
    return isinstance(args[0], torch.Tensor) and args[0].is_floating_point()


class _Operands:
    """The tensors among an operator's arguments.

    Attributes:
        any: Whether there are any.
        known: Whether all are of integers or booleans whose values are known.
        are_simulated: Whether one is a fake or on the card.
        on_card: Whether one is on the card.
        on_host: Those in host memory, without tensors of one number, which CUDA's kernels take from there.
    """

    def __init__(self, card_mode: CardMode, args: Any, kwargs: dict[str, Any]) -> None:
        self._card_mode = card_mode
        self.known = True
        self.any = self.are_simulated = self.on_card = False
        self.on_host: list[torch.Tensor] = []
        self._add(args)
        self._add(kwargs.values())

    def determine(self, func: Any) -> bool:
        """Whether the values of an operator's results are known."""
        return is_constant(func) or (self.known and self.any and not is_random(func))

    def _add(self, values: Any) -> None:
        for value in values:
            if type(value) in (list, tuple):
                self._add(value)
            elif isinstance(value, torch.Tensor):
                self.any = True
                if self.known and not self._card_mode.fakes.values.knows(value):
                    self.known = False
                if isinstance(value, FakeTensor):
                    self.are_simulated = True
                if self._card_mode.is_on_card(value):
                    self.on_card = self.are_simulated = True
                    if isinstance(value, FakeTensor):
                        value.fake_device = CARD
                elif value.dim() > 0:
                    self.on_host.append(value)


def _redirected(kwargs: dict[str, Any], operands: _Operands) -> dict[str, Any]:
    """Return keyword arguments that name the simulation's devices, without pinning: host memory does not count."""
    if "pin_memory" in kwargs:
        kwargs = {**kwargs, "pin_memory": None}
    requested = kwargs.get("device")
    if requested is not None and requested.type != "meta":
        kwargs = {**kwargs, "device": _target_device(requested, operands)}
    return kwargs


def _target_device(requested: torch.device, operands: _Operands) -> torch.device:
    if requested.type == "cuda":
        return CARD
    if requested == EXPLICIT_HOST:
        return HOST
    if requested == HOST and operands.on_card:  # the default of functions such as zeros_like
        return CARD
    return requested
