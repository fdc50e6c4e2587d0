"""Objects inside an optimizer's state, and objects whose own state cannot be read."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from oomprobe.state import Keeper


class Preconditioner:
    def __init__(self, parameter):
        self.average = torch.zeros_like(parameter)
        self.steps = 0
        self.itself = self


@dataclass(frozen=True, slots=True)
class Slotted:
    average: torch.Tensor
    steps: int


class Shampoo(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                inside = state.setdefault("inside", Preconditioner(parameter))
                inside.average += 1
                inside.steps += 1
                state["slotted"] = Slotted(inside.average * 2, inside.steps)
                parameter -= inside.average


@pytest.fixture
def stepped():
    model = nn.Linear(2, 1)
    optimizer = Shampoo(model.parameters())
    optimizer.step()
    return model, optimizer


def picture(optimizer):
    states = optimizer.state.values()
    objects = [one for state in states for one in (state["inside"], state["slotted"])]
    return [*(id(state["inside"]) for state in states), *((one.steps, one.average.tolist()) for one in objects)]


@pytest.mark.parametrize("late", [False, True])
def test_objects_in_an_optimizers_state_come_back(stepped, late):
    model, optimizer = stepped
    before = picture(optimizer)
    kept = Keeper(model, [], [] if late else [optimizer], "cpu")
    kept.add(optimizer)
    optimizer.step()
    assert kept.differences()
    kept.put_back()
    assert kept.differences() == []
    assert picture(optimizer) == before


@pytest.mark.parametrize("late", [False, True])
def test_a_change_inside_an_object_alone_is_noticed(stepped, late):
    model, optimizer = stepped
    kept = Keeper(model, [], [] if late else [optimizer], "cpu")
    kept.add(optimizer)
    inside = optimizer.state[model.weight]["inside"]
    inside.steps += 1
    assert kept.differences() == ["state of Shampoo"]
    inside.steps -= 1
    assert kept.differences() == []
    inside.average += 1
    assert kept.differences() == ["state of Shampoo"]
    kept.put_back()
    inside.added = 1
    assert kept.differences() == ["state of Shampoo"]
    kept.put_back()
    assert not hasattr(inside, "added")


@pytest.mark.parametrize("late", [False, True])
def test_objects_that_a_step_threw_away_are_made_anew(stepped, late):
    model, optimizer = stepped
    kept = Keeper(model, [], [] if late else [optimizer], "cpu")
    kept.add(optimizer)
    inside = optimizer.state[model.weight]["inside"]
    inside.itself = None
    del inside
    optimizer.state.clear()
    kept.put_back()
    assert kept.differences() == []
    assert optimizer.state[model.weight]["inside"].average.tolist() == [[1, 1]]
    optimizer.step()
    assert optimizer.state[model.weight]["inside"].steps == 2


def test_the_copy_for_a_lost_device_has_the_objects_too(stepped):
    model, optimizer = stepped
    kept = Keeper(model, [], [optimizer], "cpu")
    optimizer.step()
    copied = kept.host_copy()["optimizers"][0]["state"][0]["inside"]
    assert type(copied) is Preconditioner
    assert copied.steps == 1
    assert copied.average.tolist() == [[1, 1]]


class WantsArgument:
    class Inner:
        count = 0

    def __init__(self):
        self.inner = WantsArgument.Inner()

    def state_dict(self, epoch):
        return {"count": self.inner.count}

    def load_state_dict(self, state):
        raise NotImplementedError


def test_state_that_cannot_be_read_is_kept_by_its_attributes_and_said():
    wants = WantsArgument()
    kept = Keeper(nn.Linear(1, 1), [lambda: wants], [], "cpu")
    wants.inner.count += 1
    assert kept.differences() == ["state of WantsArgument"]
    kept.put_back()
    assert kept.differences() == []
    assert wants.inner.count == 0
    assert len(kept.notes) == 1
    assert "state of WantsArgument: its state_dict() could not be read (TypeError: " in kept.notes[0]
