"""Convolutions: what their kernels copy, and the workspaces that cuDNN may want."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import torch
from torch._prims_common import suggest_memory_format

from oomprobe.simulation.cuda_kernels import convolution_format, has_only_format
from oomprobe.simulation.kernels.steps import Launch, Operator, around, copied, launch, scratch
from oomprobe.tape.calls import RESULT, Steps, reducing
from oomprobe.tape.reductions import Reduction

_aten = torch.ops.aten


def forward(op: Operator) -> Launch | None:
    """Copy the input before the result, and the weight after it, unless they are in the kernel's memory format.

    A depthwise convolution, channels last, of more elements than 32 bits count is refused: in timm's
    results/benchmark-infer-amp-nchw-pt291-*.csv, fourteen rows of vitamin stop below that, at the same size on cards of 24, 32
    and 96 GB.
    """
    images, weight, groups = op.args[0], op.args[1], op.args[8]
    depthwise = groups > 1 and weight.shape[1] == 1 and images.dim() == 4
    if depthwise and images.numel() >= 2**31 and has_only_format(images, torch.channels_last):
        raise RuntimeError(
            f"cuDNN: a depthwise convolution, channels last, of {images.numel()} elements: more than 2^31"
        )
    chosen = convolution_format((images, weight))
    images_copy, weight_copy = copied(images, chosen), copied(weight, chosen)
    return scratch(around, images_copy + weight_copy, (len(images_copy),))


def backward(op: Operator) -> Launch | None:
    """Copies of what each gradient needs, in turn; then the bias sums the gradient of the result, as it came."""
    grad, images, weight = op.args[:3]
    chosen = convolution_format((images, weight))
    copies = [copied(tensor, chosen) for tensor in (grad, images, weight)]
    wanted = tuple(op.args[10])
    if not wanted[2] and not any(copies):
        return None
    is_permuted = bool(copies[0]) and _aten.is_non_overlapping_and_dense.default(grad)
    rule = _copy_in_turn
    if is_depthwise_without_cudnn(op.args[1:]):
        rule = _of_depthwise if images.dim() > 3 else _of_depthwise_sequences
    elif images.dim() == 3 and is_permuted:
        rule = _of_sequences
    elif op.args[7] or (copies[0] and suggest_memory_format(grad) is torch.channels_last):
        rule = _gradient_first
    item_bytes = grad.element_size()
    kind = Reduction(
        op.processors, item_bytes, max(4, item_bytes), tuple(dim != 1 for dim in range(grad.dim()))
    )
    numbers = [*chain.from_iterable(copies)]
    numbers += (grad.storage_offset(), *grad.shape, *grad.stride())
    return launch(_backward_steps, (rule, kind, wanted, tuple(map(len, copies))), numbers)


class _Parts(NamedTuple):
    """What the gradients of a convolution take: the bytes of each copy, and each result; empty if there is none."""

    grad: tuple[int, ...]
    images: tuple[int, ...]
    weight: tuple[int, ...]
    of_images: tuple[None, ...]
    of_weight: tuple[None, ...]


def _backward_steps(
    rule: Callable[..., list[int | None]], kind: Reduction, wanted: tuple[bool, ...], copies: tuple[int, ...], *numbers: int
) -> Steps:  # fmt: skip
    first, second = copies[0], copies[0] + copies[1]
    third = second + copies[2]
    results = [(RESULT,) * is_wanted for is_wanted in wanted]
    copied_bytes = numbers[:first], numbers[first:second], numbers[second:third]
    steps = rule(_Parts(*copied_bytes, *results[:2]))
    if wanted[2]:
        steps += (RESULT, *reducing(kind, *numbers[third:]))
    return tuple(steps)


def _copy_in_turn(parts: _Parts) -> list[int | None]:
    """Copy the gradient for each of the results."""
    grad, images, weight, of_images, of_weight = parts
    steps: list[int | None] = [*images]
    if of_images:
        steps += (*of_images, *weight, *grad, *(-1,) * len(weight + grad))
    if of_weight:
        steps += (*grad, *of_weight, *(-1,) * len(grad))
    return [*steps, *(-1,) * len(images)]


def _gradient_first(parts: _Parts) -> list[int | None]:
    """Copy the gradient once, if the convolution is transposed or the gradient in another format than the input."""
    grad, images, weight, of_images, of_weight = parts
    steps: list[int | None] = [*images, *grad, *of_images]
    if of_images:
        steps += (*weight, *(-1,) * len(weight))
    return [*steps, *of_weight, *(-1,) * len(images + grad)]


def _of_sequences(parts: _Parts) -> list[int | None]:
    """Copy tensors of three dimensions that are permuted before anything else, and hold the input until the end."""
    grad, images, _, of_images, of_weight = parts
    return [*images, *grad, *of_images, *of_weight, *(-1,) * len(grad)]


def _of_depthwise(parts: _Parts) -> list[int | None]:
    grad, images, _, of_images, of_weight = parts
    return [*grad, *images, *of_weight, *(-1,) * len(images), *of_images, *(-1,) * len(grad)]


def _of_depthwise_sequences(parts: _Parts) -> list[int | None]:
    grad, images, _, of_images, of_weight = parts
    return [*images, *grad, *of_weight, *of_images, *(-1,) * len(grad)]


def is_depthwise_without_cudnn(args: Any) -> bool:
    """Whether torch's own kernel computes a convolution with these arguments. Source: native/Convolution.cpp (use_cudnn_depthwise)."""
    images, weight, transposed, groups = args[0], args[1], args[-4], args[-2]
    is_depthwise = (
        groups > 1 and weight.shape[1] == 1 and groups == images.shape[1] and images.dim() < 5
    )
    if (
        not is_depthwise
        or transposed
        or convolution_format((images, weight)) is not torch.contiguous_format
    ):
        return False
    return images.dtype is not torch.float16


def gradients_in_order(args: Any, results: Any) -> Any:
    """Return the gradients of a convolution in the order of their allocation."""
    images, weight, bias = results
    if is_depthwise_without_cudnn(args[1:]):
        return weight, images, bias
    return results


_WORKSPACE_EXTRA_BYTES = 2**15
_CONVOLUTION_ARGUMENTS = {
    _aten.convolution.default: slice(9),
    _aten.convolution_backward.default: slice(1, 10),
}


def is_convolution(func: Any) -> bool:
    """Whether an operator is a convolution, or the gradient of one."""
    return func in _CONVOLUTION_ARGUMENTS


def problem(func: Any, args: Any) -> tuple[object, ...]:
    """Return what tells convolutions apart for cuDNN: shapes, dtypes and the other arguments."""
    parts = [func]
    for value in args:
        if isinstance(value, torch.Tensor):
            parts += (value.shape, value.dtype)
        else:
            parts.append(str(value))
    return tuple(parts)


def convolution_workspace(func: Any, args: Any) -> int:
    """Return what a convolution may want as its workspace; 0 for other operators.

    This is the largest of its unfolded input patches, Winograd's workspace, and copies of its input, result and weight in
    channels last, with channels in multiples of 16 bytes. It is no prediction: cuDNN chooses among kernels, and most of them
    want less. What was recorded on a V100 and on an H200 is within it (tests/data/cudnn_workspaces_v100.csv, and
    tests/simulation/test_scratch.py).
    """
    arguments = _CONVOLUTION_ARGUMENTS.get(func)
    if arguments is None:
        return 0
    images, weight, _, stride, padding, dilation, transposed, _, groups = args[arguments]
    kernel, positions, dims = weight.shape[2:], images.shape[2:], images.dim() - 2
    stride, padding, dilation = (
        (list(values) * dims)[:dims] for values in (stride, padding, dilation)
    )
    if transposed:  # patches of its output, one for each position of its input
        channels = results = weight.shape[1] * groups
        others = [
            (positions[d] - 1) * stride[d] - 2 * padding[d] + dilation[d] * (kernel[d] - 1) + 1
            for d in range(dims)
        ]
    else:
        channels, results = images.shape[1], weight.shape[0]
        others = positions = [
            (positions[d] + 2 * padding[d] - dilation[d] * (kernel[d] - 1) - 1) // stride[d] + 1
            for d in range(dims)
        ]
    item_bytes = images.element_size()
    patches = images.shape[0] * channels * prod(kernel) * prod(positions) * item_bytes
    multiple = max(1, 16 // item_bytes)
    copies = _padded(images.shape[1], multiple) * prod(images.shape[2:]) + _padded(
        results, multiple
    ) * prod(others)
    weights = _padded(weight.shape[0], multiple) * _padded(weight.shape[1], multiple) * prod(kernel)
    copied = (images.shape[0] * copies + weights) * item_bytes + _WORKSPACE_EXTRA_BYTES
    return int(max(patches, copied, winograd_workspace(func, args)))


def _padded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def winograd_workspace(func: Any, args: Any) -> int:
    """Return what Winograd's algorithm takes for a plain convolution of 3x3; 0 for other operators.

    Input, output and weight in tiles of 6x6, each for 4x4 outputs. Up to the rounding of blocks, this is what a V100 took for
    ten of the twelve such convolutions recorded on it; the other two took less (tests/data/cudnn_workspaces_v100.csv).
    """
    arguments = _CONVOLUTION_ARGUMENTS.get(func)
    if arguments is None:
        return 0
    images, weight, _, stride, padding, dilation, transposed, _, groups = args[arguments]
    if list(weight.shape[2:]) != [3, 3] or {*stride, *dilation, groups} != {1} or transposed:
        return 0
    channels = weight.shape[:2]
    height, width = (
        size + 2 * added - 2
        for size, added in zip(images.shape[2:], (list(padding) * 2)[:2], strict=True)
    )
    tiles = images.shape[0] * -(-height // 4) * -(-width // 4)
    return int(36 * images.element_size() * (tiles * sum(channels) + prod(channels)))
