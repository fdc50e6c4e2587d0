import functools
import importlib
import sys
import types

import pytest
import torch
from torch import nn

from oomprobe.state import Tracker
from oomprobe.state.walk import is_training_state, visit


def reachable(roots):
    return [one.value for one in visit((root, "") for root in roots) if is_training_state(one)]


class Plain:
    pass


class OwnModule(nn.Linear):
    pass


@pytest.fixture
def scheduler():
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1)
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def holding(held):
    holder = Plain()
    holder.held = held
    return holder


def closure(held):
    return lambda model, batch_size: held.step()


def closure_in_a_closure(held):
    return lambda model, batch_size: (lambda: [closure(held) for _ in range(1)])()


def default(held):
    return lambda model, batch_size, it=held: None


def own_module(held):
    model = OwnModule(1, 1)
    model._scheduler = held
    return nn.Sequential(model)


REACHED = {
    "closure": closure,
    "closure in a closure": closure_in_a_closure,
    "default": default,
    "partial": lambda held: functools.partial(lambda model, batch_size, it: None, it=held),
    "bound method": lambda held: types.MethodType(lambda self, model, batch_size: None, holding(held)),
    "containers": lambda held: default({"a": [(held,)]}),
    "private attribute of a module": own_module,
    "object on a module": lambda held: own_module(holding(held)),
    "patched method of a module": lambda held: own_module(closure(held)),
}


@pytest.mark.parametrize("way", REACHED)
def test_objects_that_a_step_holds_are_reached(way, scheduler):
    assert scheduler in reachable([REACHED[way](scheduler)])
    assert scheduler not in reachable([REACHED[way](Plain())])


def test_data_sets_are_not_searched(scheduler):
    assert scheduler not in reachable([default([*range(30_000), scheduler])])


MODULES = {
    "users_state.py": "scheduler = None\n",
    "users_train.py": """
from torch import nn
import users_state

class Calls:
    def __call__(self, model, batch_size):
        held.step()

class Method:
    def step(self, model, batch_size):
        self.post()
    def post(self):
        held.step()

class Property:
    def step(self, model, batch_size):
        self.scheduler.step()
    @property
    def scheduler(self):
        return held

class Model(nn.Linear):
    def forward(self, x):
        held.step()
        return super().forward(x)

def through_module(model, batch_size):
    users_state.scheduler.step()

def names_nothing(model, batch_size):
    pass
""",
}


@pytest.fixture
def train(tmp_path, monkeypatch, scheduler):
    for name, text in MODULES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    import users_train

    users_train.held = users_train.users_state.scheduler = scheduler
    yield users_train
    for name in MODULES:
        del sys.modules[name.removesuffix(".py")]


NAMES_IT = {
    "__call__ of a class": lambda train: [train.Calls()],
    "another method": lambda train: [train.Method().step],
    "property": lambda train: [train.Property().step],
    "forward of a submodule": lambda train: [nn.Sequential(train.Model(1, 1)), train.names_nothing],
    "module": lambda train: [train.through_module],
}


@pytest.mark.parametrize("way", NAMES_IT)
def test_objects_that_the_users_code_names_are_reached(way, train, scheduler):
    assert scheduler in reachable(NAMES_IT[way](train))
    assert scheduler not in reachable([train.names_nothing, nn.Linear(1, 1)])


def test_library_code_is_not_searched(train, scheduler, monkeypatch):
    monkeypatch.setattr(train, "__file__", "/usr/lib/python3/site-packages/users_train.py")
    assert scheduler not in reachable([train.Calls(), type("Own", (train.Calls,), {})()])


INSTALLED = """
import torch
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


def test_what_an_installed_package_shares_is_never_put_back(tmp_path, monkeypatch):
    """Its objects are the user's if the step is its own, but not its global variables and class attributes."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "installed_trainer.py").write_text(INSTALLED)
    monkeypatch.syspath_prepend(folder)
    package = importlib.import_module("installed_trainer")
    trainer, model = package.Trainer(), nn.Linear(1, 1)
    tracker = Tracker(model, [trainer.step])
    trainer.step(model, 2)
    tracker.start_cold()
    tracker.put_back()
    assert (trainer.n, package.calls, package.CACHE, package.Trainer.shared) == (0, 1, {2: 1}, 1)
    del sys.modules["installed_trainer"]
