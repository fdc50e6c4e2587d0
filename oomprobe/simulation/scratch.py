"""What a kernel takes of the card's memory for itself while it runs, beside its results.

An operator's fake result says nothing of it. It is computed from the operator's arguments as torch's host code does,
here and again when a call is replayed at another batch size: `Kernel` is the rule, and the numbers that go into it (sizes,
strides) follow straight lines of the batch size where what comes out does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from oomprobe.simulation.reductions import Processors, Reduction, buffers

_aten = torch.ops.aten


class Needs(NamedTuple):
    """Bytes that a kernel takes.

    Attributes:
        held: From before its results are made until it ends.
        groups: After they are made: taken together and freed together, one group after the other.
        before: The same, before they are made.
    """

    held: tuple[int, ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()
    before: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Kernel:
    """A rule for what a kernel needs: of what is fixed, and of numbers that vary with the batch size.

    Args:
        rule: Called with `fixed` and the numbers.
        fixed: Such as the card, the bytes of an element, which dimensions are reduced.
        count: Of the numbers.
    """

    rule: Callable[..., Needs]
    fixed: tuple[Any, ...]
    count: int

    def needs(self, numbers: Sequence[int]) -> Needs:
        """What it takes, for these numbers."""
        return _needs(self, tuple(numbers))


@lru_cache(maxsize=4096)
def _needs(kernel: Kernel, numbers: tuple[int, ...]) -> Needs:
    return kernel.rule(*kernel.fixed, *numbers)


class Launch(NamedTuple):
    """A kernel with its numbers, and how many bytes those of its results take that are not as large as they look."""

    kernel: Kernel
    numbers: tuple[int, ...]
    result_bytes: Mapping[int, int] = MappingProxyType({})


def launched(processors: Processors, func: Any, args: Any, kwargs: dict[str, Any]) -> Launch | None:
    """What an operator launches that takes memory for itself; None for one that takes none, or of which nothing is known."""
    rule = _RULES.get(func.overloadpacket)
    return None if rule is None else rule(processors, func, args, kwargs)


# --- reductions ---

# How many bytes a partial result has, beside a float of the accumulated type.
_WELFORD, _WITH_INDEX, _AS_INPUT, _BOOLEAN = "welford", "index", "input", "boolean"


def _reduction(
    partial: str | None = None, dims_at: int = 1, values_per_load: int | None = None
) -> Callable[..., Launch | None]:
    """The rule of a reducing operator, whose dimensions are its argument number `dims_at`."""

    def launch(processors: Processors, func: Any, args: Any, kwargs: dict[str, Any]) -> Launch | None:
        tensor = args[0]
        dims = kwargs.get("dim", args[dims_at] if len(args) > dims_at else None)
        if isinstance(dims, torch.Tensor):  # max(a, b) compares
            return None
        if partial is _WITH_INDEX and dims is None and func.overloadpacket in (_aten.max, _aten.min):
            return _reduce(processors, tensor, None, tensor.dtype, tensor.element_size(), 4)
        dtype = kwargs.get("dtype") or (args[3] if len(args) > 3 and isinstance(args[3], torch.dtype) else None)
        if dtype is None and func.overloadpacket in _COUNTING and not tensor.is_floating_point():
            dtype = torch.int64
        dtype = dtype or tensor.dtype
        accumulated = 8 if dtype in (torch.float64, torch.int64) else 4
        partial_bytes = {None: accumulated, _WELFORD: 4 * accumulated, _WITH_INDEX: 16, _AS_INPUT: tensor.element_size(),
                         _BOOLEAN: 1}[partial]  # fmt: skip
        return _reduce(
            processors, tensor, dims, dtype, partial_bytes, values_per_load or 4, by_index=partial is _WITH_INDEX
        )

    return launch


def _reduce(
    processors: Processors, tensor: torch.Tensor, dims: Any, dtype: torch.dtype, partial_bytes: int, values_per_load: int,
    *, by_index: bool = False,
) -> Launch:  # fmt: skip
    dims = [dims] if isinstance(dims, int) else dims
    chosen = {d % max(1, tensor.dim()) for d in dims} if dims else set(range(tensor.dim()))
    reduced = tuple(d in chosen for d in range(tensor.dim()))
    converts = dtype != tensor.dtype and not (tensor.element_size() == 2 and dtype is torch.float32)
    item_bytes = dtype.itemsize if converts else tensor.element_size()
    kind = Reduction(processors, item_bytes, dtype.itemsize, partial_bytes, reduced, values_per_load)
    numbers = (tensor.storage_offset(), *tensor.shape, *tensor.stride())
    return Launch(Kernel(_of_reduction, (kind, converts), len(numbers)), numbers)


def _of_reduction(kind: Reduction, converts: bool, offset: int, *layout: int) -> Needs:
    shape, strides = layout[: len(layout) // 2], layout[len(layout) // 2 :]
    copy = (kind.item_bytes * prod(shape),) if converts else ()
    return Needs(
        groups=tuple(copy + sizes for sizes in buffers(kind, shape, strides, offset)) or ((copy,) if copy else ())
    )


# --- losses ---


def _loss(copies: int, *, before: bool = False, inner_result: bool = False) -> Callable[..., Launch | None]:
    """A loss of elements that ends in a mean or sum of its own, which no dispatcher sees.

    Args:
        copies: Buffers of all elements beside the result.
        before: They are made before the result; otherwise the result itself is made for all elements, and keeps its
            storage when it becomes one number.
        inner_result: The mean has a result of its own.
    """

    def launch(processors: Processors, func: Any, args: Any, kwargs: dict[str, Any]) -> Launch | None:
        position = next(at for at, arg in enumerate(func._schema.arguments) if arg.name == "reduction")
        if (args[position] if len(args) > position else kwargs.get("reduction", 1)) == 0:
            return None
        dtype = torch.promote_types(args[0].dtype, args[1].dtype)
        count = prod(torch.broadcast_shapes(args[0].shape, args[1].shape))  # type: ignore[no-untyped-call]
        kind = Reduction(processors, dtype.itemsize, dtype.itemsize, 8 if dtype.itemsize == 8 else 4, (True,))
        kernel = Kernel(_of_loss, (kind, copies, before, inner_result), 1)
        return Launch(kernel, (count,), {} if before else {0: count * dtype.itemsize})

    return launch


def _of_loss(kind: Reduction, copies: int, before: bool, inner_result: bool, count: int) -> Needs:
    elements = (count * kind.item_bytes,) * copies
    one = (kind.item_bytes,) if inner_result else ()
    groups = tuple(one + sizes for sizes in buffers(kind, (count,), (1,), 0)) or ((one,) if one else ())
    return (
        Needs(elements, groups) if before else Needs(groups=tuple(elements + sizes for sizes in groups) or (elements,))
    )


# --- convolutions, which want their arguments contiguous ---


def _convolution(*positions: int) -> Callable[..., Launch | None]:
    """Copies of those arguments that do not lie as the kernel reads them; the last two are the input and the weight.

    Source: aten/src/ATen/native/Convolution.cpp (determine_backend_memory_format), cudnn/ConvShared.cpp.
    """

    def launch(processors: Processors, func: Any, args: Any, kwargs: dict[str, Any]) -> Launch | None:
        tensors = [args[position] for position in positions]
        last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensors[-1].dim())
        wants_last = last is not None and any(_suggests(tensor, last) for tensor in tensors[-2:])
        wanted = last if wants_last and last is not None else torch.contiguous_format
        copies = tuple(t.numel() * t.element_size() for t in tensors if not t.is_contiguous(memory_format=wanted))
        return Launch(Kernel(_held, (), len(copies)), copies) if copies else None

    return launch


def _suggests(tensor: torch.Tensor, memory_format: torch.memory_format) -> bool:
    """Whether it lies in channels-last order and in no other."""
    return tensor.is_contiguous(memory_format=memory_format) and not tensor.is_contiguous()


def _held(*nbytes: int) -> Needs:
    return Needs(held=nbytes)


# --- embeddings ---

_ATOMIC_AT_MOST = 3072  # indices up to which no sort is needed
_ROWS_PER_PARTIAL = 10


def _embedding_backward(processors: Processors, func: Any, args: Any, kwargs: dict[str, Any]) -> Launch | None:
    grad, indices, rows = args[0], args[1], args[2]
    count = indices.numel()
    by_frequency = bool(args[4])
    key_bits = max(1, (rows - 1).bit_length() + (rows & (rows - 1) == 0))
    fixed = (
        processors,
        indices.element_size(),
        rows,
        key_bits,
        by_frequency,
        grad.is_contiguous(),
        grad.element_size(),
    )
    return Launch(Kernel(_of_embedding_backward, fixed, 2), (count, grad.shape[-1]))


def _of_embedding_backward(
    processors: Processors, index_bytes: int, rows: int, key_bits: int, by_frequency: bool, contiguous: bool,
    grad_bytes: int, count: int, width: int,
) -> Needs:  # fmt: skip
    """Sorted indices; then sums of up to ten rows each, which are added up in float32.

    Source: aten/src/ATen/native/cuda/Embedding.cu, EmbeddingBackwardKernel.cu.
    """
    copy = () if contiguous else (count * width * grad_bytes,)
    if count <= _ATOMIC_AT_MOST and not by_frequency:
        return Needs(held=copy)
    column = count * index_bytes
    segments = min(count, rows)
    partials = count // _ROWS_PER_PARTIAL + segments
    sums = (
        column,
        8,
        segments * index_bytes,
        segments * index_bytes,
        8,
        partials * index_bytes,
        partials * 4 * -(-width // 32) * 32,
    )
    sort = (column, sort_bytes(processors, count, index_bytes, index_bytes, key_bits))
    return Needs(held=(*copy, column, column), before=(sort,), groups=(sums,))


# --- attention ---


def _flash(processors: Processors, func: Any, args: Any, kwargs: dict[str, Any]) -> Launch | None:
    query, key = args[0], args[1]
    with_dropout = bool(args[3] if len(args) > 3 else kwargs.get("dropout_p", 0.0))
    batch, heads, length, width = query.shape
    kernel = Kernel(_of_flash, (processors.multiprocessors, with_dropout), 5)
    return Launch(kernel, (batch, heads, length, key.shape[2], width))


def _of_flash(
    multiprocessors: int, with_dropout: bool, batch: int, heads: int, length: int, keys: int, width: int
) -> Needs:
    """Partial outputs in float32 where few heads leave multiprocessors idle, so that the keys are split among them.

    Source: aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp (num_splits_heuristic).
    """
    key_blocks = -(-keys // (256 if width <= 64 else 128 if width <= 128 else 64))
    blocks, places = batch * heads * -(-length // 64), 2 * multiprocessors
    if with_dropout or blocks >= 0.8 * places:
        return Needs()
    splits = [
        n
        for n in range(1, min(128, places, key_blocks) + 1)
        if n == 1 or -(-key_blocks // n) != -(-key_blocks // (n - 1))
    ]
    share = {n: blocks * n / places / -(-blocks * n // places) for n in splits}
    chosen = next(n for n in splits if share[n] >= 0.85 * max(share.values()))
    if chosen == 1:
        return Needs()
    rows = chosen * batch * heads * length * 4
    return Needs(groups=((rows, rows * -(-width // 32) * 32),))


def _flash_backward(processors: Processors, func: Any, args: Any, kwargs: dict[str, Any]) -> Launch | None:
    grad_out, query, out = args[0], args[1], args[4]
    copied = sum(not tensor.transpose(1, 2).is_contiguous() for tensor in (grad_out, out))
    return Launch(Kernel(_of_flash_backward, (query.element_size(), copied), 4), tuple(query.shape))


def _of_flash_backward(item_bytes: int, copied: int, batch: int, heads: int, length: int, width: int) -> Needs:
    """Copies that lie as the kernel reads them; the row sums, and the gradient of the query in float32.

    Source: flash_api.cpp (mha_bwd), aten/src/ATen/native/transformers/cuda/attention_backward.cu.
    """
    rows = batch * heads * -(-length // 128) * 128 * 4
    return Needs(
        held=(batch * heads * length * width * item_bytes,) * copied, groups=((rows, rows * -(-width // 32) * 32),)
    )


def _efficient_backward(processors: Processors, func: Any, args: Any, kwargs: dict[str, Any]) -> Launch | None:
    query, key = args[1], args[2]
    copied = not args[0].transpose(1, 2).is_contiguous()
    fixed = (processors.capability, query.element_size(), query.shape[3], copied)
    return Launch(Kernel(_of_efficient_backward, fixed, 4), (*query.shape[:3], key.shape[2]))


def _of_efficient_backward(
    capability: tuple[int, int],
    item_bytes: int,
    width: int,
    copied: bool,
    batch: int,
    heads: int,
    length: int,
    keys: int,
) -> Needs:
    """The gradient of the query in float32, in tiles with a lock each; in 16 bit, wide heads accumulate all three.

    Source: aten/src/ATen/native/transformers/cuda/attention_backward.cu and mem_eff_attention/kernel_backward.h; the tiles
    are those that torch 2.14 chooses.
    """
    half = item_bytes == 2
    tile = 128 if width > 64 and (half or capability >= (8, 0)) else 64
    tiles = -(-length // tile) * -(-width // 64) * (tile * 256 + 16)
    if half and width > 128:
        tiles += 2 * (-(-keys // 64) * 64) * (-(-width // 128) * 128) * 4
    row_sums, workspace = batch * heads * length * 4, batch * heads * tiles
    held = (batch * heads * length * width * item_bytes,) * copied
    if half:
        return Needs(held, ((row_sums, workspace),))
    return Needs(held, ((row_sums * width, row_sums, row_sums), (row_sums, workspace)))


# --- normalisation and softmax ---

_TALL = 64 * 1024
_PARTIAL_SUMS_AT_MOST = 2**20


def _layer_norm(processors: Processors, func: Any, args: Any, kwargs: dict[str, Any]) -> Launch | None:
    """Mean and deviation are kept in float32 whatever the input is."""
    if args[0].element_size() != 2:
        return None
    rows = args[0].numel() // max(1, prod(args[1]))
    return Launch(Kernel(_held, (), 0), (), {1: 4 * rows, 2: 4 * rows})


def _layer_norm_backward(processors: Processors, func: Any, args: Any, kwargs: dict[str, Any]) -> Launch | None:
    tensor, width = args[1], prod(args[2])
    kernel = Kernel(_of_layer_norm_backward, (processors, tensor.element_size(), tuple(args[7])), 2)
    return Launch(kernel, (tensor.numel() // max(1, width), width))


def _of_layer_norm_backward(
    processors: Processors, item_bytes: int, wanted: tuple[bool, ...], rows: int, width: int
) -> Needs:
    """Partial sums over the rows of a tall input, which are then reduced.

    Source: aten/src/ATen/native/cuda/layer_norm_kernel.cu (LaunchGammaBetaBackwardCUDAKernel).
    """
    if rows <= _TALL or width // 32 >= processors.multiprocessors // 2:
        return Needs()
    partial_rows = min(-(-rows // 32), _PARTIAL_SUMS_AT_MOST // width)
    kind = Reduction(processors, item_bytes, item_bytes, 4, (True, False))
    sums = buffers(kind, (partial_rows, width), (width, 1), 0) or ((),)
    partials = (partial_rows * width * item_bytes,) * sum(wanted[1:])
    return Needs(groups=tuple((*partials, width * item_bytes, *sizes) for sizes in sums))


def _softmax_backward(processors: Processors, func: Any, args: Any, kwargs: dict[str, Any]) -> Launch | None:
    """The product of gradient and output. Source: aten/src/ATen/native/cuda/SoftMax.cu."""
    nbytes = args[0].numel() * torch.promote_types(args[0].dtype, args[1].dtype).itemsize
    return Launch(Kernel(_afterwards, (), 1), (nbytes,))


def _afterwards(*nbytes: int) -> Needs:
    return Needs(groups=(nbytes,))


def _log_sigmoid(processors: Processors, func: Any, args: Any, kwargs: dict[str, Any]) -> Launch | None:
    """What a CPU keeps for backward, CUDA computes again."""
    return Launch(Kernel(_held, (), 0), (), {1: 0})


# --- sorts ---

# Keys that a block sorts at once: for a key and a value of 8 bytes each.
_TILES = {(7, 0): 3840, (7, 5): 2816, (8, 0): 3840, (8, 6): 3840, (9, 0): 4608}


def sort_bytes(processors: Processors, count: int, key_bytes: int, value_bytes: int, key_bits: int) -> int:
    """What cub's radix sort of pairs takes: both once more, a histogram for each 8 bits, and a state for each tile.

    Source: cub/device/dispatch/dispatch_radix_sort.cuh; tiles fitted to what torch 2.14 asks of the allocator.
    """
    tile = _TILES[max((known for known in _TILES if known <= processors.capability), default=(7, 0))]
    passes = -(-key_bits // 8)
    sizes = (count * key_bytes, count * value_bytes, -(-count // tile) * 1024, passes * 2048, 256)
    return sum(-(-size // 256) * 256 for size in sizes) + 255


_SORTED_AT_ONCE = 4096  # by one block


def _sort(processors: Processors, func: Any, args: Any, kwargs: dict[str, Any]) -> Launch | None:
    tensor = args[0]
    position = next(at for at, arg in enumerate(func._schema.arguments) if arg.name == "dim")
    dim = kwargs.get("dim", args[position] if len(args) > position else -1)
    if tensor.dim() == 0:
        return None
    along_rows = tensor.stride(dim) == 1 and tensor.is_contiguous()
    return Launch(Kernel(_of_sort, (tensor.element_size(), along_rows), 2), (tensor.numel(), tensor.shape[dim]))


def _of_sort(item_bytes: int, along_rows: bool, count: int, length: int) -> Needs:
    """Source: aten/src/ATen/native/cuda/Sort.cpp, SortStable.cu, cub's segmented radix sort."""
    if length <= _SORTED_AT_ONCE:
        return Needs()
    keys, indices = count * item_bytes, count * 8
    copies = () if along_rows else (keys, keys, indices)
    return Needs(groups=((*copies, indices, keys + indices + 255),))


def _index_put(processors: Processors, func: Any, args: Any, kwargs: dict[str, Any]) -> Launch | None:
    """Where values are added up, places are sorted first. Source: aten/src/ATen/native/cuda/Indexing.cu."""
    if not (args[3] if len(args) > 3 else kwargs.get("accumulate", False)):
        return None
    indices = [index for index in args[1] if index is not None]
    count = prod(torch.broadcast_shapes(*(index.shape for index in indices)))  # type: ignore[no-untyped-call]
    return Launch(Kernel(_of_index_put, (processors, max(1, args[0].numel().bit_length())), 1), (count,))


def _of_index_put(processors: Processors, key_bits: int, count: int) -> Needs:
    return Needs(groups=((8 * count,) * 4 + (sort_bytes(processors, count, 8, 8, key_bits),),))


_COUNTING = {_aten.sum, _aten.nansum, _aten.prod}
_RULES: dict[Any, Callable[..., Launch | None]] = {
    _aten.sum: _reduction(),
    _aten.nansum: _reduction(),
    _aten.mean: _reduction(),
    _aten.linalg_vector_norm: _reduction(dims_at=2),
    _aten.norm: _reduction(dims_at=2),
    _aten.var: _reduction(_WELFORD, values_per_load=2),
    _aten.std: _reduction(_WELFORD, values_per_load=2),
    _aten.var_mean: _reduction(_WELFORD, values_per_load=2),
    _aten.std_mean: _reduction(_WELFORD, values_per_load=2),
    _aten.amax: _reduction(_AS_INPUT),
    _aten.amin: _reduction(_AS_INPUT),
    _aten.any: _reduction(_BOOLEAN),
    _aten.all: _reduction(_BOOLEAN),
    _aten.max: _reduction(_WITH_INDEX),
    _aten.min: _reduction(_WITH_INDEX),
    _aten.argmax: _reduction(_WITH_INDEX),
    _aten.argmin: _reduction(_WITH_INDEX),
    _aten.mse_loss: _loss(1),
    _aten.smooth_l1_loss: _loss(1),
    _aten.huber_loss: _loss(1, before=True),
    _aten.binary_cross_entropy: _loss(0, inner_result=True),
    _aten.soft_margin_loss: _loss(0, inner_result=True),
    _aten.convolution: _convolution(0, 1),
    _aten.convolution_backward: _convolution(0, 1, 2),
    _aten.embedding_dense_backward: _embedding_backward,
    _aten._scaled_dot_product_flash_attention: _flash,
    _aten._scaled_dot_product_flash_attention_backward: _flash_backward,
    _aten._scaled_dot_product_efficient_attention_backward: _efficient_backward,
    _aten.native_layer_norm: _layer_norm,
    _aten.native_layer_norm_backward: _layer_norm_backward,
    _aten._softmax_backward_data: _softmax_backward,
    _aten.log_sigmoid_forward: _log_sigmoid,
    _aten.sort: _sort,
    _aten.index_put: _index_put,
    _aten.index_put_: _index_put,
    _aten._index_put_impl_: _index_put,
}
