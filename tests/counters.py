"""Ways to count calls, each a pair: what makes a counter, and what counts a call with it."""

import array
import collections
import contextvars
import functools
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
from composed import Momentum
from torch import nn

numbers = 0
MANY = 10_000  # more calls than any test makes


def from_loader():
    dataset = torch.utils.data.TensorDataset(torch.arange(MANY))
    return iter(torch.utils.data.DataLoader(dataset))


def turn(queued):
    queued.put(queued.get())


def filled():
    queued = queue.Queue()
    for flag in (True, False, False):
        queued.put(flag)
    return queued


def lines():
    file = tempfile.TemporaryFile("w+")  # noqa: SIM115
    file.write("line\n" * MANY)
    file.seek(0)
    return file


def add(counts, name=0):
    counts[name] += 1


def add_to_buffer(module):
    module.n += 1


def toggle_gradient(layer):
    layer.weight.grad = torch.ones(1, 1) if layer.weight.grad is None else None


def add_attribute(counts):
    counts.n = getattr(counts, "n", 0) + 1


def add_variable(_):
    global numbers
    numbers += 1


def add_to_the_environment(_):
    os.environ["CALLS"] = str(int(os.environ.get("CALLS", "0")) + 1)


@dataclass(slots=True)
class Slotted:
    n: int = 0


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("n", torch.zeros(1))


class Source:
    """Hands out numbers, as loaders of people's own do."""

    def __init__(self):
        self.numbers = iter(range(MANY))

    def __next__(self):
        return next(self.numbers)


COUNTERS = {
    "iter(DataLoader)": (from_loader, next),
    "generator": (lambda: (one for one in range(MANY)), next),
    "own iterator": (Source, next),
    "cycle": (lambda: itertools.cycle([True, False, False]), next),
    "random.Random": (lambda: random.Random(1), lambda drawn: drawn.random()),
    "numpy generator": (lambda: np.random.default_rng(1), lambda drawn: drawn.random()),
    "global random": (lambda: 0, lambda _: random.random()),
    "RandomState": (lambda: np.random.RandomState(1), lambda drawn: drawn.rand()),
    "deque": (lambda: collections.deque([True, False, False]), lambda flags: flags.rotate(1)),
    "Queue": (filled, turn),
    "file": (lines, lambda file: file.readline()),
    "Counter": (collections.Counter, add),
    "dict": (lambda: {0: 0}, add),
    "UserDict": (lambda: collections.UserDict({0: 0}), add),
    "list": (lambda: [0], add),
    "array": (lambda: array.array("l", [0]), add),
    "numpy array": (lambda: np.zeros(1), add),
    "list in a numpy array": (lambda: np.array([[], None], object), lambda seen: seen[0].append(1)),
    "tensor on the host": (lambda: torch.zeros(1), add),
    "version of a tensor": (lambda: torch.zeros(2000), lambda counts: counts.add_(1)),
    "length of a list": (list, lambda seen: seen.append(None)),
    "length of a set": (set, lambda seen: seen.add(len(seen))),
    "function": (lambda: lambda: None, add_attribute),
    "SimpleNamespace": (types.SimpleNamespace, add_attribute),
    "class": (lambda: type("Class", (), {}), add_attribute),
    "object": (lambda: type("Class", (), {})(), add_attribute),
    "slots": (Slotted, add_attribute),
    "module": (nn.Identity, add_attribute),
    "buffer of a module": (Counting, add_to_buffer),
    "gradient": (lambda: nn.Linear(1, 1), toggle_gradient),
    "own optimizer": (lambda: Momentum([torch.zeros(1, requires_grad=True)]), add_attribute),
    "attribute of a tensor": (lambda: torch.zeros(1), add_attribute),
    "thread-local": (threading.local, add_attribute),
    "lru_cache": (
        lambda: functools.lru_cache(abs),
        lambda cached: cached(cached.cache_info().currsize),
    ),
    "full lru_cache": (
        lambda: functools.lru_cache(maxsize=1)(abs),
        lambda cached: cached(cached.cache_info().misses),
    ),
    "ContextVar": (
        lambda: contextvars.ContextVar("n", default=0),
        lambda counts: counts.set(counts.get() + 1),
    ),
    "variable": (lambda: 0, add_variable),
    "environment": (lambda: 0, add_to_the_environment),
    "nested": (
        lambda: {"a": [(Slotted(), [collections.OrderedDict(n=0)])]},
        lambda counts: add(counts["a"][0][1][0], "n"),
    ),
}
