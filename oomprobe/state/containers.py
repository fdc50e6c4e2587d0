"""Python's containers by the methods of their base classes: a subclass may have overridden its own, to count or refuse."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

_BASES: tuple[type[Any], ...] = (OrderedDict, defaultdict, dict, list, tuple)


def _base(value: object) -> Any:
    return next(base for base in _BASES if isinstance(value, base))


def entries(value: Any) -> dict[Any, Any]:
    """What a dict, list or tuple holds, by key or index."""
    if isinstance(value, dict):
        return dict(_base(value).items(value))
    return dict(enumerate(_base(value).__iter__(value)))


def same_keys(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    """Whether two have the same keys in the same order; keys may be tensors, which do not answer to ``==``."""
    return len(one) == len(other) and all(
        a is b or (hash(a) == hash(b) and a in other and b in one) for a, b in zip(one, other, strict=True)
    )


def refill(value: Any, parts: dict[Any, Any]) -> Any:
    """Give a container its old contents, keeping the container itself; what has not changed is not written."""
    now = entries(value)
    if len(now) == len(parts) and all(
        j is k and a is b for (j, a), (k, b) in zip(now.items(), parts.items(), strict=True)
    ):
        return value
    if isinstance(value, tuple):
        return _tuple_of(type(value), parts.values())
    _fill(value, parts)
    return value


def _fill(value: Any, parts: dict[Any, Any]) -> None:
    base = _base(value)
    if base is list:
        list.__setitem__(value, slice(None), list(parts.values()))
        return
    base.clear(value)
    for key, part in parts.items():
        base.__setitem__(value, key, part)


def _tuple_of(kind: type[Any], parts: Iterable[Any]) -> Any:
    """A named tuple past its constructor, which may want other arguments; C's own kinds through theirs."""
    parts = list(parts)
    try:
        return tuple.__new__(kind, parts)
    except TypeError:
        return kind(parts)


def rebuilt(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """The same containers, of the same types, with other leaves.

    Example:
        >>> rebuilt(OrderedDict(a=[1, (2,)]), str)
        OrderedDict([('a', ['1', ('2',)])])
    """
    if isinstance(value, deque):
        return deque((rebuilt(part, leaf) for part in value), value.maxlen)
    if not isinstance(value, dict | list | tuple):
        return leaf(value)
    parts = {key: rebuilt(part, leaf) for key, part in entries(value).items()}
    if isinstance(value, tuple):
        return _tuple_of(type(value), parts.values())
    made = _empty_like(value)
    if getattr(made, "__dict__", None) is not None:
        vars(made).update({name: rebuilt(part, leaf) for name, part in vars(value).items()})
    _fill(made, parts)
    return made


def _empty_like(value: Any) -> Any:
    base = _base(value)
    try:
        made = base.__new__(type(value))
    except TypeError:  # a kind of C's own
        return base()
    if isinstance(value, defaultdict):
        made.default_factory = value.default_factory
    return made
