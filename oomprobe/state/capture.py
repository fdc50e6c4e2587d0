"""Which objects with state a step can reach: what it closes over, names, or is bound to."""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterable, Iterator

import torch

from oomprobe.state.attributes import attributes_of
from oomprobe.state.containers import entries
from oomprobe.state.hooks import MODULE_HOOKS, TENSOR_HOOKS
from oomprobe.state.own import has_state, is_own, members, named_by

MAX_DEPTH = 6  # a trainer that holds a strategy that holds an optimizer is at depth 3
MAX_OBJECTS = 20_000  # a walk that meets more has wandered into a data set
MAX_CONTAINER = 1_000  # parameter lists are shorter; data sets are not
MAX_REGISTRY = 20_000  # entries of a longer container that are looked at for state of their own

_CODE = (types.FunctionType, types.MethodType, functools.partial)
_MODULE_NAMES = frozenset(vars(torch.nn.Module()))  # its registers and hooks


def reachable(roots: Iterable[object]) -> list[object]:
    """Walk from steps and objects to everything that holds training state.

    Args:
        roots: Steps (functions, bound methods, partials, callable objects), models, optimizers.

    Returns:
        Objects with ``state_dict`` and leaf tensors that require gradients, each once, nearest first.

    Example:
        >>> model = torch.nn.Linear(2, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> def step(model, batch_size):
        ...     optimizer.step()
        >>> [type(o).__name__ for o in reachable([step])]
        ['SGD', 'Parameter', 'Parameter']
    """
    found: list[object] = []
    seen: set[int] = set()
    queue = deque((root, 0) for root in roots)
    while queue and len(seen) < MAX_OBJECTS:
        value, depth = queue.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if has_state(value) or _is_learnable(value):
            found.append(value)
        if depth < MAX_DEPTH:
            queue.extend((child, depth + _distance(child)) for child in _children(value))
    return found


def _distance(child: object) -> int:
    """A class is part of its objects."""
    return 0 if isinstance(child, type) else 1


def _is_learnable(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf


def _children(value: object) -> Iterator[object]:
    if isinstance(value, types.FunctionType):
        yield from _of_function(value)
    elif isinstance(value, types.MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, dict):
        yield from _of_container(dict.keys(value))
        yield from _of_container(dict.values(value))
    elif isinstance(value, list | tuple):
        yield from _of_container(entries(value).values() if len(value) <= MAX_REGISTRY else ())
    elif isinstance(value, set | frozenset | deque):
        yield from _of_container(value)
    elif isinstance(value, torch.nn.Module):
        yield from _of_module(value)
    elif isinstance(value, type):
        yield from members(value)
    elif isinstance(value, torch.Tensor):
        yield from _of_hooks(value)
    elif not isinstance(value, types.ModuleType):
        yield from _of_object(value)


def _of_function(function: types.FunctionType) -> Iterator[object]:
    if (function.__module__ or "").split(".")[0] == "torch":
        return
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a cell that is not filled yet
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    if "__wrapped__" in function.__dict__:
        yield function.__dict__["__wrapped__"]
    yield from named_by(function)


def _of_container(values: Iterable[object]) -> Iterator[object]:
    items = list(values)
    if len(items) <= MAX_CONTAINER:
        yield from items
    elif len(items) <= MAX_REGISTRY:
        yield from (item for item in items if _may_hold_state(item))


def _may_hold_state(value: object) -> bool:
    """Whether it has state, or is an object of the user's that holds one directly."""
    return has_state(value) or any(has_state(part) for part in getattr(value, "__dict__", {}).values())


def _of_module(module: torch.nn.Module) -> Iterator[object]:
    """Classes, hooks, and attributes that are not modules, parameters or buffers: a wrapper may keep its optimizer there."""
    for submodule in module.modules():
        own = not type(submodule).__module__.startswith("torch.")
        if own and is_own(type(submodule).__module__):
            yield type(submodule)
        yield from _of_hooks(submodule)
        for name, value in list(vars(submodule).items()):
            if name not in _MODULE_NAMES and (own or not name.startswith("_")) and _may_lead_to_state(value):
                yield value
        for parameter in submodule.parameters(recurse=False):
            yield from _of_hooks(parameter)


def _of_hooks(holder: torch.nn.Module | torch.Tensor) -> Iterator[object]:
    of_module = isinstance(holder, torch.nn.Module)
    for name in MODULE_HOOKS if of_module else TENSOR_HOOKS if holder.is_leaf else ():
        hooks = getattr(holder, name, None)
        if hooks and isinstance(hooks, dict):
            yield from list(hooks.values())


def _may_lead_to_state(value: object) -> bool:
    if has_state(value) or isinstance(value, (list, tuple, dict, deque, *_CODE)):
        return True
    return bool(getattr(value, "__dict__", None)) and not isinstance(value, type | types.ModuleType | torch.Tensor)


def _of_object(value: object) -> Iterator[object]:
    if type(value).__module__ in {"builtins", "numpy"}:
        return
    if is_own(type(value).__module__):
        yield type(value)
    yield from attributes_of(value).values()
