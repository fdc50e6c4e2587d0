"""What a kernel takes of the card's memory for itself while it runs, beside its results.

An operator's fake result says nothing of it. It is computed from the operator's arguments as torch's host code does,
here and again when a call is replayed at another batch size: `Kernel` is the rule, and the numbers that go into it (sizes,
strides) follow straight lines of the batch size where what comes out does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from oomprobe.simulation.reductions import Processors, Reduction, buffers

_aten = torch.ops.aten
_NO_BYTES: Mapping[int, int] = MappingProxyType({})


class Needs(NamedTuple):
    """Bytes that a kernel takes. What is in a group is taken together and freed together, one group after the other."""

    held: tuple[int, ...] = ()  # from before its results are made until it ends
    groups: tuple[tuple[int, ...], ...] = ()  # after they are made
    before: tuple[tuple[int, ...], ...] = ()  # before they are made


@dataclass(frozen=True, slots=True)
class Kernel:
    """A rule for what a kernel needs, called with what is fixed and `count` numbers that vary with the batch size."""

    rule: Callable[..., Needs]
    fixed: tuple[Any, ...]
    count: int


@lru_cache(maxsize=4096)
def needs_of(kernel: Kernel, numbers: tuple[int, ...]) -> Needs:
    """What a kernel takes, for these numbers."""
    return kernel.rule(*kernel.fixed, *numbers)


class Launch(NamedTuple):
    """A kernel with its numbers, and how many bytes those of its results take that are not as large as they look."""

    kernel: Kernel
    numbers: tuple[int, ...]
    result_bytes: Mapping[int, int]


class _Operator(NamedTuple):
    """An operator with its arguments, on the card."""

    processors: Processors
    func: Any
    args: Any
    kwargs: dict[str, Any]

    def given(self, name: str) -> Any:
        """An argument by its name; None where this overload has none of it."""
        position, default = _position(self.func, name)
        return self.kwargs.get(name, self.args[position] if position < len(self.args) else default)


@cache
def _position(func: Any, name: str) -> tuple[int, Any]:
    arguments = func._schema.arguments
    found = ((at, argument.default_value) for at, argument in enumerate(arguments) if argument.name == name)
    return next(found, (len(arguments), None))


def launched(processors: Processors, func: Any, args: Any, kwargs: dict[str, Any]) -> Launch | None:
    """What an operator launches that takes memory for itself; None for one that takes none, or of which nothing is known."""
    rule = _RULES.get(func.overloadpacket)
    return None if rule is None else rule(_Operator(processors, func, args, kwargs))


def _launch(
    rule: Callable[..., Needs],
    fixed: tuple[Any, ...],
    numbers: tuple[int, ...],
    result_bytes: Mapping[int, int] = _NO_BYTES,
) -> Launch:
    return Launch(Kernel(rule, fixed, len(numbers)), numbers, result_bytes)


def _held(*nbytes: int) -> Needs:
    return Needs(held=nbytes)


# --- reductions ---

# How many bytes a partial result has, beside a float of the accumulated type.
_WELFORD, _WITH_INDEX, _AS_INPUT, _BOOLEAN = "welford", "index", "input", "boolean"


def _reduction(partial: str | None = None, values_per_load: int = 4) -> Callable[[_Operator], Launch | None]:
    """The rule of a reducing operator."""

    def launch(op: _Operator) -> Launch | None:
        tensor, dims, dtype = op.args[0], op.given("dim"), op.kwargs.get("dtype")
        if op.func._overloadname == "other":  # max(a, b) compares
            return None
        if dtype is None and op.func.overloadpacket in _COUNTING and not tensor.is_floating_point():
            dtype = torch.int64
        dtype = dtype or tensor.dtype
        accumulated = 8 if dtype in (torch.float64, torch.int64) else 4
        partial_bytes = {None: accumulated, _WELFORD: 4 * accumulated, _WITH_INDEX: 16, _AS_INPUT: tensor.element_size(),
                         _BOOLEAN: 1}[partial]  # fmt: skip
        if partial is _WITH_INDEX and dims is None and op.func.overloadpacket in (_aten.max, _aten.min):
            partial_bytes = tensor.element_size()  # nobody asks where it is
        dims = [dims] if isinstance(dims, int) else dims
        chosen = {d % max(1, tensor.dim()) for d in dims} if dims else set(range(tensor.dim()))
        reduced = tuple(d in chosen for d in range(tensor.dim()))
        converts = dtype != tensor.dtype and not (tensor.element_size() == 2 and dtype is torch.float32)
        item_bytes = dtype.itemsize if converts else tensor.element_size()
        kind = Reduction(op.processors, item_bytes, dtype.itemsize, partial_bytes, reduced, values_per_load)
        return _launch(_of_reduction, (kind, converts), (tensor.storage_offset(), *tensor.shape, *tensor.stride()))

    return launch


def _of_reduction(kind: Reduction, converts: bool, offset: int, *layout: int) -> Needs:
    shape, strides = layout[: len(layout) // 2], layout[len(layout) // 2 :]
    copy = (kind.item_bytes * prod(shape),) if converts else ()
    return Needs(groups=_together(copy, buffers(kind, shape, strides, offset)))


def _together(first: tuple[int, ...], groups: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """What is taken with each group, and alone where there is none."""
    return tuple(first + sizes for sizes in groups) or ((first,) if first else ())


# --- losses ---


def _loss(copies: int, *, before: bool = False, inner_result: bool = False) -> Callable[[_Operator], Launch | None]:
    """A loss of elements that ends in a mean or sum of its own, which no dispatcher sees.

    Beside the result it makes so many copies of all elements; where they are not made before it, the result too is made
    for all elements, and keeps its storage when it becomes one number. The mean may have a result of its own.
    """

    def launch(op: _Operator) -> Launch | None:
        if op.given("reduction") == 0:
            return None
        dtype = torch.promote_types(op.args[0].dtype, op.args[1].dtype)
        count = prod(torch.broadcast_shapes(op.args[0].shape, op.args[1].shape))  # type: ignore[no-untyped-call]
        kind = Reduction(op.processors, dtype.itemsize, dtype.itemsize, 8 if dtype.itemsize == 8 else 4, (True,))
        result_bytes = {} if before else {0: count * dtype.itemsize}
        return _launch(_of_loss, (kind, copies, before, inner_result), (count,), result_bytes)

    return launch


def _of_loss(kind: Reduction, copies: int, before: bool, inner_result: bool, count: int) -> Needs:
    elements = (count * kind.item_bytes,) * copies
    one = (kind.item_bytes,) if inner_result else ()
    groups = _together(one, buffers(kind, (count,), (1,), 0))
    return Needs(elements, groups) if before else Needs(groups=_together(elements, groups))


# --- convolutions ---


def _convolution(*positions: int) -> Callable[[_Operator], Launch | None]:
    """Copies of those arguments that do not lie as the kernel reads them; the last two are the input and the weight.

    Source: aten/src/ATen/native/Convolution.cpp (determine_backend_memory_format), cudnn/ConvShared.cpp.
    """

    def launch(op: _Operator) -> Launch | None:
        tensors = [op.args[position] for position in positions]
        last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensors[-1].dim())
        wanted = torch.contiguous_format
        if last is not None and any(_lies_only_in(tensor, last) for tensor in tensors[-2:]):
            wanted = last
        copies = tuple(t.numel() * t.element_size() for t in tensors if not t.is_contiguous(memory_format=wanted))
        return _launch(_held, (), copies) if copies else None

    return launch


def _lies_only_in(tensor: torch.Tensor, memory_format: torch.memory_format) -> bool:
    return tensor.is_contiguous(memory_format=memory_format) and not tensor.is_contiguous()


_CONVOLUTION_ARGUMENTS = {_aten.convolution.default: slice(9), _aten.convolution_backward.default: slice(1, 10)}


def convolution_workspace(func: Any, args: Any) -> int:
    """Bytes that a convolution would like, at most: the patches of its input side by side; 0 for other operators.

    cuDNN chooses among kernels by what is free, and knows ones that need nothing: this is an upper end, no prediction.
    """
    arguments = _CONVOLUTION_ARGUMENTS.get(func)
    if arguments is None:
        return 0
    images, weight, _, stride, padding, dilation, transposed, _, groups = args[arguments]
    kernel, places = weight.shape[2:], images.shape[2:]
    if prod(kernel) == 1:
        return 0
    if transposed:  # the patches are those of its output, one for each place of its input
        channels = weight.shape[1] * groups
    else:
        dims = len(kernel)
        stride, padding, dilation = ((list(values) * dims)[:dims] for values in (stride, padding, dilation))
        channels = images.shape[1]
        places = [
            (places[d] + 2 * padding[d] - dilation[d] * (kernel[d] - 1) - 1) // stride[d] + 1 for d in range(dims)
        ]
    return int(images.shape[0] * channels * prod(kernel) * prod(places) * images.element_size())


# --- embeddings ---

_ATOMIC_AT_MOST = 3072  # indices up to which no sort is needed
_ROWS_PER_PARTIAL = 10


def _embedding_backward(op: _Operator) -> Launch | None:
    grad, indices, rows, _, by_frequency = op.args
    key_bits = max(1, (rows - 1).bit_length() + (rows & (rows - 1) == 0))
    layout = grad.is_contiguous(), grad.element_size()
    fixed = (op.processors, indices.element_size(), rows, key_bits, bool(by_frequency), *layout)
    return _launch(_of_embedding_backward, fixed, (indices.numel(), grad.shape[-1]))


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
    column, segments = count * index_bytes, min(count, rows)
    partials = count // _ROWS_PER_PARTIAL + segments
    starts = (segments * index_bytes, segments * index_bytes)
    sums = (column, 8, *starts, 8, partials * index_bytes, partials * 4 * -(-width // 32) * 32)
    sort = (column, sort_bytes(processors, count, index_bytes, index_bytes, key_bits))
    return Needs(held=(*copy, column, column), before=(sort,), groups=(sums,))


# --- attention ---


def _flash(op: _Operator) -> Launch | None:
    query, key = op.args[0], op.args[1]
    batch, heads, length, width = query.shape
    fixed = (op.processors.multiprocessors, bool(op.given("dropout_p")))
    return _launch(_of_flash, fixed, (batch, heads, length, key.shape[2], width))


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
    most = min(128, places, key_blocks)
    splits = [n for n in range(1, most + 1) if n == 1 or -(-key_blocks // n) != -(-key_blocks // (n - 1))]
    share = {n: blocks * n / places / -(-blocks * n // places) for n in splits}
    chosen = next(n for n in splits if share[n] >= 0.85 * max(share.values()))
    if chosen == 1:
        return Needs()
    rows = chosen * batch * heads * length * 4
    return Needs(groups=((rows, rows * -(-width // 32) * 32),))


def _flash_backward(op: _Operator) -> Launch | None:
    grad_out, query, out = op.args[0], op.args[1], op.args[4]
    copied = sum(not tensor.transpose(1, 2).is_contiguous() for tensor in (grad_out, out))
    return _launch(_of_flash_backward, (query.element_size(), copied), tuple(query.shape))


def _of_flash_backward(item_bytes: int, copied: int, batch: int, heads: int, length: int, width: int) -> Needs:
    """Copies that lie as the kernel reads them; the row sums, and the gradient of the query in float32.

    Source: flash_api.cpp (mha_bwd), aten/src/ATen/native/transformers/cuda/attention_backward.cu.
    """
    copies = (batch * heads * length * width * item_bytes,) * copied
    rows = batch * heads * -(-length // 128) * 128 * 4
    return Needs(held=copies, groups=((rows, rows * -(-width // 32) * 32),))


def _efficient_backward(op: _Operator) -> Launch | None:
    grad_out, query, key = op.args[:3]
    copied = not grad_out.transpose(1, 2).is_contiguous()
    fixed = (op.processors.capability, query.element_size(), query.shape[3], copied)
    return _launch(_of_efficient_backward, fixed, (*query.shape[:3], key.shape[2]))


def _of_efficient_backward(
    capability: tuple[int, int], item_bytes: int, width: int, copied: bool, batch: int, heads: int, length: int,
    keys: int,
) -> Needs:  # fmt: skip
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


# --- normalisation, softmax and log-sigmoid ---

_TALL = 64 * 1024
_PARTIAL_SUMS_AT_MOST = 2**20


def _layer_norm(op: _Operator) -> Launch | None:
    """Mean and deviation are kept in float32 whatever the input is."""
    tensor = op.args[0]
    if tensor.element_size() != 2:
        return None
    row_bytes = 4 * (tensor.numel() // max(1, prod(op.args[1])))
    return _launch(_held, (), (), {1: row_bytes, 2: row_bytes})


def _layer_norm_backward(op: _Operator) -> Launch | None:
    tensor, width = op.args[1], prod(op.args[2])
    fixed = (op.processors, tensor.element_size(), tuple(op.args[7]))
    return _launch(_of_layer_norm_backward, fixed, (tensor.numel() // max(1, width), width))


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
    partials = (partial_rows * width * item_bytes,) * sum(wanted[1:])
    return Needs(groups=_together((*partials, width * item_bytes), buffers(kind, (partial_rows, width), (width, 1), 0)))


def _softmax_backward(op: _Operator) -> Launch | None:
    """The product of gradient and output. Source: aten/src/ATen/native/cuda/SoftMax.cu."""
    grad, output = op.args[:2]
    return _launch(_afterwards, (), (grad.numel() * torch.promote_types(grad.dtype, output.dtype).itemsize,))


def _afterwards(*nbytes: int) -> Needs:
    return Needs(groups=(nbytes,))


def _log_sigmoid(op: _Operator) -> Launch | None:
    """What a CPU keeps for backward, CUDA computes again."""
    return _launch(_held, (), (), {1: 0})


# --- sorts ---

# Keys that a block sorts at once: for a key and a value of 8 bytes each.
_TILES = {(7, 0): 3840, (7, 5): 2816, (8, 0): 3840, (8, 6): 3840, (9, 0): 4608}
_SORTED_AT_ONCE = 4096  # by one block


def sort_bytes(processors: Processors, count: int, key_bytes: int, value_bytes: int, key_bits: int) -> int:
    """What cub's radix sort of pairs takes: both once more, a histogram for each 8 bits, and a state for each tile.

    Source: cub/device/dispatch/dispatch_radix_sort.cuh; tiles fitted to what torch 2.14 asks of the allocator.
    """
    tile = _TILES[max((known for known in _TILES if known <= processors.capability), default=(7, 0))]
    passes = -(-key_bits // 8)
    sizes = (count * key_bytes, count * value_bytes, -(-count // tile) * 1024, passes * 2048, 256)
    return sum(-(-size // 256) * 256 for size in sizes) + 255


def _sort(op: _Operator) -> Launch | None:
    tensor, dim = op.args[0], op.given("dim")
    if tensor.dim() == 0:
        return None
    along_rows = tensor.stride(dim) == 1 and tensor.is_contiguous()
    return _launch(_of_sort, (tensor.element_size(), along_rows), (tensor.numel(), tensor.shape[dim]))


def _of_sort(item_bytes: int, along_rows: bool, count: int, length: int) -> Needs:
    """Source: aten/src/ATen/native/cuda/Sort.cpp, SortStable.cu, cub's segmented radix sort."""
    if length <= _SORTED_AT_ONCE:
        return Needs()
    keys, indices = count * item_bytes, count * 8
    copies = () if along_rows else (keys, keys, indices)
    return Needs(groups=((*copies, indices, keys + indices + 255),))


def _index_put(op: _Operator) -> Launch | None:
    """Where values are added up, places are sorted first. Source: aten/src/ATen/native/cuda/Indexing.cu."""
    if not op.given("accumulate"):
        return None
    shapes = [index.shape for index in op.args[1] if index is not None]
    count = prod(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    return _launch(_of_index_put, (op.processors, max(1, op.args[0].numel().bit_length())), (count,))


def _of_index_put(processors: Processors, key_bits: int, count: int) -> Needs:
    return Needs(groups=((8 * count,) * 4 + (sort_bytes(processors, count, 8, 8, key_bits),),))


_COUNTING = {_aten.sum, _aten.nansum, _aten.prod}
_RULES: dict[Any, Callable[[_Operator], Launch | None]] = {
    **dict.fromkeys((_aten.sum, _aten.nansum, _aten.mean, _aten.linalg_vector_norm, _aten.norm), _reduction()),
    **dict.fromkeys((_aten.var, _aten.std, _aten.var_mean, _aten.std_mean), _reduction(_WELFORD, values_per_load=2)),
    **dict.fromkeys((_aten.amax, _aten.amin), _reduction(_AS_INPUT)),
    **dict.fromkeys((_aten.any, _aten.all), _reduction(_BOOLEAN)),
    **dict.fromkeys((_aten.max, _aten.min, _aten.argmax, _aten.argmin), _reduction(_WITH_INDEX)),
    **dict.fromkeys((_aten.mse_loss, _aten.smooth_l1_loss), _loss(1)),
    **dict.fromkeys((_aten.binary_cross_entropy, _aten.soft_margin_loss), _loss(0, inner_result=True)),
    _aten.huber_loss: _loss(1, before=True),
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
    **dict.fromkeys((_aten.index_put, _aten.index_put_, _aten._index_put_impl_), _index_put),
}
