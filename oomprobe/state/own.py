"""Which code is the user's own, and what it names."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from itertools import accumulate

_LIBRARIES = frozenset({"torch", "oomprobe", *sys.stdlib_module_names})
_INSTALLED = ("site-packages", "dist-packages")


def is_own(module_name: object) -> bool:
    """Whether a module is neither Python's, nor torch's, nor installed from a package.

    Example:
        >>> is_own("__main__"), is_own("torch.nn"), is_own("json")
        (True, False, False)
    """
    if not isinstance(module_name, str) or module_name == "__main__":
        return True
    if module_name.partition(".")[0] in _LIBRARIES:
        return False
    module = sys.modules.get(module_name)
    places = [getattr(module, "__file__", None), *(getattr(module, "__path__", None) or ())]
    return not any(part in place for place in places if isinstance(place, str) for part in _INSTALLED)


def is_of_library(kind: type) -> bool:
    """Whether a class is Python's or torch's."""
    return str(kind.__module__).partition(".")[0] in _LIBRARIES


def named_by(function: types.FunctionType) -> Iterator[object]:
    """What its body, and the functions inside it, may mean by the names in it."""
    names = _names(function.__code__)
    own = is_own(function.__module__)
    met: set[int] = set()
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        if isinstance(value, types.ModuleType):
            yield from _of_module(value, names, met)
        else:
            yield value
    for module in _imported(function, names) if own else ():
        yield from _of_module(module, names, met)


def _names(code: types.CodeType) -> set[str]:
    """Global and attribute names of a function and of the functions inside it."""
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*(_names(c) for c in inner))


def _imported(function: types.FunctionType, names: set[str]) -> Iterator[types.ModuleType]:
    """Own modules that a body may import: by their whole names, or as seen from its package or one above."""
    packages = accumulate((function.__globals__.get("__package__") or "").split("."), "{}.{}".format)
    for prefix in ("", *(f"{package}." for package in packages)):
        for name in names:
            module = sys.modules.get(prefix + name)
            if module is not None and is_own(module.__name__):
                yield module


def _of_module(module: types.ModuleType, names: set[str], met: set[int]) -> Iterator[object]:
    """What may be used as ``module.name``: of own modules everything, of libraries what has state."""
    if id(module) in met:
        return
    met.add(id(module))
    own = is_own(module.__name__)
    for name in names & vars(module).keys():
        value = vars(module)[name]
        if not isinstance(value, types.ModuleType):
            if own or has_state(value):
                yield value
        elif own and is_own(value.__name__):
            yield from _of_module(value, names, met)


def members(kind: type) -> Iterator[object]:
    """Attributes of a class and of its own bases, and the functions behind its methods and properties."""
    for base in kind.__mro__:
        if is_own(base.__module__):
            for member in list(vars(base).values()):
                yield from (getattr(member, name) for name in _functions_behind(member))
                yield member


def _functions_behind(member: object) -> tuple[str, ...]:
    if isinstance(member, staticmethod | classmethod):
        return ("__func__",)
    return ("fget", "fset") if isinstance(member, property) else ()


def has_state(value: object) -> bool:
    """Whether an object (not a class) has ``state_dict()`` and ``load_state_dict()``."""
    return not isinstance(value, type) and all(
        callable(getattr(type(value), name, None)) for name in ("state_dict", "load_state_dict")
    )
