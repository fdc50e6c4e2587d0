import collections
import sys
import time
import types

import pytest
import torch
from torch import nn

from oomprobe.state.reach import reachable


class Plain:
    pass


class Base:
    __slots__ = ("held",)


class Slotted(Base):
    __slots__ = ("__dict__",)

    def __call__(self, model, batch_size):
        pass


class OwnModule(nn.Linear):
    pass


@pytest.fixture
def scheduler():
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1)
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


@pytest.fixture
def engine(scheduler, tmp_path, monkeypatch):
    (tmp_path / "engine_of_a_user.py").write_text(
        "context = None\nclass Context: pass\ndef train(model, batch_size):\n    scheduler.step()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import engine_of_a_user

    engine_of_a_user.context = Plain()
    engine_of_a_user.context.held = scheduler
    engine_of_a_user.scheduler = scheduler
    yield engine_of_a_user
    del sys.modules["engine_of_a_user"]


def calls_through_a_module(model, batch_size):
    engine_of_a_user.train(model, batch_size)  # noqa: F821


def names_an_object_of_a_module(model, batch_size):
    engine_of_a_user.context.held.step()  # noqa: F821


@pytest.mark.parametrize("step", [calls_through_a_module, names_an_object_of_a_module])
def test_functions_and_objects_named_through_a_module(step, engine, scheduler):
    step = types.FunctionType(step.__code__, {"engine_of_a_user": engine})
    step.__module__ = None
    assert scheduler in reachable([step])


def test_slots_of_base_classes_and_attributes_beside_them(scheduler):
    slotted = Slotted()
    slotted.held = scheduler
    assert scheduler in reachable([slotted])
    del slotted.held
    slotted.other = scheduler
    assert scheduler in reachable([slotted])


def test_deques(scheduler):
    assert scheduler in reachable([lambda m, b, queue=collections.deque([scheduler]): None])


def test_private_and_plain_attributes_of_own_modules(scheduler):
    model = OwnModule(1, 1)
    model._scheduler = scheduler
    assert scheduler in reachable([model])
    del model._scheduler
    model.helper = Plain()
    model.helper.held = scheduler
    assert scheduler in reachable([model])


def test_long_registries_but_not_data(scheduler):
    holder = Plain()
    holder.held = scheduler
    registry = {i: i for i in range(15_000)}
    registry["trainer"] = holder
    assert scheduler not in reachable([lambda m, b, r=[*range(30_000), scheduler]: None])
    assert scheduler in reachable([lambda m, b, r=registry: None])


PACKAGE = {
    "__init__.py": "",
    "state.py": "from users_package import deep\nscheduler = None\n",
    "deep.py": "from users_package import state\n",
    "train.py": """
from torch import nn
import users_package.state
import users_package

class Registry:
    held = None

class Calls:
    def __call__(self, model, batch_size):
        held.step()

class Method:
    def step(self, model, batch_size):
        self.post()
    def post(self):
        held.step()

class OfClass:
    @classmethod
    def step(cls, model, batch_size):
        cls.post()
    @staticmethod
    def post():
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

def of_registry(model, batch_size):
    Registry.held.step()

def through_package(model, batch_size):
    users_package.state.scheduler.step()

def imports_from_package(model, batch_size):
    from users_package import state
    state.scheduler.step()

def imports_from_here(model, batch_size):
    from . import state
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

    train.held = train.Registry.held = train.users_package.state.scheduler = scheduler
    yield train
    for name in [name for name in sys.modules if name.partition(".")[0] == "users_package"]:
        del sys.modules[name]


NAMES_IT = {
    "__call__ of a class": lambda train: [train.Calls()],
    "another method": lambda train: [train.Method().step],
    "another class method": lambda train: [train.OfClass.step],
    "property": lambda train: [train.Property().step],
    "forward of the model": lambda train: [train.Model(1, 1), train.names_nothing],
    "forward of a submodule": lambda train: [nn.Sequential(train.Model(1, 1)), train.names_nothing],
    "class attribute": lambda train: [train.of_registry],
    "submodule of a package": lambda train: [train.through_package],
    "import in the body": lambda train: [train.imports_from_package],
    "relative import in the body": lambda train: [train.imports_from_here],
    "import of a name in the body": lambda train: [train.imports_name],
}


@pytest.mark.parametrize("way", NAMES_IT)
def test_what_own_code_names(way, package, scheduler):
    assert scheduler in reachable(NAMES_IT[way](package))
    assert scheduler not in reachable([package.names_nothing, nn.Linear(1, 1)])


HOOKED = {
    "forward": lambda model, hook: model[0].register_forward_hook(hook),
    "backward": lambda model, hook: model.register_full_backward_hook(hook),
    "tensor": lambda model, hook: model[0].weight.register_hook(hook),
    "accumulation": lambda model, hook: model[0].weight.register_post_accumulate_grad_hook(hook),
    "patched": lambda model, hook: setattr(model[0], "forward", hook),
}


@pytest.mark.parametrize("kind", HOOKED)
def test_what_hooks_close_over(kind, scheduler):
    model = nn.Sequential(nn.Linear(1, 1))
    HOOKED[kind](model, lambda *_: scheduler.step())
    assert scheduler in reachable([model])


def test_code_of_libraries_is_not_walked(package, scheduler, monkeypatch):
    monkeypatch.setattr(package, "__file__", "/usr/lib/python3/site-packages/users_package/train.py")
    assert scheduler not in reachable([package.Calls()])


def test_a_large_model_is_walked_quickly(package):
    layers = [package.Model(1, 1) for _ in range(500)]
    for layer in layers:
        layer.config = Plain()
        layer.config.sizes = list(range(20))
        layer.register_forward_hook(lambda *_: None)
    model = nn.Sequential(*layers)
    started = time.perf_counter()
    reachable([model, package.names_nothing])
    assert time.perf_counter() - started < 0.2
