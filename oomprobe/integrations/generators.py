"""Random number generators, torch's and those of a collator or a data set: kept while a probe draws from them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from oomprobe.scope import scope
from oomprobe.state.surroundings import generators

WRAPPED = ("dataset", "datasets", "transform")  # where data sets that wrap others have them


@scope
def generators_kept(owners: Iterable[object]) -> Iterator[None]:
    """Give generators back, the host's default ones and attributes of objects; one made meanwhile is gone again.

    Args:
        owners: Objects with attributes, and data sets in them that they wrap; others are passed over.

    Example:
        >>> class Collator:
        ...     random = random.Random(7)
        >>> collator = Collator()
        >>> collator.random = random.Random(7)
        >>> with generators_kept([collator]):
        ...     drawn = collator.random.random()
        >>> collator.random.random() == drawn
        True
    """
    attributes = [vars(owner) for owner in _with_wrapped(owners)]
    known = [(own, dict(own)) for own in attributes]
    defaults = [(put, get()) for get, put in generators("cpu").values()]
    puts = [put for _, values in known for value in values.values() if (put := _keeper_of(value)) is not None]
    try:
        yield
    finally:
        for put_default, state in defaults:
            put_default(state)
        for put in puts:
            put()
        for own, values in known:
            for name, value in list(own.items()):
                if _keeper_of(value) is not None and values.get(name) is not value:
                    own.pop(name)
                    own.update({name: values[name]} if name in values else {})


def _with_wrapped(owners: Iterable[object]) -> list[object]:
    """Each once, and what they wrap, and what that wraps."""
    found: dict[int, object] = {}
    waiting = list(owners)
    while waiting:
        one = waiting.pop()
        if id(one) in found or not hasattr(one, "__dict__"):
            continue
        found[id(one)] = one
        for value in (vars(one)[name] for name in WRAPPED if name in vars(one)):
            waiting += value if isinstance(value, list | tuple) else [value]
    return list(found.values())


def _keeper_of(value: Any) -> Callable[[], object] | None:
    """Puts a generator back to where it is now; None for anything else."""
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda: value.set_state(state)
    if isinstance(value, random.Random):
        inner = value.getstate()
        return lambda: value.setstate(inner)
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator.state
        return lambda: setattr(value.bit_generator, "state", bits)
    if isinstance(value, np.random.RandomState):
        legacy = value.get_state()
        return lambda: value.set_state(legacy)
    return None
