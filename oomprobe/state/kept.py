"""What the user's own code counts with and keeps: saved once, put back before every trial and at the end.

Only holders of values in the user's own code are saved: closure variables and globals of functions, attributes and slots of
instances and classes, and the lists, dicts, sets and deques that these hold. A saved holder is a shallow copy: putting it
back makes each name refer to its original value, and names that did not exist go again. Objects of libraries are not walked
into. Those that changed, such as an iterator that has moved on, are named.
"""

from __future__ import annotations

import argparse
import array
import collections
import enum
import functools
import io
import itertools
import operator
import random
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from oomprobe.state.compare import same
from oomprobe.state.reach import LIBRARIES, MAX_CONTAINER, MAX_OBJECTS, code_names, has_state, is_users_code, module_of
from oomprobe.state.tensors import HostCopies, TensorCopy
from oomprobe.state.values import MAX_ENTRIES

SMALL_BYTES = 2**12  # tensors and arrays up to this size are put back before every trial, larger ones at the end
COPIED_BYTES = 2**30  # of larger ones, in all; the others are compared by their version
_PLAIN = (int, float, complex, str, bytes, bool, type(None), enum.Enum, torch.dtype, torch.device, torch.Size)
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace, collections.UserDict, collections.UserList)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# The tracker restores these, and `_modules` here.
_REGISTRIES = frozenset({"_parameters", "_buffers", "_modules", "training"})
_MISSING = object()
_UNKNOWN = object()  # the fingerprint of an object that does not show whether it has changed

Named = tuple[Any, str]  # a value and its path, such as "trainer.it"


@dataclass(slots=True)
class Holder:
    """A place that holds values by key, and what it held at first."""

    path: str  # what stands before the names of its values, such as "trainer."
    read: Callable[[], dict[Any, Any]]
    write: Callable[[dict[Any, Any], dict[Any, Any]], object]  # what it held before, and holds now
    owner: Any = None  # whose values they are: an object, a container, or None for variables
    before: dict[Any, Any] = field(
        default_factory=dict
    )  # in place of tensors their copies, so that steps can free them
    moves: bool = False  # whether a source of data beside its values has moved on, so that they must not be put back

    def named(self, key: Any) -> str:
        return f"{self.path}{key}" if self.path.endswith(".") or not self.path else f"{self.path}[{key!r}]"


@dataclass(slots=True)
class Innards:
    """A generator of random numbers, an array, or a container too long to save: its state, and how to put it back."""

    path: str
    kind: str
    read: Callable[[], Any]
    write: Callable[[Any], object] | None = None
    is_small: bool = True
    before: Any = None


class Graph:
    """A tensor with the graph that computed it: it cannot be copied, and keeping it alive would keep a step's memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._reference = weakref.ref(tensor)

    def restore(self) -> torch.Tensor | None:
        return self._reference()

    def find(self) -> object:
        """Return the tensor, or this object if it is gone, which is no value of the user's."""
        tensor = self._reference()
        return self if tensor is None else tensor


class Kept:
    """What the user's own code holds, as found from the steps and the model, saved and put back.

    Example:
        >>> __name__ = "__main__"  # the user's script
        >>> class Trainer:
        ...     calls = 0
        ...     def step(self, model, batch_size):
        ...         self.calls += 1
        ...         self.last = torch.ones(batch_size)
        >>> trainer = Trainer()
        >>> kept = Kept([trainer.step], torch.nn.Identity())
        >>> trainer.step(None, 2), kept.put_back(), trainer.calls, hasattr(trainer, "last")
        (None, None, 0, False)
    """

    def __init__(self, steps: Iterable[object], model: torch.nn.Module, device: object = None) -> None:
        """Find and save; a `device` of the user's own counts memory, which must not be put back."""
        steps = list(steps)
        self._packages = {_package(one) for one in (*steps, type(model))}
        self._holders: list[Holder] = []
        self._innards: list[Innards] = []
        self._libraries: list[tuple[str, Any, Any]] = []  # path, object that is not walked into, and its fingerprint
        self._tensors: dict[int, tuple[str, TensorCopy, int]] = {}  # by id: path, copy and version
        self.copies = HostCopies()
        # The objects visited, kept alive so that no other gets their ids.
        self._seen: dict[int, Any] = {id(device): device}
        self._names: set[str] = set()  # that the user's functions use
        self._left: list[
            tuple[Holder, dict[Any, Any]]
        ] = []  # plain values that the last trial left, where they changed
        self._only_at_end = False
        self._walk([*((step, "") for step in steps), (model, "model")])
        for holder in self._holders:
            held = holder.read()
            holder.before = {key: self._saved(one) for key, one in held.items()}
        for one in self._innards:
            one.before = one.read()
        self._seen = {key: one for key, one in self._seen.items() if not isinstance(one, torch.Tensor)}
        self._take(0)

    @property
    def is_exact(self) -> bool:
        """Whether every trial starts at the same call, because everything that counts is put back before it."""
        return not self._only_at_end and not any(holder.moves for holder in self._holders)

    # --- putting back ---

    def copy_large(self) -> None:
        """Copy tensors that are not small too, so that `put_back` can restore them at the end."""
        self._take(COPIED_BYTES)

    def put_back(self, *, at_end: bool = False) -> None:
        """Put everything back, before a trial or at the end."""
        if not at_end:
            self.find_moves()
        if self._only_at_end and not at_end:
            return
        for holder in self._holders:
            if at_end or not holder.moves:
                with suppress(Exception):  # `changes` names what did not come back, also from a lost device
                    self._put_back(holder)
        for one in self._innards:
            if one.write is not None and (at_end or one.is_small) and not same(one.read(), one.before):
                with suppress(Exception):
                    one.write(one.before)
        for _, copy, _ in self._tensors.values():
            if copy.storage.nbytes <= SMALL_BYTES:
                with suppress(Exception):
                    copy.storage.write()

    def end_trial(self) -> None:
        """Take note of what has moved on in a trial; what it leaves is then what `leave` brings back."""
        self._left = []
        self.find_moves()

    def find_moves(self) -> None:
        """Mark the values beside an iterator or a queue that has moved on, up to the roots: they must agree with it."""
        moved = {
            id(one) for path, one, before in self._libraries if _is_source(one) and self._has_changed(path, one, before)
        }
        todo = [*self._holders] if moved else []
        while marked := [holder for holder in todo if any(id(one) in moved for one in holder.before.values())]:
            for holder in marked:
                holder.moves = True
                moved.add(id(holder if holder.owner is None else holder.owner))
            todo = [holder for holder in todo if not holder.moves]
        beside = {id(one) for holder in self._holders if holder.moves for one in holder.before.values()}
        for holder in self._holders:
            holder.moves |= isinstance(holder.owner, dict | list | set | deque) and id(holder.owner) in beside

    def _put_back(self, holder: Holder) -> None:
        now = holder.read()
        before = {
            key: one.restore() if isinstance(one, TensorCopy | Graph) else one for key, one in holder.before.items()
        }
        if [*now] == [*before] and all(map(operator.is_, now.values(), before.values())):
            return
        self._left.append((holder, {k: one for k, one in now.items() if isinstance(one, _PLAIN) or _is_iterator(one)}))
        holder.write(before, now)

    def leave(self) -> bool:
        """Bring back the plain values that the last trial left, and put values back only at the end. Return whether there were any."""
        for holder, left in self._left:
            now = holder.read()
            with suppress(Exception):
                holder.write({**now, **left}, now)
        has_left, self._left, self._only_at_end = bool(self._left), [], True
        return has_left

    # --- what changed ---

    def changes(self) -> list[str]:
        """Return what differs from the start, each with its kind, such as ``"trainer.it (an iterator)"``."""
        found: dict[str, Any] = {}
        for path, one, print_before in self._libraries:
            if self._has_changed(path, one, print_before):
                found[path] = one
        for holder in self._holders:
            now = holder.read()
            before = {
                key: one.find() if isinstance(one, TensorCopy | Graph) else one for key, one in holder.before.items()
            }
            for key in now.keys() | before.keys():
                if now.get(key, _MISSING) is not before.get(key, _MISSING):
                    value = now.get(key)
                    found[holder.named(key)] = before.get(key) if value is None else value
        named = {path: _kind(one) for path, one in found.items()}
        named |= {one.path: one.kind for one in self._innards if not same(one.read(), one.before)}
        for path, copy, version in self._tensors.values():
            tensor = copy.find()
            if tensor is not None and not copy.storage.is_intact(tensor._version == version):
                named[path] = "a tensor"
        return [f"{path} ({kind})" for path, kind in named.items()]

    def _has_changed(self, path: str, one: Any, print_before: Any) -> bool:
        print_now = _fingerprint(one)
        if print_now is _UNKNOWN:
            return path.rpartition(".")[2] in self._names or path.endswith("]")
        return not same(print_now, print_before)

    def plain_values(self) -> object:
        """Return the numbers, texts and lengths that the user's code holds, and the states of random number generators."""
        held = [[(key, _plain(one)) for key, one in holder.read().items()] for holder in self._holders]
        own = [repr(one.read()) for one in self._innards if one.is_small]
        return held, own, random.getstate(), repr(np.random.get_state())

    # --- finding ---

    def _is_ours(self, value: Any) -> bool:
        """Return whether an object is of the user's own code, or of the package that the step or the model comes from."""
        name = module_of(value)
        return is_users_code(name) or str(name).partition(".")[0] in self._packages

    def _saved(self, value: Any) -> Any:
        """Return what to save of a value: for a tensor something that does not keep it alive."""
        if id(value) in self._tensors:
            return self._tensors[id(value)][1]
        return Graph(value) if isinstance(value, torch.Tensor) and not value.is_leaf else value

    def _walk(self, roots: Iterable[Named]) -> None:
        queue = deque(roots)
        while queue and len(self._seen) < MAX_OBJECTS:
            value, path = queue.popleft()
            if id(value) not in self._seen and not isinstance(value, _PLAIN):
                self._seen[id(value)] = value
                queue.extend(self._parts(value, path))

    def _hold(self, holder: Holder) -> Iterator[Named]:
        self._holders.append(holder)
        return ((value, holder.named(key)) for key, value in holder.read().items())

    def _parts(self, value: Any, path: str) -> Iterator[Named]:  # noqa: C901 - one branch for each kind of value
        """Save what `value` holds, if it is of the user's own code, and yield that with its paths."""
        if isinstance(value, types.FunctionType):
            yield from self._parts_of_function(value)
        elif isinstance(value, types.MethodType):
            yield from ((value.__self__, path or type(value.__self__).__name__.lower()), (value.__func__, path))
        elif isinstance(value, functools.partial):
            yield from ((one, path) for one in (value.func, *value.args, *value.keywords.values()))
        elif isinstance(value, property | staticmethod | classmethod | functools.cached_property):
            names = ("fget", "fset", "__func__", "func")
            yield from ((getattr(value, name), path) for name in names if getattr(value, name, None) is not None)
        elif isinstance(value, type):
            if self._is_ours(value):
                yield from self._hold(_of_class(value))
                yield from ((base, path) for base in value.__bases__)
        elif isinstance(value, functools._lru_cache_wrapper):
            yield value.__wrapped__, path
            self._libraries.append((path, value, _fingerprint(value)))
        elif type(value).__module__.partition(".")[0] == "oomprobe":
            return
        elif isinstance(value, tuple | frozenset):
            yield from ((one, f"{path}[{number}]") for number, one in enumerate(value) if number < MAX_CONTAINER)
        elif isinstance(value, dict | list | set | deque):
            yield from self._parts_of_container(value, path)
        elif isinstance(value, torch.Tensor):
            self._keep_tensor(value, path)
        elif isinstance(value, np.ndarray):
            self._keep_array(value, path)
        elif isinstance(value, random.Random | np.random.Generator | np.random.RandomState | torch.Generator):
            self._innards.append(_generator(value, path))
        elif isinstance(value, torch.nn.Module):
            yield from self._parts_of_module(value, path)
        elif isinstance(value, _NAMESPACES) or self._is_ours(value):
            yield type(value), type(value).__name__
            yield from self._parts_of_instance(value, path)
        elif not (has_state(value) or isinstance(value, torch.optim.Optimizer | torch.utils.data.DataLoader)):
            self._libraries.append((path, value, _fingerprint(value)))

    def _parts_of_function(self, function: types.FunctionType) -> Iterator[Named]:
        if not self._is_ours(function):  # such as a decorator around a function of the user's
            inner = (*vars(function).values(), *_contents(dict(enumerate(function.__closure__ or ()))).values())
            yield from ((one, "") for one in inner if isinstance(one, types.FunctionType))
            return
        yield from ((one, f"{function.__name__}()") for one in function.__defaults__ or ())
        yield from ((one, f"{function.__name__}()") for one in (function.__kwdefaults__ or {}).values())
        if function.__closure__:
            cells = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
            yield from self._hold(Holder("", lambda: _contents(cells), lambda before, now: _fill(cells, before)))
        yield from self._hold(_of_namespace(vars(function), f"{function.__name__}."))
        names = code_names(function.__code__)
        self._names |= names | {*function.__code__.co_freevars}
        namespace = function.__globals__
        yield from self._hold(_of_namespace(namespace, "", names))
        for name in names & namespace.keys():
            module = namespace[name]
            if isinstance(module, types.ModuleType) and is_users_code(module.__name__):
                yield from self._hold(_of_namespace(vars(module), f"{name}.", names))

    def _parts_of_container(self, value: Any, path: str) -> Iterator[Named]:
        if len(value) > MAX_ENTRIES:
            self._innards.append(Innards(path, _kind(value), lambda: len(value)))
        else:
            base = next(kind for kind in type(value).__mro__ if not self._is_ours(kind))
            parts = self._hold(_of_container(value, path, base))
            yield from parts if len(value) <= MAX_CONTAINER else ()
        if self._is_ours(value):  # a subclass of the user's
            yield from self._parts_of_instance(value, path)

    def _parts_of_instance(self, value: Any, path: str) -> Iterator[Named]:
        if hasattr(value, "__dict__"):
            yield from self._hold(_of_namespace(vars(value), f"{path}.", owner=value))
        slots = {  # not the members of types written in C, which may be new objects at each read
            name: member
            for kind in type(value).__mro__
            if "__slots__" in vars(kind)
            for name, member in vars(kind).items()
            if isinstance(member, types.MemberDescriptorType)
        }
        if slots and self._is_ours(value):
            yield from self._hold(_of_slots(value, slots, f"{path}."))

    def _parts_of_module(self, module: torch.nn.Module, path: str) -> Iterator[Named]:
        if self._is_ours(module):
            yield type(module), type(module).__name__
            yield from self._hold(_of_namespace(vars(module), f"{path}.", without=_REGISTRIES, owner=module))
        elif type(module).__module__.startswith("torch.nn.modules."):  # such as the rate of a Dropout
            plain = [
                name for name, value in vars(module).items() if isinstance(value, _PLAIN) and name not in _REGISTRIES
            ]
            self._hold(_of_namespace(vars(module), f"{path}.", plain))
        if module._modules or self._is_ours(module):
            yield from self._hold(_of_container(module._modules, f"{path}.", dict))
        for name in _HOOKS:
            yield from ((hook, path) for hook in list(vars(module).get(name, {}).values()))

    def _keep_tensor(self, tensor: torch.Tensor, path: str) -> None:
        """Register a tensor without gradient, unless it is the model's, whose copy the snapshot has."""
        is_simple = type(tensor) is torch.Tensor and not tensor.requires_grad and tensor.device.type != "meta"
        if is_simple and isinstance(copy := self.copies.keep(tensor, take=False), TensorCopy):
            self._tensors[id(tensor)] = path, copy, tensor._version

    def _keep_array(self, array: Any, path: str) -> None:
        if (
            array.nbytes > COPIED_BYTES
            or array.dtype.hasobject
            or not array.flags.writeable
            or isinstance(array, np.memmap)
        ):
            return

        def write(before: Any) -> None:
            array[...] = before

        self._innards.append(Innards(path, "an array", array.copy, write, is_small=array.nbytes <= SMALL_BYTES))

    def _take(self, left_bytes: int) -> None:
        """Copy the tensors that are small, and others as far as `left_bytes` goes."""
        for _, copy, _ in self._tensors.values():
            nbytes, tensor = copy.storage.nbytes, copy.find()
            if tensor is not None and not copy.storage.is_taken and nbytes <= max(SMALL_BYTES, left_bytes):
                left_bytes -= nbytes if nbytes > SMALL_BYTES else 0
                copy.storage.take(tensor.untyped_storage())


# --- kinds of holders ---


def _of_namespace(
    namespace: dict[str, Any],
    path: str,
    names: Iterable[str] | None = None,
    *,
    without: frozenset[str] = frozenset(),
    owner: object = None,
) -> Holder:
    """Return the holder of the attributes or globals in `namespace`; with `names`, of these only."""

    def read() -> dict[Any, Any]:
        if names is not None:
            return {name: namespace[name] for name in names if name in namespace}
        return {name: value for name, value in list(namespace.items()) if name not in without}

    def write(before: dict[Any, Any], now: dict[Any, Any]) -> None:
        for name in now.keys() - before.keys():
            namespace.pop(name, None)
        namespace.update(before)

    return Holder(path, read, write, owner=owner)


def _of_class(kind: type) -> Holder:
    def write(before: dict[Any, Any], now: dict[Any, Any]) -> None:
        for name in now.keys() - before.keys():
            type.__delattr__(kind, name)
        for name, value in before.items():
            if now.get(name, _MISSING) is not value:
                type.__setattr__(kind, name, value)

    def read() -> dict[Any, Any]:
        return {name: value for name, value in vars(kind).items() if not name.startswith(("__", "_abc_"))}

    return Holder(f"{kind.__name__}.", read, write)


def _of_slots(owner: object, slots: dict[str, Any], path: str) -> Holder:
    def read() -> dict[Any, Any]:
        found = {}
        for name, member in slots.items():
            with suppress(AttributeError):  # not set
                found[name] = member.__get__(owner)
        return found

    def write(before: dict[Any, Any], now: dict[Any, Any]) -> None:
        for name in now.keys() - before.keys():
            slots[name].__delete__(owner)
        for name, value in before.items():
            slots[name].__set__(owner, value)

    return Holder(path, read, write, owner=owner)


def _of_container(container: Any, path: str, base: Any) -> Holder:
    """Return the holder of a dict, list, set or deque; the methods of `base` change it, not those of a user's subclass."""

    def read() -> dict[Any, Any]:
        if isinstance(container, dict):
            return dict(base.items(container))
        return {one: one for one in container} if isinstance(container, set) else dict(enumerate(container))

    def write(before: dict[Any, Any], now: dict[Any, Any]) -> None:
        base.clear(container)
        for key, value in before.items():
            if isinstance(container, dict):
                base.__setitem__(container, key, value)
            else:
                (base.add if isinstance(container, set) else base.append)(container, value)

    return Holder(path, read, write, owner=container)


def _contents(cells: dict[Any, types.CellType]) -> dict[Any, Any]:
    found = {}
    for name, cell in cells.items():
        with suppress(ValueError):  # it is empty
            found[name] = cell.cell_contents
    return found


def _fill(cells: dict[Any, types.CellType], before: dict[Any, Any]) -> None:
    for name, cell in cells.items():
        if name in before:
            cell.cell_contents = before[name]
        else:
            del cell.cell_contents


def _generator(value: Any, path: str) -> Innards:
    kind = "a random number generator"
    if isinstance(value, random.Random):
        return Innards(path, kind, value.getstate, value.setstate)
    if isinstance(value, np.random.RandomState):
        return Innards(path, kind, value.get_state, value.set_state)
    if isinstance(value, torch.Generator):
        return Innards(path, kind, value.get_state, value.set_state)
    return Innards(
        path, kind, lambda: value.bit_generator.state, lambda state: setattr(value.bit_generator, "state", state)
    )


# --- what values are ---


def _package(value: Any) -> str:
    """Return the top-level package of a step or a class; "" for the standard library, torch and oomprobe."""
    value = getattr(value, "__func__", getattr(value, "func", value))
    name = getattr(value, "__module__", None) or type(value).__module__
    package = str(name).partition(".")[0]
    return "" if package in LIBRARIES else package


def _is_iterator(value: Any) -> bool:
    return hasattr(type(value), "__next__")


def _is_source(value: Any) -> bool:
    """Return whether a value hands out data one after another, so that counters beside it must agree with its position."""
    return _is_iterator(value) or type(value).__module__ in ("queue", "_queue", "multiprocessing.queues")


def _plain(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value
    return len(value) if isinstance(value, dict | list | set | deque) else None


def _fingerprint(value: Any) -> Any:
    """Return what shows that an object of a library has changed; `_UNKNOWN` for an iterator that shows nothing."""
    if isinstance(value, functools._lru_cache_wrapper):
        return value.cache_info().currsize
    if isinstance(value, io.IOBase):
        return None if value.closed or not value.seekable() else value.tell()
    if hasattr(value, "__dict__") and not isinstance(value, type | types.ModuleType):
        hides = not _is_iterator(value)  # private attributes, such as caches
        return {name: _plain(one) for name, one in list(vars(value).items()) if not (hides and name.startswith("_"))}
    if not _is_iterator(value):
        return bytes(value) if isinstance(value, array.array | bytearray) else None
    if isinstance(value, itertools.count | itertools.repeat):
        return repr(value)
    left = operator.length_hint(value, -1)
    return _UNKNOWN if left < 0 else left


def _kind(value: Any) -> str:
    if _is_iterator(value) and not isinstance(value, io.IOBase):
        return "an iterator"
    if isinstance(value, torch.Tensor | Graph):
        return "a tensor"
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
