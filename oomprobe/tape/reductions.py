"""Scratch memory of reductions: partial results of blocks that share an output, and their semaphores.

The host computes it from the tensor's layout and the card's multiprocessors. It can be large: the bias gradient of a linear
layer, ``grad.sum(0)`` of shape (20000, 1024), takes 108 MiB on an A100.

Sources: aten/src/ATen/native/cuda/Reduce.cuh (`setReduceConfig`, `gpu_reduce_kernel`) and aten/src/ATen/TensorIterator.cpp
(order, coalescing and splitting of dimensions) of torch 2.14.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

_MAX_BLOCK_THREADS = 512
_WARP = 32
_MIN_VALUES, _MAX_VALUES = 16, 256  # reduced by one thread
_INT_MAX = 2**31 - 1


class Processors(NamedTuple):
    """Properties of a card that determine scratch sizes."""

    capability: tuple[int, int]
    multiprocessors: int
    threads: int  # resident per multiprocessor


@dataclass(frozen=True, slots=True)
class Reduction:
    """A reduction, except for its shape."""

    processors: Processors
    item_bytes: int  # of an element of the input
    partial_bytes: int  # of a partial result
    reduced: tuple[bool, ...]  # by dimension


class _Dim(NamedTuple):
    """A dimension with strides in bytes; an `out_stride` of 0 means reduced."""

    size: int
    stride: int
    out_stride: int


@lru_cache(maxsize=4096)
def buffers(
    kind: Reduction, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> tuple[tuple[int, ...], ...]:
    """Return the bytes of partial results and of semaphores for each kernel of the reduction.

    A tensor above 2 GiB takes several kernels. Strides and offset are the input's, in elements.

    Example:
        >>> a100 = Processors((8, 0), 108, 2048)
        >>> buffers(Reduction(a100, 4, 4, (True, False)), (20000, 1024), (1024, 1), 0)
        ((113246208, 32),)
    """
    if 0 in shape:
        return ()
    dims = _coalesced(_reordered(_dims(kind, shape, strides)))
    kernels = (_kernel_buffers(kind, part, offset) for part in _split(dims))
    return tuple(sizes for sizes in kernels if sizes)


def _dims(kind: Reduction, shape: Sequence[int], strides: Sequence[int]) -> list[_Dim]:
    """Return the dimensions, fastest first."""
    dims, out_stride = [], kind.partial_bytes
    for size, stride, reduced in zip(
        reversed(shape), reversed(strides), reversed(kind.reduced), strict=True
    ):
        if reduced:
            dims.append(_Dim(size, stride * kind.item_bytes, 0))
        else:
            dims.append(_Dim(size, stride * kind.item_bytes, out_stride))
            out_stride *= size
    return dims


def _reordered(dims: list[_Dim]) -> list[_Dim]:
    """TensorIteratorBase::reorder_dimensions: reduced ones first, then by stride; its insertion sort decides ties."""
    for start in range(1, len(dims)):
        at = start
        for before in range(start - 1, -1, -1):
            order = _compare_dims(dims[before], dims[at])
            if order > 0:
                dims[before], dims[at] = dims[at], dims[before]
                at = before
            elif order < 0:
                break
    return dims


def _compare_dims(first: _Dim, second: _Dim) -> int:
    """Return 1 if the second comes first, -1 if the first does, 0 if undecided."""
    if (first.out_stride == 0) != (second.out_stride == 0):
        return 1 if second.out_stride == 0 else -1
    for stride, second_stride in (
        (first.out_stride, second.out_stride),
        (first.stride, second.stride),
    ):
        if stride == 0 or second_stride == 0:
            continue
        if stride != second_stride:
            return 1 if stride > second_stride else -1
        if first.size > second.size:
            return 1
    return 0


def _coalesced(dims: list[_Dim]) -> list[_Dim]:
    """TensorIteratorBase::coalesce_dimensions."""
    coalesced = dims[:1]
    for dim in dims[1:]:
        last = coalesced[-1]
        follows = (
            last.size * last.stride == dim.stride and last.size * last.out_stride == dim.out_stride
        )
        if last.size == 1:
            coalesced[-1] = dim
        elif dim.size == 1 or follows:
            coalesced[-1] = last._replace(size=last.size * dim.size)
        else:
            coalesced.append(dim)
    return coalesced


def _split(dims: list[_Dim]) -> Iterator[list[_Dim]]:
    """Halve the tensor until 32 bits can address each part."""
    reach_in = sum((d.size - 1) * d.stride for d in dims)
    reach_out = sum((d.size - 1) * d.out_stride for d in dims)
    reach = max(reach_in, reach_out) + 1
    if reach <= _INT_MAX and prod(d.size for d in dims) <= _INT_MAX:
        yield dims
        return
    extents = [(d.size - 1) * max(d.stride, d.out_stride) for d in dims]
    longest = max(range(len(dims)), key=lambda at: (extents[at], at))
    half = dims[longest].size // 2
    for size in (half, dims[longest].size - half):
        yield from _split(
            [*dims[:longest], dims[longest]._replace(size=size), *dims[longest + 1 :]]
        )


def _kernel_buffers(kind: Reduction, dims: list[_Dim], offset: int) -> tuple[int, int] | None:
    """setReduceConfig: divide the work among threads, warps and blocks; no buffers unless blocks share an output."""
    n_reduced = sum(d.out_stride == 0 for d in dims)  # these come first
    inputs, outputs = prod(d.size for d in dims[:n_reduced]), prod(d.size for d in dims[n_reduced:])
    along_input = n_reduced == len(dims) or dims[0].stride < dims[n_reduced].stride
    out_vector = 1
    # Neighbouring threads read neighbouring elements, which belong to one output or to neighbouring outputs.
    if along_input:
        width, height = _block(inputs, outputs, _MAX_BLOCK_THREADS)
        step_in, step_out = width, 1
    else:
        if dims[n_reduced].stride == kind.item_bytes:
            out_vector = _out_vector(kind, dims, n_reduced, offset)
        width, height = _block(outputs // out_vector, inputs, _MAX_BLOCK_THREADS // out_vector)
        step_in, step_out = 1, width
    values_per_thread = -(-inputs // (step_in * height))
    grid = -(-(outputs // out_vector) // step_out)
    blocks = _blocks_per_output(kind.processors, width * height, values_per_thread, grid)
    if blocks <= 1:
        return None
    return kind.partial_bytes * outputs * blocks * step_out * out_vector, 4 * grid


def _blocks_per_output(
    processors: Processors, threads: int, values_per_thread: int, grid: int
) -> int:
    """Return how many blocks share an output: as many as the multiprocessors run, each with enough values."""
    target_grid = processors.multiprocessors * (processors.threads // threads)
    if values_per_thread < _MAX_VALUES or grid > target_grid:
        return 1
    most, least = -(-values_per_thread // _MIN_VALUES), -(-values_per_thread // _MAX_VALUES)
    return max(min(-(-target_grid // grid), most), least)


def _out_vector(kind: Reduction, dims: list[_Dim], first_kept: int, offset: int) -> int:
    """get_output_vec_size: the number of adjacent outputs that a thread can compute."""
    strides = [d.stride // kind.item_bytes for at, d in enumerate(dims) if at != first_kept]
    vector = 4
    for number in (offset, dims[first_kept].size, *strides):
        while number % vector:
            vector //= 2
    return vector


def _block(width_limit: int, height_limit: int, max_threads: int) -> tuple[int, int]:
    max_width, max_height = (
        _power_below(width_limit, max_threads),
        _power_below(height_limit, max_threads),
    )
    height = min(max_height, max_threads // min(max_width, _WARP))
    return min(max_width, max_threads // height), height


def _power_below(limit: int, most: int) -> int:
    """last_pow2: the largest power of 2 up to a limit, and up to `most`; at least 1."""
    return min(most, 1 << max(0, limit.bit_length() - 1))
