"""Records from plain data, such as JSON, read by the annotations of their fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from enum import StrEnum
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from oomprobe.errors import InvalidArgumentError

T = TypeVar("T")


def from_plain(cls: type[T], data: Mapping[str, Any]) -> T:
    """Return the dataclass that `dataclasses.asdict`, and then perhaps JSON, made plain.

    It leaves out keys that are no field: a newer oomprobe with the same schema may have written more.

    Raises:
        KeyError, TypeError, ValueError: the data lack a field without a default, or are of another form.

    Examples:
        >>> from oomprobe.records.breakdown import ModuleMemory
        >>> from_plain(ModuleMemory, {"name": "a", "kind": "b", "count": 1, "activation_bytes": 2, "invented_later": 3})
        ModuleMemory(name='a', kind='b', count=1, activation_bytes=2, parameter_bytes=0)
    """
    given = {}
    for name, kind in get_type_hints(cls).items():
        if name in data:
            given[name] = _read(kind, data[name])
    return cls(**given)


def _read(kind: Any, value: Any) -> Any:
    """Return a value as its annotation wants it; a number, a text, or anything that is annotated otherwise stays as it is."""
    outer, inner = get_origin(kind), get_args(kind)
    if outer is UnionType:  # such as `int | None`
        if value is None:
            return None
        return _read(inner[0], value)
    if outer in (tuple, Sequence):
        return tuple(_read(inner[0], item) for item in value)
    if not isinstance(kind, type):
        return value
    if is_dataclass(kind):
        return from_plain(kind, value)
    if issubclass(kind, StrEnum):
        return kind(value)
    return value


@contextmanager
def reading(what: str, data: object, version: int) -> Iterator[None]:
    """Refuse data of another schema version, or that cannot be read."""
    written_with = None
    if isinstance(data, Mapping):
        written_with = data.get("schema_version")
    if written_with != version:
        raise InvalidArgumentError(
            f"this {what} has schema_version {written_with!r}; this oomprobe reads {version}: run the probe again, or read it with "
            "the oomprobe that wrote it"
        )
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"this is not a {what} that oomprobe wrote: {error!r}"
        ) from error
