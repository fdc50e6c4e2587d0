"""References to what the user's code holds. They keep nothing alive, so that what a step lets go of is freed as in training."""

from __future__ import annotations

import sys
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any

import torch

from oomprobe.ground.units import known

# What reads the values that something holds, by key, and what identifies the place of a key.
Holder = tuple[Callable[[], Any], Callable[[Any], object]]
MISSING = object()
REGISTRIES = ("_parameters", "_buffers", "_modules")
HOOKS = tuple(
    name
    for name, value in vars(torch.nn.Module()).items()
    if isinstance(value, dict | set) and name not in REGISTRIES
)
_MAKERS = {object, dict, list, set, tuple, deque, OrderedDict, types.SimpleNamespace}


def _maker(kind: type) -> type:
    """Return the class written in C whose ``__new__`` makes objects of a class."""
    return next(
        base
        for base in kind.__mro__
        if isinstance(vars(base).get("__new__"), types.BuiltinFunctionType)
    )


def is_made_in_python(kind: type) -> bool:
    """Return whether all that objects of a class hold is in their items, attributes and slots, and none of it only in C.

    Examples:
        >>> is_made_in_python(defaultdict), is_made_in_python(zip)
        (True, False)
    """
    return _maker(kind) in _MAKERS


def slots_of(kind: type) -> dict[str, types.MemberDescriptorType]:
    """Return the slots of a class, by name; not the members of classes written in C, which may be new objects at each read."""
    slots = {}
    for base in kind.__mro__:
        if "__slots__" in vars(base):
            for name, member in vars(base).items():
                if isinstance(member, types.MemberDescriptorType):
                    slots[name] = member
    return slots


def hooks_of(module: torch.nn.Module) -> dict[str, Any]:
    """Return what a module keeps its hooks and the like in, by name; one from a file of an older torch lacks some."""
    attributes = vars(module)
    return {name: attributes[name] for name in HOOKS if name in attributes}


def keyed(container: Any) -> Iterable[tuple[Any, Any]]:
    """Return what a container holds, with the key or position of each."""
    return container.items() if isinstance(container, dict) else enumerate(container)


def weak(tensor: torch.Tensor) -> Callable[[], torch.Tensor | None]:
    """Return a reference that does not keep a tensor alive; it can outlive its Python object, which is then made anew."""
    reference, is_old = weakref.ref(tensor), hasattr(tensor, "_fix_weakref")

    def find() -> torch.Tensor | None:
        alive = reference()
        if is_old and alive is not None:
            alive._fix_weakref()  # type: ignore[attr-defined]
        return alive

    return find


def _lacks_one(parts: Iterable[Any]) -> bool:
    """Return whether a part is missing; by `is`, since arrays compare their items."""
    return any(part is MISSING for part in parts)


def gradient_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of a leaf; torch warns of any other tensor that is asked for one."""
    return tensor.grad if tensor.is_leaf else None


class Saved:
    """A stand-in for a saved value, which the step may have freed since."""

    find: Callable[[], Any]  # returns the value; None if it is gone

    def refers_to(self, value: Any) -> bool:
        """Return whether a value is the saved one."""
        raise NotImplementedError


def refers_to(before: Any, now: Any) -> bool:
    """Return whether a value is the one that was saved."""
    if isinstance(before, Saved):
        return before.refers_to(now)
    return before is now


class Reference(Saved):
    """A reference to an object or a container of the user's.

    It is strong until `let_go`. After that, `find` returns the object while the user's code holds it, and `restore` makes it
    anew if it is gone, empty but for the items of a tuple: its places fill it. Lists, dicts and tuples have no weak
    references. One is found where it was held at the start, if nothing else held it then; if something else did, such
    as a variable of a caller, it lives as long as in training anyway, and the reference stays strong.

    Attributes:
        kind: The class of the object.
        first_id: Its id when the reference was made.
    """

    def __init__(self, value: Any, *, is_strong: bool = False) -> None:
        self.kind, self.first_id = type(value), id(value)
        self._id, self._value = self.first_id, value
        self._weak: Callable[[], Any] | None = None
        # What its class does when it is freed, such as closing a file, could not be taken back.
        self._is_strong = (
            is_strong or hasattr(self.kind, "__del__") or not is_made_in_python(self.kind)
        )
        self._held_by: list[
            tuple[Callable[[], Any], Any]
        ] = []  # how to read each holder, and the key there
        self._is_looking = False
        self._parts: list[Any] = []  # of a tuple, as `saved` returns them

    def held_by(self, read: Callable[[], Any], key: Any) -> None:
        """Take note of one place where the object is held: `read` returns what the holder holds, by key or position."""
        self._held_by.append((read, key))

    def stay_strong(self) -> None:
        """Keep the object alive for good, since not all that it holds could be put into a new one."""
        self._is_strong = True

    def let_go(self, save: Callable[[Any], Any]) -> None:
        """Stop keeping the object alive, if it can be found and made anew.

        `save` returns what to save of an item of a tuple, or `MISSING` if that could not be made anew.
        """
        value = self._value
        if self._is_strong:
            return
        try:
            self._weak = weakref.ref(value)
        except TypeError:  # lists, dicts, tuples and classes with __slots__ have no weak references
            if sys.getrefcount(value) - _OWN_REFERENCES > len(self._held_by):
                self._is_strong = True
                return
        if isinstance(value, tuple):
            parts = [*map(save, value)]
            if _lacks_one(parts):
                self._is_strong = True
                return
            self._parts = parts
        self._prepare = _preparation(value)
        self._weak_cells = list(_weak_cells(value))
        self._value = None

    def let_go_again(self) -> None:
        """Stop keeping alive what `restore` made."""
        if not self._is_strong:
            self._value = None

    def find(self) -> Any:
        """Return the object; None if it is gone."""
        if self._value is not None:
            return self._value
        if self._weak is not None:
            return self._weak()
        if self._is_looking:  # it is among what it holds
            return None
        self._is_looking = True
        try:
            return self._find_where_held()
        finally:
            self._is_looking = False

    def _find_where_held(self) -> Any:
        for read, key in self._held_by:
            values = read()
            if isinstance(values, dict):
                values = [values[key]] if key in values else values.values()
            elif isinstance(values, list) and key < len(values):
                values = chain([values[key]], values)  # unless it has moved, it is the first
            for value in values:
                if self.refers_to(value):
                    return value
        return None

    def refers_to(self, value: Any) -> bool:
        """Return whether a value is the object.

        Another list or dict that the step made may have the id of one that is gone: then it takes its place, and its
        contents. A tuple cannot: it has to hold what this one held.
        """
        if self._weak is not None:
            return value is not None and self._weak() is value
        if id(value) != self._id or type(value) is not self.kind:
            return False
        return not self._parts or all(map(refers_to, self._parts, value))

    def restore(self, get: Callable[[Any], Any]) -> Any:
        """Return the object, made anew if it is gone, and then kept alive until `let_go_again`.

        `get` returns what stands for an item of a tuple, or `MISSING`; then this does so too.
        """
        value = self.find()
        if value is not None:
            return value
        new: Any = _maker(self.kind).__new__
        if issubclass(self.kind, tuple):
            parts = [*map(get, self._parts)]
            if _lacks_one(parts):
                return MISSING
            value = new(self.kind, parts)
        else:
            value = new(self.kind)
        self._prepare(value)
        self._value, self._id = value, id(value)
        if self._weak is not None:
            self._weak = weakref.ref(value)
        for cell in self._weak_cells:
            cell.cell_contents = weakref.ref(value)
        return value


def _preparation(value: Any) -> Callable[[Any], object]:
    """Return what gives a new object what `__new__` does not, as this one has it."""
    if isinstance(value, defaultdict):
        factory = value.default_factory
        return lambda new: defaultdict.__init__(new, factory)
    if isinstance(value, deque):
        return partial(deque.__init__, maxlen=value.maxlen)
    if isinstance(value, torch.nn.Module):
        kinds = {name: type(vars(value)[name]) for name in (*REGISTRIES, *hooks_of(value))}
        return lambda new: vars(new).update({name: kind() for name, kind in kinds.items()})
    return lambda new: None


class BoundMethod(Saved):
    """A bound method, whose object it does not keep alive."""

    def __init__(self, method: types.MethodType, owner: Reference) -> None:
        self._function, self._owner = method.__func__, owner

    def refers_to(self, value: Any) -> bool:
        """Return whether a value is this method of the same object."""
        is_method = isinstance(value, types.MethodType) and value.__func__ is self._function
        return is_method and self._owner.refers_to(value.__self__)

    def find(self) -> types.MethodType | None:
        """Return the method; None if its object is gone."""
        owner = self._owner.find()
        return None if owner is None else types.MethodType(self._function, owner)

    def restore(self, get: Callable[[Any], Any]) -> Any:
        """Return the method; of an object that is gone, it is that of the object made anew, or `MISSING` if that is."""
        owner = self._owner.restore(get)
        return MISSING if owner is MISSING else types.MethodType(self._function, owner)


def _weak_cells(value: object) -> Iterator[types.CellType]:
    """Yield where functions among an object's attributes refer to it weakly, as torch's schedules make an optimizer's ``step``."""
    for function in getattr(value, "__dict__", {}).values():
        if isinstance(function, types.FunctionType):
            for cell in function.__closure__ or ():
                with suppress(ValueError):  # it is empty
                    reference = cell.cell_contents
                    if isinstance(reference, weakref.ref) and reference() is value:
                        yield cell


class References:
    """The references to all that the user's code held when tracking began."""

    def __init__(self) -> None:
        self._by_id: dict[int, Reference] = {}  # by the ids that the objects had then

    def add(self, reference: Reference) -> None:
        self._by_id[reference.first_id] = reference

    def to(self, value: object) -> Reference | None:
        """Return the reference to an object; None if it has none."""
        reference = self._by_id.get(id(value))
        if reference is None or reference.find() is not value:
            return None
        return reference

    def alive(self, kind: type) -> Iterator[Any]:
        """Yield the objects of a class that are there."""
        of_kind = [one for one in self._by_id.values() if issubclass(one.kind, kind)]
        yield from known(reference.find() for reference in of_kind)

    def let_go(self, holders: Iterable[Holder], save: Callable[[Any], Any]) -> None:
        """Keep nothing alive any more that a step may let go of; `holders` are all from which it can be taken and put back."""
        noted = set[object]()
        for read, slot in holders:
            for key, value in keyed(read()):
                reference = self.to(value)
                if (
                    reference is not None and slot(key) not in noted
                ):  # several functions may use one variable
                    noted.add(slot(key))
                    reference.held_by(read, key)
        value = None
        for reference in self._by_id.values():
            reference.let_go(save)

    def let_go_again(self) -> None:
        """Keep nothing alive that was made anew."""
        for reference in self._by_id.values():
            reference.let_go_again()


def own_references(reference: Reference) -> int:
    """Count the references to an object that `let_go` itself makes, which differ between versions of Python."""
    value = reference._value
    return sys.getrefcount(value)


_OWN_REFERENCES = own_references(Reference([]))
