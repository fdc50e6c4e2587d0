"""Ways to count calls, each a pair: what makes a counter for an epoch of so many calls, and what counts a call and tells the last one."""

import array
import collections
import contextvars
import io
import itertools
import os
import queue
import random
import tempfile
import threading
import types
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

numbers = 0


def dataset(length):
    return torch.utils.data.TensorDataset(torch.arange(length))


def from_loader(length):
    return iter(torch.utils.data.DataLoader(dataset(length)))


def ends(source, length):
    """Whether a source has nothing more."""
    return next(source, None) is None


def flags(length):
    return [True, *[False] * (length - 1)]


def rotate(held, length):
    held.rotate(1)
    return held[0]


def from_queue(make):
    def filled(length):
        flagged = make()
        for flag in flags(length):
            flagged.put(flag)
        return flagged

    def take(flagged, length):
        flag = flagged.get()
        flagged.put(flag)
        return flag

    return filled, take


def lines(length):
    file = tempfile.TemporaryFile("w+")  # noqa: SIM115
    file.write("line\n" * length)
    file.seek(0)
    return file


def at_end_of(file, length):
    if file.readline():
        return False
    file.seek(0)
    return True


def add(name=0, one=1):
    """Return a counter that adds to an item."""

    def count(held, length):
        held[name] += one
        return int(held[name]) % length == 0

    return count


def add_attribute(held, length):
    held.n = getattr(held, "n", 0) + 1
    return held.n % length == 0


def add_variable(held, length):
    global numbers
    numbers += 1
    return numbers % length == 0


def add_to_the_environment(held, length):
    os.environ["CALLS"] = str(int(os.environ.get("CALLS", "0")) + 1)
    return int(os.environ["CALLS"]) % length == 0


def longer(append):
    def count(held, length):
        append(held)
        return len(held) % length == 0

    return count


def remember(cached, length):
    cached(cached.cache_info().currsize)
    return cached.cache_info().currsize % length == 0


def cached(length):
    import functools

    return functools.lru_cache(lambda number: number)


def in_context(held, length):
    held.set(held.get() + 1)
    return held.get() % length == 0


class Attributes:
    pass


@dataclass(slots=True)
class Slotted:
    n: int = 0


class Own(dict):
    pass


class Source:
    """Hands out numbers, as loaders of people's own do."""

    def __init__(self, length):
        self.numbers = iter(range(length))

    def __next__(self):
        return next(self.numbers)


def nested(length):
    return {"a": [(Attributes(), [collections.OrderedDict(n=0)])]}


COUNTERS = {
    "iter(DataLoader)": (from_loader, ends),
    "generator": (lambda length: (one for one in range(length)), ends),
    "range iterator": (lambda length: iter(range(length)), ends),
    "enumerate": (lambda length: enumerate(range(length)), ends),
    "zip": (lambda length: zip(range(length), range(length), strict=True), ends),
    "own iterator": (Source, ends),
    "cycle": (lambda length: itertools.cycle(flags(length)), lambda held, length: next(held)),
    "count": (lambda length: itertools.count(1), lambda held, length: next(held) % length == 0),
    "random.Random": (lambda length: random.Random(1), lambda held, length: held.randrange(length) == 0),
    "numpy generator": (lambda length: np.random.default_rng(1), lambda held, length: held.integers(length) == 0),
    "RandomState": (lambda length: np.random.RandomState(1), lambda held, length: held.randint(length) == 0),
    "global random": (lambda length: 0, lambda held, length: random.randrange(length) == 0),
    "deque": (lambda length: collections.deque(flags(length)), rotate),
    "Queue": from_queue(queue.Queue),
    "SimpleQueue": from_queue(queue.SimpleQueue),
    "file": (lines, at_end_of),
    "StringIO": (lambda length: io.StringIO("line\n" * length), at_end_of),
    "Counter": (lambda length: collections.Counter(), add()),
    "dict": (lambda length: {0: 0}, add()),
    "own dict": (lambda length: Own({0: 0}), add()),
    "UserDict": (lambda length: collections.UserDict({0: 0}), add()),
    "list": (lambda length: [0], add()),
    "array": (lambda length: array.array("l", [0]), add()),
    "numpy array": (lambda length: np.zeros(1), add()),
    "0-d array": (lambda length: np.zeros(()), add(())),
    "tensor on the host": (lambda length: torch.zeros(1), add()),
    "version of a tensor": (lambda length: torch.zeros(2000), longer(lambda n: n.add_(1))),
    "length of a list": (lambda length: [], longer(lambda held: held.append(None))),
    "length of a bytearray": (lambda length: bytearray(), longer(lambda held: held.append(0))),
    "length of a set": (lambda length: set(), longer(lambda held: held.add(len(held)))),
    "SimpleNamespace": (lambda length: types.SimpleNamespace(), add_attribute),
    "object": (lambda length: Attributes(), add_attribute),
    "class": (lambda length: type("Class", (), {}), add_attribute),
    "function": (lambda length: lambda: None, add_attribute),
    "slots": (lambda length: Slotted(), add_attribute),
    "module": (lambda length: nn.Identity(), add_attribute),
    "attribute of a tensor": (lambda length: torch.zeros(1), add_attribute),
    "thread-local": (lambda length: threading.local(), add_attribute),
    "lru_cache": (cached, remember),
    "ContextVar": (lambda length: contextvars.ContextVar("n", default=0), in_context),
    "variable": (lambda length: 0, add_variable),
    "environment": (lambda length: 0, add_to_the_environment),
    "nested": (nested, lambda held, length: add("n")(held["a"][0][1][0], length)),
}
