"""Bitwise comparison of tensors, containers and objects."""

from __future__ import annotations

import types
from collections import deque
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_ATOMS = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    torch.dtype,
    torch.layout,
    torch.memory_format,
)
_default_eq: Any = object.__eq__  # inherited by classes that define no comparison


def same(first: Any, second: Any) -> bool:
    """Return whether two values are equal, including what is inside containers, tensors and objects, NaN bits too.

    Values that cannot be compared (a lock, a file, a generator) count as equal.

    Examples:
        >>> same({"a": (1, np.zeros(2))}, {"a": (1, np.zeros(2))}), same([1], [2])
        (True, False)
        >>> same({float("nan"): 1}, {float("nan"): 1})
        True
    """
    with suppress(RecursionError):  # of a container that contains itself
        return _are_same(first, second)
    return True


def _are_same(first: Any, second: Any) -> bool:
    if first is second:
        return True
    # Atoms are equal only if identical.
    if type(first) is not type(second) or isinstance(first, _ATOMS):
        return False
    if isinstance(first, torch.Tensor):
        return same_tensors(first, second)
    if isinstance(first, float | complex | np.generic | np.ndarray):
        first, second = np.asarray(first), np.asarray(second)
        if first.dtype.hasobject:  # the bytes are addresses
            return _are_same(first.tolist(), second.tolist())
        return (first.dtype, first.shape, first.tobytes()) == (
            second.dtype,
            second.shape,
            second.tobytes(),
        )
    if isinstance(first, set | frozenset):
        return bool(first == second)
    if isinstance(first, dict):
        if first.keys() == second.keys():
            return all(_are_same(value, second[key]) for key, value in first.items())
        return _are_same(
            [*first.items()], [*second.items()]
        )  # equal keys may not be found: NaN, tensors
    if isinstance(first, list | tuple | deque):
        return len(first) == len(second) and all(
            _are_same(a, b) for a, b in zip(first, second, strict=True)
        )
    return _same_objects(first, second)


def _same_objects(first: Any, second: Any) -> bool:
    try:
        if first == second:
            return True
        is_comparable = type(first).__eq__ is not _default_eq
    except Exception:  # the comparison returns no truth value
        is_comparable = False
    if hasattr(first, "__dict__"):
        return _are_same(vars(first), vars(second))
    return not is_comparable


def same_tensors(first: Any, second: Any) -> bool:
    """Return whether two tensors have the same dtype, shape, layout and bits."""
    if (first.dtype, first.shape, first.layout) != (second.dtype, second.shape, second.layout):
        return False
    if "meta" in (first.device.type, second.device.type):
        return bool(first.device == second.device)
    if is_traceable_wrapper_subclass(first):
        parts = inner_tensors(second)
        return all(same_tensors(part, parts[name]) for name, part in inner_tensors(first).items())
    return torch.equal(_bits_in(first), _bits_in(second))


def inner_tensors(wrapper: Any) -> dict[str, torch.Tensor]:
    """Return the tensors inside a tensor subclass, by its names for them; a DTensor also names its mesh."""
    named = {name: getattr(wrapper, name) for name in wrapper.__tensor_flatten__()[0]}
    return {name: part for name, part in named.items() if isinstance(part, torch.Tensor)}


def _bits_in(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.cpu().contiguous().reshape(-1).view(torch.uint8)
