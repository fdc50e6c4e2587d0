"""Which objects with state a step can reach: what it closes over, names, or is bound to."""

from __future__ import annotations

import functools
import sysconfig
import types
from collections import deque
from collections.abc import Iterable, Iterator

import torch

MAX_DEPTH = 6  # a trainer that holds a strategy that holds an optimizer is at depth 3
MAX_OBJECTS = 20_000  # a walk that meets more has wandered into a data set
MAX_CONTAINER = 1_000  # parameter lists are shorter; data sets are not
MAX_REGISTRY = 20_000  # entries of a longer container that are looked at for state of their own

_STANDARD = sysconfig.get_paths()["stdlib"]
_MODULE_NAMES = frozenset(vars(torch.nn.Module()))  # its registers and hooks


def has_state(value: object) -> bool:
    """Whether an object (not a class) has ``state_dict()`` and ``load_state_dict()``."""
    return not isinstance(value, type) and all(
        callable(getattr(type(value), name, None)) for name in ("state_dict", "load_state_dict")
    )


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
    queue = [(root, 0) for root in roots]
    while queue and len(seen) < MAX_OBJECTS:
        value, depth = queue.pop(0)
        if id(value) in seen:
            continue
        seen.add(id(value))
        if has_state(value) or _is_learnable(value):
            found.append(value)
        if depth < MAX_DEPTH:
            queue.extend((child, depth + 1) for child in _children(value))
    return found


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
        yield from _of_container(value.keys())
        yield from _of_container(value.values())
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from _of_container(value)
    elif isinstance(value, torch.nn.Module):
        yield from _of_module(value)
    elif not isinstance(value, type | types.ModuleType | torch.Tensor):
        yield from _attributes(value)


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
    names = _names(function.__code__)
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        if isinstance(value, types.ModuleType):
            yield from _of_named_module(value, names)
        else:
            yield value


def _of_named_module(module: types.ModuleType, names: set[str]) -> Iterator[object]:
    """What a function may use as ``module.name``: of the user's own modules everything, of libraries what has state."""
    own = _is_own(module)
    for name in names & vars(module).keys():
        value = vars(module)[name]
        if has_state(value) or (own and not isinstance(value, type | types.ModuleType)):
            yield value


def _is_own(module: types.ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and not any(part in file for part in ("site-packages", "dist-packages", _STANDARD))


def _names(code: types.CodeType) -> set[str]:
    """Global and attribute names of a function and of the functions inside it."""
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*(_names(c) for c in inner))


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
    """Attributes that are not modules, parameters or buffers: a wrapper may keep its optimizer there."""
    for submodule in module.modules():
        own = not type(submodule).__module__.startswith("torch.")
        for name, value in list(vars(submodule).items()):
            if name not in _MODULE_NAMES and (own or not name.startswith("_")) and _may_lead_to_state(value):
                yield value


def _may_lead_to_state(value: object) -> bool:
    if has_state(value) or isinstance(value, list | tuple | dict | deque):
        return True
    return bool(getattr(value, "__dict__", None)) and not isinstance(value, type | types.ModuleType | torch.Tensor)


def _attributes(value: object) -> Iterator[object]:
    if type(value).__module__ in {"builtins", "numpy"}:
        return
    yield from (getattr(value, name) for name in _slots(value) if hasattr(value, name))
    yield from list(getattr(value, "__dict__", {}).values())


def _slots(value: object) -> list[str]:
    """Of its class and of all classes above."""
    slots = [vars(kind).get("__slots__", ()) for kind in type(value).__mro__]
    names = [name for one in slots for name in ([one] if isinstance(one, str) else one)]
    return [name for name in names if name not in ("__dict__", "__weakref__")]
