"""Kernels of CUDA whose host code calls other operators, written as these calls: they make torch's requests in torch's order.

For fakes, torch computes only the shapes of their results. Sources: aten/src/ATen/native, each function as named.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import inf, prod
from typing import Any

import torch

from oomprobe.simulation.kernels.steps import entry
from oomprobe.simulation.unknown import check_split

_aten = torch.ops.aten
_Tensor = torch.Tensor
_MEAN = 1
_LARGEST = 2  # mode of embedding_bag
_COMPOSITES: dict[str, Callable[..., Any]] = {}  # by the operator's name


def composite_of(func: Any) -> Callable[..., Any] | None:
    """Return what an operator's host code does, if that is to call other operators."""
    return _COMPOSITES.get(func.name())


@entry(_COMPOSITES, "aten::logsumexp")
def _logsumexp(tensor: _Tensor, dims: list[int], keepdim: bool = False) -> Any:
    """ReduceOps.cpp (logsumexp_out_impl)."""
    largest = _aten.amax.default(tensor, dims, True)
    kept = largest
    if not keepdim:
        kept = _aten.squeeze.dims(largest, dims)
    _aten.masked_fill_.Scalar(kept, _aten.eq.Scalar(_aten.abs.default(kept), inf), 0)
    exponentials = _aten.exp_.default(_aten.sub.Tensor(tensor, largest))
    result = _aten.sum.dim_IntList(exponentials, dims, keepdim)
    return _aten.add_.Tensor(_aten.log_.default(result), kept)


@entry(_COMPOSITES, "aten::binary_cross_entropy_with_logits")
def _binary_cross_entropy_with_logits(
    logits: _Tensor, target: _Tensor, weight: _Tensor | None = None, pos_weight: _Tensor | None = None, reduction: int = _MEAN
) -> Any:  # fmt: skip
    """Loss.cpp."""
    logarithms = _aten.log_sigmoid_forward.default(logits)[0]
    if pos_weight is not None:
        factors = _aten.add_.Scalar(_aten.mul.Tensor(_aten.sub.Scalar(pos_weight, 1), target), 1)
        _aten.mul_.Tensor(logarithms, factors)
        del factors
    loss = _aten.sub_.Tensor(_aten.mul_.Tensor(_aten.rsub.Scalar(target, 1), logits), logarithms)
    if weight is not None:
        _aten.mul_.Tensor(loss, weight)
    return _reduce(loss, reduction)


@entry(_COMPOSITES, "aten::huber_loss")
def _huber_loss(
    predicted: _Tensor, target: _Tensor, reduction: int = _MEAN, delta: float = 1.0
) -> Any:
    """Loss.cpp."""
    return _reduce(_aten.empty_like.default(predicted), reduction)


def _reduce(loss: _Tensor, reduction: int) -> Any:
    if reduction == 0:
        return loss
    return (_aten.mean if reduction == _MEAN else _aten.sum).default(loss)


@entry(_COMPOSITES, "aten::_safe_softmax")
def _safe_softmax(tensor: _Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    """SoftMax.cpp: rows that are masked altogether become zeros."""
    result = _aten._softmax.default(tensor, dim, False)
    masked = _aten.eq.Scalar(tensor, -inf)
    rows = _aten.all.dim(masked, dim, True)
    _aten.masked_fill_.Tensor(result, rows, _aten.new_zeros.default(result, []))
    return result


@entry(_COMPOSITES, "aten::_embedding_bag", "aten::_embedding_bag_forward_only")
def _embedding_bag(
    weight: _Tensor,
    indices: _Tensor,
    offsets: _Tensor,
    scale: bool = False,
    mode: int = 0,
    *_: Any,
    **__: Any,
) -> Any:
    """cuda/EmbeddingBag.cu; fakes have the results of the CPU, which needs other ones."""
    bags, width = offsets.shape[0], weight.shape[1]
    sizes = _aten.new_empty.default(offsets, [bags])
    bag_of_index = _aten.new_empty.default(indices, [indices.shape[0]])
    result = _aten.new_empty.default(weight, [bags, width])
    largest = _aten.new_empty.default(indices, [bags, width] if mode == _LARGEST else [0])
    return result, bag_of_index, sizes, largest


@entry(_COMPOSITES, "aten::_euclidean_dist")
def _euclidean_distances(first: _Tensor, second: _Tensor) -> Any:
    """Distance.cpp (_euclidean_dist): one product of matrices that contain the squares."""
    norms, ones = _squares(first)
    other_norms, other_ones = _squares(second)
    left = _aten.cat.default([_aten.mul.Scalar(first, -2), norms, ones], -1)
    del norms, ones
    right = _aten.cat.default([second, other_ones, other_norms], -1)
    del other_norms, other_ones
    multiply = _aten.bmm.default if left.dim() > 2 else _aten.mm.default
    product = multiply(left, _aten.transpose.int(right, -1, -2))
    return _aten.sqrt_.default(_aten.clamp_min_.default(product, 0))


def _squares(tensor: _Tensor) -> tuple[_Tensor, _Tensor]:
    norms = _aten.sum.dim_IntList(_aten.pow.Tensor_Scalar(tensor, 2), [-1], True)
    return norms, _aten.ones_like.default(norms)


@entry(_COMPOSITES, "aten::count_nonzero", "aten::count_nonzero.dim_IntList")
def _count_nonzero(tensor: _Tensor, dims: int | list[int] | None = None) -> Any:
    """TensorAdvancedIndexing.cpp."""
    return _aten.sum.dim_IntList(_aten.ne.Scalar(tensor, 0), dims)


@entry(_COMPOSITES, "aten::masked_scatter_backward")
def _masked_scatter_backward(grad: _Tensor, mask: _Tensor, shape: list[int]) -> Any:
    """TensorAdvancedIndexing.cpp: what was taken, and zeros for the rest; of unknown values, no rest."""
    count = prod(shape)
    taken = _aten.masked_select.default(grad, mask)
    missing = count - taken.numel()
    if missing > 0:
        zeros = _aten.new_zeros.default(grad, [missing])
        taken = _aten.cat.default([taken, zeros])
    return _aten.view.default(taken[:count], shape)


@entry(_COMPOSITES, "aten::multinomial")
def _multinomial(
    probabilities: _Tensor, count: int, replacement: bool = False, *, generator: Any = None
) -> Any:
    """Distributions.cpp: without replacement, the largest of the probabilities divided by random numbers."""
    result = _aten.new_empty.default(
        probabilities, [*probabilities.shape[:-1], count], dtype=torch.int64
    )
    if (
        replacement and count > 1
    ):  # native/cuda/MultinomialKernel.cu: normalized, summed up, and a random number for each
        shares = _aten.empty_like.default(probabilities)
        _summed, _random = _aten.empty_like.default(shares), _aten.empty_like.default(shares)
        return result
    least, most = _aten.aminmax.default(probabilities)
    valid = _aten.bitwise_and.Tensor(_aten.lt.Scalar(most, inf), _aten.ge.Scalar(least, 0))
    sums = _aten.sum.dim_IntList(probabilities, [-1])
    are_empty = _aten.eq.Scalar(sums, 0)
    empty = _aten.any.default(are_empty)
    del sums, are_empty
    _aten.bitwise_and.Tensor(valid, empty)
    divided = _aten.empty_like.default(probabilities)
    if count == 1:
        return _aten.argmax.out(divided, -1, True, out=result)
    return _aten.topk.default(divided, count)[1]


@entry(_COMPOSITES, "aten::normal.float_Tensor", "aten::normal.Tensor_Tensor")
def _normal(mean: _Tensor | float, deviations: _Tensor, *, generator: Any = None) -> Any:
    """DistributionTemplates.h: deviations are checked twice."""
    _check_positive(deviations)
    result = deviations
    if isinstance(mean, _Tensor):
        result = _aten.expand.default(result, torch.broadcast_shapes(mean.shape, result.shape))  # type: ignore[no-untyped-call]
    result = _aten.empty_like.default(result)
    _check_positive(deviations)
    if not isinstance(mean, _Tensor):
        _aten.new_empty.default(deviations, [])
    return result


def _check_positive(deviations: _Tensor) -> None:
    least = _aten.min.default(deviations)
    _aten.ge.Scalar(least, 0)


@entry(_COMPOSITES, "aten::_pack_padded_sequence")
def _pack_padded_sequence(padded: _Tensor, lengths: _Tensor, batch_first: bool) -> Any:
    """PackedSequence.cpp: the steps that as many sequences have are copied, then all joined."""
    padded = _aten.transpose.int(padded, 0, int(batch_first))
    ends, steps, sizes = lengths.tolist(), [], list[int]()
    for begin, end in pairwise([0, *sorted({*ends})]):
        count = sum(other >= end for other in ends)
        block = _aten.slice.Tensor(_aten.slice.Tensor(padded, 0, begin, end), 1, 0, count)
        block = _aten.contiguous.default(block)
        steps.append(_aten.view.default(block, [-1, *padded.shape[2:]]))
        sizes += [count] * (end - begin)
    return _aten.cat.default(steps), torch.tensor(sizes, device=lengths.device)


@entry(_COMPOSITES, "aten::_ctc_loss.Tensor")
def _ctc_loss(chances: _Tensor, classes: _Tensor, *lengths: Any) -> Any:
    """LossCTC.cpp: read the lengths from the host."""
    ends, counts, *others = lengths
    return _aten._ctc_loss.default(chances, classes, ends.tolist(), counts.tolist(), *others)


@entry(_COMPOSITES, "aten::_ctc_loss")
def _ctc_loss_of_lists(
    chances: _Tensor, _: _Tensor, __: list[int], counts: list[int], *___: Any
) -> Any:
    """cuda/LossCTC.cu: each sequence's lengths and offset, then the sums of its paths."""
    steps, batch, _classes = chances.shape
    states = 2 * max(counts) + 1  # a blank around each class
    _numbers = [chances.new_empty(batch, dtype=torch.int64) for _ in range(3)]
    sums = _aten.new_empty.default(chances, [batch, steps, states])
    loss = _aten.new_empty.default(chances, [batch])
    return loss, sums


@entry(_COMPOSITES, "aten::_ctc_loss_backward", "aten::_ctc_loss_backward.Tensor")
def _ctc_loss_backward(_: _Tensor, chances: _Tensor, *others: Any) -> Any:
    """cuda/LossCTC.cu: the same, for paths from the end."""
    sums = others[4]
    batch = len(sums)
    _numbers = [chances.new_empty(batch, dtype=torch.int64) for _ in range(3)]
    _backward_sums = _aten.empty_like.default(sums)
    return _aten.empty_like.default(chances)


@entry(_COMPOSITES, "fsdp::split_with_sizes_copy")
def _split_gathered(
    gathered: _Tensor, sizes: list[int], dim: int = 0, *, out: list[_Tensor]
) -> None:
    """torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py."""
    _aten.split_with_sizes_copy.out(gathered, sizes, dim, out=out)


@entry(_COMPOSITES, "fsdp::chunk_cat")
def _join_chunks(tensors: list[_Tensor], dim: int, num_chunks: int, *, out: _Tensor) -> None:
    """torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py."""
    _aten._chunk_cat.out(tensors, dim, num_chunks, out=out)


@entry(_COMPOSITES, "_c10d_functional::all_to_all_single")
def _all_to_all(tensor: _Tensor, output_sizes: list[int], input_sizes: list[int], _: str) -> Any:
    """torch/csrc/distributed/c10d/Functional.cpp."""
    check_split(tensor, input_sizes)
    return _aten.new_empty.default(tensor, [sum(output_sizes), *tensor.shape[1:]])


@entry(_COMPOSITES, "_c10d_functional::wait_tensor")
def _wait(tensor: _Tensor) -> _Tensor:
    """torch/csrc/distributed/c10d/Functional.cpp."""
    return tensor
