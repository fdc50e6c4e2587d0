"""Values that something holds by name or position, and how to read and replace them: variables, attributes, items, registries."""

from __future__ import annotations

import enum
import functools
import types
import weakref
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch

from oomprobe.state.references import Reference, gradient_of

# Values that hold nothing: they are compared and put back, never walked into.
PLAIN = (
    int, float, complex, str, bytes, bool, type(None), enum.Enum, torch.dtype, torch.device, torch.Size, types.ModuleType,
)  # fmt: skip
_MISSING = object()


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
    # By key, what it shall hold, and what it holds now; not for an owner that is gone.
    write: Callable[[dict[Any, Any], dict[Any, Any]], object]
    owner: Reference | None = None  # whose they are: an object or a container; None for variables
    when: When = When.EACH_TRIAL
    # Whether they are the model's or an optimizer's, which must come back bit for bit.
    trains: bool = False
    is_ordered: bool = False  # whether the order of a dict's items is part of it
    is_registry: bool = False  # of a module: its parameters, buffers, modules or hooks
    # Returns what identifies a variable, which several functions may use.
    variable: Callable[[Any], object] | None = None

    @property
    def holder(self) -> Any:
        """The object or container that holds them; None for variables, or if it was freed."""
        return None if self.owner is None else self.owner.find()

    @property
    def is_gone(self) -> bool:
        """Whether the owner was freed."""
        return self.owner is not None and self.holder is None

    def slot(self, key: Any) -> object:
        """Return what identifies the attribute, item or variable with this key."""
        if self.variable is not None:
            return self.variable(key)
        return self.read, key

    def named(self, key: Any) -> str:
        """Return the path of one value."""
        parts = key if isinstance(key, tuple) else (key,)
        # The text of a tensor takes memory on its device.
        if not all(isinstance(part, PLAIN) for part in parts):
            key = type(key).__name__
            parts = (key,)
        is_item = self.path and not self.path.endswith(".")
        if is_item:
            return f"{self.path}[{key!r}]"
        return f"{self.path}{'.'.join(map(str, parts))}"


def of_variables(
    namespace: dict[str, Any], path: str, names: Collection[str] | None = None
) -> Values:
    """Return the variables of a module or a function; with `names`, only these."""

    def read() -> dict[str, Any]:
        if names is None:
            return namespace
        return {name: namespace[name] for name in names if name in namespace}

    write = _writer(namespace.__setitem__, namespace.__delitem__)
    return Values(path, read, write, variable=lambda name: (id(namespace), name))


def of_cells(cells: dict[Any, types.CellType]) -> Values:
    """Return the variables of the functions around a function."""

    def put(name: str, value: Any) -> None:
        cells[name].cell_contents = value

    def drop(name: str) -> None:
        del cells[name].cell_contents

    return Values(
        "", lambda: in_cells(cells), _writer(put, drop), variable=lambda name: id(cells[name])
    )


def of_class(kind: type) -> Values:
    """Return the attributes and methods of a class."""

    def read() -> dict[Any, Any]:
        return {
            name: value
            for name, value in vars(kind).items()
            if not name.startswith(("__", "_abc_"))
        }

    write = _writer(partial(type.__setattr__, kind), partial(type.__delattr__, kind))
    return Values(f"{kind.__name__}.", read, write, variable=lambda name: (id(kind), name))


def of_attributes(owner: Reference, path: str, *, without: frozenset[str] = frozenset()) -> Values:
    """Return the values of an object's ``__dict__``, without some names."""

    def read(value: object) -> dict[str, Any]:
        attributes: dict[str, Any] = vars(value)
        if not without:
            return attributes
        return {name: attribute for name, attribute in attributes.items() if name not in without}

    def put(name: str, attribute: Any) -> None:
        vars(owner.find())[name] = attribute

    def drop(name: str) -> None:
        del vars(owner.find())[name]

    return Values(path, _reader(owner.find, read), _writer(put, drop), owner)


def of_slots(owner: Reference, slots: dict[str, Any], path: str) -> Values:
    """Return the values of an object's slots."""

    def read(value: object) -> dict[Any, Any]:
        attributes: dict[Any, Any] = {}
        for name, member in slots.items():
            with suppress(AttributeError):  # not set
                attributes[name] = member.__get__(value)
        return attributes

    def put(name: str, attribute: Any) -> None:
        slots[name].__set__(owner.find(), attribute)

    def drop(name: str) -> None:
        slots[name].__delete__(owner.find())

    return Values(path, _reader(owner.find, read), _writer(put, drop), owner)


def of_tensor(find: Callable[[], torch.Tensor | None], path: str) -> Values:
    """Return the attributes of the tensor that is found, and the gradient of a leaf."""

    def read(tensor: torch.Tensor) -> dict[Any, Any]:
        attributes: dict[Any, Any] = {}
        gradient = gradient_of(tensor)
        if gradient is not None:
            attributes["grad"] = gradient
        # Sharded parameters of FSDP keep there what its C++ and Python objects know of them.
        if not type(tensor).__module__.startswith("torch.distributed.fsdp"):
            attributes |= vars(tensor)
        return attributes

    def put(name: str, value: Any) -> None:
        setattr(find(), name, value)

    def drop(name: str) -> None:
        if name == "grad":
            put(name, None)
        else:
            delattr(find(), name)

    reader = _reader(find, read)
    return Values(f"{path}.", reader, _writer(put, drop), when=When.COLD, trains=True)


def of_registry(owner: Reference, name: str, path: str) -> Values:
    """Return the parameters, buffers or modules that a module has registered."""
    read = _reader(owner.find, lambda module: vars(module)[name])

    def write(before: dict[Any, Any], now: dict[Any, Any]) -> None:
        registry = vars(owner.find())[name]
        registry.clear()
        registry.update(before)

    return Values(path, read, write, owner, trains=True, is_ordered=True, is_registry=True)


def of_hooks(owner: Reference, names: Collection[str], path: str) -> Values:
    """Return what a module has registered beside its parameters, buffers and modules, such as hooks, by registry and key."""

    def read(module: torch.nn.Module) -> dict[Any, Any]:
        hooks: dict[Any, Any] = {}
        for name in names:
            registry = vars(module)[name]
            # Such as the names of buffers that state_dict() leaves out.
            is_set = isinstance(registry, set)
            for key in registry:
                hooks[name, key] = key if is_set else registry[key]
        return hooks

    def write(before: dict[Any, Any], now: dict[Any, Any]) -> None:
        registries = vars(owner.find())
        for name in names:
            registries[name].clear()
        for (name, key), hook in before.items():
            registry = registries[name]
            if isinstance(registry, set):
                registry.add(hook)
            else:
                registry[key] = hook

    reader = _reader(owner.find, read)
    return Values(f"{path}.", reader, write, owner, when=When.COLD, trains=True, is_registry=True)


def of_items(owner: Reference, path: str, base: Any) -> Values:
    """Return the items of a dict, list, set or deque; methods of `base` read and change it, not those of a user's subclass."""
    is_dict, is_set = issubclass(base, dict), issubclass(base, set)

    def read(container: Any) -> Any:
        return dict(base.items(container)) if is_dict else [*base.__iter__(container)]

    def write(before: dict[Any, Any], now: dict[Any, Any]) -> None:
        container = owner.find()
        base.clear(container)
        if is_dict:
            for key, value in before.items():
                base.__setitem__(container, key, value)
            return
        add = base.add if is_set else base.append
        for value in before.values():
            add(container, value)

    return Values(path, _reader(owner.find, read), write, owner, is_ordered=True)


def of_tuple(owner: Reference, path: str) -> Values:
    """Return the items of a tuple, which cannot be replaced in it."""
    return Values(path, lambda: owner.find() or (), lambda before, now: None, owner)


def of_cache(cache: functools._lru_cache_wrapper[Any], path: str) -> Values:
    """Return how many results a function's cache keeps, which was empty: it can only be emptied again."""
    find: Callable[[], Any] = weakref.ref(cache)

    def read(now: Any) -> dict[Any, Any]:
        kept = now.cache_info().currsize
        return {"results": kept} if kept else {}

    def write(before: dict[Any, Any], _: dict[Any, Any]) -> None:
        if not before:
            find().cache_clear()

    return Values(f"{path}.", _reader(find, read), write)


def _reader(find: Callable[[], Any], read: Callable[[Any], Any]) -> Callable[[], Any]:
    """Return how to read what an owner holds that is found; nothing once it is gone."""

    def read_found() -> Any:
        owner = find()
        return {} if owner is None else read(owner)

    return read_found


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


def in_cells(cells: dict[Any, types.CellType]) -> dict[Any, Any]:
    """Return what cells hold, without those that are empty."""
    values = {}
    for name, cell in cells.items():
        with suppress(ValueError):
            values[name] = cell.cell_contents
    return values
