"""Norms: copies, and sums for each channel, group or row."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from oomprobe.simulation.cuda_kernels import image_format, uses_cudnn_norm
from oomprobe.simulation.kernels.steps import (
    FLOAT_BYTES,
    Launch,
    Operator,
    afterwards,
    around,
    copied,
    launch,
    scratch,
    throughout,
)
from oomprobe.tape.calls import RESULT, Steps, in_turn, reducing
from oomprobe.tape.reductions import Processors, Reduction

_aten = torch.ops.aten
_LAYER_NORM_ROWS = 64 * 1024  # above which gradients of few weights are summed in parts, of 32 rows
_ROWS_PER_PART = 32


def layer_norm_backward(op: Operator) -> Launch:
    """Copy the input before the results, and the gradient after them."""
    grad, given = op.args[:2]
    width = prod(op.args[2])
    before, after = copied(given), copied(grad)
    fixed = (op.processors, given.element_size(), width, tuple(op.args[-1]), len(before))
    return launch(_layer_norm_backward_steps, fixed, (given.numel(), *before, *after))


def _layer_norm_backward_steps(
    processors: Processors,
    item_bytes: int,
    width: int,
    wanted: tuple[bool, ...],
    before: int,
    count: int,
    *copies: int,
) -> Steps:
    """Sum many rows in parts, and these into new gradients of the weights. Source: native/cuda/layer_norm_kernel.cu."""
    rows, weights = count // max(1, width), sum(wanted[1:])
    is_long = rows > _LAYER_NORM_ROWS and width // 32 < processors.multiprocessors // 2
    if not is_long or not weights:
        return *copies[:before], *(RESULT,) * sum(wanted), *copies[before:]
    kind = Reduction(processors, item_bytes, max(FLOAT_BYTES, item_bytes), (True, False))
    parts = -(-rows // _ROWS_PER_PART)
    sums = reducing(kind, 0, parts, width, width, 1)
    steps: list[int | None] = [
        *copies[:before],
        *(RESULT,) * wanted[0],
        *(width * item_bytes,) * weights,
    ]
    steps += (*copies[before:], *(parts * width * item_bytes,) * weights)
    for number in range(weights):
        steps += (
            RESULT,
            *sums,
            number - 2 * weights - len(copies[before:]),
        )  # the sum takes the gradient's place
    return tuple(steps)


def group_norm(op: Operator) -> Launch | None:
    """A factor and a summand for each channel of each sample. Source: native/cuda/group_norm_kernel.cu."""
    given, weight, bias, samples, channels, positions, groups = op.args[:7]
    after = [*copied(given)]
    if given.element_size() < FLOAT_BYTES:  # mean and deviation of each group in float32
        after += (samples * groups * FLOAT_BYTES,) * 2
    if positions > 1 and (weight is not None or bias is not None):
        after += (samples * channels * FLOAT_BYTES,) * 2
    return scratch(afterwards, after)


def group_norm_backward(op: Operator) -> Launch:
    """Sums and factors for each channel, and for each group, of each sample. Source: as of the forward pass."""
    grad, given, weight = op.args[0], op.args[1], op.args[4]
    samples, channels, positions, groups = op.args[5:9]
    copies = (*copied(grad), *copied(given))
    of_channels, of_groups = samples * channels * FLOAT_BYTES, samples * groups * FLOAT_BYTES
    after: tuple[int, ...] = (of_groups, of_groups)
    if positions > 1:
        after = (of_channels, of_channels, of_groups, of_groups)
        if weight is not None:
            after = (*after, of_channels)
    return launch(around, (len(copies),), (*copies, *after))


def batch_norm(op: Operator) -> Launch | None:
    """Without cuDNN, rows of channels are summed in parts. Source: native/cuda/Normalization.cuh."""
    given, is_training = op.args[0], op.args[5]
    if not is_training or uses_cudnn_norm(given, op.args[1]) or not _has_rows_of_channels(given):
        return None
    return launch(_channels_summed, (4, given.shape[1]), (given.numel(),))


def _channels_summed(sums: int, channels: int, count: int) -> Steps:
    return RESULT, *_channel_parts(sums, channels, count // channels)


def batch_norm_backward(op: Operator) -> Launch | None:
    """CuDNN copies a gradient in another memory format than the input; torch sums rows of channels in parts before its results.

    Source: native/cudnn/BatchNorm.cpp, native/cuda/Normalization.cuh.
    """
    grad, given, weight, is_training = op.args[0], op.args[1], op.args[2], op.args[7]
    if _sums_channels(op.args):
        fixed = (given.shape[1], tuple(op.args[9]), is_training, _has_rows_of_channels(grad))
        return launch(_channel_gradients, fixed, (given.numel(),))
    if given.dim() == 2 or weight is None or weight.element_size() == 2:
        return None
    if not is_training and not _aten.is_non_overlapping_and_dense.default(grad):
        return None
    return scratch(throughout, copied(grad, image_format(given)))


def _channel_gradients(
    channels: int, wanted: tuple[bool, ...], is_training: bool, in_parts: bool, count: int
) -> Steps:
    """Two sums for each channel, the gradients of the weights, and last that of the input."""
    sums = (channels * FLOAT_BYTES,) * (2 if is_training else 3)  # evaluated, also the deviations
    parts: tuple[int, ...] = ()
    if in_parts:
        parts = _channel_parts(2, channels, count // channels)
    return *sums, *(RESULT,) * sum(wanted[1:]), *in_turn([parts]), *(RESULT,) * wanted[0]


def batch_norm_gradients(args: Any, results: Any) -> Any:
    """Return the gradients of a batch norm in the order of their allocation."""
    return (*results[1:], results[0]) if _sums_channels(args) else results


def _sums_channels(args: Any) -> bool:
    given, weight, is_training = args[1], args[2], args[7]
    return _has_rows_of_channels(given) and not (is_training and uses_cudnn_norm(given, weight))


def _has_rows_of_channels(given: torch.Tensor) -> bool:
    if given.dim() == 2:
        return given.is_contiguous()
    return image_format(given) is torch.channels_last


_TILE, _MOST_THREADS, _ROWS_PER_THREAD = 32, 512, 16
_FEWEST_BLOCKS, _MOST_BLOCKS = 8, 128  # that share a sum


def _channel_parts(sums: int, channels: int, rows: int) -> tuple[int, ...]:
    """Return the partial sums of blocks that share channels, and their semaphores (flexible_launch_configs)."""
    across = min(_power_up_to(channels), _TILE)
    down = min(_power_up_to(-(-rows // _ROWS_PER_THREAD)), _MOST_THREADS // across)
    if across * down != _MOST_THREADS:
        across = min(_power_up_to(channels), _MOST_THREADS // down)
    blocks = min(-(-rows // (down * _ROWS_PER_THREAD)), _MOST_BLOCKS)
    if blocks < _FEWEST_BLOCKS:
        return ()
    return sums * channels * blocks * FLOAT_BYTES, -(-channels // across) * 4


def _power_up_to(limit: int) -> int:
    return 1 << max(0, limit.bit_length() - 1)
