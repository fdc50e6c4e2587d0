"""Answers to questions about values, which simulated tensors do not have, and errors for what cannot be simulated.

A step that asks `torch.isfinite(loss)` or `loss < best` should take the path that training takes. So comparisons are
answered as if every element were 1, which is also what `.item()` returns; the answer follows its tensor until it is read.
Errors name the line of the user's file and an alternative.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from oomprobe.errors import SimulationError
from oomprobe.ground.frames import raised_at, user_line

# --- answers ---

KnownBools = weakref.WeakKeyDictionary[
    torch.UntypedStorage, bool
]  # values of boolean tensors, by storage

_CONSTANT = {"isfinite": True, "isnan": False, "isinf": False}
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "gt": operator.gt, "ge": operator.ge, "lt": operator.lt, "le": operator.le, "eq": operator.eq, "ne": operator.ne,
    **dict.fromkeys(("logical_and", "bitwise_and", "mul"), lambda a, b: bool(a) and bool(b)),
    **dict.fromkeys(("logical_or", "bitwise_or"), lambda a, b: bool(a) or bool(b)),
}  # fmt: skip
_SAME = {
    "any", "all", "clone", "_to_copy", "detach", "squeeze", "unsqueeze", "view", "reshape", "expand", "select", "amax",
}  # fmt: skip
_NOT = {"logical_not", "bitwise_not"}


def propagate_bool(known: KnownBools, func: Any, args: Any, result: Any) -> None:
    """Record the value of a boolean result if it follows from the operator's arguments."""
    if not isinstance(result, torch.Tensor) or result.dtype is not torch.bool:
        return
    value = _bool_result(known, func.overloadpacket.__name__, args)
    if value is not None:
        known[result.untyped_storage()] = value


def _bool_result(known: KnownBools, name: str, args: Any) -> bool | None:
    if name in _CONSTANT:
        return _CONSTANT[name]
    values = [_value(known, arg) for arg in args[:2]]
    if None in values or not values:
        return None
    if name in _SAME:
        return bool(values[0])
    if name in _NOT:
        return not values[0]
    if name in _COMPARE and len(values) == 2:
        return bool(_COMPARE[name](*values))
    return None


def _value(known: KnownBools, arg: Any) -> Any:
    """Return the value of all elements of an argument; None if unknown."""
    if not isinstance(arg, torch.Tensor):
        return arg if isinstance(arg, int | float) else 0
    if arg.dtype is torch.bool:
        return known.get(arg.untyped_storage())
    return 1


def read_value(tensor: torch.Tensor, notes: dict[str, None]) -> Any:
    """Return 1.0 for a floating-point tensor; 1 for an integer and False for a boolean one, with a note."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return 1.0
    if tensor.dtype is torch.bool:
        value: int = False
        problem = "reads a boolean from a tensor without data and gets False. If the step then does less work"
    else:
        value = 1
        problem = "reads an integer from a tensor without data and gets 1. If a size depends on it"
    notes[f"{user_line()} {problem}, this answer is wrong"] = None
    return value


# --- refusals ---

_WANTS_DATA = ("no fake impl registered", "Cannot access data pointer of Tensor")
_NEEDS_CUDA = (
    "not compiled with CUDA", "not linked with support for cuda", "has no attribute '_cuda_", "has no attribute '_nccl_",
    "from the 'CUDA' backend", "No CUDA GPUs", "CUDA driver", "Cannot initialize CUDA", "no NCCL built in", "active drivers",
)  # fmt: skip


def wants_data(error: RuntimeError) -> bool:
    """Whether torch reports that code needs the data of a tensor without data."""
    if isinstance(error, SimulationError):
        return False
    return any(text in str(error) for text in _WANTS_DATA)


def needs_cuda(error: BaseException) -> bool:
    """Whether torch, or the lack of a function of its own, reports that CUDA is not there."""
    return any(text in str(error) for text in _NEEDS_CUDA)


def lacks_cpu_kernel(error: RuntimeError) -> bool:
    """Whether only the CPU lacks the kernel; torch treats simulated tensors as CPU tensors."""
    return any(
        text in str(error)
        for text in ('_cpu" not implemented for', "with arguments from the 'CPU' backend")
    )


def refuse_operator(func: Any) -> NoReturn:
    """Raise for an operator whose output shape depends on values."""
    name = func.name().partition(".")[0]
    raise SimulationError(
        f"{name} at {user_line()} depends on the values of a tensor, and a simulated card has none: make its result from shapes, or probe "
        "on a real device"
    )


def check_split(tensor: torch.Tensor, sizes: Sequence[int]) -> None:
    """Raise if the parts in which a tensor is sent to other ranks are not all of it: their sizes come from values."""
    if sum(sizes) != len(tensor):
        raise SimulationError(
            f"all_to_all at {user_line()} sends parts of a tensor whose sizes depend on values, and a simulated card has none: send equal "
            "parts, or probe on real devices"
        )


def refuse_missing_kernel(func: Any, why: BaseException) -> NoReturn:
    """Raise for an operator without a fake implementation."""
    raise SimulationError(
        f"{func} at {user_line()} cannot run without data ({type(why).__name__}: {why}). Register its output shapes with "
        "torch.library.register_fake, or probe on a real device"
    )


def refuse_address(why: BaseException | None = None) -> NoReturn:
    """Raise for code that asks for a tensor's data pointer, as custom kernels do."""
    where = user_line()
    if why is not None:
        where = raised_at(why) or "the step"
    raise SimulationError(
        f"{where} asks for the address of a tensor's data, and a simulated card has none: a custom kernel needs "
        "torch.library.custom_op and register_fake to run here; or probe on a real device"
    ) from why


def refuse_layout(tensor: torch.Tensor) -> None:
    """Raise if the tensor is sparse or quantised."""
    if tensor.is_quantized:
        refuse_quantized(tensor)
    if tensor.layout is not torch.strided:
        _refuse_tensor(str(tensor.layout).removeprefix("torch."), tensor)


def refuse_quantized(tensor: torch.Tensor, *_: object, **__: object) -> NoReturn:
    """Raise for what quantises a tensor: torch knows no such fake."""
    _refuse_tensor("quantised", tensor)


def _refuse_tensor(kind: str, tensor: torch.Tensor) -> NoReturn:
    raise SimulationError(
        f"a {kind} tensor of shape {tuple(tensor.shape)} at {user_line()}: a simulated card supports dense tensors only; probe on a real "
        "device"
    )
