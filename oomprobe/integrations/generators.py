"""Random number generators, the host's default ones and those of a collator or a data set: given back after a probe."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from oomprobe.errors import DeviceLostError
from oomprobe.state.surroundings import generators

# What makes batches, and holds other such things: by their types, and where they may be of any type by their names.
PARTS = (Dataset, DataLoader, Sampler)
NAMES = ("dataset", "datasets", "transform", "transforms", "sampler", "batch_sampler", "collate_fn")
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


class Generators:
    """Those in attributes of objects, as they were when each was added."""

    def __init__(self, owners: Iterable[object] = ()) -> None:
        self._puts: dict[int, tuple[Any, Callable[[], object]]] = {}
        self._attributes: list[tuple[weakref.ref[Any], dict[str, object]]] = []
        self.add(owners)

    def add(self, owners: Iterable[object]) -> None:
        """Keep those of further objects, which may die before they are put back; what is kept already stays so.

        A generator, a method, a data set, a loader or what is named like one is followed; the rest is not held, for it may
        be large.
        """
        seen: dict[int, object] = {}
        waiting = list(owners)
        while waiting:
            one = waiting.pop()
            one = one.__self__ if isinstance(one, MethodType) else one
            if id(one) in seen or isinstance(one, type):
                continue
            seen[id(one)] = one
            if isinstance(one, GENERATORS):
                if not isinstance(one, random.SystemRandom):  # which has no state
                    self._puts.setdefault(id(one), (one, _put_of(one)))
            elif hasattr(one, "__dict__"):
                self._attributes.append((weakref.ref(one), {key: _noted(value) for key, value in vars(one).items()}))
                waiting += _parts(one)

    def put_back(self, *, device_lost: bool = False) -> None:
        """Each to where it was; one made meanwhile is gone again."""
        for one, put in self._puts.values():
            if not (device_lost and isinstance(one, torch.Generator) and one.device.type != "cpu"):
                put()
        for reference, before in self._attributes:
            now = vars(owner) if (owner := reference()) is not None else {}
            for name, value in list(now.items()):
                if isinstance(value, GENERATORS) and before.get(name) not in (value, ...):
                    del now[name]
                    now |= {name: before[name]} if name in before else {}


@contextmanager
def generators_kept(owners: Iterable[object]) -> Iterator[Generators]:
    """Give generators back, the host's default ones and attributes of objects; one made meanwhile is gone again.

    Args:
        owners: Objects with attributes, and data sets, loaders and the like in them; others are passed over.

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


def _parts(one: object) -> Iterator[object]:
    if isinstance(one, partial):
        yield from (one.func, *one.args, *one.keywords.values())
    for name, value in vars(one).items():
        if name in NAMES:
            yield from value if isinstance(value, list | tuple) else [value]
        elif isinstance(value, (*PARTS, *GENERATORS)):
            yield value


def _noted(value: object) -> object:
    """What a generator may take the place of, such as its seed; anything else is an ellipsis."""
    return value if isinstance(value, (*GENERATORS, int, type(None))) else ...


def _put_of(one: Any) -> Callable[[], object]:
    """Puts a generator back to where it is now."""
    if isinstance(one, torch.Generator):
        return partial(one.set_state, one.get_state())
    if isinstance(one, random.Random):
        return partial(one.setstate, one.getstate())
    if isinstance(one, np.random.Generator):
        return partial(setattr, one.bit_generator, "state", one.bit_generator.state)
    return partial(one.set_state, one.get_state(legacy=False))
