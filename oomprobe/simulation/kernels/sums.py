"""Reductions, and losses that compute their own mean."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch

from oomprobe.simulation.kernels.steps import (
    FLOAT_BYTES,
    INT64_BYTES,
    Launch,
    Operator,
    Rule,
    copied,
    launch,
    throughout,
)
from oomprobe.tape.calls import RESULT, Steps, reducing
from oomprobe.tape.reductions import Reduction


def reduction(partial_bytes: Callable[[torch.dtype], int], *, casts: bool = False) -> Rule:
    """Return the rule of a reduction that keeps a partial result of some bytes for a dtype; it may first cast its input."""

    def rule(op: Operator) -> Launch | None:
        tensor, dims = op.args[0], op.argument("dim")
        if not isinstance(tensor, torch.Tensor) or tensor.dim() == 0:
            return None
        dtype = op.argument("dtype") or tensor.dtype
        if casts and not dtype.is_floating_point and not dtype.is_complex:
            dtype = torch.int64
        if isinstance(dims, int):
            dims = [dims]
        elif not dims:
            dims = range(tensor.dim())
        chosen = {d % tensor.dim() for d in dims}
        reduced = tuple(d in chosen for d in range(tensor.dim()))
        layout = (tensor.storage_offset(), *tensor.shape, *tensor.stride())
        if casts and dtype is torch.int64 and tensor.dtype is not torch.int64:
            kind = Reduction(op.processors, INT64_BYTES, INT64_BYTES, reduced)
            return launch(_reduced, (kind, 1), (tensor.numel() * INT64_BYTES, *layout))
        kind = Reduction(op.processors, tensor.element_size(), partial_bytes(dtype), reduced)
        return launch(_reduced, (kind, 0), layout)

    return rule


def _reduced(kind: Reduction, copies: int, *numbers: int) -> Steps:
    """Reduce, perhaps from copies: after their bytes, the numbers are an offset, a shape and strides."""
    return RESULT, *numbers[:copies], *reducing(kind, *numbers[copies:])


def accumulated(dtype: torch.dtype) -> int:
    """Return the bytes in which a dtype is summed: 32 bits for those of 16."""
    return max(FLOAT_BYTES, dtype.itemsize)


INDEXED_BYTES = 16  # a value and its index


def of_extremes(partial_bytes: Callable[[torch.dtype], int]) -> Rule:
    """Return the rule of extremes, or their indices: of all elements, or in one dimension.

    All elements are read as contiguous.
    """

    def rule(op: Operator) -> Launch | None:
        tensor = op.args[0]
        if len(op.args) > 1 and isinstance(op.args[1], torch.Tensor):
            return None  # elementwise
        if op.argument("dim") is not None:
            return reduction(lambda _: INDEXED_BYTES)(op)
        kind = Reduction(op.processors, tensor.element_size(), partial_bytes(tensor.dtype), (True,))
        copy = copied(tensor)
        return launch(_reduced, (kind, len(copy)), (*copy, 0, tensor.numel(), 1))

    return rule


_CHUNK = 65_536  # elements


def foreach_norm(op: Operator) -> Launch:
    """A partial result for each chunk of the longest tensor, of every tensor. Source: native/cuda/ForeachReduceOp.cu."""
    tensors = op.args[0]
    chunks = max(-(-tensor.numel() // _CHUNK) for tensor in tensors)
    return launch(throughout, (), (len(tensors) * chunks * FLOAT_BYTES,))


# --- losses ---


def loss(op: Operator) -> Launch | None:
    """A loss whose result is allocated for all elements, and keeps that storage when it is reduced to one number.

    Before it is reduced, it is computed in another tensor.
    """
    if op.argument("reduction") == 0:
        return None
    dtype = torch.promote_types(op.args[0].dtype, op.args[1].dtype)
    count = prod(torch.broadcast_shapes(op.args[0].shape, op.args[1].shape))  # type: ignore[no-untyped-call]
    kind = Reduction(op.processors, dtype.itemsize, accumulated(dtype), (True,))
    nbytes = count * dtype.itemsize
    return launch(_reduced, (kind, 1), (nbytes, 0, count, 1), nbytes)


def binary_cross_entropy(op: Operator) -> Launch | None:
    """As other losses, but the reduced loss is a tensor of its own, copied into the first. Source: native/cuda/Loss.cu."""
    tensor = op.args[0]
    if op.argument("reduction") == 0:
        return None
    kind = Reduction(op.processors, tensor.element_size(), accumulated(tensor.dtype), (True,))
    numbers = (tensor.element_size(), 0, tensor.numel(), 1)
    return launch(_reduced, (kind, 1), numbers, tensor.numel() * tensor.element_size())
