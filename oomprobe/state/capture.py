"""Which objects with state a step can reach: what it closes over, names, or is bound to."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator

import torch

MAX_DEPTH = 6  # a trainer that holds a strategy that holds an optimizer is at depth 3
MAX_OBJECTS = 20_000  # a walk that meets more has wandered into a data set
MAX_CONTAINER = 1_000  # parameter lists and registries are shorter; data sets are not


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
        yield from _of_container([*value.keys(), *value.values()])
    elif isinstance(value, list | tuple | set | frozenset):
        yield from _of_container(value)
    elif isinstance(value, torch.nn.Module):
        yield from _of_module(value)
    elif not isinstance(value, type | types.ModuleType | torch.Tensor):
        yield from _attributes(value)


def _of_function(function: types.FunctionType) -> Iterator[object]:
    if function.__module__.split(".")[0] == "torch":
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
            yield from (vars(value)[n] for n in names & vars(value).keys() if has_state(vars(value)[n]))
        else:
            yield value


def _names(code: types.CodeType) -> set[str]:
    """Global and attribute names of a function and of the functions inside it."""
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*(_names(c) for c in inner))


def _of_container(values: Iterable[object]) -> Iterator[object]:
    items = list(values)
    if len(items) <= MAX_CONTAINER:
        yield from items


def _of_module(module: torch.nn.Module) -> Iterator[object]:
    """Attributes that are not modules, parameters or buffers: a wrapper may keep its optimizer there."""
    for submodule in module.modules():
        yield from (v for k, v in vars(submodule).items() if not k.startswith("_") and _may_lead_to_state(v))


def _may_lead_to_state(value: object) -> bool:
    return has_state(value) or isinstance(value, list | tuple | dict)


def _attributes(value: object) -> Iterator[object]:
    if type(value).__module__ in {"builtins", "numpy"} or not hasattr(value, "__dict__"):
        yield from (getattr(value, n) for n in _slots(value) if hasattr(value, n))
        return
    yield from list(vars(value).values())


def _slots(value: object) -> list[str]:
    slots = getattr(type(value), "__slots__", ())
    return [slots] if isinstance(slots, str) else list(slots)
