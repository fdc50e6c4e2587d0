"""Scratch memory that kernels allocate while they run, in addition to their results.

A fake result does not reveal it, so it is computed from the operator's arguments, as torch's host code does. A replay at
another batch size computes it again: a rule's input (sizes, strides) is linear in the batch size, its result may not be.

Rules cover kernels that take MiB in transformers and convolutional networks. The scratch memory of sorts, layer norms and
losses not listed below is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from math import prod
from typing import Any, NamedTuple

import torch

from oomprobe.ground import torch_versions
from oomprobe.simulation.cuda_kernels import convolution_format, has_only_format
from oomprobe.simulation.reductions import Processors, Reduction, buffers

_aten = torch.ops.aten


class Needs(NamedTuple):
    """Bytes of a kernel's scratch blocks; blocks of a group are allocated and freed together, one group after the other."""

    throughout: tuple[int, ...] = ()  # from before its results are allocated until it ends
    after: tuple[tuple[int, ...], ...] = ()  # groups, after its results are allocated
    before: tuple[tuple[int, ...], ...] = ()  # groups, before that
    last: tuple[tuple[int, ...], ...] = ()  # groups, once `throughout` is freed


@dataclass(frozen=True, slots=True)
class Kernel:
    """A rule for a kernel's scratch memory; its arguments are fixed values and `count` numbers that vary with the batch."""

    rule: Callable[..., Needs]
    fixed: tuple[Any, ...]
    count: int

    def on(self, processors: Processors) -> Kernel:
        """Return the rule on a card of the same compute capability with these processors."""
        fixed = list(self.fixed)
        for at, value in enumerate(fixed):
            if isinstance(value, Reduction):
                fixed[at] = replace(value, processors=processors)
        return replace(self, fixed=tuple(fixed))


@lru_cache(maxsize=4096)
def needs_of(kernel: Kernel, numbers: tuple[int, ...]) -> Needs:
    """Return a kernel's scratch memory."""
    return kernel.rule(*kernel.fixed, *numbers)


class Launch(NamedTuple):
    """A kernel with its numbers, and the bytes of its result if they differ from its apparent size."""

    kernel: Kernel
    numbers: tuple[int, ...]
    result_bytes: int | None


class _Operator(NamedTuple):
    """An operator on the card, with its arguments."""

    processors: Processors
    func: Any
    args: Any
    kwargs: dict[str, Any]

    def argument(self, name: str) -> Any:
        """Return an argument or its default; None if this overload does not have it."""
        position, default = _position(self.func, name)
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)


@cache
def _position(func: Any, name: str) -> tuple[int, Any]:
    arguments = func._schema.arguments
    for position, argument in enumerate(arguments):
        if argument.name == name:
            return position, argument.default_value
    return len(arguments), None


def find_launch(processors: Processors, func: Any, args: Any, kwargs: dict[str, Any]) -> Launch | None:
    """Return the operator's kernel if a rule for its scratch memory is known."""
    rule = _RULES.get(func.overloadpacket)
    return None if rule is None else rule(_Operator(processors, func, args, kwargs))


def _launch(
    rule: Callable[..., Needs], fixed: tuple[Any, ...], numbers: tuple[int, ...], result_bytes: int | None = None
) -> Launch:
    return Launch(Kernel(rule, fixed, len(numbers)), numbers, result_bytes)


def _copying(tensors: Sequence[torch.Tensor], memory_format: torch.memory_format) -> Launch | None:
    """Return the launch of a kernel that holds copies of the arguments which are not in its format; None if all are."""
    copies = _copies(tensors, memory_format)
    return _launch(_throughout, (), copies) if copies else None


def _copies(tensors: Sequence[torch.Tensor], memory_format: torch.memory_format) -> tuple[int, ...]:
    return tuple(t.numel() * t.element_size() for t in tensors if not t.is_contiguous(memory_format=memory_format))


def _throughout(*nbytes: int) -> Needs:
    return Needs(throughout=nbytes)


# --- reductions ---


def _reduction(op: _Operator) -> Launch:
    tensor, dims = op.args[0], op.argument("dim")
    dtype = op.kwargs.get("dtype") or tensor.dtype
    if isinstance(dims, int):
        dims = [dims]
    elif not dims:
        dims = range(tensor.dim())
    chosen = {d % max(1, tensor.dim()) for d in dims}
    reduced = tuple(d in chosen for d in range(tensor.dim()))
    kind = Reduction(op.processors, tensor.element_size(), dtype.itemsize, reduced)
    return _launch(_reduction_needs, (kind,), (tensor.storage_offset(), *tensor.shape, *tensor.stride()))


def _reduction_needs(kind: Reduction, offset: int, *layout: int) -> Needs:
    shape, strides = layout[: len(layout) // 2], layout[len(layout) // 2 :]
    return Needs(after=buffers(kind, shape, strides, offset))


# --- losses ---


def _loss(copies: int) -> Callable[[_Operator], Launch | None]:
    """Return the rule of an elementwise loss that computes its mean or sum without dispatching an operator.

    Its result is allocated for all elements, and keeps that storage when reduced to one number. The loss also allocates
    `copies` of all elements.
    """

    def launch(op: _Operator) -> Launch | None:
        if op.argument("reduction") == 0:
            return None
        dtype = torch.promote_types(op.args[0].dtype, op.args[1].dtype)
        count = prod(torch.broadcast_shapes(op.args[0].shape, op.args[1].shape))  # type: ignore[no-untyped-call]
        nbytes = count * dtype.itemsize
        return _launch(borrowed, (), (nbytes,) * copies, nbytes)

    return launch


def borrowed(*nbytes: int) -> Needs:
    """Return the need for blocks after the result is allocated."""
    return Needs(after=(nbytes,))


# --- convolutions ---


def _convolution(*positions: int) -> Callable[[_Operator], Launch | None]:
    """Return a rule that copies arguments not in the kernel's memory format; the last two are the input and the weight."""

    def launch(op: _Operator) -> Launch | None:
        tensors = [op.args[position] for position in positions]
        return _copying(tensors, convolution_format(tensors[-2:]))

    return launch


def _convolution_backward(op: _Operator) -> Launch | None:
    """Copies as in the forward pass; then the bias sums the gradient of the result, as it came."""
    grad, chosen = op.args[0], convolution_format(op.args[1:3])
    if not op.args[10][2]:
        return _copying(op.args[:3], chosen)
    copies = _copies(op.args[:3], chosen)
    reduced = tuple(dim != 1 for dim in range(grad.dim()))
    kind = Reduction(op.processors, grad.element_size(), grad.element_size(), reduced)
    layout = (grad.storage_offset(), *grad.shape, *grad.stride())
    return _launch(_convolution_backward_needs, (kind, len(copies)), (*copies, *layout))


def _convolution_backward_needs(kind: Reduction, copied: int, *numbers: int) -> Needs:
    return Needs(numbers[:copied], last=_reduction_needs(kind, *numbers[copied:]).after)


def _convolution_forward(op: _Operator) -> Launch | None:
    """Refuse a depthwise convolution, channels last, of more elements than 32 bits count.

    Source: in timm's results/benchmark-infer-amp-nchw-pt291-*.csv, fourteen rows of vitamin stop below that, at the same
    size on cards of 24, 32 and 96 GB.
    """
    images, weight, groups = op.args[0], op.args[1], op.args[8]
    depthwise = groups > 1 and weight.shape[1] == 1 and images.dim() == 4
    if depthwise and images.numel() >= 2**31 and has_only_format(images, torch.channels_last):
        raise RuntimeError(
            f"cuDNN: a depthwise convolution, channels last, of {images.numel()} elements: more than 2^31"
        )
    return _convolution(0, 1)(op)


_WORKSPACE_EXTRA_BYTES = 2**15
_CONVOLUTION_ARGUMENTS = {_aten.convolution.default: slice(9), _aten.convolution_backward.default: slice(1, 10)}


def is_convolution(func: Any) -> bool:
    """Whether an operator is a convolution, or the gradient of one."""
    return func in _CONVOLUTION_ARGUMENTS


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
    stride, padding, dilation = ((list(values) * dims)[:dims] for values in (stride, padding, dilation))
    if transposed:  # patches of its output, one for each position of its input
        channels = results = weight.shape[1] * groups
        others = [
            (positions[d] - 1) * stride[d] - 2 * padding[d] + dilation[d] * (kernel[d] - 1) + 1 for d in range(dims)
        ]
    else:
        channels, results = images.shape[1], weight.shape[0]
        others = positions = [
            (positions[d] + 2 * padding[d] - dilation[d] * (kernel[d] - 1) - 1) // stride[d] + 1 for d in range(dims)
        ]
    item_bytes = images.element_size()
    patches = images.shape[0] * channels * prod(kernel) * prod(positions) * item_bytes
    multiple = max(1, 16 // item_bytes)
    copies = _padded(images.shape[1], multiple) * prod(images.shape[2:]) + _padded(results, multiple) * prod(others)
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
        size + 2 * added - 2 for size, added in zip(images.shape[2:], (list(padding) * 2)[:2], strict=True)
    )
    tiles = images.shape[0] * -(-height // 4) * -(-width // 4)
    return int(36 * images.element_size() * (tiles * sum(channels) + prod(channels)))


# --- kernels that need contiguous arguments ---


def _contiguous(*positions: int) -> Callable[[_Operator], Launch | None]:
    """Return a rule that copies arguments which are not contiguous."""

    def launch(op: _Operator) -> Launch | None:
        return _copying([op.args[position] for position in positions], torch.contiguous_format)

    return launch


def _batch_norm_backward(op: _Operator) -> Launch | None:
    """Copy a gradient that is not in the input's memory format; without cuDNN, as with 16-bit weights, nothing is copied.

    Source: aten/src/ATen/native/cudnn/BatchNorm.cpp.
    """
    grad, given, weight = op.args[:3]
    if weight is None or weight.element_size() == 2:
        return None
    chosen = torch.contiguous_format
    if given.dim() == 4 and has_only_format(given, torch.channels_last):
        chosen = torch.channels_last
    return _copying([grad], chosen)


# --- indices that kernels sort ---

_INT64_BYTES = 8
_MAX_UNSORTED_INDICES = 3072
_ROWS_PER_PARTIAL = 10
_SORTED_BY_ONE_BLOCK = 2304
_INDICES_PER_SORT_TILE = 3840  # on an A100; within a third of it on other cards


def _sort_bytes(count: int, column: int) -> int:
    """Return what cub takes to sort pairs of which each half takes `column` bytes, as measured with torch 2.14."""
    if count <= _SORTED_BY_ONE_BLOCK:
        return 1
    return 2 * column + -(-count // _INDICES_PER_SORT_TILE) * 1024 + 4607


def _embedding_backward(op: _Operator) -> Launch | None:
    grad, indices, rows = op.args[:3]
    fixed = (indices.element_size(), rows, grad.is_contiguous(), grad.element_size())
    return _launch(_embedding_backward_needs, fixed, (indices.numel(), grad.shape[-1]))


def _embedding_backward_needs(
    index_bytes: int, rows: int, contiguous: bool, grad_bytes: int, count: int, width: int
) -> Needs:
    """Indices sorted by cub, with a state for each tile; then sums of up to ten rows each, accumulated in float32.

    Source: aten/src/ATen/native/cuda/Embedding.cu, EmbeddingBackwardKernel.cu; cub/device/dispatch/dispatch_radix_sort.cuh.
    """
    copies: tuple[int, ...] = ()
    if not contiguous:
        copies = (count * width * grad_bytes,)
    if count <= _MAX_UNSORTED_INDICES:
        return Needs(throughout=copies)
    column, segments = count * index_bytes, min(count, rows)
    partials = count // _ROWS_PER_PARTIAL + segments
    starts = (segments * index_bytes, segments * index_bytes)
    sums = (column, *starts, partials * index_bytes, partials * 4 * width)
    sort = (column, _sort_bytes(count, column))
    return Needs(throughout=(*copies, column, column), before=(sort,), after=(sums,))


def _accumulating_index_put(op: _Operator) -> Launch | None:
    if not op.argument("accumulate"):
        return None
    shapes, converted = [], 0
    for index in op.args[1]:
        if index is not None:
            shapes.append(index.shape)
            converted += index.element_size() < _INT64_BYTES
    count = prod(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    return _launch(_index_put_needs, (len(shapes), converted), (count,))


def _index_put_needs(indices: int, converted: int, count: int) -> Needs:
    """Linear indices, and what sorts them. Source: aten/src/ATen/native/cuda/Indexing.cu (index_put_with_sort_kernel)."""
    column = count * _INT64_BYTES
    temporaries = ((column,) * (1 + converted), *((column, column),) * (indices - 1))
    return Needs(throughout=(column,), after=(*temporaries, (column, column, column, _sort_bytes(count, column))))


# --- attention ---


def _flash_backward(op: _Operator) -> Launch | None:
    grad_out, query, key, out = op.args[0], op.args[1], op.args[2], op.args[4]
    copied = sum(not tensor.transpose(1, 2).is_contiguous() for tensor in (grad_out, out))
    fixed = (query.element_size(), copied, key.shape[1] != query.shape[1])
    return _launch(_flash_backward_needs, fixed, (*query.shape, key.shape[2]))


def _flash_backward_needs(
    item_bytes: int, copied: int, grouped: bool, batch: int, heads: int, length: int, width: int, keys: int
) -> Needs:  # fmt: skip
    """Copies in the kernel's layout; row sums and the query's gradient in float32; key and value per query head.

    Source: flash_api.cpp (mha_bwd), aten/src/ATen/native/transformers/cuda/attention_backward.cu.
    """
    copies = (batch * heads * length * width * item_bytes,) * copied
    rows = batch * heads * -(-length // 128) * 128 * 4
    expanded = (batch * heads * keys * width * item_bytes,) * 2 * grouped  # summed over each group of query heads
    return Needs(throughout=copies, after=((rows, rows * torch_versions.flash_backward_width(width), *expanded),))


_CUDNN_BYTES = 256


def _cudnn_backward(op: _Operator) -> Launch | None:
    query, key = op.args[1:3]
    fixed = (query.element_size(), key.shape[1] != query.shape[1])
    return _launch(_cudnn_backward_needs, fixed, (*query.shape, key.shape[2]))


def _cudnn_backward_needs(
    item_bytes: int, grouped: bool, batch: int, heads: int, length: int, width: int, keys: int
) -> Needs:  # fmt: skip
    """One workspace: row sums and the query's gradient in float32; key and value per query head.

    As recorded on an H200 (tests/evidence), with 64 and 128 as widths.
    """
    rows = batch * heads * length * 4
    expanded = batch * heads * keys * width * item_bytes * 2 * grouped
    return borrowed(rows * width + rows + _CUDNN_BYTES + expanded)


def _efficient_backward(op: _Operator) -> Launch | None:
    grad_out, query, key = op.args[:3]
    copied = not grad_out.transpose(1, 2).is_contiguous()
    fixed = (op.processors.capability, query.element_size(), query.shape[3], copied)
    return _launch(_efficient_backward_needs, fixed, (*query.shape[:3], key.shape[2]))


def _efficient_backward_needs(
    capability: tuple[int, int], item_bytes: int, width: int, copied: bool, batch: int, heads: int, length: int,
    keys: int,
) -> Needs:  # fmt: skip
    """The query's gradient in float32, in tiles with a lock each; wide 16-bit heads also accumulate key and value.

    Source: aten/src/ATen/native/transformers/cuda/attention_backward.cu and mem_eff_attention/kernel_backward.h; tile
    sizes are those of torch 2.14.
    """
    half = item_bytes == 2
    has_large_tiles = half or capability >= (8, 0)
    tile = 128 if has_large_tiles and width > 64 else 64
    tiles = -(-length // tile) * -(-width // 64) * (tile * 256 + 16)
    if half and width > 128:
        tiles += 2 * (-(-keys // 64) * 64) * (-(-width // 64) * 64) * 4
    row_sums, workspace = batch * heads * length * 4, batch * heads * tiles
    copies = (batch * heads * length * width * item_bytes,) * copied
    if half:
        return Needs(copies, ((row_sums, workspace),))
    return Needs(copies, ((row_sums * width, row_sums), (row_sums, workspace)))


# --- elementwise ---


def _where(op: _Operator) -> Launch | None:
    """Copy a number, or a tensor of one number in host memory, to the card. Source: aten/src/ATen/native/TensorCompare.cpp."""
    numbers = [tensor for tensor in op.args[1:3] if tensor.dim() == 0 and tensor.device.index is None]
    return _launch(_throughout, tuple(tensor.element_size() for tensor in numbers), ()) if numbers else None


# --- softmax ---


def _softmax_backward(op: _Operator) -> Launch | None:
    """The product of gradient and output. Source: aten/src/ATen/native/cuda/SoftMax.cu."""
    grad, output = op.args[:2]
    return _launch(borrowed, (), (grad.numel() * torch.promote_types(grad.dtype, output.dtype).itemsize,))


# --- 32-bit indices ---


def _reflection(op: _Operator) -> Launch | None:
    """Refuse what 32 bits do not count. Source: aten/src/ATen/native/cuda/ReflectionPad.cu (canUse32BitIndexMath)."""
    if op.args[0].numel() >= 2**31 - 1:
        raise RuntimeError("input tensor must fit into 32-bit index math")
    return None


_RULES: dict[Any, Callable[[_Operator], Launch | None]] = {
    **dict.fromkeys((_aten.sum, _aten.mean, _aten.linalg_vector_norm), _reduction),
    **dict.fromkeys((_aten.mse_loss, _aten.smooth_l1_loss), _loss(1)),
    _aten.binary_cross_entropy: _loss(0),
    _aten.convolution: _convolution_forward,
    _aten.convolution_backward: _convolution_backward,
    **dict.fromkeys((_aten.native_layer_norm_backward, _aten.native_group_norm_backward), _contiguous(0, 1)),
    _aten.native_batch_norm_backward: _batch_norm_backward,
    **dict.fromkeys(
        (
            *(_aten.native_layer_norm, _aten.native_group_norm, _aten._softmax, _aten._log_softmax),
            *(_aten.roll, _aten.cumsum, _aten.topk, _aten._log_softmax_backward_data),
        ),
        _contiguous(0),
    ),
    **dict.fromkeys((_aten.reflection_pad1d, _aten.reflection_pad2d), _reflection),
    _aten.embedding_dense_backward: _embedding_backward,
    **dict.fromkeys((_aten.index_put, _aten.index_put_), _accumulating_index_put),
    _aten.where: _where,
    _aten._scaled_dot_product_flash_attention_backward: _flash_backward,
    _aten._scaled_dot_product_cudnn_attention: lambda _: _launch(borrowed, (), (_CUDNN_BYTES,)),
    _aten._scaled_dot_product_cudnn_attention_backward: _cudnn_backward,
    _aten._scaled_dot_product_efficient_attention_backward: _efficient_backward,
    _aten._softmax_backward_data: _softmax_backward,
}
if hasattr(_aten, "_fused_rms_norm_backward"):
    _RULES |= {_aten._fused_rms_norm: _contiguous(0), _aten._fused_rms_norm_backward: _contiguous(0, 1)}
