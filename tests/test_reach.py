"""What a step can reach. This module is the user's code; the scheduler belongs to a library, and must be found in it."""

import functools
import sys
import types

import pytest
import torch
from torch import nn

from oomprobe.state import Tracker
from oomprobe.state.walk import is_training_state, visit

held = None  # a global variable, which some of the code below names


def reachable(roots):
    return [one.value for one in visit((root, "") for root in roots) if is_training_state(one)]


def names_nothing(model, batch_size):
    pass


class Plain:
    def act(self):
        pass


class OwnModule(nn.Linear):
    def __init__(self, scheduler=None):
        super().__init__(1, 1)
        self._scheduler = scheduler


class Calls:
    scheduler = property(lambda self: held)

    def __call__(self, model, batch_size):
        self.post()

    def post(self):
        self.scheduler.step()


class NamesInForward(nn.Linear):
    def forward(self, x):
        held.step()
        return super().forward(x)


@pytest.fixture
def scheduler(monkeypatch):
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1)
    one = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    monkeypatch.setattr(sys.modules[__name__], "held", one)
    return one


def holding(held, kind=Plain):
    holder = kind()
    holder.held = held
    return holder


class OfLibrary:
    __module__ = "torch.a_test"


def closure(held):
    return lambda model, batch_size: held.step()


def default(held):
    return lambda model, batch_size, it=held: None


REACHED = {
    "closure": closure,
    "default": default,
    "partial": lambda held: functools.partial(lambda model, batch_size, it: None, it=held),
    "bound method": lambda held: types.MethodType(
        lambda self, model, batch_size: None, holding(held)
    ),
    "containers": lambda held: default({"a": [(held,)]}),
    "frozenset": lambda held: default(frozenset([held])),
    "object of a library": lambda held: default(holding([*range(999), {"it": held}], OfLibrary)),
    "bound method in an object of a library": lambda held: default(
        holding(holding(held).act, OfLibrary)
    ),
    "private attribute of a module": lambda held: nn.Sequential(OwnModule(held)),
    "object on a module": lambda held: OwnModule(holding(held)),
    "patched method of a module": lambda held: OwnModule(closure(held)),
}
NAMED = {
    "a property in another method than __call__": Calls(),
    "forward of a submodule": nn.Sequential(NamesInForward(1, 1)),
}


@pytest.mark.parametrize("way", REACHED)
def test_objects_that_a_step_holds_are_reached(way, scheduler):
    assert scheduler in reachable([REACHED[way](scheduler)])
    assert scheduler not in reachable([REACHED[way](Plain())])


@pytest.mark.parametrize("way", NAMED)
def test_objects_that_the_users_code_names_are_reached(way, scheduler):
    assert scheduler in reachable([NAMED[way]])
    assert scheduler not in reachable([names_nothing, OwnModule()])


def test_data_sets_and_library_code_are_not_searched(scheduler, monkeypatch):
    for hold in (default, lambda held: default(holding(held, OfLibrary))):
        assert scheduler in reachable([hold([*range(999), scheduler])])
        assert scheduler not in reachable([hold([*range(1_000), scheduler])])
    many = [[[] for _ in range(900)] for _ in range(30)]
    assert len([*visit([(many, "")])]) == 20_000
    monkeypatch.setattr(
        sys.modules[__name__], "__file__", "/usr/lib/python3/site-packages/users_train.py"
    )
    assert scheduler not in reachable([Calls(), type("Own", (Calls,), {})()])


INSTALLED = """
CACHE, calls = {}, 0

class Trainer:
    shared = 0
    def __init__(self):
        self.n = 0
    def step(self, model, batch_size):
        global calls
        calls += 1
        CACHE[batch_size] = calls
        Trainer.shared += 1
        self.n += 1
"""


def test_what_an_installed_package_shares_is_never_put_back(monkeypatch):
    """Its objects are the user's if the step is its own, but not its global variables and class attributes."""
    package = types.ModuleType("installed_trainer")
    package.__file__ = "/usr/lib/python3/site-packages/installed_trainer.py"
    monkeypatch.setitem(sys.modules, package.__name__, package)
    exec(INSTALLED, vars(package))
    trainer, model = package.Trainer(), nn.Linear(1, 1)
    tracker = Tracker(model, [trainer.step])
    trainer.step(model, 2)
    tracker.start_cold()
    tracker.put_back()
    assert (trainer.n, package.calls, package.CACHE, package.Trainer.shared) == (0, 1, {2: 1}, 1)
