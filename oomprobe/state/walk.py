"""The one walk over what steps, models and other objects hold: closures, names, attributes, containers and modules.

The user's own code is walked into wherever it leads, with a path for each value. Objects of libraries are only passed through,
a few deep, in search of training state: modules, optimizers and other objects with ``state_dict``, and leaf tensors that require
gradients.
"""

from __future__ import annotations

import argparse
import collections
import enum
import functools
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from oomprobe.state import contents
from oomprobe.state.contents import PLAIN, Values, When
from oomprobe.state.references import REGISTRIES, Reference, hooks_of, keyed, slots_of, weak

MAX_DEPTH = 6  # in libraries: an optimizer in a strategy in a trainer is at depth 3
MAX_OBJECTS = 20_000  # a walk that visits more has entered a data set
MAX_CONTAINER = 1_000  # lists of parameters are shorter; data sets are longer

LIBRARIES = frozenset({"torch", "oomprobe", *sys.stdlib_module_names})
_NAMESPACES = (
    types.SimpleNamespace,
    argparse.Namespace,
    collections.UserDict,
    collections.UserList,
)
_AROUND_CODE = (partial, property, staticmethod, classmethod, functools.cached_property)
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
# Schedulers and scalers refuse to run past their end, or after a failed step.
_COLD = ("torch.optim.", "torch.amp.")
_CONTAINERS = (dict, list, set, deque)
_DATA = (
    *_CONTAINERS,
    *_NAMESPACES,
    tuple,
    frozenset,
    torch.Tensor,
    np.ndarray,
    *_GENERATORS,
    types.FunctionType,
)
# What owners of data have under any name, and under these.
_FOLLOWED = (torch.utils.data.Dataset, torch.utils.data.DataLoader, torch.utils.data.Sampler)
_FOLLOWED_NAMES = (
    "dataset",
    "datasets",
    "transform",
    "transforms",
    "sampler",
    "batch_sampler",
    "collate_fn",
)
_SKIPPED = (*weakref.ProxyTypes, *PLAIN)
PARALLEL = ("torch.distributed.", "torch.nn.parallel.")


class Kind(enum.Enum):
    """What a value is to a probe."""

    TENSOR = enum.auto()
    ARRAY = enum.auto()
    GENERATOR = enum.auto()  # of random numbers
    MODULE = enum.auto()
    STATEFUL = enum.auto()  # has state_dict() and load_state_dict(), like every optimizer
    CODE = enum.auto()  # a function, method or class of the user's
    # An object of the user's, or a container: all that matters is what it holds.
    HOLDER = enum.auto()
    # An object of a library that the user's code holds, which is not walked into.
    LIBRARY = enum.auto()


class Met(NamedTuple):
    """A value that the walk has met, its path, such as ``"trainer.it"``, and what it holds."""

    value: Any
    path: str
    kind: Kind
    values: tuple[Values, ...] = ()
    trains: bool = False  # whether the model or an optimizer holds it


class _Node(NamedTuple):
    value: Any
    path: str
    depth: int = 0  # in libraries
    when: When = When.EACH_TRIAL  # for a container: like the values among which it is
    trains: bool = False


def visit(
    roots: Iterable[tuple[object, str]],
    owners: Iterable[object] = (),
    *,
    without: Iterable[object] = (),
) -> Iterator[Met]:
    """Yield what can be reached from `roots`, pairs of a value and its path: each once, the user's own first, nearest first.

    `owners` are objects of libraries that are walked into like the user's own, `without` objects to
    leave out.

    Examples:
        >>> __name__ = "__main__"  # the user's script
        >>> optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
        >>> def step(model, batch_size):
        ...     optimizer.step()
        >>> [type(one.value).__name__ for one in visit([(step, "")]) if is_training_state(one)]
        ['SGD', 'Parameter', 'Parameter']
    """
    return _Walk(list(roots), list(owners), without).seen()


def is_training_state(seen: Met) -> bool:
    """Return whether a value is a module, an object with ``state_dict``, or a leaf tensor that requires a gradient."""
    if seen.kind is Kind.TENSOR:
        return is_learnable(seen.value)
    return seen.kind in (Kind.MODULE, Kind.STATEFUL)


def has_state(value: object) -> bool:
    """Return whether an object (not a class) has ``state_dict()`` and ``load_state_dict()``."""
    kind = type(value)
    return callable(getattr(kind, "state_dict", None)) and callable(
        getattr(kind, "load_state_dict", None)
    )


def is_learnable(value: object) -> bool:
    """Return whether a value is a leaf tensor that requires a gradient."""
    return isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf


def has_data(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has values to copy: neither a lazy one, nor a meta tensor, nor one of a simulated card has."""
    if is_lazy(tensor) or tensor.device.type == "meta":
        return False
    return not type(tensor).__module__.startswith("torch._subclasses.")


def is_users_code(module_name: object) -> bool:
    """Return whether a module is the user's: neither Python's, nor torch's, nor installed from a package.

    Examples:
        >>> is_users_code("__main__"), is_users_code("torch.nn"), is_users_code("json")
        (True, False, False)
    """
    if not isinstance(module_name, str) or module_name == "__main__":
        return True
    if module_name.partition(".")[0] in LIBRARIES:
        return False
    file = str(getattr(sys.modules.get(module_name), "__file__", ""))
    return "site-packages" not in file and "dist-packages" not in file


def module_of(value: Any) -> object:
    """Return the name of the module whose code an object is.

    For a function it is in its globals: `functools.wraps` gives a library's wrapper the ``__module__`` of what it wraps.
    """
    if isinstance(value, types.FunctionType):
        return value.__globals__.get("__name__")
    kind = value if isinstance(value, type) else type(value)
    return getattr(kind, "__module__", None)


def package_of(value: Any) -> str:
    """Return the top-level package whose code an object is."""
    return str(module_of(value)).partition(".")[0]


def code_names(code: types.CodeType) -> set[str]:
    """Return the global and attribute names that a function and its inner functions use."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= code_names(constant)
    return names


_Seen = tuple[Kind, Iterable[Values]]  # what a value is, and what it holds


class _Walk:
    """One walk; its methods say what each kind of value holds."""

    def __init__(
        self, roots: list[tuple[object, str]], owners: list[object], without: Iterable[object]
    ) -> None:
        self._owners = set(map(id, owners))
        # Objects of these packages are walked into too, but not what they share with others:
        # variables and classes.
        self._packages = set[str]()
        # Kept alive, so that no other object gets their ids.
        self._met: dict[int, Any] = {id(value): value for value in without}
        self._queue = deque[_Node]()
        self._passed = deque[_Node]()  # held by objects of libraries
        for root, path in roots:
            code = getattr(root, "__func__", getattr(root, "func", root))
            self._packages.add(str(getattr(code, "__module__", None)).partition(".")[0])
            self._queue.append(_Node(root, path, trains=isinstance(root, torch.Tensor)))
        self._packages -= LIBRARIES
        for owner in owners:
            self._queue.append(_Node(owner, type(owner).__name__))

    def seen(self) -> Iterator[Met]:
        visited = 0
        while queue := self._queue or self._passed:
            node = queue.popleft()
            value = node.value
            if id(value) in self._met or isinstance(value, _SKIPPED):
                continue
            # Training state is never left out, however much else there is.
            is_state = isinstance(value, torch.Tensor) or has_state(value)
            if not is_state:
                if visited >= MAX_OBJECTS:
                    continue
                visited += 1
            self._met[id(value)] = value
            if node.depth and not is_state:
                if node.depth <= MAX_DEPTH:
                    self._pass(_parts(value), node.path, node.depth + 1)
                continue
            seen = self._of(node)
            # What a library computes with is its own affair, what it trains is not.
            is_librarys = node.depth and seen.kind is Kind.TENSOR
            if not is_librarys or is_learnable(value):
                yield seen
            for values in seen.values:
                self._descend(values)

    def _descend(self, values: Values) -> None:
        """Queue what is held; of an object of a library only data and functions, since the rest is its own affair."""
        holder, parts = values.holder, values.read()
        is_container = isinstance(holder, (*_CONTAINERS, tuple))
        if is_container and len(parts) > MAX_CONTAINER and values.when is not When.COLD:
            return
        is_owner = id(holder) in self._owners
        is_users = values.is_registry or self.is_users(holder)
        only_data = (values.trains or is_owner) and not is_users
        for key, value in keyed(parts):
            if isinstance(value, PLAIN):  # most are: their paths would take long
                continue
            path = values.named(key)
            if is_owner and (isinstance(value, _FOLLOWED) or key in _FOLLOWED_NAMES):
                self._follow(value, path)
            elif only_data and not (isinstance(value, _DATA) or self.is_users(value)):
                self._pass([value], path)
            else:
                self._queue.append(_Node(value, path, 0, values.when, values.trains))

    def _follow(self, value: Any, path: str) -> None:
        """Walk into a data set, a loader or what one of them uses, whosever it is."""
        for part in value if isinstance(value, list | tuple) else [value]:
            self._owners.add(id(getattr(part, "__self__", part)))
            self._add(path, part)

    def _add(self, path: str, *values: Any) -> None:
        for value in values:
            self._queue.append(_Node(value, path))

    def _pass(self, values: Iterable[Any], path: str, depth: int = 1) -> None:
        for value in values:
            self._passed.append(_Node(value, path, depth))

    def is_users(self, value: Any) -> bool:
        """Return whether an object is of the user's own code, or of the package that a root comes from."""
        return is_users_code(module_of(value)) or package_of(value) in self._packages

    def _of(self, node: _Node) -> Met:
        looks = (look for kinds, look in _LOOKS if isinstance(node.value, kinds))
        kind, values = next(looks, _Walk._of_object)(self, node)
        return Met(node.value, node.path, kind, tuple(values), node.trains)

    def _variables_of(self, function: types.FunctionType) -> Iterator[Values]:
        name, cells = function.__name__, _cells_of(function)
        if not self.is_users(function):  # such as a decorator around a function of the user's
            inside = [*vars(function).values(), *contents.in_cells(cells).values()]
            self._add("", *_functions_in(inside))
            self._pass(inside, name)
            return
        self._add(f"{name}()", *_defaults_of(function))
        if cells:
            yield contents.of_cells(cells)
        names, variables = code_names(function.__code__), function.__globals__
        used = {variable: variables[variable] for variable in names & variables.keys()}
        # An installed package shares these with others.
        if not is_users_code(module_of(function)):
            self._pass(used.values(), name)
            return
        yield contents.of_variables(vars(function), f"{name}.")
        yield contents.of_variables(variables, "", names)
        for variable, module in used.items():
            if isinstance(module, types.ModuleType) and is_users_code(module.__name__):
                yield contents.of_variables(vars(module), f"{variable}.", names)

    def _of_method(self, node: _Node) -> _Seen:
        owner = node.value.__self__
        self._add(node.path or type(owner).__name__.lower(), owner)
        self._add(node.path, node.value.__func__)
        return Kind.CODE, ()

    def _of_wrapper(self, node: _Node) -> _Seen:
        self._add(node.path, *_parts(node.value))
        return Kind.CODE, ()

    def _of_class(self, node: _Node) -> _Seen:
        kind = node.value
        if not is_users_code(kind.__module__):
            return Kind.CODE, ()
        self._add(node.path, *kind.__bases__)
        # __call__ too, which is not among its values
        self._add(node.path, *_functions_in(vars(kind).values()))
        return Kind.CODE, [contents.of_class(kind)]

    def _of_cache(self, node: _Node) -> _Seen:
        cache = node.value
        self._add(node.path, cache.__wrapped__)
        if not is_users_code(module_of(cache.__wrapped__)):
            return Kind.CODE, ()
        # Some of what a cache returns may be known by its identity, so one that is not empty cannot
        # be emptied.
        if cache.cache_info().currsize:
            return Kind.LIBRARY, ()
        return Kind.CODE, [contents.of_cache(cache, node.path)]

    def _of_frozenset(self, node: _Node) -> _Seen:
        for value in node.value:
            self._queue.append(node._replace(value=value))
        return Kind.HOLDER, ()

    def _of_container(self, node: _Node) -> _Seen:
        value, path, reference = node.value, node.path, Reference(node.value)
        if isinstance(value, tuple):
            items, is_users = contents.of_tuple(reference, path), False
        else:
            base = next(kind for kind in type(value).__mro__ if not self.is_users(kind))
            items, is_users = contents.of_items(reference, path, base), self.is_users(value)
        values = [items._replace(when=node.when, trains=node.trains)]
        if is_users:
            values += self._attributes_of(reference, path)
        return Kind.HOLDER, values

    def _registries_of(self, module: torch.nn.Module, path: str) -> Iterator[Values]:
        kind, is_users = type(module), self.is_users(module)
        if is_users:
            self._add(kind.__name__, kind)
        # The attributes of DDP and its like belong to C++ objects.
        is_parallel = kind.__module__.startswith(PARALLEL)
        is_strong = kind.__module__.startswith((*PARALLEL, "torch.jit."))
        reference = Reference(module, is_strong=is_strong)
        hooks = hooks_of(module)
        for registry in hooks.values():
            self._met[id(registry)] = registry
        for name in REGISTRIES:
            registry = vars(module)[name]
            # Sharded parameters change places with whole ones while a step runs, and torch's own
            # objects know which are there.
            is_sharded = any(map(is_traceable_wrapper_subclass, registry.values()))
            self._met[id(registry)] = registry
            values = contents.of_registry(reference, name, f"{path}.")
            yield values._replace(when=When.AT_END if is_sharded else When.COLD)
        yield contents.of_hooks(reference, tuple(hooks), path)
        if not is_parallel:
            restarts = is_users or kind.__module__.startswith("torch.nn.modules.")
            values = contents.of_attributes(
                reference, f"{path}.", without=frozenset((*REGISTRIES, *hooks))
            )
            yield values._replace(when=When.EACH_TRIAL if restarts else When.AT_END, trains=True)

    def _of_loader(self, node: _Node) -> _Seen:
        if id(node.value) in self._owners:
            return self._holder(node, When.AT_END)
        return Kind.LIBRARY, ()  # whose position is not covered

    def _of_object(self, node: _Node) -> _Seen:
        value = node.value
        is_owner, is_users = id(value) in self._owners, self.is_users(value)
        keeps_state = has_state(value)
        if not (is_owner or is_users or keeps_state):
            self._pass(_parts(value), node.path)
            return Kind.LIBRARY, ()
        when = When.EACH_TRIAL
        if str(module_of(value)).startswith(_COLD):
            when = When.COLD
        elif is_owner or not is_users:
            when = When.AT_END
        return self._holder(node, when, keeps_state=keeps_state)

    def _holder(self, node: _Node, when: When, *, keeps_state: bool = False) -> _Seen:
        kind = Kind.STATEFUL if keeps_state else Kind.HOLDER
        return kind, self._attributes_of(Reference(node.value), node.path, when, trains=keeps_state)

    def _attributes_of(
        self, reference: Reference, path: str, when: When = When.EACH_TRIAL, *, trains: bool = False
    ) -> Iterator[Values]:
        value = reference.find()
        is_users = self.is_users(value)
        if is_users:
            self._add(type(value).__name__, type(value))
        if hasattr(value, "__dict__"):
            yield contents.of_attributes(reference, f"{path}.")._replace(when=when, trains=trains)
        slots = slots_of(type(value))
        if not slots:
            return
        if is_users:
            yield contents.of_slots(reference, slots, f"{path}.")._replace(when=when, trains=trains)
        else:
            reference.stay_strong()


# How to look into a value of each kind, by the first that fits: an object of the user's may be of
# several.
_LOOKS: tuple[tuple[Any, Callable[[_Walk, _Node], _Seen]], ...] = (
    (
        torch.Tensor,
        lambda _, node: (Kind.TENSOR, [contents.of_tensor(weak(node.value), node.path)]),
    ),
    (np.ndarray, lambda *_: (Kind.ARRAY, ())),
    (_GENERATORS, lambda *_: (Kind.GENERATOR, ())),
    (types.FunctionType, lambda walk, node: (Kind.CODE, walk._variables_of(node.value))),
    (types.MethodType, _Walk._of_method),
    (_AROUND_CODE, _Walk._of_wrapper),
    (type, _Walk._of_class),
    (functools._lru_cache_wrapper, _Walk._of_cache),
    (frozenset, _Walk._of_frozenset),
    ((tuple, *_CONTAINERS), _Walk._of_container),
    (torch.nn.Module, lambda walk, node: (Kind.MODULE, walk._registries_of(node.value, node.path))),
    (torch.utils.data.DataLoader, _Walk._of_loader),
    (torch.optim.Optimizer, lambda walk, node: walk._holder(node, When.COLD, keeps_state=True)),
    (
        _NAMESPACES,
        lambda walk, node: walk._holder(node, When.EACH_TRIAL, keeps_state=has_state(node.value)),
    ),
)


def _cells_of(function: types.FunctionType) -> dict[Any, types.CellType]:
    """Return the variables of the functions around a function that it uses, by name."""
    return dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))


def _functions_in(values: Iterable[Any]) -> list[types.FunctionType]:
    return [value for value in values if isinstance(value, types.FunctionType)]


def _defaults_of(function: types.FunctionType) -> list[Any]:
    """Return the defaults of a function's parameters."""
    return [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


def _parts(value: Any) -> Iterable[Any]:
    """Return what an object that is not walked into holds."""
    if isinstance(value, (*_CONTAINERS, tuple, frozenset)):
        if len(value) > MAX_CONTAINER:
            return ()
        return list(dict.values(value) if isinstance(value, dict) else value)
    if isinstance(value, types.FunctionType):
        return [*contents.in_cells(_cells_of(value)).values(), *_defaults_of(value)]
    if isinstance(value, types.MethodType):
        return value.__self__, value.__func__
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, _AROUND_CODE):
        return [getattr(value, name, None) for name in ("fget", "fset", "__func__", "func")]
    if isinstance(value, type) or type(value).__module__ in ("builtins", "numpy"):
        return ()
    return list(getattr(value, "__dict__", {}).values())
