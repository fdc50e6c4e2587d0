"""What holds other values, kept with what was in it: containers, and objects that are looked into."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from oomprobe.state.attributes import KeptAttributes, set_attribute
from oomprobe.state.containers import entries, refill, same_keys
from oomprobe.state.kept import Kept


class KeptContainer:
    """A dict, list or tuple and everything in it."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self.parts: dict[Any, Kept] = {}
        self.attributes = KeptAttributes({})  # a subclass may have some
        self._busy = False  # a container may contain itself

    def recall(self) -> Any:
        if self._busy:
            return self._value
        self._busy = True
        try:
            parts, errors = self._recalled()
            self.attributes.put_back(self._value)
        finally:
            self._busy = False
        self._value = refill(self._value, parts)
        if errors:
            raise errors[0]
        return self._value

    def _recalled(self) -> tuple[dict[Any, Any], list[Exception]]:
        """Its parts; one that cannot be restored is left as it is now."""
        now, parts, errors = entries(self._value), {}, []
        for key, part in self.parts.items():
            try:
                parts[key] = part.recall()
            except Exception as error:  # of one part: the rest is still to be restored
                errors.append(error)
                parts |= {key: now[key]} if key in now else {}
        return parts, errors

    def differs(self, value: Any) -> bool:
        if self._busy:
            return False
        if value is not self._value:
            return True
        now = entries(value)
        if not same_keys(now, self.parts):
            return True
        self._busy = True
        try:
            parts = zip(self.parts.values(), now.values(), strict=True)
            return any(part.differs(one) for part, one in parts) or bool(self.attributes.changed(value))
        finally:
            self._busy = False

    def on_host(self) -> dict[Any, Any]:
        """Its parts by key or index (a container inside itself is left out)."""
        if self._busy:
            return {}
        self._busy = True
        try:
            return {key: part.on_host() for key, part in self.parts.items()}
        finally:
            self._busy = False


class KeptInside:
    """An object with what it holds. It is watched, as tensors are; made anew, past its constructor, where it has died."""

    def __init__(self, value: Any) -> None:
        self._kind = type(value)
        self._watch = watching(value)
        self.attributes = KeptAttributes({})
        self._busy = False

    def recall(self) -> Any:
        value = self._watch()
        if value is None:
            value = made = object.__new__(self._kind)
            self._watch = lambda: made
        if not self._busy:
            self._busy = True
            try:
                self.attributes.put_back(value)
            finally:
                self._busy = False
        return value

    def differs(self, value: Any) -> bool:
        if self._busy:
            return False
        self._busy = True
        try:
            return value is not self._watch() or bool(self.attributes.changed(value))
        finally:
            self._busy = False

    def on_host(self) -> Any:
        """Another one with the same attributes."""
        made = object.__new__(self._kind)
        if not self._busy:
            self._busy = True
            try:
                for name, part in self.attributes.on_host().items():
                    set_attribute(made, name, part)
            finally:
                self._busy = False
        return made


def watching(value: Any) -> Callable[[], Any]:
    """A weak reference, or where its class has no room for one, a strong one."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value
