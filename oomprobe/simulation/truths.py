"""Answers to questions about tensors without data, as if every element were 1: the value a loss reads, too.

A step that asks `torch.isfinite(loss)` or `loss < best` is to go the way that training goes. So comparisons are answered
from what `.item()` would give, and the answer goes along with the tensor of the answer until it is read.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from typing import Any

import torch

Truths = weakref.WeakKeyDictionary[torch.UntypedStorage, bool]

_CONSTANT = {"isfinite": True, "isclose": True, "isnan": False, "isinf": False, "isposinf": False, "isneginf": False}
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "gt": operator.gt, "ge": operator.ge, "lt": operator.lt, "le": operator.le, "eq": operator.eq, "ne": operator.ne,
}  # fmt: skip
_LOGIC: dict[str, Callable[[Any, Any], bool]] = {
    "logical_and": lambda a, b: bool(a) and bool(b),
    "bitwise_and": lambda a, b: bool(a) and bool(b),
    "__and__": lambda a, b: bool(a) and bool(b),
    "mul": lambda a, b: bool(a) and bool(b),
    "logical_or": lambda a, b: bool(a) or bool(b),
    "bitwise_or": lambda a, b: bool(a) or bool(b),
    "__or__": lambda a, b: bool(a) or bool(b),
    "logical_xor": lambda a, b: bool(a) != bool(b),
}
_SAME = {
    "any",
    "all",
    "clone",
    "_to_copy",
    "detach",
    "squeeze",
    "unsqueeze",
    "view",
    "reshape",
    "expand",
    "select",
    "amax",
}
_NOT = {"logical_not", "bitwise_not"}


def follow(truths: Truths, func: Any, args: Any, result: Any) -> None:
    """Note what the result of an operator is true or false, where that follows from its arguments."""
    if not isinstance(result, torch.Tensor) or result.dtype is not torch.bool:
        return
    truth = _truth(truths, func.overloadpacket.__name__, args)
    if truth is not None:
        truths[result.untyped_storage()] = truth


def _truth(truths: Truths, name: str, args: Any) -> bool | None:
    if name in _CONSTANT:
        return _CONSTANT[name]
    values = [_value(truths, arg) for arg in args[:2]]
    if None in values or not values:
        return None
    if name in _SAME:
        return bool(values[0])
    if name in _NOT:
        return not values[0]
    both = _COMPARE.get(name) or _LOGIC.get(name)
    return bool(both(*values)) if both is not None and len(values) == 2 else None


def _value(truths: Truths, arg: Any) -> Any:
    """What an argument is, everywhere; None where nobody knows."""
    if not isinstance(arg, torch.Tensor):
        return arg if isinstance(arg, int | float) else 0
    if arg.dtype is torch.bool:
        return truths.get(arg.untyped_storage())
    return 1
