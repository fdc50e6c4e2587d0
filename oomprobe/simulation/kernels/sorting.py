"""Kernels that sort: indices whose values are added, rows, the largest of them, permutations; and scans."""

from __future__ import annotations

from math import ceil, log, log2, prod

import torch

from oomprobe.ground.units import known
from oomprobe.simulation.kernels.steps import (
    FLOAT_BYTES,
    INT64_BYTES,
    Launch,
    Operator,
    afterwards,
    copied,
    given_back,
    launch,
    scratch,
    throughout,
)
from oomprobe.tape.calls import RESULT, Steps, in_turn
from oomprobe.tape.reductions import Processors

# --- indices that kernels sort ---

_MAX_UNSORTED_INDICES = 3072
_ROWS_PER_PARTIAL = 10
_SORTED_BY_ONE_BLOCK = 2304
_SORT_ALIGNMENT = 256
# Pairs in a tile of cub's sort on an A100, by the bytes of a key and of a value; within a third of it on other cards.
_PAIRS_PER_TILE = {(8, 8): 3840, (4, 8): 3072, (4, 4): 6272, (2, 8): 3072}


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _SORT_ALIGNMENT) * _SORT_ALIGNMENT


def _sort_bytes(count: int, key_bytes: int, value_bytes: int, bits: int) -> int:
    """Return what cub takes to sort pairs by `bits` of their keys, as measured with torch 2.14: copies, and counts for each tile."""
    if count <= _SORTED_BY_ONE_BLOCK:
        return 1
    copies = _aligned(count * key_bytes) + _aligned(count * value_bytes)
    return copies + _counts_of_tiles(
        count, _PAIRS_PER_TILE.get((key_bytes, value_bytes), 3840), bits
    )


def _counts_of_tiles(count: int, pairs_per_tile: int, bits: int) -> int:
    return -(-count // pairs_per_tile) * 1024 + -(-bits // 8) * 2048 + 511


def _scan_bytes(count: int, item_bytes: int) -> int:
    """Return what cub takes to scan or to count runs: the state of each tile, and of 32 more; within a twentieth."""
    tiles = -(-count // 1920)
    return sum(-(-(tiles + 32) * nbytes // 256) * 256 for nbytes in (8, item_bytes + 8)) - 1


def embedding_backward(op: Operator) -> Launch:
    """Sort the indices of an embedding's gradient."""
    grad, indices, rows = op.args[:3]
    fixed = (indices.element_size(), rows, grad.element_size(), _MAX_UNSORTED_INDICES)
    numbers = (indices.numel(), grad.shape[-1], *copied(indices), *copied(grad))
    return launch(_embedding_backward_steps, fixed, numbers)


def embedding_bag_backward(op: Operator) -> Launch | None:
    """Sort the indices of a bag's gradient, unless the rows are known."""
    grad, indices, rows, mode = op.args[0], op.args[1], op.args[6], op.args[8]
    if mode == 2:  # the largest, whose rows are known
        return scratch(throughout, copied(grad))
    fixed = (indices.element_size(), rows, grad.element_size(), 0)
    return launch(
        _embedding_backward_steps, fixed, (indices.numel(), grad.shape[-1], *copied(grad))
    )


def _embedding_backward_steps(
    index_bytes: int, rows: int, grad_bytes: int, unsorted: int, count: int, width: int, *copies: int
) -> Steps:  # fmt: skip
    """Indices sorted by cub, with a state for each tile; then sums of up to ten rows each, accumulated in float32.

    Source: native/cuda/Embedding.cu, EmbeddingBackwardKernel.cu; cub/device/dispatch/dispatch_radix_sort.cuh.
    """
    if count <= unsorted:
        return *copies, RESULT
    column, segments = count * index_bytes, min(count, rows)
    partials = count // _ROWS_PER_PARTIAL + segments
    sort = (column, _sort_bytes(count, index_bytes, index_bytes, _bits_of(rows)))
    steps = [*copies, column, column, *in_turn([sort]), RESULT]
    steps += (
        column,
        INT64_BYTES,
        *in_turn([(column, _scan_bytes(count, index_bytes))]),
    )  # unique rows
    steps += (segments * index_bytes,) * 2
    steps += (*in_turn([(_scan_bytes(segments, index_bytes),)]), INT64_BYTES)
    steps += (partials * index_bytes, partials * FLOAT_BYTES * width)
    return tuple(steps)


def _bits_of(count: int) -> int:
    """Return how many bits the numbers below a count have."""
    return max(1, (count - 1).bit_length())


def index(op: Operator) -> Launch | None:
    """Indices of 32 bits are converted; those that are expanded are copied. Source: native/TensorAdvancedIndexing.cpp."""
    indices = known(op.args[1])
    steps = [index.numel() * INT64_BYTES for index in indices if index.dtype is torch.int32]
    shape = torch.broadcast_shapes(*(index.shape for index in indices))  # type: ignore[no-untyped-call]
    if len(indices) > 1:
        steps += [prod(shape) * INT64_BYTES for index in indices if index.shape != shape]
    return scratch(throughout, steps)


def index_put(op: Operator) -> Launch | None:
    """A number is copied to the card, unless a mask is filled with it; values that are added need sorted indices."""
    values = op.args[2]
    is_mask = any(index is not None and index.dtype is torch.bool for index in op.args[1])
    if values.dim() == 0 and values.device.index is None and not is_mask:
        return launch(throughout, (values.element_size(),), ())
    if not op.argument("accumulate"):
        return None
    shapes, converted, rows = [], 0, 1
    for dim, index in enumerate(op.args[1]):
        if index is not None:
            shapes.append(index.shape)
            rows *= op.args[0].shape[dim]
            converted += index.dtype is torch.int32
    count = prod(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    copy = copied(op.args[2]) if op.args[2].numel() > 1 else ()
    return launch(_index_put_steps, (len(shapes), converted, rows), (count, *copy))


def _index_put_steps(indices: int, converted: int, rows: int, count: int, *copies: int) -> Steps:
    """Linear indices, and what sorts them. Source: native/cuda/Indexing.cu (index_put_with_sort_kernel)."""
    if not count:
        return (RESULT,)
    column = count * INT64_BYTES
    steps: list[int | None] = [
        RESULT,
        *(column,) * converted,
        column,
        column,
        -2,
        *(-2,) * converted,
    ]
    for _ in range(indices - 1):
        steps += (column, column, -1, -1)
    return (
        *steps,
        *copies,
        column,
        column,
        column,
        _sort_bytes(count, INT64_BYTES, INT64_BYTES, _bits_of(rows)),
    )


_COUNTED_BY_ONE_BLOCK, _WAVES = 4096, 5
_CHOSEN_PER_TILE = 4608


def nonzero(op: Operator) -> Launch:
    """Count the elements that are not 0, then take their positions. Source: native/cuda/Nonzero.cu, cub."""
    tensor = op.args[0]
    return launch(_nonzero_steps, (op.processors,), (tensor.numel(), *copied(tensor)))


def _nonzero_steps(processors: Processors, count: int, *copies: int) -> Steps:
    counting = 1
    if count > _COUNTED_BY_ONE_BLOCK:
        blocks = processors.multiprocessors * (processors.threads // 256) * _WAVES
        counting = _aligned(blocks * 4) + 255
    tiles = -(-count // _CHOSEN_PER_TILE)
    return *copies, 4, counting, -1, RESULT, _aligned((tiles + 32) * 16) + 255


# --- sorts ---

_SORTED_IN_PLACE = 4096  # numbers of a row
_SEGMENTS_SORTED_APART = 128
_BLOCKS_PER_PROCESSOR, _BLOCKS_MORE = 40, 44  # an upper limit: as if a block took no registers


def sort(op: Operator) -> Launch | None:
    """Sort rows, with their indices."""
    tensor, dim = op.args[0], op.argument("dim")
    if tensor.dim() == 0:
        return None
    fixed = (op.processors, tensor.element_size(), tensor.stride(dim) != 1)
    return launch(_sort_steps, fixed, (tensor.numel(), tensor.shape[dim]))


def _sort_steps(
    processors: Processors, item_bytes: int, has_gaps: bool, count: int, row: int
) -> Steps:
    """Short rows are sorted in place, with the numbers of one row; long ones by cub. Source: native/cuda/Sort.cu, Sort.cpp."""
    if row <= _SORTED_IN_PLACE:
        return RESULT, row * INT64_BYTES
    rows = count // row
    column = count * INT64_BYTES
    copies: tuple[int, ...] = ()
    if has_gaps:
        copies = (
            count * item_bytes,
            count * item_bytes,
            column,
        )  # of the numbers, and of both results
    by_keys = _sort_bytes(count, item_bytes, INT64_BYTES, 8 * item_bytes)
    if item_bytes == 2:  # by another algorithm, with counts for each block that the card runs
        blocks = _BLOCKS_PER_PROCESSOR * processors.multiprocessors + _BLOCKS_MORE
        by_keys = (
            _aligned(count * item_bytes) + _aligned(column) + blocks * 1024 + _SORT_ALIGNMENT - 1
        )
    if 1 < rows < _SEGMENTS_SORTED_APART and row < 1_000_000:  # all at once, and then by their rows
        by_rows = _counts_of_tiles(count, _PAIRS_PER_TILE[8, 8], _bits_of(rows))
        return RESULT, *copies, column, column, count * item_bytes, by_keys, -1, -1, by_rows
    if rows == 1 or row >= 1_000_000:
        return RESULT, *copies, column, by_keys
    return (
        RESULT,
        *copies,
        column,
        _aligned(count * item_bytes) + _aligned(column) + _SORT_ALIGNMENT - 1,
    )


_THREADS, _REGISTERS = 256, 40
_FEWEST_ITEMS, _MOST_ITEMS = 4, 64  # of a thread
# Number of rows up to which rows from some length on are divided among blocks.
_LONG_ROWS = ((20, 20_000), (40, 10_000), (80, 8000), (199, 5000), (799, 3000), (4000, 800))
_MANY_ROWS_LENGTH = 400


def topk(op: Operator) -> Launch | None:
    """Find the largest of each row, and sort them."""
    tensor = op.args[0]
    if tensor.dim() == 0:
        return None
    is_sorted = op.argument("sorted")
    numbers = (tensor.numel(), tensor.shape[op.argument("dim")], op.args[1], *copied(tensor))
    return launch(_topk_steps, (op.processors, tensor.element_size(), is_sorted), numbers)


def _topk_steps(
    processors: Processors,
    item_bytes: int,
    is_sorted: bool,
    count: int,
    row: int,
    chosen: int,
    *copy: int,
) -> Steps:
    """Find the smallest of those chosen, which are then sorted. Source: native/cuda/TensorTopK.cu, TensorTopK.cpp."""
    rows = count // row
    steps = (*copy, *_selection(processors, item_bytes, rows, row))
    if not is_sorted or chosen <= _SORTED_IN_PLACE:
        return RESULT, *steps
    results = rows * chosen
    _, *sort = _sort_steps(processors, item_bytes, False, results, chosen)
    indices = results * INT64_BYTES
    return (
        RESULT,
        *steps,
        *given_back(steps),
        indices,
        results * item_bytes,
        *sort,
        *given_back(sort),
        indices,
    )


def _selection(processors: Processors, item_bytes: int, rows: int, row: int) -> tuple[int, ...]:
    """Long rows are divided among blocks, which count digits."""
    if not _divides_rows(rows, row):
        return ()
    blocks_each = min(65_536 // (_REGISTERS * _THREADS), 32)
    items = -(-rows * row // (processors.multiprocessors * blocks_each * _THREADS))
    blocks = -(-row // (_THREADS * max(_FEWEST_ITEMS, min(items, _MOST_ITEMS))))
    counts = rows * blocks * 4
    scan = _scan_bytes(rows * blocks, INT64_BYTES)
    digits = (rows * blocks * 256 * 2, rows * 256 * 4)
    return rows * item_bytes, *(rows * 8,) * 2, *digits, counts, counts, scan, -1, scan


def _divides_rows(rows: int, row: int) -> bool:
    for most, length in _LONG_ROWS:
        if rows <= most:
            return row >= length
    return row >= _MANY_ROWS_LENGTH


def cumulative(op: Operator) -> Launch | None:
    """A vector is scanned by cub. Source: native/cuda/ScanUtils.cuh."""
    tensor, copy = op.args[0], copied(op.args[0])
    if tensor.dim() == 1:
        return launch(_vector_scanned, (tensor.element_size(),), (tensor.numel(), *copy))
    return scratch(afterwards, copy)


_MASKED_PER_TILE = 1344
_SCANNED_PER_TILE = {2: 3712, 4: 1920, 8: 1920}


def _vector_scanned(item_bytes: int, count: int, *copy: int) -> Steps:
    tiles = -(-count // _SCANNED_PER_TILE.get(item_bytes, 1920))
    state_bytes = INT64_BYTES if item_bytes <= FLOAT_BYTES else 3 * INT64_BYTES
    return RESULT, *copy, _aligned((tiles + 32) * state_bytes) + 2 * _SORT_ALIGNMENT - 1


def masked_scatter(op: Operator) -> Launch:
    """Scan the mask for where each element comes from. Source: native/cuda/IndexKernel.cpp (masked_scatter__cuda)."""
    tensor, mask = op.args[:2]
    return launch(_masked_scatter_steps, (), (tensor.numel(), *copied(mask.expand(tensor.shape))))


def _masked_scatter_steps(count: int, *copies: int) -> Steps:
    tiles = -(-count // _MASKED_PER_TILE)
    return RESULT, count * INT64_BYTES, *copies, _aligned((tiles + 32) * 3 * INT64_BYTES) + 255


def permutation(op: Operator) -> Launch | None:
    """Numbers, sorted by random keys of as many bits as make a repetition unlikely. Source: native/cuda/Randperm.cu."""
    count = op.args[0]
    return launch(_permutation_steps, (), (count,)) if count > 0 else None


def _permutation_steps(count: int) -> Steps:
    bits = min(64, ceil(log2(count - (6 * count**2 + 1) / (12 * log(0.9)))))
    key_bytes = 4 if bits <= 32 else 8
    column = count * INT64_BYTES
    keys = count * key_bytes
    return (
        RESULT,
        INT64_BYTES,
        -1,
        column,
        keys,
        keys,
        _sort_bytes(count, key_bytes, INT64_BYTES, bits),
    )
