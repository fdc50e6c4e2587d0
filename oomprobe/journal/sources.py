"""The files in which a step and a model are written, with those beside them that they use."""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

_FOREIGN = {Path(sysconfig.get_paths()[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
_FOREIGN |= {Path(__file__).parents[1]}


def sources_of(values: Iterable[object]) -> dict[str, str]:
    """Digests of the files that define `values`, and of those that the same author wrote and they import.

    An edit of any of them makes another question of a probe, also where it is only a comment: what a step does may be
    in a helper, in a method of the model, in a table of settings.

    Args:
        values: Functions, and classes of objects.

    Returns:
        By name of the module, the first sixteen digits of the SHA-256 of its file. Installed packages are not among them.

    Example:
        >>> from collections import OrderedDict
        >>> sources_of([OrderedDict])
        {}
    """
    waiting, found = [name for value in values for name in _homes(value)], {}
    while waiting:
        name = waiting.pop()
        module = sys.modules.get(name)
        file = None if module is None else _own_file(module)
        if module is None or file is None or name in found:
            continue
        try:
            found[name] = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
        except OSError:
            continue
        waiting += _used_by(module)
    return dict(sorted(found.items()))


def _homes(value: object) -> Iterator[str]:
    """Modules of a function, or of a class and those it inherits from."""
    kinds = type.__dict__["__mro__"].__get__(value) if issubclass(type(value), type) else [value]
    for one in kinds:
        name = _text(one, "__module__")
        if name:
            yield name


def _used_by(module: ModuleType) -> Iterator[str]:
    for value in list(vars(module).values()):
        name = _text(value, "__name__" if issubclass(type(value), ModuleType) else "__module__")
        if name:
            yield name


def _text(value: object, name: str) -> str:
    try:
        text = getattr(value, name, "")
    except Exception:  # whatever objects of the user's do when they are asked
        return ""
    return text if type(text) is str else ""


def _own_file(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    path = Path(file).absolute() if isinstance(file, str) and file.endswith(".py") else None
    return None if path is None or not _FOREIGN.isdisjoint(path.parents) else path
