"""Kernels that copy a tensor into a list of others, or back: host code tells them by tables of addresses, sizes and blocks.

Source: aten/src/ATen/native/cuda/TensorShape.cu (split_with_sizes_copy_out_cuda, _chunk_cat_cuda). FSDP2 copies by them what it has
gathered, and what it is about to reduce.
"""

from __future__ import annotations

from math import ceil, prod, sqrt

import torch

from oomprobe.simulation.kernels.steps import (
    INT64_BYTES,
    Launch,
    Operator,
    afterwards,
    launch,
    throughout,
)
from oomprobe.tape.calls import Steps
from oomprobe.tape.reductions import Processors

_BLOCK_THREADS = 128
_TILE_BYTES = 16 * _BLOCK_THREADS  # copied by a block of threads at once
_BLOCKS_PER_RESIDENT = 2  # of which so many are launched as multiprocessors hold at once


def split_copy(op: Operator) -> Launch | None:
    """Split a tensor into others."""
    results, source = op.argument("out"), op.args[0]
    if results is None or any(result.dtype != source.dtype for result in results):
        return None
    if not all(map(torch.ops.aten.is_non_overlapping_and_dense.default, (source, *results))):
        return None
    dim = op.argument("dim") % source.dim()
    item_bytes = source.stride(dim) * source.element_size()
    chunks = [size * item_bytes for size in op.argument("split_sizes")]
    return launch(_split_tables, (op.processors,), (prod(source.shape[:dim]), *chunks))


def _split_tables(processors: Processors, rows: int, *chunks: int) -> Steps:
    """Return the steps for splits of these bytes in each row."""
    most_blocks = (
        processors.multiprocessors * processors.threads // _BLOCK_THREADS * _BLOCKS_PER_RESIDENT
    )
    turns = _ceil_div(rows * sum(_ceil_div(chunk, _TILE_BYTES) for chunk in chunks), most_blocks)
    rows_per_block = min(ceil(sqrt(turns)), rows)
    tile_bytes = _TILE_BYTES * _ceil_div(turns, rows_per_block)
    blocks = sum(_ceil_div(chunk, tile_bytes) for chunk in chunks)
    return afterwards((4 * len(chunks) + 1 + blocks) * INT64_BYTES)


def chunk_cat(op: Operator) -> Launch | None:
    """Concatenate chunks of tensors, by tables if all are contiguous, and otherwise from padded copies."""
    tensors, result = op.args[0], op.argument("out")
    source = tensors[0].dtype
    target = source if result is None else result.dtype
    dim, count = op.argument("dim") % tensors[0].dim(), op.argument("num_chunks")
    chunks, copies = [], []
    for tensor in tensors:
        chunk = _ceil_div(tensor.shape[dim], count) * prod(tensor.shape[dim + 1 :])
        chunks.append(chunk * target.itemsize)
        if tensor.shape[dim] % count or not tensor.is_contiguous():
            copies.append(prod(tensor.shape[:dim]) * chunk * count * source.itemsize)
    widens = (source, target) == (torch.bfloat16, torch.float32)
    if all(tensor.is_contiguous() for tensor in tensors) and (source == target or widens):
        return launch(_chunk_tables, (), chunks)
    return launch(throughout if result is None else afterwards, (), copies)


def _chunk_tables(*chunks: int) -> Steps:
    blocks = sum(_ceil_div(chunk, _TILE_BYTES) for chunk in chunks)
    return afterwards((6 * len(chunks) + 2 + blocks) * INT64_BYTES)


def _ceil_div(number: int, by: int) -> int:
    return -(-number // by)
