"""Attention: flash, cuDNN's and memory-efficient."""

from __future__ import annotations

from math import ceil, prod

from oomprobe.ground import torch_versions
from oomprobe.simulation.kernels.steps import (
    FLOAT_BYTES,
    Launch,
    Operator,
    afterwards,
    launch,
    throughout,
)
from oomprobe.tape.calls import RESULT, Steps
from oomprobe.tape.reductions import Processors

_FLASH_SPLITS = 128


def flash(op: Operator) -> Launch | None:
    """Few and long heads are divided among blocks, whose results are then combined. Source: flash_api.cpp (set_params_splitkv)."""
    query, key = op.args[:2]
    if op.argument("dropout_p"):
        return launch(throughout, (RESULT, RESULT, 16), ())
    fixed = (op.processors, query.shape[3])
    return launch(
        _flash_steps, fixed, (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    )


def _flash_steps(
    processors: Processors, width: int, batch: int, heads: int, length: int, keys: int
) -> Steps:
    keys_per_block = step = 64
    if width <= 128:
        keys_per_block, step = 256 if width <= 64 else 128, 32
    rows = -(-length // 64)
    splits = _splits(
        batch * heads * rows, processors.multiprocessors * 2, -(-keys // keys_per_block)
    )
    if splits == 1:
        return RESULT, RESULT, RESULT
    width_rounded = -(-width // step) * step
    row_bytes = splits * batch * heads * length * FLOAT_BYTES
    return RESULT, RESULT, row_bytes, row_bytes * width_rounded, RESULT


def _splits(blocks: int, processors: int, most: int) -> int:
    """num_splits_heuristic: the fewest parts with which the card is nearly as busy as with the best number."""
    if blocks >= 0.8 * processors:
        return 1
    shares = []
    for splits in range(1, min(_FLASH_SPLITS, processors, most) + 1):
        share = 0.0
        if splits == 1 or -(-most // splits) != -(-most // (splits - 1)):
            waves = blocks * splits / processors
            share = waves / ceil(waves)
        shares.append(share)
    return next(
        splits for splits, share in enumerate(shares, 1) if share and share >= 0.85 * max(shares)
    )


def flash_backward(op: Operator) -> Launch | None:
    """Copy what is not in the kernel's layout."""
    grad_out, query, key, out = op.args[0], op.args[1], op.args[2], op.args[4]
    copied = sum(not tensor.transpose(1, 2).is_contiguous() for tensor in (grad_out, out))
    fixed = (query.element_size(), copied, key.shape[1] != query.shape[1])
    return launch(_flash_backward_steps, fixed, (*query.shape, key.shape[2]))


def _flash_backward_steps(
    item_bytes: int, copied: int, grouped: bool, batch: int, heads: int, length: int, width: int, keys: int
) -> Steps:  # fmt: skip
    """Copies in the kernel's layout; row sums and the query's gradient in float32; key and value per query head.

    Source: flash_api.cpp (mha_bwd), aten/src/ATen/native/transformers/cuda/attention_backward.cu.
    """
    copies = (batch * heads * length * width * item_bytes,) * copied
    rows = batch * heads * -(-length // 128) * 128 * 4
    expanded = (
        (batch * heads * keys * width * item_bytes,) * 2 * grouped
    )  # summed over each group of query heads
    return *copies, RESULT, rows, rows * torch_versions.flash_backward_width(width), *expanded


CUDNN_BYTES = 256


def cudnn_backward(op: Operator) -> Launch | None:
    """Take one workspace."""
    query, key = op.args[1:3]
    fixed = (query.element_size(), key.shape[1] != query.shape[1])
    return launch(_cudnn_backward_steps, fixed, (*query.shape, key.shape[2]))


def _cudnn_backward_steps(
    item_bytes: int, grouped: bool, batch: int, heads: int, length: int, width: int, keys: int
) -> Steps:  # fmt: skip
    """One workspace: row sums and the query's gradient in float32; key and value per query head.

    As recorded on an H200 (tests/evidence), with 64 and 128 as widths.
    """
    rows = batch * heads * length * 4
    expanded = batch * heads * keys * width * item_bytes * 2 * grouped
    return afterwards(rows * width + rows + CUDNN_BYTES + expanded)


_KEY_SPLITS = 200  # of all heads, each with a tile for key and value
_TILE_WIDTH = 128  # of efficient attention: wider heads of 16 bits are summed in float32


def efficient(op: Operator) -> Launch | None:
    """Sum the result of wide 16-bit heads in float32. Source: mem_eff_attention/kernel_forward.h (kNeedsOutputAccumulatorBuffer)."""
    query, value = op.args[0], op.args[2]
    if value.element_size() == FLOAT_BYTES or value.shape[3] <= _TILE_WIDTH:
        return None
    return launch(afterwards, (), (prod(query.shape[:3]) * value.shape[3] * FLOAT_BYTES,))


def efficient_backward(op: Operator) -> Launch | None:
    """Copy a gradient that is not in the kernel's layout."""
    grad_out, query, key = op.args[:3]
    copied = not grad_out.transpose(1, 2).is_contiguous()
    fixed = (op.processors.capability, query.element_size(), query.shape[3], copied)
    return launch(_efficient_backward_steps, fixed, (*query.shape[:3], key.shape[2]))


def _efficient_backward_steps(
    capability: tuple[int, int], item_bytes: int, width: int, copied: bool, batch: int, heads: int, length: int,
    keys: int,
) -> Steps:  # fmt: skip
    """The query's gradient in float32, in tiles with a lock each; wide 16-bit heads also accumulate key and value.

    Source: aten/src/ATen/native/transformers/cuda/attention_backward.cu and mem_eff_attention/kernel_backward.h; tile
    sizes are those of torch 2.14.
    """
    half = item_bytes == 2
    has_large_tiles = half or capability >= (8, 0)
    tile = 128 if has_large_tiles and width > 64 else 64
    tiles = -(-length // tile) * -(-width // 64) * (tile * 256 + 16)
    if half and width > _TILE_WIDTH:
        splits = min(-(-keys // 64), max(1, _KEY_SPLITS // (batch * heads)))
        tiles += 2 * splits * 64 * (-(-width // _TILE_WIDTH) * _TILE_WIDTH) * FLOAT_BYTES
    row_sums, workspace = batch * heads * length * 4, batch * heads * tiles
    copies = (batch * heads * length * width * item_bytes,) * copied
    if half:
        return *copies, RESULT, row_sums, workspace
    if length == 1 or heads == 1:  # as the second sums
        return *copies, RESULT, row_sums * width, row_sums, -2, workspace
    return *copies, RESULT, row_sums * width, row_sums, row_sums, -3, -2, workspace
