"""A digest of what a function does, as far as its code and its simple values tell: the same in every process.

No address, line number or file path is in it, so a file may move. Docstrings are constants of the code, and count.
"""

from __future__ import annotations

import dis
import hashlib
import inspect
import json
from collections.abc import Mapping
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

_SIMPLE = (int, float, complex, bool, str, bytes, type(None), type(...))
_STORES = {"STORE_GLOBAL", "STORE_DEREF", "STORE_ATTR"}


def digest(value: object) -> str:
    """The sha256 of what `described` says."""
    return hashlib.sha256(json.dumps(described(value)).encode()).hexdigest()


def described(value: object) -> Any:
    """JSON types that say what a value is; total.

    Of a function: its code, its defaults, and the simple values (numbers, strings, bools, None, tuples of them) and the
    functions of its own package that it closes over or names. What it also assigns is a count, not a setting, and is left
    out. Of anything else that is not simple: the name of its type.

    Example:
        >>> described((1, "a", object()))
        ['tuple', ['int', '0x1'], ['str', "'a'"], ['object']]
    """
    try:
        return _Described(_package(value)).of(value)
    except Exception:  # an object may fail at whatever it is asked
        return [_type_name(value)]


def function_of(value: Any) -> Any:
    """What is called in the end: the function inside partials and a bound method; of an object, the object."""
    while isinstance(value, partial | MethodType):
        value = value.func if isinstance(value, partial) else value.__func__
    return value


class _Described:
    """Describes values for one root function.

    Args:
        package: Whose functions are looked into, and no library's.
    """

    def __init__(self, package: str) -> None:
        self._package = package
        self._seen: set[int] = set()  # functions may name each other

    def of(self, value: Any) -> Any:
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, partial):
            return ["partial", self.of(value.func), self.of(value.args), self._named(value.keywords)]
        if isinstance(value, MethodType):
            return ["method", self.of(value.__func__), self._settings(value.__self__, function_of(value))]
        call = _call_of(value)
        if isinstance(call, FunctionType):
            return ["object", self.of(call), self._settings(value, call)]
        if getattr(value, "__wrapped__", None) is not None:  # a wrapper of C, such as functools.lru_cache
            return [_type_name(value), self.of(value.__wrapped__)]
        return self._value(value)

    def _value(self, value: Any) -> Any:
        if isinstance(value, CodeType):
            return self._code(value)
        if type(value) is tuple:
            return ["tuple", *(self._value(one) for one in value)]
        if type(value) is frozenset:  # in an order of its own in each process
            return ["frozenset", *sorted((self._value(one) for one in value), key=json.dumps)]
        if type(value) not in _SIMPLE:
            return [_type_name(value), *([value.__qualname__] if inspect.isbuiltin(value) else [])]
        text = hex(value) if type(value) is int else repr(value)  # Python refuses to write long integers in tens
        return [type(value).__name__, text]

    def _code(self, code: CodeType) -> Any:
        return [
            code.co_name,
            code.co_code.hex(),
            code.co_exceptiontable.hex(),
            [code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags],
            list(code.co_names),
            [self._value(constant) for constant in code.co_consts],
        ]

    def _function(self, function: FunctionType) -> Any:
        if id(function) in self._seen:
            return ["again", function.__qualname__]
        self._seen.add(id(function))
        assigned, named = _names(function.__code__)
        closure = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        cells = {name: cell.cell_contents for name, cell in closure if _is_filled(cell)}
        there = {name: function.__globals__[name] for name in sorted(named) if name in function.__globals__}
        return [
            self._code(function.__code__),
            self._value(function.__defaults__),
            self._named(function.__kwdefaults__ or {}),
            self._telling(cells, assigned),
            self._telling(there, assigned),
        ]

    def _settings(self, owner: object, function: Any) -> Any:
        """Simple attributes that a method names and does not assign."""
        assigned, named = _names(function.__code__) if isinstance(function, FunctionType) else (set(), set())
        attributes = getattr(owner, "__dict__", {})
        there = {name: attributes[name] for name in sorted(named) if name in attributes}
        return [_type_name(owner), self._telling(there, assigned)]

    def _telling(self, values: Mapping[str, Any], assigned: set[str]) -> Any:
        described = {}
        for name, value in values.items():
            if isinstance(value, FunctionType):
                described[name] = self._function(value) if _package(value) == self._package else value.__qualname__
            elif name not in assigned and _is_simple(value):
                described[name] = self._value(value)
        return described

    def _named(self, values: Mapping[str, Any]) -> Any:
        return {name: self._value(value) for name, value in sorted(values.items())}


def _names(code: CodeType) -> tuple[set[str], set[str]]:
    """Names that code assigns, and all that it names, with the functions inside it."""
    assigned = {str(one.argval) for one in dis.get_instructions(code) if one.opname in _STORES}
    named = set(code.co_names)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            more_assigned, more_named = _names(inner)
            assigned, named = assigned | more_assigned, named | more_named
    return assigned, named


def _is_simple(value: object) -> bool:
    return all(map(_is_simple, value)) if type(value) is tuple else type(value) in _SIMPLE


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # of a variable that is assigned later
        return False


def _package(value: object) -> str:
    """Where a function was written; a decorator's wrapper only says that it is of the module it wraps."""
    function = function_of(value)
    function = inspect.unwrap(function) if isinstance(function, FunctionType) else _call_of(function)
    return str(getattr(function, "__globals__", {}).get("__name__")).partition(".")[0]


def _call_of(value: object) -> Any:
    """What calling an object calls: of its class, since its own attributes may be anything."""
    return getattr(type(value), "__call__", None)  # noqa: B004


def _type_name(value: object) -> str:
    return type(value).__qualname__
