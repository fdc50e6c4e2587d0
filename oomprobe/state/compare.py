"""Bitwise comparison of tensors, containers and objects."""

from __future__ import annotations

import types
from collections import deque
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_ATOMS = (type, types.FunctionType, types.BuiltinFunctionType, torch.dtype, torch.layout, torch.memory_format)
_default_eq: Any = object.__eq__  # inherited by classes that define no comparison


def same(one: Any, other: Any) -> bool:
    """Return whether two values are equal, including what is inside containers, tensors and objects, NaN bits too.

    Values that cannot be compared (a lock, a file, a generator) count as equal.

    Examples:
        >>> same({"a": (1, np.zeros(2))}, {"a": (1, np.zeros(2))}), same([1], [2])
        (True, False)
    """
    try:
        return _same(one, other)
    except RecursionError:  # a container that contains itself
        return True


def _same(one: Any, other: Any) -> bool:
    kind: Any = type(one)
    if one is other:
        return True
    if kind is not type(other) or isinstance(one, _ATOMS):  # atoms are equal only if identical
        return False
    if isinstance(one, torch.Tensor):
        return same_tensors(one, other)
    if isinstance(one, float | complex | np.generic | np.ndarray):
        mine, theirs = np.asarray(one), np.asarray(other)
        if mine.dtype.hasobject:  # the bytes are addresses
            return _same(mine.tolist(), theirs.tolist())
        return (mine.dtype, mine.shape, mine.tobytes()) == (theirs.dtype, theirs.shape, theirs.tobytes())
    if isinstance(one, set | frozenset):
        return bool(one == other)
    if isinstance(one, dict) and one.keys() == other.keys():
        return all(_same(one[key], other[key]) for key in one)
    if isinstance(one, dict):
        return _same([*one.items()], [*other.items()])
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(_same(a, b) for a, b in zip(one, other, strict=True))
    try:
        if one == other:
            return True
        is_comparable = kind.__eq__ is not _default_eq
    except Exception:  # the comparison returns no truth value
        is_comparable = False
    return _same(vars(one), vars(other)) if hasattr(one, "__dict__") else not is_comparable


def same_tensors(one: Any, other: Any) -> bool:
    """Return whether two tensors have the same dtype, shape, layout and bits."""
    if (one.dtype, one.shape, one.layout) != (other.dtype, other.shape, other.layout):
        return False
    if one.device.type == "meta" or other.device.type == "meta":
        return bool(one.device == other.device)
    if is_traceable_wrapper_subclass(one):
        others = inner_tensors(other)
        return all(same_tensors(part, others[name]) for name, part in inner_tensors(one).items())
    return torch.equal(_bits(one), _bits(other))


def inner_tensors(wrapper: Any) -> dict[str, torch.Tensor]:
    """Return the tensors inside a tensor subclass, by its names for them; a DTensor also names its mesh."""
    named = {name: getattr(wrapper, name) for name in wrapper.__tensor_flatten__()[0]}
    return {name: part for name, part in named.items() if isinstance(part, torch.Tensor)}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.cpu().contiguous().reshape(-1).view(torch.uint8)
