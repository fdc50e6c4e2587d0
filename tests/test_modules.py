"""Plain attributes of modules go back with their buffers: half a restore leaves a model that believes in what is gone."""

import copy
import types
import warnings
import weakref

import pytest
import torch
from torch import nn

import oomprobe
from oomprobe.state import Keeper


def train(model, loss_of):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model, batch_size):
        optimizer.zero_grad()
        loss_of(model, batch_size).backward()
        optimizer.step()

    return step


def probed(model, loss_of):
    step = train(model, loss_of)
    result = oomprobe.find_max_batch(model, step, device="cpu:1GiB", max_batch=16, progress="off")
    assert result.state_verified
    return step


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self._grow(4)

    def _grow(self, length):
        self.length = length
        self.register_buffer("table", torch.arange(length * 2.0).view(length, 2), persistent=False)

    def forward(self, x):
        if x.shape[0] > self.length:
            self._grow(x.shape[0])
        return x * self.table[: x.shape[0]]


def test_a_table_and_its_length_go_back_together():
    model = nn.Sequential(Rotary(), nn.Linear(2, 1))
    step = probed(model, lambda model, n: model(torch.ones(n, 2)).sum())
    assert (model[0].length, len(model[0].table)) == (4, 4)
    step(model, 16)


class BuildsLater(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.built, self.sizes = nn.Linear(2, 2), False, []

    def forward(self, x):
        if not hasattr(self, "marker"):
            self.marker = object()
            self.sizes.append(2)
        if not self.built:
            self.second, self.built = nn.Linear(2, 1), True
        return self.second(self.first(x))


def test_what_is_built_in_the_first_call_is_built_again():
    model = BuildsLater()
    step = probed(model, lambda model, n: model(torch.ones(n, 2)).sum())
    assert not hasattr(model, "second")
    assert not hasattr(model, "marker")
    assert (model.built, model.sizes) == (False, [])
    step(model, 4)


@pytest.mark.parametrize("normed", [nn.utils.spectral_norm, nn.utils.weight_norm])
@pytest.mark.parametrize("trained", [False, True])
def test_the_older_norms_leave_no_graph_behind(normed, trained):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(normed(nn.Linear(3, 2)), nn.Linear(2, 1))
    loss_of = lambda model, n: model(torch.ones(n, 3)).sum()  # noqa: E731
    if trained:
        train(model, loss_of)(model, 1)
    before = model[0].weight.detach().clone()
    probed(model, loss_of)
    assert torch.equal(model[0].weight, before)
    assert model[0].weight.is_leaf
    copy.deepcopy(model)


def test_a_tensor_that_is_an_attribute_comes_back_as_itself():
    model = nn.Linear(1, 1)
    model.table = table = torch.ones(3)
    kept = Keeper(model, [], [], "cpu")
    model.table.zero_()
    assert kept.differences() == ["table of Linear"]
    model.table = torch.zeros(5)
    kept.put_back()
    assert kept.differences() == []
    assert model.table is table
    assert table.tolist() == [1, 1, 1]


class Helper:
    pass


def test_tensors_and_objects_that_a_step_replaces_are_not_held():
    model = nn.Linear(1, 1)
    model.table, model.helper = torch.ones(3), Helper()
    died = [weakref.ref(model.table), weakref.ref(model.helper)]
    kept = Keeper(model, [], [], "cpu")
    model.table = model.helper = None
    assert [ref() for ref in died] == [None, None]
    kept.put_back()
    assert model.table.tolist() == [1, 1, 1]
    assert kept.differences() == []


CHANGES = {
    "number": lambda m: setattr(m, "number", 2),
    "text": lambda m: setattr(m, "text", "b"),
    "nothing": lambda m: setattr(m, "nothing", object()),
    "size": lambda m: setattr(m, "size", torch.Size([3])),
    "sizes": lambda m: m.sizes.append(2),
    "by_size": lambda m: m.by_size.setdefault("b", 2),
    "function": lambda m: setattr(m, "function", abs),
    "added": lambda m: setattr(m, "added", object()),
    "text, deleted": lambda m: delattr(m, "text"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_plain_attributes(change):
    model = nn.Sequential(nn.Linear(1, 1))
    module = model[0]
    module.number, module.text, module.nothing, module.function = 1, "a", None, len
    module.size, module.sizes, module.by_size = torch.Size([2]), [1], {"a": 1}
    before = dict(vars(module))
    kept = Keeper(model, [], [], "cpu")
    CHANGES[change](module)
    assert kept.differences() == [f"{change.partition(',')[0]} of Linear"]
    kept.put_back()
    assert kept.differences() == []
    assert vars(module).items() >= before.items()
    assert vars(module).keys() == before.keys()
    assert (module.sizes, module.by_size) == ([1], {"a": 1})


class WithExtra(nn.Module):
    """Its extra state is in attributes that set_extra_state makes anew."""

    def __init__(self):
        super().__init__()
        self.inner, self.scales = types.SimpleNamespace(scale=1), [1]

    def get_extra_state(self):
        return {"scale": self.inner.scale}

    def set_extra_state(self, state):
        self.inner, self.scales = types.SimpleNamespace(**state), [1]


def test_extra_state_may_make_attributes_anew():
    model = WithExtra()
    kept = Keeper(model, [], [], "cpu")
    model.inner.scale = 2
    kept.put_back()
    assert kept.differences() == []
    assert model.inner.scale == 1


def test_what_goes_with_cpp_objects_is_left_alone():
    model = type("Parallel", (nn.Module,), {"__module__": "torch.nn.parallel.distributed"})()
    model.rebuilt = False
    kept = Keeper(model, [], [], "cpu")
    model.rebuilt = True
    kept.put_back()
    assert model.rebuilt
    assert kept.differences() == []
