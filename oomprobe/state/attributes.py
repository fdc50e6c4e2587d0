"""What an object holds by name, in its ``__dict__`` and in its slots, past whatever its class makes of attributes."""

from __future__ import annotations

from types import MemberDescriptorType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oomprobe.state.kept import Kept


def attributes_of(value: Any) -> dict[str, Any]:
    """By name; properties are not asked, for what they do is not known.

    Example:
        >>> from types import SimpleNamespace
        >>> attributes_of(SimpleNamespace(a=1))
        {'a': 1}
    """
    found: dict[str, Any] = {}
    for name, slot in _slots(value).items():
        try:
            found[name] = slot.__get__(value)
        except AttributeError:  # never set
            continue
    return found | getattr(value, "__dict__", {})


def set_attribute(value: Any, name: str, part: Any) -> None:
    """Also of a frozen dataclass."""
    slot = _slots(value).get(name)
    if slot is None:
        vars(value)[name] = part
    else:
        slot.__set__(value, part)


def delete_attribute(value: Any, name: str) -> None:
    """Take it away."""
    slot = _slots(value).get(name)
    if slot is None:
        del vars(value)[name]
    else:
        slot.__delete__(value)


def _slots(value: Any) -> dict[str, MemberDescriptorType]:
    """Of its class and of all classes above."""
    kinds = [kind for kind in type(value).__mro__ if "__slots__" in vars(kind)]
    members = [pair for kind in kinds for pair in vars(kind).items()]
    return {name: member for name, member in members if isinstance(member, MemberDescriptorType)}


class KeptAttributes:
    """Attributes as they were. Whose they are is not held, so that it may die."""

    def __init__(self, parts: dict[str, Kept], ignored: frozenset[str] = frozenset()) -> None:
        self.parts = parts
        self._ignored = ignored

    def put_back(self, value: Any) -> None:
        """Restore all that can be; raises the first error after that."""
        now, errors = self._now(value), []
        for name in [*now, *self.parts]:
            try:
                self._put_back(value, name, now)
            except Exception as error:  # of one attribute: the rest is still to be restored
                errors.append(error)
        if errors:
            raise errors[0]

    def _put_back(self, value: Any, name: str, now: dict[str, Any]) -> None:
        if name not in self.parts:
            delete_attribute(value, name)
            return
        before = self.parts[name].recall()
        if name not in now or now[name] is not before:
            set_attribute(value, name, before)

    def changed(self, value: Any) -> set[str]:
        """The names of those that are not as they were."""
        now = self._now(value)
        differing = {name for name in now.keys() & self.parts.keys() if self.parts[name].differs(now[name])}
        return differing | (now.keys() ^ self.parts.keys())

    def on_host(self) -> dict[str, Any]:
        """As they were, in host memory."""
        return {name: part.on_host() for name, part in self.parts.items()}

    def _now(self, value: Any) -> dict[str, Any]:
        return {name: part for name, part in attributes_of(value).items() if name not in self._ignored}
