"""Where torch takes another path on CUDA than on a CPU, and the path matters for memory.

The simulated world runs on CPU tensors, so these branches are put in below autograd, by the dispatcher, while it runs.
Sources: aten/src/ATen/native/Dropout.cpp (a fused dropout keeps a mask of one byte), aten/src/ATen/autocast_mode.h
(CUDA's lists), aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (which attention kernel is chosen).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from oomprobe.simulation import attention, casting

_aten = torch.ops.aten


class Choices:
    """Registers CUDA's branches with the dispatcher.

    Those of dropout, attention and softmax concern this thread only; another thread's calls go the way they always went.
    The autocast lists hold for every thread while they are registered.

    Args:
        active: Whether the simulated world is running in the calling thread.
        capability: Of the card, which decides on attention kernels.
    """

    def __init__(self, active: Callable[[], bool], capability: tuple[int, int]) -> None:
        self._active, self._capability = active, capability
        self._library: Any = None

    def __enter__(self) -> Choices:
        self._library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says once that a kernel was registered over another one
            self._register()
        return self

    def _register(self) -> None:
        for key in ("AutogradCPU", "CPU"):
            self._library.impl("dropout", self._dropout, key)
            self._library.impl("scaled_dot_product_attention", self._attention, key)
            self._library.impl("linear", self._linear, key)
            for name in ("softmax", "log_softmax"):
                self._library.impl(f"{name}.int", functools.partial(self._softmax, name), key)
        for name, kernel in casting.kernels():
            self._library.impl(name, kernel, "AutocastCPU")

    def __exit__(self, *_: object) -> None:
        self._library._destroy()

    def _dropout(self, tensor: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        if not self._active():
            return _composite(_aten.dropout.default, tensor, p, train)  # type: ignore[no-any-return]
        if p == 0 or not train or tensor.numel() == 0:
            return tensor
        return torch.native_dropout(tensor, p, train)[0]

    def _linear(self, tensor: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Of an input with gaps, the bias is added in place; but for tensor subclasses, which fakes are."""
        if not self._active() or bias is None or tensor.dim() < 3 or tensor.is_contiguous():
            return _composite(_aten.linear.default, tensor, weight, bias)  # type: ignore[no-any-return]
        return torch.matmul(tensor, weight.t()).add_(bias)

    def _softmax(self, name: str, tensor: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """From 16 to 32 bits inside the kernel, where a CPU makes a copy first."""
        if self._active() and tensor.dtype is torch.float16 and dtype is torch.float32:
            return getattr(_aten, f"_{name}")(tensor, dim, True)  # type: ignore[no-any-return]
        return _composite(getattr(_aten, name).int, tensor, dim, dtype)  # type: ignore[no-any-return]

    def _attention(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self._active():
            return _composite(_aten.scaled_dot_product_attention.default, query, key, value, *args, **kwargs)
        return attention.attend(self._capability, query, key, value, *args, **kwargs)


def _composite(op: Any, *args: Any, **kwargs: Any) -> Any:
    """What the operator does of itself, in C++, under the kernels that were put in its place here."""
    return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
