import gc
import weakref

import pytest
import torch
from torch.optim import optimizer as torch_optimizer

from oomprobe.runners.hooks import OptimizerWatch, accumulating
from oomprobe.state import Tracker


class PlainSteps(torch.optim.Optimizer):
    """An optimizer as users write it: no hooks, no super().step()."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p -= p.grad


@pytest.fixture
def model():
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2)


def backward(model):
    model(torch.ones(4, 3)).square().sum().backward()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


# --- partial state of a failed step ---


class FailsAt(torch.optim.AdamW):
    """Runs out of memory while creating the state of its nth parameter."""

    def __init__(self, params, nth):
        super().__init__(params, foreach=False)
        self.nth = nth

    def _init_group(self, group, *lists):
        for place, parameter in enumerate(group["params"]):
            if place == self.nth and not self.state[parameter]:
                self.state[parameter]["step"] = torch.tensor(0.0)
                raise torch.OutOfMemoryError("CUDA out of memory.")
            one = {**group, "params": [parameter]}
            super()._init_group(one, *lists)
        return False


@pytest.mark.parametrize("read", [False, True], ids=["", "read before"])
@pytest.mark.parametrize("stepped", [False, True], ids=["", "stepped before"])
def test_partial_optimizer_state_is_dropped(model, read, stepped):
    optimizer = FailsAt(model.parameters(), nth=None)
    if read:  # for example to log norms: this leaves an empty entry
        assert optimizer.state[model.bias].get("exp_avg") is None
    if stepped:  # only the weight
        model.bias.requires_grad_(False)
        backward(model)
        optimizer.step()
        model.bias.requires_grad_(True)
    before = {parameter: dict(state) for parameter, state in optimizer.state.items() if state}
    tracker = Tracker(model, [optimizer.step])
    optimizer.nth = 1
    backward(model)
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    assert len(optimizer.state) == 2
    tracker.start_cold()
    assert {parameter: dict(state) for parameter, state in optimizer.state.items() if state} == before
    optimizer.nth = None
    backward(model)
    optimizer.step()
    assert [sorted(state) for state in optimizer.state.values()] == [["exp_avg", "exp_avg_sq", "step"]] * 2


def test_an_unfinished_optimizer_is_not_kept_alive(model):
    optimizer = FailsAt(model.parameters(), nth=0)
    backward(model)
    with OptimizerWatch(lambda one: None):
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.step()
        gone = weakref.ref(optimizer)
        del optimizer
        gc.collect()
        assert gone() is None


# --- optimizers that step ---


@pytest.mark.parametrize("kind", [sgd, lambda m: PlainSteps(m.parameters())], ids=["SGD", "plain"])
def test_an_optimizer_is_seen_before_and_after_its_step(model, kind):
    optimizer, unused = kind(model), sgd(model)
    before, weights_seen = model.weight.detach().clone(), []
    with OptimizerWatch(lambda one: weights_seen.append((one, model.weight.detach().clone()))) as watch:
        backward(model)
        assert (watch.stepped, weights_seen) == (set(), [])
        optimizer.step()
        created_inside = sgd(model)
        created_inside.step()
    assert watch.stepped == {id(optimizer), id(created_inside)}
    assert id(unused) not in watch.stepped
    assert [id(one) for one, _ in weights_seen] == [id(optimizer), id(created_inside)]
    assert torch.equal(weights_seen[0][1], before)


def test_only_the_users_own_hooks_stay(model):
    called, seen = [], []
    handle = torch_optimizer.register_optimizer_step_post_hook(lambda *_: called.append(1))
    try:
        with pytest.raises(KeyError, match="labels"), OptimizerWatch(seen.append) as watch:
            raise KeyError("labels")
        backward(model)
        sgd(model).step()
    finally:
        handle.remove()
    assert (called, seen, watch.stepped) == ([1], [], set())


# --- accumulation ---


def test_while_accumulating_nothing_steps_and_gradients_add_up(model):
    optimizers = [sgd(model), torch.optim.Adam(model.parameters()), PlainSteps(model.parameters())]
    weight = model.weight.detach().clone()
    backward(model)
    once = model.weight.grad.clone()
    with OptimizerWatch(lambda one: None) as watch, accumulating(iter(optimizers), model):
        for clear in (optimizers[0].zero_grad, model.zero_grad):
            clear()
            backward(model)
        assert [optimizer.step() for optimizer in optimizers] == [None] * 3
    assert watch.stepped == set()
    assert torch.equal(model.weight, weight)
    assert torch.allclose(model.weight.grad, 3 * once)


def test_after_accumulating_optimizers_step_again(model):
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # it wraps `step` to count calls
    weight, attributes = model.weight.detach().clone(), (dict(vars(optimizer)), dict(vars(model)))
    backward(model)
    with pytest.raises(KeyError, match="labels"), accumulating([optimizer, optimizer], model):
        raise KeyError("labels")
    assert (dict(vars(optimizer)), dict(vars(model))) == attributes
    optimizer.step()
    scheduler.step()  # if the optimizer's step had not been counted, this would warn, and warnings are errors here
    assert not torch.equal(model.weight, weight)


def test_a_models_own_step_method_still_works():
    cell = type("Cell", (torch.nn.Module,), {"step": lambda self, x: 2 * x})()
    with accumulating([], cell):
        assert cell.step(21) == 42
