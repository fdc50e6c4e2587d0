"""How much memory a reduction takes while it runs: partial results of blocks that share one output, and their semaphores.

The host computes it from the tensor's layout and the card's multiprocessors before it starts the kernel. It is no small
matter: the bias gradient of a linear layer, ``grad.sum(0)`` of shape (20000, 1024), takes 108 MiB on an A100.

Sources: aten/src/ATen/native/cuda/Reduce.cuh (`setReduceConfig`, `gpu_reduce_kernel`), aten/src/ATen/TensorIterator.cpp
(the order of dimensions, which of them are joined, how large tensors are split) of torch 2.14.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

_MOST_THREADS = 512  # of a block
_WARP = 32
_FEW_VALUES, _MANY_VALUES = 16, 256  # that one thread adds up
_VALUES_PER_LOAD = 4  # that a thread reads at once where all of them go into one output
_INT_MAX = 2**31 - 1


class Processors(NamedTuple):
    """What of a card decides on the sizes of temporary buffers."""

    capability: tuple[int, int]
    multiprocessors: int
    threads: int


@dataclass(frozen=True, slots=True)
class Reduction:
    """A reduction but for its shape."""

    processors: Processors
    item_bytes: int  # of an element of the input
    out_bytes: int  # of an element of the output
    reduced: tuple[bool, ...]  # for each dimension, whether it is


class _Dim(NamedTuple):
    """A dimension, with its strides in bytes; 0 in the output: reduced."""

    size: int
    stride: int
    out_stride: int


@lru_cache(maxsize=4096)
def buffers(
    kind: Reduction, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> tuple[tuple[int, ...], ...]:
    """What the reduction takes, in bytes: for each of its kernels the partial results and the semaphores.

    A tensor beyond 2 GiB takes several kernels. Strides and offset are the input's, in elements.

    Example:
        >>> a100 = Processors((8, 0), 108, 2048)
        >>> buffers(Reduction(a100, 4, 4, (True, False)), (20000, 1024), (1024, 1), 0)
        ((113246208, 32),)
    """
    if 0 in shape:
        return ()
    dims = _joined(_ordered(_dims(kind, shape, strides)))
    found = (_of_kernel(kind, part, offset) for part in _parts(dims))
    return tuple(sizes for sizes in found if sizes)


def _dims(kind: Reduction, shape: Sequence[int], strides: Sequence[int]) -> list[_Dim]:
    """The fastest dimension first."""
    dims, out_stride = [], kind.out_bytes
    for size, stride, reduced in zip(reversed(shape), reversed(strides), reversed(kind.reduced), strict=True):
        dims.append(_Dim(size, stride * kind.item_bytes, 0 if reduced else out_stride))
        out_stride *= 1 if reduced else size
    return dims


def _ordered(dims: list[_Dim]) -> list[_Dim]:
    """TensorIteratorBase::reorder_dimensions: reduced ones first, then by strides; an insertion sort, as ties depend on it."""
    dims = list(dims)
    for start in range(1, len(dims)):
        at = start
        for other in range(start - 1, -1, -1):
            order = _compared(dims[other], dims[at])
            if order > 0:
                dims[other], dims[at] = dims[at], dims[other]
                at = other
            elif order < 0:
                break
    return dims


def _compared(first: _Dim, second: _Dim) -> int:
    """Positive: the second is to come first; 0: nothing speaks for either."""
    if (first.out_stride == 0) != (second.out_stride == 0):
        return 1 if second.out_stride == 0 else -1
    for one, other in ((first.out_stride, second.out_stride), (first.stride, second.stride)):
        if one == 0 or other == 0:
            continue
        if one != other:
            return 1 if one > other else -1
        if first.size > second.size:
            return 1
    return 0


def _joined(dims: list[_Dim]) -> list[_Dim]:
    """TensorIteratorBase::coalesce_dimensions."""
    joined = dims[:1]
    for dim in dims[1:]:
        last = joined[-1]
        follows = last.size * last.stride == dim.stride and last.size * last.out_stride == dim.out_stride
        if last.size == 1:
            joined[-1] = dim
        elif dim.size == 1 or follows:
            joined[-1] = last._replace(size=last.size * dim.size)
        else:
            joined.append(dim)
    return joined


def _parts(dims: list[_Dim]) -> Iterator[list[_Dim]]:
    """Halves of halves, until a kernel can address each with 32 bits."""
    reach = max(sum((d.size - 1) * d.stride for d in dims), sum((d.size - 1) * d.out_stride for d in dims)) + 1
    if reach <= _INT_MAX and prod(d.size for d in dims) <= _INT_MAX:
        yield dims
        return
    extents = [(d.size - 1) * max(d.stride, d.out_stride) for d in dims]
    longest = max(range(len(dims)), key=lambda at: (extents[at], at))
    half = dims[longest].size // 2
    for size in (half, dims[longest].size - half):
        yield from _parts([*dims[:longest], dims[longest]._replace(size=size), *dims[longest + 1 :]])


def _of_kernel(kind: Reduction, dims: list[_Dim], offset: int) -> tuple[int, ...]:
    """setReduceConfig: how threads, warps and blocks share the work; nothing is taken where no blocks share an output."""
    n_reduced = sum(d.out_stride == 0 for d in dims)
    outputs = prod(d.size for d in dims if d.out_stride)
    inputs = prod(d.size for d in dims) // outputs
    along_input = n_reduced == len(dims) or (n_reduced > 0 and dims[0].stride < dims[n_reduced].stride)
    if not n_reduced:
        return ()
    width_limit, height_limit = (inputs, outputs) if along_input else (outputs, inputs)
    out_vector = 1
    if along_input and len(dims) == 1 and dims[0].stride == kind.item_bytes and inputs >= 128:
        width_limit //= _VALUES_PER_LOAD
    elif not along_input and dims[n_reduced].stride == kind.item_bytes:
        out_vector = _out_vector(kind, dims, n_reduced, offset)
        width_limit //= out_vector
    width, height = _block(width_limit, height_limit, _MOST_THREADS // out_vector)
    step_in, step_out = (width, 1) if along_input else (1, width)
    if -(-inputs // step_in) < min(height * 16, _MANY_VALUES):
        return ()  # each warp has outputs of its own
    step_in *= height
    values = -(-inputs // step_in)
    grid = -(-(outputs // out_vector) // step_out)
    wanted = kind.processors.multiprocessors * (kind.processors.threads // (width * height))
    if values < _MANY_VALUES or grid > wanted:
        return ()
    blocks = max(min(-(-wanted // grid), -(-values // _FEW_VALUES)), -(-values // _MANY_VALUES))
    if blocks <= 1:
        return ()
    partial_bytes = max(4, kind.out_bytes)  # sums of 16 bit are added up in 32
    partials = partial_bytes * outputs * blocks * (1 if along_input else width * out_vector)
    return partials, 4 * grid


def _out_vector(kind: Reduction, dims: list[_Dim], first_kept: int, offset: int) -> int:
    """get_output_vec_size: how many outputs a thread can have side by side."""
    strides = [d.stride // kind.item_bytes for at, d in enumerate(dims) if at != first_kept]
    vector = 4
    for number in (offset, dims[first_kept].size, *strides):
        while number % vector:
            vector //= 2
    return vector


def _block(width_limit: int, height_limit: int, most: int) -> tuple[int, int]:
    widest, highest = (
        most if limit >= most else 1 << max(0, limit.bit_length() - 1) for limit in (width_limit, height_limit)
    )
    height = min(highest, most // min(widest, _WARP))
    return min(widest, most // height), height
