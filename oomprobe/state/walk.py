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
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from oomprobe.state.references import HOOKS, REGISTRIES, Reference, slots_of

MAX_DEPTH = 6  # in libraries: an optimizer in a strategy in a trainer is at depth 3
MAX_OBJECTS = 20_000  # a walk that visits more has entered a data set
MAX_CONTAINER = 1_000  # lists of parameters are shorter; data sets are longer

LIBRARIES = frozenset({"torch", "oomprobe", *sys.stdlib_module_names})
PLAIN = (
    int, float, complex, str, bytes, bool, type(None), enum.Enum, torch.dtype, torch.device, torch.Size, types.ModuleType,
)  # fmt: skip
_INSTALLED = ("site-packages", "dist-packages")
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace, collections.UserDict, collections.UserList)
_AROUND_CODE = (partial, property, staticmethod, classmethod, functools.cached_property)
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
# Schedulers and scalers refuse to run past their end, or after a failed step.
_COLD = ("torch.optim.", "torch.amp.")
_CONTAINERS = (dict, list, set, deque)
_DATA = (*_CONTAINERS, *_NAMESPACES, tuple, frozenset, torch.Tensor, np.ndarray, *_GENERATORS, types.FunctionType)
# What owners of data have under any name, and under these.
_FOLLOWED = (torch.utils.data.Dataset, torch.utils.data.DataLoader, torch.utils.data.Sampler)
_FOLLOWED_NAMES = ("dataset", "datasets", "transform", "transforms", "sampler", "batch_sampler", "collate_fn")
_MISSING = object()
PARALLEL = ("torch.distributed.", "torch.nn.parallel.")


class Kind(enum.Enum):
    """What a value is to a probe."""

    TENSOR = enum.auto()
    ARRAY = enum.auto()
    GENERATOR = enum.auto()  # of random numbers
    MODULE = enum.auto()
    STATEFUL = enum.auto()  # has state_dict() and load_state_dict(), like every optimizer
    CODE = enum.auto()  # a function, method or class of the user's
    HOLDER = enum.auto()  # an object of the user's, or a container: all that matters is what it holds
    LIBRARY = enum.auto()  # an object of a library that the user's code holds, which is not walked into


class When(enum.Enum):
    """When values go back."""

    COLD = enum.auto()  # before each trial, whatever else can go back: they decide about memory
    EACH_TRIAL = enum.auto()  # before each trial, unless a source of data beside them has moved on
    AT_END = enum.auto()


class Values(NamedTuple):
    """Values that something holds by name or position, and how to replace them in place."""

    path: str  # what stands before the name of a value, such as "trainer."
    # Returns a dict, or a list, set or deque: perhaps the live one, not to be changed; {} of an owner that is gone.
    read: Callable[[], Any]
    write: Callable[[dict[Any, Any], dict[Any, Any]], object]  # by key, what it shall hold, and what it holds now
    owner: Reference | None = None  # whose they are: an object or a container; None for variables
    when: When = When.EACH_TRIAL
    trains: bool = False  # whether they are the model's or an optimizer's, which must come back bit for bit
    is_ordered: bool = False  # whether the order of a dict's items is part of it
    is_registry: bool = False  # of a module: its parameters, buffers, modules or hooks
    # Returns what identifies a variable, which several functions may use.
    variable: Callable[[Any], object] | None = None

    @property
    def owner_id(self) -> int:
        """The id of the owner; that of None if it was freed, or there is none."""
        return id(None if self.owner is None else self.owner.find())

    @property
    def is_gone(self) -> bool:
        """Whether the owner was freed."""
        return self.owner is not None and self.owner.find() is None

    def slot(self, key: Any) -> object:
        """Return what identifies the attribute, item or variable with this key."""
        if self.owner is not None:
            return self.owner, key
        return (self.read, key) if self.variable is None else self.variable(key)

    def named(self, key: Any) -> str:
        """Return the path of one value."""
        parts = key if isinstance(key, tuple) else (key,)
        if not all(isinstance(one, PLAIN) for one in parts):  # the text of a tensor takes memory on its device
            key = type(key).__name__
        if self.path.endswith(".") or not self.path:
            return f"{self.path}{'.'.join(map(str, parts)) if isinstance(key, tuple) else key}"
        return f"{self.path}[{key!r}]"


class Seen(NamedTuple):
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
    roots: Iterable[tuple[object, str]], owners: Iterable[object] = (), *, without: Iterable[object] = ()
) -> Iterator[Seen]:
    """Yield what can be reached from `roots`, pairs of a value and its path: each once, the user's own first, nearest first.

    `owners` are objects of libraries that are walked into like the user's own, `without` objects to leave out.

    Examples:
        >>> __name__ = "__main__"  # the user's script
        >>> optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
        >>> def step(model, batch_size):
        ...     optimizer.step()
        >>> [type(one.value).__name__ for one in visit([(step, "")]) if is_training_state(one)]
        ['SGD', 'Parameter', 'Parameter']
    """
    return _Walk(list(roots), list(owners), without).seen()


def is_training_state(seen: Seen) -> bool:
    """Return whether a value is a module, an object with ``state_dict``, or a leaf tensor that requires a gradient."""
    return seen.kind in (Kind.MODULE, Kind.STATEFUL) or (seen.kind is Kind.TENSOR and is_learnable(seen.value))


def has_state(value: object) -> bool:
    """Return whether an object (not a class) has ``state_dict()`` and ``load_state_dict()``."""
    return not isinstance(value, type) and all(
        callable(getattr(type(value), name, None)) for name in ("state_dict", "load_state_dict")
    )


def is_learnable(value: object) -> bool:
    """Return whether a value is a leaf tensor that requires a gradient."""
    return isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf


def has_data(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has values to copy: neither a lazy one, nor a meta tensor, nor one of a simulated card has."""
    return (
        not is_lazy(tensor)
        and tensor.device.type != "meta"
        and not type(tensor).__module__.startswith("torch._subclasses.")
    )


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
    file = getattr(sys.modules.get(module_name), "__file__", None) or ""
    return not any(part in file for part in _INSTALLED)


def module_of(value: Any) -> object:
    """Return the name of the module whose code an object is.

    For a function it is in its globals: `functools.wraps` gives a library's wrapper the ``__module__`` of what it wraps.
    """
    if isinstance(value, types.FunctionType):
        return value.__globals__.get("__name__")
    return getattr(value if isinstance(value, type) else type(value), "__module__", None)


def code_names(code: types.CodeType) -> set[str]:
    """Return the global and attribute names that a function and its inner functions use."""
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*(code_names(c) for c in inner))


class _Walk:
    """One walk; its methods say what each kind of value holds."""

    def __init__(self, roots: list[tuple[object, str]], owners: list[object], without: Iterable[object]) -> None:
        self._owners = {id(one) for one in owners}
        # Objects of these packages are walked into too, but not what they share with others: variables and classes.
        self._packages = {_package(one) for one, _ in roots}
        # Kept alive, but for tensors, so that no other object gets their ids.
        self._met: dict[int, Any] = {id(one): one for one in without}
        self._queue = deque(_Node(one, path, trains=isinstance(one, torch.Tensor)) for one, path in roots)
        self._queue.extend(_Node(one, type(one).__name__) for one in owners)
        self._passed = deque[_Node]()  # held by objects of libraries

    def seen(self) -> Iterator[Seen]:
        others = 0
        while self._queue or self._passed:
            node = self._queue.popleft() if self._queue else self._passed.popleft()
            value = node.value
            is_state = isinstance(value, torch.nn.Module | torch.Tensor) or has_state(value)
            if (
                id(value) in self._met
                or isinstance(value, weakref.ProxyTypes)
                or not (is_state or others < MAX_OBJECTS)
            ):
                continue
            self._met[id(value)] = None if isinstance(value, torch.Tensor) else value
            others += not is_state
            if node.depth and not is_state:
                if node.depth <= MAX_DEPTH:
                    self._pass(_parts(value), node.path, node.depth + 1)
                continue
            found = self._of(node)
            if not node.depth or found.kind is not Kind.TENSOR or is_learnable(value):
                yield found
            for values in found.values:
                self._descend(values)

    def _descend(self, values: Values) -> None:
        """Queue what is held; of an object of a library only data and functions, since the rest is its own affair."""
        owner, held = None if values.owner is None else values.owner.find(), values.read()
        if isinstance(owner, (*_CONTAINERS, tuple)) and len(held) > MAX_CONTAINER and values.when is not When.COLD:
            return
        is_owner, is_users = id(owner) in self._owners, owner is None or values.is_registry or self.is_users(owner)
        for key, one in held.items() if isinstance(held, dict) else enumerate(held):
            if isinstance(one, PLAIN):
                continue
            if is_owner and (isinstance(one, _FOLLOWED) or key in _FOLLOWED_NAMES):
                self._follow(one, values.named(key))
            elif (values.trains or is_owner) and not (is_users or isinstance(one, _DATA) or self.is_users(one)):
                self._pass([one], values.named(key))
            else:
                self._queue.append(_Node(one, values.named(key), 0, values.when, values.trains))

    def _follow(self, value: Any, path: str) -> None:
        """Walk into a data set, a loader or what one of them uses, whosever it is."""
        for one in value if isinstance(value, list | tuple) else [value]:
            self._owners.add(id(getattr(one, "__self__", one)))
            self._add(path, one)

    def _add(self, path: str, *values: Any) -> None:
        self._queue.extend(_Node(one, path) for one in values if not isinstance(one, PLAIN))

    def _pass(self, values: Iterable[Any], path: str, depth: int = 1) -> None:
        self._passed.extend(_Node(one, path, depth) for one in values if not isinstance(one, PLAIN))

    def is_users(self, value: Any) -> bool:
        """Return whether an object is of the user's own code, or of the package that a root comes from."""
        name = module_of(value)
        return is_users_code(name) or str(name).partition(".")[0] in self._packages

    def _of(self, node: _Node) -> Seen:  # noqa: C901 - one branch for each kind of value
        value, path, is_owner = node.value, node.path, id(node.value) in self._owners
        if isinstance(value, torch.Tensor):
            return Seen(value, path, Kind.TENSOR, (of_tensor(weak(value), path),), node.trains)
        if isinstance(value, np.ndarray):
            return Seen(value, path, Kind.ARRAY)
        if isinstance(value, _GENERATORS):
            return Seen(value, path, Kind.GENERATOR)
        if isinstance(value, types.FunctionType):
            return Seen(value, path, Kind.CODE, tuple(self._of_function(value)))
        if isinstance(value, types.MethodType):
            self._add(path or type(value.__self__).__name__.lower(), value.__self__)
            self._add(path, value.__func__)
            return Seen(value, path, Kind.CODE)
        if isinstance(value, _AROUND_CODE):
            self._add(path, *_parts(value))
            return Seen(value, path, Kind.CODE)
        if isinstance(value, type):
            if not is_users_code(value.__module__):
                return Seen(value, path, Kind.CODE)
            functions = (one for one in vars(value).values() if isinstance(one, types.FunctionType))  # __call__ too
            self._add(path, *value.__bases__, *functions)
            return Seen(value, path, Kind.CODE, (_of_class(value),))
        if isinstance(value, functools._lru_cache_wrapper):
            self._add(path, value.__wrapped__)
            if not is_users_code(module_of(value.__wrapped__)):
                return Seen(value, path, Kind.CODE)
            # Some of what a cache returns may be known by its identity, so one that is not empty cannot be emptied.
            if value.cache_info().currsize:
                return Seen(value, path, Kind.LIBRARY)
            return Seen(value, path, Kind.CODE, (_of_cache(value, path),))
        if isinstance(value, tuple):
            items = _of_tuple(Reference(value), path)._replace(when=node.when, trains=node.trains)
            return Seen(value, path, Kind.HOLDER, (items,))
        if isinstance(value, frozenset):
            self._queue.extend(node._replace(value=one) for one in value if not isinstance(one, PLAIN))
            return Seen(value, path, Kind.HOLDER)
        if isinstance(value, _CONTAINERS):
            base = next(kind for kind in type(value).__mro__ if not self.is_users(kind))
            reference = Reference(value)
            held = _of_container(reference, path, base)._replace(when=node.when, trains=node.trains)
            more = self._of_instance(reference, path) if self.is_users(value) else ()
            return Seen(value, path, Kind.HOLDER, (held, *more))
        if isinstance(value, torch.nn.Module):
            return Seen(value, path, Kind.MODULE, tuple(self._of_module(value, path)))
        is_loader, is_optimizer = (
            isinstance(value, one) for one in (torch.utils.data.DataLoader, torch.optim.Optimizer)
        )
        keeps_state = is_optimizer or (has_state(value) and not is_loader)  # the position of a loader is not covered
        if (
            not keeps_state
            and not is_owner
            and (is_loader or not (self.is_users(value) or isinstance(value, _NAMESPACES)))
        ):
            self._pass([] if is_loader else _parts(value), path)
            return Seen(value, path, Kind.LIBRARY)
        when = When.AT_END if is_owner or not self.is_users(value) else When.EACH_TRIAL
        if isinstance(value, _NAMESPACES):
            when = When.EACH_TRIAL
        if is_optimizer or str(module_of(value)).startswith(_COLD):
            when = When.COLD
        values = tuple(one._replace(when=when, trains=keeps_state) for one in self._of_instance(Reference(value), path))
        return Seen(value, path, Kind.STATEFUL if keeps_state else Kind.HOLDER, values)

    def _of_function(self, function: types.FunctionType) -> Iterator[Values]:
        name = function.__name__
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        if not self.is_users(function):  # such as a decorator around a function of the user's
            inside = [*vars(function).values(), *contents(cells).values()]
            self._add("", *(one for one in inside if isinstance(one, types.FunctionType)))
            self._pass(inside, name)
            return
        self._add(f"{name}()", *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        if cells:
            yield _of_cells(cells)
        names, variables = code_names(function.__code__), function.__globals__
        if not is_users_code(module_of(function)):  # of an installed package: it shares these with others
            self._pass((variables[one] for one in names & variables.keys()), name)
            return
        yield of_namespace(vars(function), f"{name}.")
        yield of_namespace(variables, "", names)
        for one in names & variables.keys():
            module = variables[one]
            if isinstance(module, types.ModuleType) and is_users_code(module.__name__):
                yield of_namespace(vars(module), f"{one}.", names)

    def _of_instance(self, reference: Reference, path: str) -> Iterator[Values]:
        value = reference.find()
        if self.is_users(value):
            self._add(type(value).__name__, type(value))
        if hasattr(value, "__dict__"):
            yield _of_attributes(reference, f"{path}.")
        slots = slots_of(type(value))
        if slots and self.is_users(value):
            yield _of_slots(reference, slots, f"{path}.")
        elif slots:
            reference.stay_strong()

    def _of_module(self, module: torch.nn.Module, path: str) -> Iterator[Values]:
        if self.is_users(module):
            self._add(type(module).__name__, type(module))
        # The attributes of DDP and its like belong to C++ objects.
        is_bound = type(module).__module__.startswith((*PARALLEL, "torch.jit."))
        reference = Reference(module, is_strong=is_bound)
        hooks = {name: vars(module)[name] for name in HOOKS if name in vars(module)}
        self._met |= {id(one): one for one in hooks.values()}
        for name in REGISTRIES:
            registry = vars(module)[name]
            # Sharded parameters change places with whole ones while a step runs, and torch's own objects know which are there.
            is_sharded = any(is_traceable_wrapper_subclass(one) for one in registry.values() if one is not None)
            self._met[id(registry)] = registry
            when = When.AT_END if is_sharded else When.COLD
            values = _of_registry(reference, name, f"{path}.")
            yield values._replace(when=when)
        yield _of_hooks(reference, tuple(hooks), path)
        if not type(module).__module__.startswith(PARALLEL):
            restarts = self.is_users(module) or type(module).__module__.startswith("torch.nn.modules.")
            values = _of_attributes(reference, f"{path}.", without=frozenset((*REGISTRIES, *hooks)))
            yield values._replace(when=When.EACH_TRIAL if restarts else When.AT_END, trains=True)


def _package(value: Any) -> str:
    """Return the top-level package of a root; "" for the standard library, torch and oomprobe."""
    value = getattr(value, "__func__", getattr(value, "func", value))
    name = getattr(value, "__module__", None) or type(value).__module__
    package = str(name).partition(".")[0]
    return "" if package in LIBRARIES else package


def _parts(value: Any) -> Iterable[Any]:
    """Return what an object that is not walked into holds."""
    if isinstance(value, dict | list | tuple | set | frozenset | deque):
        held = dict.values(value) if isinstance(value, dict) else value
        return list(held) if len(value) <= MAX_CONTAINER else ()
    if isinstance(value, types.FunctionType):
        cells = dict(enumerate(value.__closure__ or ()))
        return [*contents(cells).values(), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    if isinstance(value, types.MethodType):
        return value.__self__, value.__func__
    if isinstance(value, _AROUND_CODE):
        inside = [getattr(value, name, None) for name in ("fget", "fset", "__func__", "func")]
        return [*inside, *value.args, *value.keywords.values()] if isinstance(value, partial) else inside
    if isinstance(value, type) or type(value).__module__ in ("builtins", "numpy"):
        return ()
    return list(getattr(value, "__dict__", {}).values())


def weak(tensor: torch.Tensor) -> Callable[[], torch.Tensor | None]:
    """Return a reference that does not keep a tensor alive; it can outlive its Python object, which is then made anew."""
    reference, is_old = weakref.ref(tensor), hasattr(tensor, "_fix_weakref")

    def find() -> torch.Tensor | None:
        found = reference()
        if is_old and found is not None:
            found._fix_weakref()  # type: ignore[attr-defined]
        return found

    return find


# --- values, and how to replace them ---


def of_namespace(namespace: dict[str, Any], path: str, names: Collection[str] | None = None) -> Values:
    """Return the variables of a module or a function; with `names`, only these."""

    def read() -> dict[str, Any]:
        return namespace if names is None else {name: namespace[name] for name in names if name in namespace}

    write = _writer(namespace.__setitem__, namespace.__delitem__)
    return Values(path, read, write, variable=lambda name: (id(namespace), name))


def _of_attributes(owner: Reference, path: str, *, without: frozenset[str] = frozenset()) -> Values:
    """Return the values of an object's ``__dict__``, without some names."""

    def read() -> dict[str, Any]:
        value = owner.find()
        attributes: dict[str, Any] = {} if value is None else vars(value)
        return {name: one for name, one in attributes.items() if name not in without} if without else attributes

    def put(name: str, attribute: Any) -> None:
        vars(owner.find())[name] = attribute

    def drop(name: str) -> None:
        del vars(owner.find())[name]

    return Values(path, read, _writer(put, drop), owner)


def _writer(
    put: Callable[[Any, Any], object], drop: Callable[[Any], object]
) -> Callable[[dict[Any, Any], dict[Any, Any]], None]:
    """Return how to write values by name: drop those that are not wanted, put those that differ."""

    def write(before: dict[Any, Any], now: dict[Any, Any]) -> None:
        for name in now.keys() - before.keys():
            drop(name)
        for name, value in before.items():
            if now.get(name, _MISSING) is not value:
                put(name, value)

    return write


def of_tensor(find: Callable[[], torch.Tensor | None], path: str) -> Values:
    """Return the attributes of the tensor that is found, and the gradient of a leaf."""

    def read() -> dict[Any, Any]:
        now = find()
        if now is None:
            return {}
        known = {"grad": now.grad} if now.is_leaf and now.grad is not None else {}
        # Sharded parameters of FSDP keep there what its C++ and Python objects know of them.
        return known if type(now).__module__.startswith("torch.distributed.fsdp") else {**known, **vars(now)}

    def drop(name: str) -> None:
        setattr(find(), name, None) if name == "grad" else delattr(find(), name)

    write = _writer(lambda name, value: setattr(find(), name, value), drop)
    return Values(f"{path}.", read, write, when=When.COLD, trains=True)


def _of_registry(owner: Reference, name: str, path: str) -> Values:
    """Return the parameters, buffers or modules that a module has registered."""

    def read() -> Any:
        module = owner.find()
        return {} if module is None else vars(module)[name]

    def write(before: dict[Any, Any], now: dict[Any, Any]) -> None:
        module = owner.find()
        if module is not None:
            registry = vars(module)[name]
            registry.clear()
            registry.update(before)

    return Values(path, read, write, owner, trains=True, is_ordered=True, is_registry=True)


def _of_hooks(owner: Reference, names: Collection[str], path: str) -> Values:
    """Return what a module has registered beside its parameters, buffers and modules, such as hooks."""

    def registries() -> dict[str, Any]:
        module = owner.find()
        return {} if module is None else {name: vars(module)[name] for name in names}

    def read() -> dict[Any, Any]:
        return {
            (name, key): one
            for name, held in registries().items()
            if held
            for key, one in (held.items() if isinstance(held, dict) else zip(held, held, strict=True))
        }

    def write(before: dict[Any, Any], now: dict[Any, Any]) -> None:
        found = registries()
        for held in found.values():
            held.clear()
        for (name, key), one in before.items():
            if name in found:
                held = found[name]
                held.update({key: one} if isinstance(held, dict) else [one])

    return Values(f"{path}.", read, write, owner, when=When.COLD, trains=True, is_registry=True)


def _of_cache(cache: functools._lru_cache_wrapper[Any], path: str) -> Values:
    """Return how many results a function's cache keeps, which was empty: it can only be emptied again."""
    find = weakref.ref(cache)

    def read() -> dict[Any, Any]:
        now = find()
        kept = 0 if now is None else now.cache_info().currsize
        return {"results": kept} if kept else {}

    def write(before: dict[Any, Any], _: dict[Any, Any]) -> None:
        now = find()
        if now is not None and not before:
            now.cache_clear()

    return Values(f"{path}.", read, write)


def _of_class(kind: type) -> Values:
    def read() -> dict[Any, Any]:
        return {name: value for name, value in vars(kind).items() if not name.startswith(("__", "_abc_"))}

    write = _writer(partial(type.__setattr__, kind), partial(type.__delattr__, kind))
    return Values(f"{kind.__name__}.", read, write, variable=lambda name: (id(kind), name))


def _of_slots(owner: Reference, slots: dict[str, Any], path: str) -> Values:
    def read() -> dict[Any, Any]:
        value, found = owner.find(), {}
        for name, member in {} if value is None else slots.items():
            with suppress(AttributeError):  # not set
                found[name] = member.__get__(value)
        return found

    def put(name: str, attribute: Any) -> None:
        slots[name].__set__(owner.find(), attribute)

    def drop(name: str) -> None:
        slots[name].__delete__(owner.find())

    return Values(path, read, _writer(put, drop), owner)


def _of_container(owner: Reference, path: str, base: Any) -> Values:
    """Return the values of a dict, list, set or deque; methods of `base` read and change it, not those of a user's subclass."""
    is_dict, is_set, is_exact = issubclass(base, dict), issubclass(base, set), owner.kind is base

    def read() -> Any:
        container = owner.find()
        if container is None:
            return {}
        if is_exact:
            return container
        return dict(base.items(container)) if is_dict else [*base.__iter__(container)]

    def write(before: dict[Any, Any], now: dict[Any, Any]) -> None:
        container = owner.find()
        if container is None:
            return
        base.clear(container)
        for key, value in before.items():
            if is_dict:
                base.__setitem__(container, key, value)
            else:
                (base.add if is_set else base.append)(container, value)

    return Values(path, read, write, owner, is_ordered=True)


def _of_tuple(owner: Reference, path: str) -> Values:
    """Return the items of a tuple, which cannot be replaced in it."""
    return Values(path, lambda: owner.find() or (), lambda before, now: None, owner)


def _of_cells(cells: dict[Any, types.CellType]) -> Values:
    put, drop = (lambda name, one: setattr(cells[name], "cell_contents", one)), types.CellType.cell_contents.__delete__
    write = _writer(put, lambda name: drop(cells[name]))
    return Values("", lambda: contents(cells), write, variable=lambda name: id(cells[name]))


def contents(cells: dict[Any, types.CellType]) -> dict[Any, Any]:
    """Return what cells hold, without those that are empty."""
    found = {}
    for name, cell in cells.items():
        with suppress(ValueError):
            found[name] = cell.cell_contents
    return found
