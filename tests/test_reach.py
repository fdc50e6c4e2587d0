import functools
import sys
import time
import types

import pytest
import torch
from torch import nn

from oomprobe.state.reach import reachable


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


def wrapped(held):
    return functools.wraps(closure(held))(lambda *args: None)


def own_module(held):
    model = OwnModule(1, 1)
    model._scheduler = held
    return nn.Sequential(model)


REACHED = {
    "closure": closure,
    "closure in a closure": closure_in_a_closure,
    "default": default,
    "wrapped function": wrapped,
    "partial": lambda held: functools.partial(lambda model, batch_size, it: None, it=held),
    "bound method": lambda held: types.MethodType(lambda self, model, batch_size: None, holding(held)),
    "containers": lambda held: default({"a": [(held,)]}),
    "private attribute of a module": own_module,
    "object on a module": lambda held: own_module(holding(held)),
    "patched method of a module": lambda held: own_module(closure(held)),
}


@pytest.mark.parametrize("way", REACHED)
def test_a_step_reaches_what_it_holds(way, scheduler):
    assert scheduler in reachable([REACHED[way](scheduler)])
    assert scheduler not in reachable([REACHED[way](Plain())])


def test_data_sets_are_not_walked(scheduler):
    assert scheduler not in reachable([default([*range(30_000), scheduler])])


PACKAGE = {
    "__init__.py": "",
    "state.py": "from users_package import deep\nscheduler = None\n",
    "deep.py": "from users_package import state\n",
    "train.py": """
from torch import nn
import users_package.state
import users_package

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

def through_package(model, batch_size):
    users_package.state.scheduler.step()

def imports_from_package(model, batch_size):
    from users_package import state
    state.scheduler.step()

def imports_name(model, batch_size):
    from .state import scheduler
    scheduler.step()

def names_nothing(model, batch_size):
    pass
""",
}


@pytest.fixture
def package(tmp_path, monkeypatch, scheduler):
    folder = tmp_path / "users_package"
    folder.mkdir()
    for name, text in PACKAGE.items():
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    import users_package.train as train

    train.held = train.users_package.state.scheduler = scheduler
    yield train
    for name in [name for name in sys.modules if name.partition(".")[0] == "users_package"]:
        del sys.modules[name]


NAMES_IT = {
    "__call__ of a class": lambda train: [train.Calls()],
    "another method": lambda train: [train.Method().step],
    "property": lambda train: [train.Property().step],
    "forward of the model": lambda train: [train.Model(1, 1), train.names_nothing],
    "forward of a submodule": lambda train: [nn.Sequential(train.Model(1, 1)), train.names_nothing],
    "submodule of a package": lambda train: [train.through_package],
    "import in the body": lambda train: [train.imports_from_package],
    "relative import in the body": lambda train: [train.imports_name],
}


@pytest.mark.parametrize("way", NAMES_IT)
def test_a_step_reaches_what_own_code_names(way, package, scheduler):
    assert scheduler in reachable(NAMES_IT[way](package))
    assert scheduler not in reachable([package.names_nothing, nn.Linear(1, 1)])


def test_code_of_libraries_is_not_walked(package, scheduler, monkeypatch):
    monkeypatch.setattr(package, "__file__", "/usr/lib/python3/site-packages/users_package/train.py")
    assert scheduler not in reachable([package.Calls()])


def test_a_large_model_is_walked_quickly(package):
    layers = [package.Model(1, 1) for _ in range(500)]
    for layer in layers:
        layer.config = Plain()
        layer.config.sizes = list(range(20))
    model = nn.Sequential(*layers)
    started = time.perf_counter()
    reachable([model, package.names_nothing])
    assert time.perf_counter() - started < 0.2
