"""What the simulated world cannot know: named, with the line of the user's file, and what to do instead."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any, NoReturn

import torch

from oomprobe.errors import SimulationError
from oomprobe.verdicts.failure import is_library

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
    where = user_line() if why is None else raised_at(why)
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
    for frame, line in traceback.walk_stack(None):
        path = Path(frame.f_code.co_filename)
        if _is_users(path):
            return f"{path.name}:{line}"
    return "an unknown line"


def raised_at(error: BaseException) -> str:
    """File and line where a user's code raised an error, or called what did."""
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return next((f"{Path(name).name}:{line}" for name, line in reversed(places) if _is_users(Path(name))), "the step")


def _is_users(path: Path) -> bool:
    return not is_library(path) and path.exists()  # a generated one has no line to look at
