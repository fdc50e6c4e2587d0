"""Random number generators, the host's default ones and those of data sets and collators: restored after a probe."""

from __future__ import annotations

import random
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

GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
PARTS = (Dataset, DataLoader, Sampler, *GENERATORS)  # followed under any name; anything else under these names
NAMES = ("dataset", "datasets", "transform", "transforms", "sampler", "batch_sampler", "collate_fn")


@contextmanager
def generators_kept(owners: Iterable[object]) -> Iterator[None]:
    """Restore generators, the default ones and attributes of objects; delete those that were made meanwhile.

    Args:
        owners: Objects with attributes. Data sets, loaders, samplers, transforms and collate functions in them are followed.
    """
    seen: dict[int, object] = {}
    attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
    restores: list[Callable[[], object]] = [partial(put, get()) for get, put in generators("cpu").values()]
    on_card: list[Callable[[], object]] = []
    waiting = list(owners)
    while waiting:
        one = waiting.pop()
        one = one.__self__ if isinstance(one, MethodType) else one
        if id(one) in seen or isinstance(one, type):
            continue
        seen[id(one)] = one
        if isinstance(one, GENERATORS):
            on_host = getattr(one, "device", torch.device("cpu")).type == "cpu"
            (restores if on_host else on_card).append(_restore(one))
        elif hasattr(one, "__dict__"):
            attributes.append((vars(one), dict(vars(one))))
            waiting += _parts(one)
    try:
        yield
    except DeviceLostError:
        on_card.clear()  # a lost device takes no state
        raise
    finally:
        for restore in (*restores, *on_card):
            restore()
        for now, before in attributes:
            for name in [name for name, value in now.items() if isinstance(value, GENERATORS)]:
                if name not in before:
                    del now[name]
                else:
                    now[name] = before[name]


def _parts(one: object) -> Iterator[object]:
    if isinstance(one, partial):
        yield from (one.func, *one.args, *one.keywords.values())
    for name, value in vars(one).items():
        if name in NAMES:
            yield from value if isinstance(value, list | tuple) else [value]
        elif isinstance(value, PARTS):
            yield value


def _restore(one: Any) -> Callable[[], object]:
    """What puts a generator back to where it is now."""
    if isinstance(one, torch.Generator):
        return partial(one.set_state, one.get_state())
    if isinstance(one, random.SystemRandom):  # which has no state
        return lambda: None
    if isinstance(one, random.Random):
        return partial(one.setstate, one.getstate())
    if isinstance(one, np.random.Generator):
        return partial(setattr, one.bit_generator, "state", one.bit_generator.state)
    return partial(one.set_state, one.get_state(legacy=False))
