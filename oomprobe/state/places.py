"""Places where state is kept: each has a path, a way to read and to write it, and a time at which it goes back."""

from __future__ import annotations

import array
import functools
import io
import itertools
import operator
import random
import types
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from operator import is_
from typing import Any

import numpy as np
import torch

from oomprobe.state.compare import same
from oomprobe.state.contents import PLAIN, Values
from oomprobe.state.references import (
    MISSING,
    BoundMethod,
    Reference,
    Saved,
    is_made_in_python,
    keyed,
    refers_to,
)
from oomprobe.state.tensors import (
    AnyCopy,
    GraphTensor,
    HostCopies,
    TensorCopy,
    can_copy,
    version_of,
)
from oomprobe.state.walk import Kind, Met, package_of

# Tensors and arrays up to this size are put back before every trial, larger ones at the end.
SMALL_BYTES = 2**12
# Of larger ones outside the model, in all; of the others only their version is compared.
COPIED_BYTES = 2**30
MAX_ENTRIES = 100_000  # in all containers together: comparing them takes 3 ms; of others only the length is compared
PIECE_BYTES = 2**24
_UNKNOWN = object()  # the fingerprint of an object that does not show whether it has changed


def saved(value: Any, *, copies: HostCopies, trains: bool) -> Any:
    """Return what to save of a value: for a tensor, or what has a reference, something that does not keep it alive."""
    if isinstance(value, torch.Tensor):
        if value.device.type == "meta":
            return value
        is_kept = value.is_leaf or trains
        return copies.keep(value) if is_kept and can_copy(value) else GraphTensor(value)
    if isinstance(value, types.MethodType):
        owner = copies.references.to(value.__self__)
        return value if owner is None else BoundMethod(value, owner)
    return copies.references.to(value) or value


def saved_item(value: Any, *, copies: HostCopies) -> Any:
    """Return what to save of an item of a tuple; `MISSING` for a tensor that cannot be made anew."""
    item = saved(value, copies=copies, trains=False)
    return MISSING if isinstance(item, GraphTensor) else item


class Place:
    """The values that something held at the start. Putting them back makes each name refer to its first value again.

    Tensors, containers and objects of the user's among them are not kept alive, so that steps can free them. Those that were
    freed are made anew: tensors from their copies, all else from the places of what it held.
    """

    def __init__(self, values: Values, copies: HostCopies) -> None:
        now = values.read()
        self.values, self._copies = values, copies
        self.moves = False  # whether a source of data beside them has moved on, so that they must not be put back
        self.left: dict[Any, Any] = {}  # plain values that the last trial left
        self._is_namespace = isinstance(now, dict) and not values.is_ordered
        self._take(now)
        self._first = self._before
        # Objects by which a source of data is known to be among the values, or beside them.
        self.ids = set[int]()
        for value in self._before.values():
            if isinstance(value, Reference):
                self.ids.add(value.first_id)
            elif not isinstance(value, PLAIN):
                self.ids.add(id(value))

    def _take(self, now: Any) -> None:
        save = partial(saved, copies=self._copies, trains=self.values.trains)
        self._before = {save(key): save(value) for key, value in _by_key(now).items()}
        # Plain values are compared by `is` alone, which is several times as fast.
        self._is_plain = not any(
            isinstance(part, Saved) for part in chain(self._before, self._before.values())
        )

    @property
    def name(self) -> str:
        """The path of what holds the values."""
        return self.values.path.removesuffix(".")

    @property
    def was_empty(self) -> bool:
        """Whether there were no values at the start."""
        return not self._first

    def restart_from_here(self) -> None:
        """Let the next trials begin with what is there now; the values of the start still come back at the end."""
        self._take(self.values.read())

    def forget(self, name: str) -> None:
        """Let there have been no value with this name at the start."""
        self._before.pop(name, None)

    def go_back_to_start(self) -> None:
        """Let the values of the start be those to put back, not those of `restart_from_here`."""
        if self._before is not self._first:
            self._before, self._is_plain = self._first, False

    def put_back_alive(self) -> bool:
        """Put back what can be without a tensor that was freed, and remember what the trial left; return whether all is back."""
        now = self.values.read()
        if self._is_back(now):
            return True
        now = _by_key(now)
        if not self.left:
            for key, value in now.items():
                if isinstance(value, PLAIN) or is_iterator(value):
                    self.left[key] = value
        return self._write(now, _present)

    def put_back(self) -> None:
        """Put the values back, those made anew that were freed."""
        now = self.values.read()
        if not self._is_back(now):
            self._write(_by_key(now), _restored)

    def _write(self, now: dict[Any, Any], get: Callable[[Any], Any]) -> bool:
        """Write what `get` returns of what was saved; return whether it returned everything."""
        before = {}
        for saved_key, saved_value in self._before.items():
            key, value = get(saved_key), get(saved_value)
            if key is not MISSING and value is not MISSING:
                before[key] = value
        self.values.write(before, now)
        return len(before) == len(self._before)

    def leave(self) -> bool:
        """Bring back the plain values that the last trial left; return whether there were any."""
        now, left = _by_key(self.values.read()), self.left
        if left:
            self.values.write({**now, **left}, now)
        self.left = {}
        return bool(left)

    def changes(self) -> dict[str, Any]:
        """Return what differs from the start, by path: the value of the start, or one that was not there."""
        now = self.values.read()
        if self._is_back(now):
            return {}
        now, before = _by_key(now), {_find(key, key): value for key, value in self._before.items()}
        changed: dict[str, Any] = {}
        for key in {**before, **now}:
            if refers_to(before.get(key, MISSING), now.get(key, MISSING)):
                continue
            first = _find(before.get(key), before.get(key))
            if first is None:
                first = now.get(key)
            changed[self.values.named(key)] = first
        return changed

    def added(self) -> Iterator[tuple[str, Any]]:
        """Yield each value that was not there at the start, with its path, or that of its container."""
        before = {id(_find(value)) for value in self._before.values()}
        for key, value in _by_key(self.values.read()).items():
            if id(value) not in before:
                yield self.values.named(key) if self._is_namespace else self.name, value

    def plain_values(self) -> object:
        """Return the numbers, texts and lengths among the values; None if they are those of the start."""
        now = self.values.read()
        if self._is_in(now):
            return None
        return [(key, _plain_part(value)) for key, value in _by_key(now).items()]

    def _is_back(self, now: Any) -> bool:
        """Return whether there is nothing to put back."""
        return self._is_in(now) or self.values.is_gone

    def _is_in(self, now: Any) -> bool:
        before = self._before
        if len(now) != len(before):
            return False
        if isinstance(now, set):
            return all(_find(value) in now for value in before)
        refers = is_ if self._is_plain else refers_to
        # By `map`, because there are a hundred thousand of these before every trial.
        if not isinstance(now, dict):
            return all(map(refers, before.values(), now))
        if all(map(refers, chain(before.values(), before), chain(now.values(), now))):
            return True
        # The order of variables means nothing, and their names may be other objects.
        return self._is_namespace and all(
            refers(value, now.get(key, MISSING)) for key, value in before.items()
        )


def _by_key(now: Any) -> dict[Any, Any]:
    return dict(zip(now, now, strict=True) if isinstance(now, set) else keyed(now))


def _find(before: Any, gone: Any = MISSING) -> Any:
    """Return the value that was saved, or `gone` if it was freed."""
    if not isinstance(before, Saved):
        return before
    value = before.find()
    return gone if value is None else value


def _present(before: Any) -> Any:
    """Return the value that was saved, made anew unless that takes a tensor that was freed: then `MISSING`."""
    if isinstance(before, Reference | BoundMethod):
        return before.restore(_present)
    return _find(before)


def _restored(before: Any) -> Any:
    """Return the value that was saved, made anew if it was freed."""
    if isinstance(before, Reference | BoundMethod):
        return before.restore(_restored)
    if isinstance(before, AnyCopy):
        return before.restore()
    return _find(before)


class OpaquePlace:
    """A place compared by value: a tensor beside the model, an array, a generator of random numbers, a container too long to save.

    Without `write` it is only watched, and named if it has changed. One of up to `SMALL_BYTES` goes
    back before every trial, a larger one at the end; what takes `nbytes` is copied when `take` is
    called.
    """

    def __init__(
        self,
        path: str,
        kind: str,
        read: Callable[[], Any],
        write: Callable[[Any], object] | None = None,
        *,
        equals: Callable[[Any], bool] | None = None,
        nbytes: int = 0,
    ) -> None:
        self.path, self.kind, self.nbytes = path, kind, nbytes
        self.read, self._write = read, write
        self._equals = equals or (lambda before: same(read(), before))
        self._before = MISSING if nbytes else read()
        self.emptied_by = ""  # of a cache of a function: what its user may type to empty it

    @property
    def is_restarted(self) -> bool:
        """Whether it goes back before every trial."""
        return self._write is not None and self.nbytes <= SMALL_BYTES

    @property
    def has_changed(self) -> bool:
        return not self._equals(self._before)

    def take(self, left_bytes: int) -> int:
        """Copy it if it is small or fits in `left_bytes`; return how many of these are left."""
        taken_bytes = 0 if self.nbytes <= SMALL_BYTES else self.nbytes
        if self._before is not MISSING or taken_bytes > left_bytes:
            return left_bytes
        self._before = self.read()
        return left_bytes - taken_bytes

    def put_back(self) -> None:
        if self._write is not None and self._before is not MISSING:
            self._write(self._before)


def opaque_place(seen: Met, names: set[str]) -> OpaquePlace | None:
    """Return the place of an array, a generator, or an object of a library that shows whether it has changed."""
    value, path = seen.value, seen.path
    if seen.kind is Kind.ARRAY:
        return _array_place(value, path)
    if seen.kind is Kind.GENERATOR:
        return OpaquePlace(path, "a random number generator", *access_to(value))
    if seen.kind is not Kind.LIBRARY or package_of(value) == "oomprobe":
        return None

    def equals(before: Any) -> bool:
        now = _fingerprint(value)
        if now is _UNKNOWN:  # what the user's code uses has been used
            is_used = path.endswith("]") or path.rpartition(".")[2] in names
            return not is_used
        return same(now, before)

    place = OpaquePlace(path, kind_of(value), lambda: _fingerprint(value), equals=equals)
    if isinstance(value, functools._lru_cache_wrapper):
        place.emptied_by = f"{path}.cache_clear()"
        place.kind = f"a cache, which {place.emptied_by} empties"
    return place


def tensor_place(copy: TensorCopy, path: str, version: int) -> OpaquePlace:
    """Return the place of a tensor beside the model; until its bytes are copied, its version tells whether it has changed."""

    def take() -> None:
        if (tensor := copy.find()) is not None and not copy.has_bytes:
            copy.storage.take(tensor.untyped_storage())

    def equals(_: object) -> bool:
        tensor = copy.find()
        return tensor is None or copy.storage.is_intact(version_of(tensor) == version)

    nbytes = copy.storage.nbytes
    return OpaquePlace(
        path, "a tensor", take, lambda _: copy.storage.write(), equals=equals, nbytes=nbytes
    )


def _array_place(array: Any, path: str) -> OpaquePlace | None:
    if array.dtype.hasobject or not array.flags.writeable or isinstance(array, np.memmap):
        return None

    def equals(before: Any) -> bool:
        return before is MISSING or _same_bytes(array, before)

    def write(before: Any) -> None:
        if not equals(before):
            array[...] = before

    return OpaquePlace(path, "an array", array.copy, write, equals=equals, nbytes=array.nbytes)


def _same_bytes(now: Any, before: Any) -> bool:
    if (now.shape, now.dtype) != (before.shape, before.dtype):
        return False
    now, before = np.atleast_1d(now), np.atleast_1d(before)
    rows = max(1, PIECE_BYTES // max(1, now[:1].nbytes))
    starts = range(0, len(now), rows)
    return all(now[at : at + rows].tobytes() == before[at : at + rows].tobytes() for at in starts)


def long_place(values: Values) -> OpaquePlace:
    """Return the place of a container that is too long to save."""
    return OpaquePlace(values.path, kind_of(values.read()), lambda: len(values.read()))


def is_iterator(value: Any) -> bool:
    """Return whether a value is an iterator."""
    return hasattr(type(value), "__next__")


def is_source(value: Any) -> bool:
    """Return whether a value hands out data one after another, so that counters beside it must agree with its position."""
    is_queue = type(value).__module__ in ("queue", "_queue", "multiprocessing.queues")
    return is_queue or (is_iterator(value) and not is_written(value))


def is_written(value: Any) -> bool:
    """Return whether a value is a file that is closed, or only written to, such as a log."""
    if not isinstance(value, io.IOBase) or is_made_in_python(type(value)):
        return False
    return value.closed or not value.readable()


def kind_of(value: Any) -> str:
    """Return what a value is, for a reader, such as ``"an iterator"``."""
    if isinstance(value, OpaquePlace):
        return value.kind
    if is_iterator(value) and not isinstance(value, io.IOBase):
        return "an iterator"
    if isinstance(value, torch.Tensor | GraphTensor | AnyCopy) or value is MISSING:
        return "a tensor"
    name = type(value).__name__
    article = "an" if name[:1].lower() in "aeiou" else "a"
    return f"{article} {name}"


def access_to(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    """Return what reads and what writes the state of a generator of random numbers."""
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return partial(getattr, bits, "state"), partial(setattr, bits, "state")
    return generator.get_state, generator.set_state  # of numpy's old kind, or torch's


def _plain_part(value: Any) -> Any:
    if isinstance(value, PLAIN):
        return value
    return len(value) if isinstance(value, dict | list | set) else None


def _fingerprint(value: Any) -> Any:
    """Return what shows that an object of a library has changed; `_UNKNOWN` for an iterator that shows nothing."""
    if isinstance(value, functools._lru_cache_wrapper):
        return value.cache_info()[1:]  # a full one has further misses
    if isinstance(value, io.IOBase):
        if value.closed or not value.seekable():
            return None
        return value.tell()
    if is_iterator(value):
        return _position_of(value)
    if hasattr(value, "__dict__"):  # without private attributes, such as caches
        return {
            name: _plain_part(part)
            for name, part in list(vars(value).items())
            if not name.startswith("_")
        }
    if isinstance(value, array.array | bytearray):
        return bytes(value) if len(value) <= SMALL_BYTES else len(value)
    return None


def _position_of(iterator: Any) -> Any:
    """Return what shows how far an iterator has come; `_UNKNOWN` if nothing does."""
    if hasattr(iterator, "__dict__"):
        return {name: _plain_part(part) for name, part in list(vars(iterator).items())}
    if isinstance(iterator, itertools.count | itertools.repeat):
        return repr(iterator)
    left = operator.length_hint(iterator, -1)
    return _UNKNOWN if left < 0 else left
