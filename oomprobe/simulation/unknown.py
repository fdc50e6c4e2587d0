"""What the simulated world cannot know, as its tensors have no values: what is answered instead, and what is refused.

A step that asks `torch.isfinite(loss)` or `loss < best` is to go the way that training goes. So comparisons are answered
as if every element were 1, which is what `.item()` gives, and the answer goes along with its tensor until it is read.
What is refused is named, with the line of the user's file, and what to do instead.
"""

from __future__ import annotations

import operator
import sys
import traceback
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch

from oomprobe.errors import SimulationError
from oomprobe.verdicts.failure import is_library

# --- answers ---

Truths = weakref.WeakKeyDictionary[torch.UntypedStorage, float]  # by storage; booleans are 0 and 1

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


def follow_truth(truths: Truths, func: Any, args: Any, result: Any) -> None:
    """Note what the result of an operator is true or false, where that follows from its arguments."""
    if not isinstance(result, torch.Tensor) or result.dtype is not torch.bool:
        return
    truth = _truth(truths, func.overloadpacket.__name__, args)
    if truth is not None:
        truths[result.untyped_storage()] = truth


def _truth(truths: Truths, name: str, args: Any) -> bool | None:
    if name in _CONSTANT:
        return _CONSTANT[name]
    values = [_value(truths, arg) for arg in args[:2]]
    if None in values or not values:
        return None
    if name in _SAME:
        return bool(values[0])
    if name in _NOT:
        return not values[0]
    return bool(_COMPARE[name](*values)) if name in _COMPARE and len(values) == 2 else None


def _value(truths: Truths, arg: Any) -> Any:
    """What an argument is, everywhere; None where nobody knows."""
    if not isinstance(arg, torch.Tensor):
        return arg if isinstance(arg, int | float) else 0
    if arg.dtype is torch.bool:
        return truths.get(arg.untyped_storage())
    return 1


def read_value(tensor: torch.Tensor, notes: dict[str, None]) -> Any:
    """A finite number that is not zero for a loss, 1 for a count, False for a question; these two with a note."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return 1.0
    if tensor.dtype is torch.bool:
        value: int = False
        did = "asks a tensor without data for yes or no: the answer was no. Where the step then does less"
    else:
        value = 1
        did = "reads a whole number from a tensor without data: it was given 1. Where a size depends on it"
    notes[f"{user_line()} {did}, this answer is wrong"] = None
    return value


# --- refusals ---

_INSTEAD = {
    "aten::nonzero": "use torch.where(mask, a, b), or multiply by the mask",
    "aten::masked_select": "multiply by the mask, or use torch.where(mask, a, b)",
    "aten::index": "a boolean mask selects a number of rows that only data knows: multiply by the mask",
    "aten::_unique2": "pass the number of classes instead of counting them",
}
_WANTS_DATA = ("no fake impl registered", "Cannot access data pointer of Tensor")


def wants_data(error: RuntimeError) -> bool:
    """Whether torch says that code asked a tensor without data for it."""
    return not isinstance(error, SimulationError) and any(text in str(error) for text in _WANTS_DATA)


def is_of_the_host(error: RuntimeError) -> bool:
    """Whether the CPU lacks a kernel that CUDA may well have: simulated tensors are CPU tensors to torch."""
    return '_cpu" not implemented for' in str(error)


def refuse_operator(func: Any) -> NoReturn:
    """Raise for an operator whose result depends on values."""
    name = func.name().partition(".")[0]
    instead = _INSTEAD.get(name, "make it from shapes, not from values")
    raise SimulationError(
        f"{name} at {user_line()} depends on the values of a tensor, and a simulated card has none: {instead}; "
        "or probe on a real device"
    )


def refuse_missing_kernel(func: Any, why: BaseException) -> NoReturn:
    """Raise for a custom operator that does not say what shapes it makes."""
    raise SimulationError(
        f"{func} at {user_line()} cannot run without data ({type(why).__name__}: {why}). Register what it returns with "
        "torch.library.register_fake, or probe on a real device"
    )


def refuse_address(why: BaseException | None = None) -> NoReturn:
    """Raise for code that wants to know where the data of a tensor is, as kernels of its own do."""
    where = user_line() if why is None else _raised_at(why)
    raise SimulationError(
        f"{where} asks for the address of a tensor's data, and a simulated card has none: a custom kernel needs "
        "torch.library.custom_op and register_fake to run here; or probe on a real device"
    ) from why


def refuse_layout(tensor: torch.Tensor) -> None:
    """Raise for tensors whose memory the simulation does not know."""
    if tensor.is_quantized or tensor.layout is not torch.strided:
        kind = "quantised" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        raise SimulationError(
            f"a {kind} tensor of shape {tuple(tensor.shape)} at {user_line()}: a simulated card knows dense tensors "
            "only; probe on a real device"
        )


def user_line() -> str:
    """File and line of the innermost frame that is neither torch's nor oomprobe's."""
    return _innermost(traceback.walk_stack(sys._getframe())) or "an unknown line"


def _raised_at(error: BaseException) -> str:
    """File and line where a user's code raised an error, or called what did."""
    return _innermost(reversed(list(traceback.walk_tb(error.__traceback__)))) or "the step"


def _innermost(frames: Iterable[tuple[FrameType, int]]) -> str | None:
    for frame, line in frames:
        path = Path(frame.f_code.co_filename)
        if not is_library(path) and path.exists():  # a generated one has no line to look at
            return f"{path.name}:{line}"
    return None
