import collections
import sys
import types

import pytest
import torch
from torch import nn

from oomprobe.state.capture import reachable


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
