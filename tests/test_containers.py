"""Containers are put back by the methods of their base classes, and only where they have changed."""

import collections

import pytest
import torch
from torch import nn

from oomprobe.state import Keeper


Pair = collections.namedtuple("Pair", "mean var")


class Frozen(dict):
    def _refuse(self, *_, **__):
        raise TypeError("frozen")

    __setitem__ = __delitem__ = clear = update = pop = setdefault = _refuse


class Adding(dict):
    def update(self, other):
        for key, value in other.items():
            self[key] = self.get(key, 0) + value


class Output(collections.OrderedDict):
    """The shape of a ModelOutput: no update, attributes beside the items."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        self.__dict__[key] = value

    def update(self, *_, **__):
        raise TypeError("no update")


class Looking(list):
    def __iter__(self):
        raise TypeError("no iteration")

    def __setitem__(self, *_):
        raise TypeError("no items")


class Named(Pair):
    def __new__(cls, mean):
        return super().__new__(cls, mean, 0.0)


class Holder:
    """State that says nothing of what it holds."""

    def __init__(self, held):
        self.held = held

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def kept_with(holder):
    return Keeper(nn.Linear(1, 1), [], [holder], "cpu")


CHANGES = {
    "frozen": (lambda: Frozen(a=1), lambda held: dict.__setitem__(held, "a", 2)),
    "adding": (lambda: Adding(a=1), lambda held: held.update({"a": 1, "b": 2})),
    "output": (lambda: Output(a=1), lambda held: held.__setitem__("b", 2)),
    "counter": (lambda: collections.Counter("aab"), lambda held: held.update("b")),
    "defaultdict": (lambda: collections.defaultdict(list, a=[1]), lambda held: held["b"].append(1)),
    "order": (lambda: collections.OrderedDict(a=1, b=2), lambda held: held.move_to_end("a")),
    "list": (lambda: Looking([1, 2]), lambda held: held.append(3)),
    "tensors": (lambda: {torch.ones(1): [torch.ones(2)]}, lambda held: next(iter(held.values()))[0].zero_()),
    "tensor keys": (lambda: {torch.ones(1): 1}, lambda held: (held.clear(), held.__setitem__(torch.zeros(1), 1))),
}


def picture(held):
    """What is in it, past its own methods."""
    if not isinstance(held, dict):
        return repr([type(held), list.__repr__(held)])
    base = collections.OrderedDict if isinstance(held, collections.OrderedDict) else dict
    return repr([type(held), *base.items(held), getattr(held, "__dict__", None)])


@pytest.mark.parametrize("kind", CHANGES)
def test_containers_come_back_past_their_own_methods(kind):
    make, change = CHANGES[kind]
    holder = Holder(make())
    held, before = holder.held, picture(holder.held)
    kept = kept_with(holder)
    kept.put_back()
    assert kept.differences() == []
    change(held)
    assert picture(held) != before
    assert kept.differences() == ["state of Holder"]
    kept.put_back()
    assert kept.differences() == []
    assert holder.held is held
    assert picture(held) == before


def test_attributes_are_compared_though_a_state_dict_says_nothing_of_them():
    holder = Holder([1])
    kept = kept_with(holder)
    holder.held = [1]
    assert kept.differences() == ["state of Holder"]


@pytest.mark.parametrize("kind", [Pair, Named])
def test_named_tuples_stay_named_tuples(kind):
    before = tuple.__new__(kind, (torch.ones(1), 0.0))
    value = before.mean.clone()
    holder = Holder(before)
    kept = kept_with(holder)
    holder.held = None
    del before
    kept.put_back()
    assert type(holder.held) is kind
    assert torch.equal(holder.held.mean, value)


def test_one_entry_that_cannot_be_restored_leaves_the_others_in_place():
    stubborn = bytearray(b"ab")
    holder = Holder({"first": [1], "stubborn": stubborn, "last": [2]})
    kept = kept_with(holder)
    with memoryview(stubborn):
        holder.held["first"].append(9)
        holder.held["last"].append(9)
        memoryview(stubborn).release()
        stubborn[:] = b"cd"
    stubborn.extend(b"e")
    with memoryview(stubborn), pytest.raises(Exception, match=r"state of Holder \(BufferError"):
        kept.put_back()
    assert holder.held == {"first": [1], "stubborn": b"cde", "last": [2]}
    kept.put_back()
    assert holder.held == {"first": [1], "stubborn": b"ab", "last": [2]}


class TypedState:
    """Its load_state_dict wants the types that its state_dict gave."""

    class Inner:
        pass

    def __init__(self):
        self.inner = TypedState.Inner()
        self.inner.pair, self.inner.lists = Pair(0.0, 1.0), collections.defaultdict(list)

    def state_dict(self):
        return {"pair": self.inner.pair, "lists": self.inner.lists}

    def load_state_dict(self, state):
        state["lists"]["new"].append(state["pair"].mean)
        del state["lists"]["new"]
        self.inner.pair, self.inner.lists = state["pair"], state["lists"]


def test_state_is_handed_over_with_its_own_types():
    typed = TypedState()
    kept = kept_with(typed)
    typed.inner.pair = Pair(1.0, 2.0)
    typed.inner.lists["a"].append(1)
    kept.put_back()
    assert kept.differences() == []
    assert typed.inner.pair == Pair(0.0, 1.0)
    assert type(typed.inner.pair) is Pair
    assert typed.inner.lists == {}
    assert typed.inner.lists.default_factory is list


def test_rebuilding_keeps_kinds_and_attributes():
    state = nn.Linear(1, 1).state_dict()
    again = rebuilt({"state": state, "size": torch.Size([2])}, lambda leaf: leaf)
    assert again["state"]._metadata == state._metadata
    assert again["state"]._metadata is not state._metadata
    assert type(again["size"]) is torch.Size
    assert refill(again["size"], entries(again["size"])) is again["size"]
