"""Errors for what cannot be simulated, and the integer that stands for one that is unknown.

Errors name the line of the user's file and an alternative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from oomprobe.errors import SimulationError
from oomprobe.ground.frames import raised_at, user_line

# --- answers ---

_ARITHMETIC = "add radd sub rsub mul rmul floordiv rfloordiv mod rmod neg pow "
_DECIDING = "lt le gt ge eq ne bool"


class Guess(int):
    """An integer that stands for an unknown one.

    Once a comparison, or a size that torch gets, depends on it, it calls `used`.
    """

    used: Callable[[], object]
    __hash__ = int.__hash__

    @classmethod
    def of(cls, value: int, used: Callable[[], object]) -> Guess:
        """Return a guess."""
        guess = cls(value)
        guess.used = used
        return guess

    def __reduce__(self) -> Any:
        return int, (int(self),)


def _noting(name: str, *, decides: bool) -> Callable[..., Any]:
    def operation(guess: Guess, *others: Any) -> Any:
        if decides:
            guess.used()
        result = getattr(int, name)(guess, *others)
        return Guess.of(result, guess.used) if type(result) is int else result

    return operation


for _name in (_ARITHMETIC + _DECIDING).split():
    setattr(Guess, f"__{_name}__", _noting(f"__{_name}__", decides=_name in _DECIDING.split()))


def use_guesses(value: Any) -> None:
    """Take note that guesses among the arguments of a function of torch are made sizes."""
    if type(value) is Guess:
        value.used()
    elif type(value) in (list, tuple):
        for item in value:
            use_guesses(item)
    elif type(value) is slice:
        use_guesses((value.start, value.stop, value.step))


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
