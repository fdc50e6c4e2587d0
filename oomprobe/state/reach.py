"""Search for the stateful objects that a step can reach through closures, names and attributes."""

from __future__ import annotations

import functools
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch

MAX_DEPTH = 6  # an optimizer in a strategy in a trainer is at depth 3
MAX_OBJECTS = 20_000  # a search that visits more has entered a data set
MAX_CONTAINER = 1_000  # parameter lists are shorter; data sets are longer

LIBRARIES = frozenset({"torch", "oomprobe", *sys.stdlib_module_names})
_INSTALLED = ("site-packages", "dist-packages")
_LEAVES = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, types.ModuleType)
_MODULE_NAMES = frozenset(vars(torch.nn.Module()))  # registries and hooks


def reachable(roots: Iterable[object]) -> list[object]:
    """Return the training state that can be reached from steps and objects, each item once, nearest first.

    Training state is objects with ``state_dict`` and leaf tensors that require gradients.

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
        if has_state(value) or is_learnable(value):
            found.append(value)
        if depth < MAX_DEPTH:
            queue.extend((child, depth + 1) for child in _children(value) if not isinstance(child, _LEAVES))
    return found


def has_state(value: object) -> bool:
    """Return whether an object (not a class) has ``state_dict()`` and ``load_state_dict()``."""
    return not isinstance(value, type) and all(
        callable(getattr(type(value), name, None)) for name in ("state_dict", "load_state_dict")
    )


def is_learnable(value: object) -> bool:
    """Return whether a value is a leaf tensor that requires a gradient."""
    return isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf


def is_users_code(module_name: object) -> bool:
    """Return whether a module is the user's: neither Python's, nor torch's, nor installed from a package.

    Example:
        >>> is_users_code("__main__"), is_users_code("torch.nn"), is_users_code("json")
        (True, False, False)
    """
    if not isinstance(module_name, str) or module_name == "__main__":
        return True
    if module_name.partition(".")[0] in LIBRARIES:
        return False
    file = getattr(sys.modules.get(module_name), "__file__", None) or ""
    return not any(part in file for part in _INSTALLED)


def module_of(value: Any) -> object:
    """Return the name of the module whose code an object is.

    For a function it is in its globals: `functools.wraps` gives a library's wrapper the ``__module__`` of what it wraps.
    """
    if isinstance(value, types.FunctionType):
        return value.__globals__.get("__name__")
    return getattr(value if isinstance(value, type) else type(value), "__module__", None)


def _children(value: object) -> Iterator[object]:
    if isinstance(value, types.FunctionType):
        yield from _children_of_function(value)
    elif isinstance(value, types.MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, dict | list | tuple | set | frozenset | deque):
        if len(value) <= MAX_CONTAINER:
            yield from dict.values(value) if isinstance(value, dict) else value
    elif isinstance(value, torch.nn.Module):
        for module in value.modules():
            yield from _children_of_module(module)
    elif isinstance(value, type):
        for base in value.__mro__:
            if is_users_code(base.__module__):
                for member in list(vars(base).values()):
                    yield getattr(member, "fget", getattr(member, "__func__", member))
    elif not isinstance(value, torch.Tensor) and type(value).__module__ not in {"builtins", "numpy"}:
        if is_users_code(type(value).__module__):
            yield type(value)
        yield from list(getattr(value, "__dict__", {}).values())


def _children_of_module(module: torch.nn.Module) -> Iterator[object]:
    """Yield attributes other than modules, parameters and buffers, because a wrapper may keep its optimizer there."""
    is_torchs = type(module).__module__.startswith("torch.")
    if not is_torchs and is_users_code(type(module).__module__):
        yield type(module)
    for name, value in list(vars(module).items()):
        if name not in _MODULE_NAMES and not (is_torchs and name.startswith("_")):
            yield value


def _children_of_function(function: types.FunctionType) -> Iterator[object]:
    if str(module_of(function)).partition(".")[0] == "torch":
        yield from (one for one in vars(function).values() if isinstance(one, types.FunctionType))  # that it wraps
        return
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # the cell is still empty
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    names = code_names(function.__code__)
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        if not isinstance(value, types.ModuleType):
            yield value
        elif is_users_code(value.__name__):
            yield from (vars(value)[part] for part in names & vars(value).keys())


def code_names(code: types.CodeType) -> set[str]:
    """Return the global and attribute names that a function and its inner functions use."""
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*(code_names(c) for c in inner))
