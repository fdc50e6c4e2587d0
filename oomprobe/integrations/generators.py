"""Random number generators, torch's and those of a collator or a data set: kept while a probe draws from them."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from oomprobe.errors import DeviceLostError
from oomprobe.scope import scope
from oomprobe.state.surroundings import generators

# What makes batches, and holds other such things: by their types, and where they may be of any type by their names.
PARTS = (Dataset, DataLoader, Sampler)
NAMES = ("dataset", "datasets", "transform", "transforms", "sampler", "batch_sampler", "collate_fn")
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_NONE, _OTHER = object(), object()


class Generators:
    """Those in attributes of objects, as they were when each was added.

    Args:
        owners: Objects with attributes, and data sets, loaders and the like in them; others are passed over.
    """

    def __init__(self, owners: Iterable[object] = ()) -> None:
        self._puts: dict[int, tuple[Any, Callable[[], object]]] = {}
        self._attributes: list[tuple[Callable[[], Any], dict[str, object]]] = []
        self.add(owners)

    def add(self, owners: Iterable[object]) -> None:
        """Keep those of further objects, which may die before they are put back; what is kept already stays so."""
        for owner in _with_parts(owners):
            if isinstance(owner, GENERATORS):
                self._puts.setdefault(id(owner), (owner, _put_of(owner)))
            else:
                before = {name: _noted(value) for name, value in vars(owner).items()}
                self._attributes.append((_reference(owner), before))

    def put_back(self, *, device_lost: bool = False) -> None:
        """Each to where it was; one made meanwhile is gone again."""
        for one, put in self._puts.values():
            if not (device_lost and isinstance(one, torch.Generator) and one.device.type != "cpu"):
                put()
        for reference, before in self._attributes:
            owner = reference()
            if owner is not None:
                _give_back(vars(owner), before)


@scope
def generators_kept(owners: Iterable[object]) -> Iterator[Generators]:
    """Give generators back, the host's default ones and attributes of objects; one made meanwhile is gone again.

    Args:
        owners: As of `Generators`, to which others can be added in the block.

    Example:
        >>> class Collator:
        ...     random = random.Random(7)
        >>> collator = Collator()
        >>> collator.random = random.Random(7)
        >>> with generators_kept([collator]) as kept:
        ...     drawn = collator.random.random()
        >>> collator.random.random() == drawn
        True
    """
    kept, lost = Generators(owners), False
    defaults = [(put, get()) for get, put in generators("cpu").values()]
    try:
        yield kept
    except DeviceLostError:
        lost = True
        raise
    finally:
        for put_default, state in defaults:
            put_default(state)
        kept.put_back(device_lost=lost)


def _with_parts(owners: Iterable[object]) -> list[object]:
    """Each once, and the generators in it, and what makes batches in it, and what is in that."""
    found: dict[int, object] = {}
    waiting = list(owners)
    while waiting:
        one = waiting.pop()
        one = one.__self__ if isinstance(one, MethodType) else one
        if id(one) in found or isinstance(one, type):
            continue
        if isinstance(one, GENERATORS):
            found[id(one)] = one
        elif hasattr(one, "__dict__"):
            found[id(one)] = one
            waiting += _parts(one)
    return list(found.values())


def _parts(one: object) -> Iterator[object]:
    if isinstance(one, partial):
        yield from (one.func, *one.args, *one.keywords.values())
    for name, value in vars(one).items():
        if name in NAMES:
            yield from value if isinstance(value, list | tuple) else [value]
        elif isinstance(value, (*PARTS, *GENERATORS)):
            yield value


def _reference(owner: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(owner)
    except TypeError:
        return lambda: owner


def _noted(value: object) -> object:
    """What a generator may take the place of, such as its seed; the rest is not held, for it may be large."""
    return value if isinstance(value, (*GENERATORS, int, type(None))) else _OTHER


def _give_back(now: dict[str, Any], before: dict[str, object]) -> None:
    for name, value in list(now.items()):
        was = before.get(name, _NONE)
        if isinstance(value, GENERATORS) and was is not value and was is not _OTHER:
            now.pop(name)
            now.update({} if was is _NONE else {name: was})


def _put_of(one: Any) -> Callable[[], object]:
    """Puts a generator back to where it is now."""
    if isinstance(one, torch.Generator):
        state = one.get_state()
        return lambda: one.set_state(state)
    if isinstance(one, random.SystemRandom):  # it has none
        return lambda: None
    if isinstance(one, random.Random):
        inner = one.getstate()
        return lambda: one.setstate(inner)
    if isinstance(one, np.random.Generator):
        bits = one.bit_generator.state
        return lambda: setattr(one.bit_generator, "state", bits)
    legacy = one.get_state(legacy=False)
    return lambda: one.set_state(legacy)
