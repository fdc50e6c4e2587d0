"""The table of kernels: what each takes while it runs, besides its results, in the order of torch's host code.

Sizes and order are those of torch 2.14's requests to its own allocator (tests/cuda/test_sequences.py compares every entry).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from operator import itemgetter
from typing import Any

import torch

from oomprobe.simulation.cuda_kernels import image_format
from oomprobe.simulation.kernels import attention, convolutions, lists, norms, sorting, sums
from oomprobe.simulation.kernels.steps import (
    FLOAT_BYTES,
    INT64_BYTES,
    Launch,
    Operator,
    Rule,
    afterwards,
    around,
    copied,
    entry,
    launch,
    scratch,
    throughout,
)
from oomprobe.tape.reductions import Processors

_aten = torch.ops.aten
_RULES: dict[Any, Rule] = {}


def find_launch(
    processors: Processors, func: Any, args: Any, kwargs: dict[str, Any]
) -> Launch | None:
    """Return the operator's kernel if a rule for its scratch memory is known."""
    rule = _RULES.get(func.overloadpacket)
    return None if rule is None else rule(Operator(processors, func, args, kwargs))


# --- kernels that copy arguments which are not contiguous ---


def _copying(
    *, before: Sequence[int] = (), after: Sequence[int] = (), keeps_last: bool = False
) -> Rule:
    """Return the rule that copies the arguments at these positions, before the results are allocated or after.

    `keeps_last`: channels last need no copy.
    """

    def rule(op: Operator) -> Launch | None:
        copies = []
        for positions in (before, after):
            sizes: list[int] = []
            for position in positions:
                sizes += _copy(op.args[position], keeps_last)
            copies.append(sizes)
        return scratch(around, copies[0] + copies[1], (len(copies[0]),))

    return rule


def _copy(value: Any, keeps_last: bool) -> tuple[int, ...]:
    if not isinstance(value, torch.Tensor):  # a number
        return ()
    if keeps_last and image_format(value) is torch.channels_last:
        return ()
    return copied(value)


@entry(_RULES, _aten.mm, _aten.bmm, _aten.mv, _aten.dot)
def _matrix_product(op: Operator) -> Launch | None:
    """Copy matrices that cuBLAS cannot read as they are, such as expanded ones. Source: native/cuda/Blas.cpp."""
    copies: list[int] = []
    for value in op.args:
        if isinstance(value, torch.Tensor) and not _is_readable(value):
            copies.append(value.numel() * value.element_size())
    return scratch(afterwards, copies)


def _is_readable(tensor: torch.Tensor) -> bool:
    if tensor.dim() == 0:
        return True
    if tensor.dim() == 1:
        return tensor.stride(0) != 0 or tensor.shape[0] == 1
    rows, columns = tensor.shape[-2:]
    down, across = tensor.stride()[-2:]
    return (across == 1 and down >= max(1, columns)) or (down == 1 and across >= max(1, rows))


# --- others ---


@entry(_RULES, _aten.where)
def _where(op: Operator) -> Launch | None:
    """Copy a number, or a tensor of one number in host memory, to the card. Source: native/TensorCompare.cpp."""
    numbers = [
        tensor for tensor in op.args[1:3] if tensor.dim() == 0 and not _is_on_card(tensor.device)
    ]
    return launch(throughout, tuple(n.element_size() for n in numbers), ()) if numbers else None


@entry(_RULES, _aten._to_copy)
def _to_other_device(op: Operator) -> Launch | None:
    """Copy what is on the card into a layout that one transfer can read or write. Source: native/cuda/Copy.cu."""
    source, device = op.args[0], op.kwargs.get("device")
    if device is None or _is_on_card(device) is _is_on_card(source.device):
        return None
    wanted = op.kwargs.get("memory_format") or torch.preserve_format
    if wanted is torch.preserve_format:
        keeps_layout = _aten.is_non_overlapping_and_dense.default(source)
        result_is_contiguous = source.is_contiguous() or not keeps_layout
    else:
        keeps_layout = source.is_contiguous(memory_format=wanted)
        result_is_contiguous = wanted is torch.contiguous_format
    dtype = op.kwargs.get("dtype") or source.dtype
    return _transferred(source, keeps_layout, result_is_contiguous, dtype)


@entry(_RULES, _aten.copy_)
def _copy_in_place(op: Operator) -> Launch | None:
    target, source = op.args[:2]
    if _is_on_card(target.device) is _is_on_card(source.device):
        return None
    keeps_layout = (
        target.stride() == source.stride() and _aten.is_non_overlapping_and_dense.default(source)
    )
    source = source.expand(target.shape)
    return _transferred(source, keeps_layout, target.is_contiguous(), target.dtype)


def _transferred(
    source: torch.Tensor, keeps_layout: bool, result_is_contiguous: bool, dtype: torch.dtype
) -> Launch | None:
    if source.numel() <= 1 or (keeps_layout and dtype == source.dtype):
        return None
    if _is_on_card(source.device):
        return scratch(afterwards, copied(source))
    if result_is_contiguous:
        return None
    return launch(afterwards, (), (source.numel() * dtype.itemsize,))


def _is_on_card(device: torch.device) -> bool:
    return device.index is not None  # of a fake; those in host memory have no index


@entry(_RULES, _aten._softmax_backward_data)
def _softmax_backward(op: Operator) -> Launch:
    """The product of gradient and output, which must be contiguous. Source: native/cuda/SoftMax.cu."""
    grad, output = op.args[:2]
    product = grad.numel() * torch.promote_types(grad.dtype, output.dtype).itemsize
    has_other_layout = not grad.is_contiguous() and _aten.is_non_overlapping_and_dense.default(grad)
    return launch(afterwards, (), (product, product) if has_other_layout else (product,))


@entry(_RULES, _aten.scatter_reduce)
def _scatter_mean(op: Operator) -> Launch | None:
    """Count what is added to each element. Source: native/TensorAdvancedIndexing.cpp (scatter_reduce_two)."""
    target, source, how = op.args[0], op.args[3], op.args[4]
    if how != "mean":
        return None
    counts = target.numel() * target.element_size()
    return launch(afterwards, (), (source.numel() * source.element_size(), counts, target.numel()))


@entry(_RULES, _aten.normal)
def _normal_of_mean(op: Operator) -> Launch | None:
    mean = op.args[0]
    if not isinstance(mean, torch.Tensor):
        return None
    return launch(afterwards, (), (mean.numel() * mean.element_size(),))


@entry(_RULES, _aten.pow)
def _power(op: Operator) -> Launch | None:
    """A number raised to a tensor is copied to the card, in 64 bits. Source: native/Pow.cpp."""
    if isinstance(op.args[0], torch.Tensor):
        return None
    return launch(afterwards, (INT64_BYTES,), ())


@entry(_RULES, _aten.bernoulli)
def _bernoulli(op: Operator) -> Launch | None:
    """Probabilities of 16 bits are widened. Source: native/cuda/DistributionBernoulli.cu."""
    tensor = op.args[0]
    if len(op.args) > 1 or tensor.element_size() >= FLOAT_BYTES:
        return None
    return launch(afterwards, (), (tensor.numel() * FLOAT_BYTES,))


@entry(_RULES, _aten._cdist_backward)
def _cdist_backward(op: Operator) -> Launch:
    """Distances of each pair in each dimension, before they are summed. Source: native/cuda/DistanceKernel.cu."""
    first, second = op.args[1:3]
    copies = (*copied(first), *copied(second))
    count = prod(first.shape[:-2]) * first.shape[-2] * second.shape[-2] * first.shape[-1]
    return launch(around, (len(copies),), (*copies, count * first.element_size()))


@entry(_RULES, _aten.reflection_pad1d, _aten.reflection_pad2d)
def _reflection(op: Operator) -> Launch | None:
    """Refuse what 32 bits do not count. Source: native/cuda/ReflectionPad.cu (canUse32BitIndexMath)."""
    if op.args[0].numel() >= 2**31 - 1:
        raise RuntimeError("input tensor must fit into 32-bit index math")
    return _copying(after=(0,))(op)


_COPIES_FIRST = _copying(after=(0,))
_COPIES_FIRST_BEFORE = _copying(before=(0,))
_COPIES_UNLESS_LAST = _copying(after=(0,), keeps_last=True)
_RULES |= {
    # reductions
    **dict.fromkeys(
        (_aten.sum, _aten.mean, _aten.nansum), sums.reduction(sums.accumulated, casts=True)
    ),
    **dict.fromkeys((_aten.linalg_vector_norm, _aten.norm), sums.reduction(sums.accumulated)),
    **dict.fromkeys(
        (_aten.var, _aten.std, _aten.var_mean, _aten.std_mean), sums.reduction(lambda _: 16)
    ),
    **dict.fromkeys(
        (_aten.amax, _aten.amin, _aten.any, _aten.all), sums.reduction(lambda dtype: dtype.itemsize)
    ),
    **dict.fromkeys((_aten.argmax, _aten.argmin), sums.of_extremes(lambda _: sums.INDEXED_BYTES)),
    **dict.fromkeys((_aten.max, _aten.min), sums.of_extremes(lambda dtype: dtype.itemsize)),
    _aten.aminmax: sums.of_extremes(lambda dtype: 2 * dtype.itemsize),
    _aten._foreach_norm: sums.foreach_norm,
    # losses
    **dict.fromkeys((_aten.mse_loss, _aten.smooth_l1_loss), sums.loss),
    _aten.binary_cross_entropy: sums.binary_cross_entropy,
    _aten.nll_loss_forward: _COPIES_FIRST,
    _aten.nll_loss_backward: _copying(after=(0, 1)),
    # convolutions, pools and images
    _aten.convolution: convolutions.forward,
    _aten.convolution_backward: convolutions.backward,
    **dict.fromkeys((_aten.avg_pool2d, _aten.max_pool2d_with_indices), _COPIES_UNLESS_LAST),
    **dict.fromkeys(
        (_aten.avg_pool3d, _aten.max_pool3d_with_indices, _aten.adaptive_max_pool2d), _COPIES_FIRST
    ),
    **dict.fromkeys(
        (_aten.avg_pool2d_backward, _aten.max_pool2d_with_indices_backward),
        _copying(after=(1, 0), keeps_last=True),
    ),
    **dict.fromkeys(
        (_aten.avg_pool3d_backward, _aten.max_pool3d_with_indices_backward), _COPIES_FIRST
    ),
    _aten.adaptive_max_pool2d_backward: _COPIES_FIRST,
    **dict.fromkeys(
        (_aten._adaptive_avg_pool2d, _aten._adaptive_avg_pool3d),
        _copying(before=(0,), keeps_last=True),
    ),
    **dict.fromkeys(
        (_aten._adaptive_avg_pool2d_backward, _aten._adaptive_avg_pool3d_backward),
        _COPIES_UNLESS_LAST,
    ),
    **dict.fromkeys(
        (
            *(_aten.upsample_nearest1d, _aten.upsample_nearest2d, _aten.upsample_nearest3d),
            *(
                _aten.upsample_nearest1d_backward,
                _aten.upsample_nearest2d_backward,
                _aten.upsample_nearest3d_backward,
            ),
            *(_aten.upsample_linear1d_backward, _aten.upsample_bilinear2d_backward),
            *(_aten.upsample_trilinear3d_backward, _aten._upsample_bilinear2d_aa),
        ),
        _COPIES_UNLESS_LAST,
    ),
    **dict.fromkeys(
        (_aten.upsample_bicubic2d_backward, _aten._upsample_bilinear2d_aa_backward), _COPIES_FIRST
    ),
    **dict.fromkeys(
        (_aten.reflection_pad1d_backward, _aten.reflection_pad2d_backward), _COPIES_FIRST
    ),
    _aten.im2col: lambda op: launch(throughout, (), (*copied(op.args[0]), op.args[0].nbytes)),
    # The result is made as large as the patches, and then resized.
    _aten.col2im: lambda op: launch(afterwards, (), copied(op.args[0]), op.args[0].nbytes),
    _aten.unfold_backward: lambda op: launch(
        afterwards, (), (op.args[1][op.args[2]] * INT64_BYTES,)
    ),
    # norms
    _aten.native_layer_norm: _COPIES_FIRST_BEFORE,
    _aten.native_layer_norm_backward: norms.layer_norm_backward,
    _aten.native_group_norm: norms.group_norm,
    _aten.native_group_norm_backward: norms.group_norm_backward,
    _aten.native_batch_norm: norms.batch_norm,
    _aten.native_batch_norm_backward: norms.batch_norm_backward,
    # softmax, sorts and scans
    **dict.fromkeys(
        (_aten._softmax, _aten._log_softmax, _aten._log_softmax_backward_data), _COPIES_FIRST
    ),
    **dict.fromkeys((_aten.cummax, _aten.cummin, _aten.cumprod, _aten.logcumsumexp), _COPIES_FIRST),
    _aten.cumsum: sorting.cumulative,
    **dict.fromkeys(
        (_aten.kthvalue, _aten.median, _aten.nanmedian, _aten.roll), _COPIES_FIRST_BEFORE
    ),
    _aten.sort: sorting.sort,
    _aten.topk: sorting.topk,
    _aten.randperm: sorting.permutation,
    _aten.bucketize: _COPIES_FIRST,
    _aten.searchsorted: _copying(after=(1, 0)),
    # indices
    _aten.embedding: _copying(before=(1,)),
    _aten.embedding_dense_backward: sorting.embedding_backward,
    _aten._embedding_bag_backward: sorting.embedding_bag_backward,
    _aten.index: sorting.index,
    _aten.nonzero: sorting.nonzero,
    **dict.fromkeys((_aten.masked_scatter, _aten.masked_scatter_), sorting.masked_scatter),
    **dict.fromkeys((_aten.index_put, _aten.index_put_), sorting.index_put),
    # attention
    _aten._scaled_dot_product_flash_attention: attention.flash,
    _aten._scaled_dot_product_flash_attention_backward: attention.flash_backward,
    _aten._scaled_dot_product_cudnn_attention: lambda _: launch(
        afterwards, (), (attention.CUDNN_BYTES,)
    ),
    _aten._scaled_dot_product_cudnn_attention_backward: attention.cudnn_backward,
    _aten._scaled_dot_product_efficient_attention: attention.efficient,
    _aten._scaled_dot_product_efficient_attention_backward: attention.efficient_backward,
    # lists of tensors
    _aten.split_with_sizes_copy: lists.split_copy,
    _aten._chunk_cat: lists.chunk_cat,
    # others
    _aten._cdist_forward: _copying(before=(0, 1)),
}
if hasattr(_aten, "_fused_rms_norm_backward"):
    _RULES |= {
        _aten._fused_rms_norm: _COPIES_FIRST_BEFORE,
        _aten._fused_rms_norm_backward: _copying(before=(1,), after=(0,)),
    }


def in_order_of_allocation(func: Any, args: Any, result: Any) -> Sequence[Any]:
    """Return an operator's results in the order in which its kernel allocates them."""
    if func in _ALLOCATION_ORDER:
        return _ALLOCATION_ORDER[func](args, result)  # type: ignore[no-any-return]
    return result if isinstance(result, list | tuple) else (result,)


# --- the order of results ---


def _picking(*positions: int) -> Callable[[Any, Any], Any]:
    pick = itemgetter(*positions)
    return lambda _, results: pick(results)


# By operator: its results in the order in which its kernel allocates them, where it is another one.
_ALLOCATION_ORDER: dict[Any, Callable[[Any, Any], Any]] = {
    _aten.native_dropout.default: _picking(1, 0),  # the mask first
    # The seed of its dropout first.
    _aten._scaled_dot_product_cudnn_attention.default: _picking(6, 7, 0, 1),
    _aten._scaled_dot_product_efficient_attention.default: _picking(2, 3, 0, 1),  # as well
    _aten.nll_loss2d_forward.default: _picking(1, 0),  # the weight first
    _aten.convolution_backward.default: convolutions.gradients_in_order,
    _aten.native_batch_norm_backward.default: norms.batch_norm_gradients,
}


@entry(_ALLOCATION_ORDER, _aten._scaled_dot_product_flash_attention.default)
def _flash_results(args: Any, results: Any) -> Any:
    if len(args) > 3 and args[3]:  # the seed of its dropout last
        return (*results[:6], results[7], results[6], *results[8:])
    return results
