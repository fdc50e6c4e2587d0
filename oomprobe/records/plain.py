"""Records from plain data, such as JSON, read by the annotations of their fields."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from enum import StrEnum
from functools import cache, partial
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from oomprobe.errors import InvalidArgumentError
from oomprobe.ground.units import LARGEST_BYTES
from oomprobe.ground.words import clean, clip
from oomprobe.records.kinds import Bytes, Plain, Samples

T = TypeVar("T")
MOST_DEPTH = 20  # of lists in lists
LARGEST = 1e30  # of other numbers; NaN is not smaller either


_kinds_of = cache(partial(get_type_hints, include_extras=True))  # of the fields of a class


def _is_shown(value: Any, *kinds: type) -> bool:
    return type(value) in kinds and abs(value) <= LARGEST


# What a value must be, and whether it is.
_CHECKS: Mapping[Any, tuple[str, Callable[[Any], bool]]] = {
    bool: ("true or false", lambda value: isinstance(value, bool)),
    str: ("a text", lambda value: isinstance(value, str)),
    int: ("a whole number", lambda value: _is_shown(value, int)),
    float: ("a number", lambda value: _is_shown(value, int, float)),
    Bytes: ("a number of bytes", lambda value: type(value) is int and 0 <= value <= LARGEST_BYTES),
    Samples: ("a batch size", lambda value: type(value) is int and 1 <= value <= LARGEST_BYTES),
}


def from_plain(cls: type[T], data: Any, place: str = "") -> T:
    """Return the dataclass that `dataclasses.asdict`, and then perhaps JSON, made plain.

    It leaves out keys that are no field: a newer oomprobe with the same schema may have written more.
    `place` is where the data stand in their file.

    Raises:
        InvalidArgumentError: the data lack a field without a default, or have another kind of value.

    Examples:
        >>> from oomprobe.records.breakdown import ModuleMemory
        >>> data = {"name": "a", "kind": "b", "count": 1, "activation_bytes": 2, "of_later": 3}
        >>> from_plain(ModuleMemory, data)
        ModuleMemory(name='a', kind='b', count=1, activation_bytes=2, parameter_bytes=0)
        >>> from_plain(ModuleMemory, {**data, "count": "x"}, "modules[3]")
        Traceback (most recent call last):
        oomprobe.errors.InvalidArgumentError: modules[3].count is "x", not a whole number
    """
    _require(data, place, Mapping, "an object")
    given = {}
    for name, kind in _kinds_of(cls).items():  # type: ignore[arg-type]  # a class has a hash
        if name in data:
            given[name] = _read_value(kind, data[name], f"{place}.{name}")
    try:
        return cls(**given)
    except TypeError as error:
        raise InvalidArgumentError(f"{_named_place(place)} is no {cls.__name__}: {error}") from None


def _read_value(kind: Any, value: Any, place: str) -> Any:
    """Return a value as its annotation wants it; what is annotated `Any` stays as it is."""
    if kind in _CHECKS:
        wanted, holds = _CHECKS[kind]
        if not holds(value):
            raise _wrong(value, place, wanted)
        return value
    if kind == Plain:
        require_plain(value, place)
        return value
    outer, inner = get_origin(kind), get_args(kind)
    if outer in (Union, UnionType):  # such as `int | None`
        if value is None:
            return None
        return _read_value(inner[0], value, place)
    if outer in (tuple, Sequence):
        _require(value, place, list | tuple, "a list")
        return tuple(_read_value(inner[0], item, f"{place}[{at}]") for at, item in enumerate(value))
    if outer is Mapping:
        _require(value, place, Mapping, "an object")
        return {
            name: _read_value(inner[1], item, f"{place}.{name}") for name, item in value.items()
        }
    if not isinstance(kind, type):
        return value
    if is_dataclass(kind):
        return from_plain(kind, value, place)
    if issubclass(kind, StrEnum):
        if value not in [*kind]:
            raise _wrong(value, place, f"one of {', '.join(kind)}")
        return kind(value)
    return value


def require_plain(value: Any, place: str, depth: int = 0) -> None:
    """Raise InvalidArgumentError unless JSON has such a value, and its numbers can be shown."""
    if depth > MOST_DEPTH:
        raise InvalidArgumentError(
            f"{_named_place(place)} has more than {MOST_DEPTH} lists in each other"
        )
    match value:
        case None | bool() | str():
            pass
        case list() | tuple():
            for at, item in enumerate(value):
                require_plain(item, f"{place}[{at}]", depth + 1)
        case Mapping():
            for name, item in value.items():
                require_plain(item, f"{place}.{name}", depth + 1)
        case _:
            _read_value(float, value, place)


def require_at_most(most: int, items: Sequence[object], place: str) -> None:
    """Raise InvalidArgumentError for a list that would take minutes to show."""
    if len(items) > most:
        raise InvalidArgumentError(
            f"{_named_place(place)} has {len(items):,} items, more than {most:,}"
        )


def _require(value: Any, place: str, kind: Any, wanted: str) -> None:
    if not isinstance(value, kind):
        raise _wrong(value, place, wanted)


def _wrong(value: Any, place: str, wanted: str) -> InvalidArgumentError:
    """Return the error for a value that is none of those wanted."""
    match value:
        case list() | tuple():
            shown = "a list"
        case Mapping():
            shown = "an object"
        case _:
            shown = json.dumps(value, default=repr)
    return InvalidArgumentError(f"{_named_place(place)} is {clip(shown, 60)}, not {wanted}")


def _named_place(place: str) -> str:
    return clip(clean(place.removeprefix(".")), 200) or "it"


@contextmanager
def reading(what: str, data: object, version: int) -> Iterator[None]:
    """Refuse data of another schema version, or that cannot be read."""
    written_with = None
    if isinstance(data, Mapping):
        written_with = data.get("schema_version")
    if written_with != version:
        raise InvalidArgumentError(
            f"this {what} has schema_version {written_with!r:.60}; this oomprobe reads {version}: run "
            "the probe again, or read it with the oomprobe that wrote it"
        )
    try:
        yield
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"this is not a {what} that oomprobe wrote: {error}") from None
