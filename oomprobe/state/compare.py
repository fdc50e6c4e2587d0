"""Equality of state: bit for bit where there are bits, part by part where there are parts."""

from __future__ import annotations

import io
import pickle
from collections import deque
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_PLAIN = (int, str, bytes, bytearray, type(None), type)
SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def same(one: Any, other: Any) -> bool:
    """Equality that looks into containers, arrays, tensors and objects, and takes NaN bits as they are.

    What cannot be compared (an object without comparison, attributes or pickle) is not called different.

    Example:
        >>> same({"a": (1, np.zeros(2))}, {"a": (1, np.zeros(2))}), same([1], [2])
        (True, False)
    """
    try:
        return _same(one, other, {})
    except RecursionError:
        return True


Pairs = dict[tuple[int, int], tuple[Any, Any]]


def _same(one: Any, other: Any, met: Pairs) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, float | complex | np.generic):
        return bool(one == other) or np.asarray(one).tobytes() == np.asarray(other).tobytes() or bool(one != one)
    if isinstance(one, _PLAIN):
        return bool(one == other)
    if (id(one), id(other)) in met:  # on the way already: a container inside itself
        return True
    met[id(one), id(other)] = (one, other)
    if isinstance(one, torch.Tensor):
        return same_tensors(one, other)
    return _same_parts(one, other, met)


def _same_parts(one: Any, other: Any, met: Pairs) -> bool:
    if isinstance(one, np.ndarray):
        return _same_arrays(one, other, met)
    if isinstance(one, dict):
        if one.keys() == other.keys():
            return all(_same(one[key], other[key], met) for key in one)
        return _same_items([*one.items()], [*other.items()], met)
    if isinstance(one, list | tuple | deque):
        return _same_items(one, other, met)
    if isinstance(one, set | frozenset):
        return bool(one == other) or _same_items(sorted(one - other, key=repr), sorted(other - one, key=repr), met)
    state = _state_of(one)
    if state is not None:
        return _same(state, _state_of(other), met)
    return _same_objects(one, other, met)


def _same_items(one: Any, other: Any, met: Pairs) -> bool:
    return len(one) == len(other) and all(_same(a, b, met) for a, b in zip(one, other, strict=True))


def _same_arrays(one: Any, other: Any, met: Pairs) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.dtype.hasobject:  # its bytes are addresses
        return _same(one.tolist(), other.tolist(), met)
    return bool(one.tobytes() == other.tobytes())


def _state_of(value: Any) -> Any:
    """The state of what compares by identity but can tell its state."""
    if isinstance(value, io.BytesIO | io.StringIO):
        return value.getvalue()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.BitGenerator):
        return value.state
    if isinstance(value, np.random.RandomState | torch.Generator):
        return value.get_state()
    return None


def _same_objects(one: Any, other: Any, met: Pairs) -> bool:
    try:
        if one == other:
            return True
    except Exception:  # an object whose comparison is not a truth value
        pass
    if getattr(one, "__dict__", None) or getattr(other, "__dict__", None):
        return _same(vars(one), vars(other), met)
    try:
        return pickle.dumps(one) == pickle.dumps(other)
    except Exception:  # a lock, a file, a handle: nothing that can be compared
        return True


def same_tensors(one: Any, other: Any) -> bool:
    """Whether two tensors have the same kind, shape and bits."""
    if (one.dtype, one.shape, one.layout) != (other.dtype, other.shape, other.layout):
        return False
    if one.device.type == "meta" or other.device.type == "meta":
        return bool(one.device == other.device)
    mine, theirs = _plain(one), _plain(other)
    return len(mine) == len(theirs) and all(
        a.shape == b.shape and torch.equal(_bits(a), _bits(b)) for a, b in zip(mine, theirs, strict=True)
    )


def _plain(tensor: Any) -> list[torch.Tensor]:
    """The strided tensors that a tensor is made of."""
    tensor = tensor.detach()
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return [plain for name in names for plain in _plain(getattr(tensor, name))]
    if tensor.is_quantized:
        return [tensor.int_repr(), *_scales(tensor)]
    if tensor.layout is torch.strided:
        return [tensor]
    if tensor.layout not in SPARSE_PARTS:
        return [tensor.to_dense()]
    return [getattr(tensor, name)() for name in SPARSE_PARTS[tensor.layout]]


def _scales(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return [torch.tensor([tensor.q_scale(), tensor.q_zero_point()], dtype=torch.float64)]
    return [tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.cpu().contiguous().reshape(-1).view(torch.uint8)
