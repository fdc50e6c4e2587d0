"""Optimizers whose step fails halfway, and optimizers that must not step while a plan's micro-batches accumulate."""

import pytest
import torch
from composed import Momentum

from oomprobe.runners.hooks import OptimizerWatch, accumulating
from oomprobe.state import Tracker


@pytest.fixture
def model():
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2)


def backward(model):
    model(torch.ones(4, 3)).square().sum().backward()


class Fails(torch.optim.Optimizer):
    """May run out of memory while it creates the state of the bias."""

    fails = False

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None and not self.state[parameter]:
                self.state[parameter]["step"] = 0
                if self.fails and parameter.dim() == 1:
                    raise torch.OutOfMemoryError("CUDA out of memory.")
                self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)


@pytest.mark.parametrize("read", [False, True], ids=["", "read before"])
@pytest.mark.parametrize("stepped", [False, True], ids=["", "stepped before"])
def test_partial_optimizer_state_is_dropped(model, read, stepped):
    optimizer = Fails(model.parameters(), {})
    if read:  # for example to log norms: this leaves an empty entry
        assert optimizer.state[model.bias].get("exp_avg") is None
    if stepped:  # only the weight
        model.bias.requires_grad_(False)
        backward(model)
        optimizer.step()
        model.bias.requires_grad_(True)
    before = {parameter: dict(state) for parameter, state in optimizer.state.items() if state}
    tracker = Tracker(model, [optimizer.step])
    optimizer.fails = True
    backward(model)
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    assert len(optimizer.state) == 2
    tracker.start_cold()
    assert {
        parameter: dict(state) for parameter, state in optimizer.state.items() if state
    } == before


def test_while_accumulating_nothing_steps_and_gradients_add_up(model):
    optimizers = [torch.optim.SGD(model.parameters()), Momentum(model.parameters())]
    weight = model.weight.detach().clone()
    backward(model)
    once = model.weight.grad.clone()
    with OptimizerWatch(lambda one: None) as watch, accumulating(iter(optimizers), model):
        for clear in (optimizers[0].zero_grad, model.zero_grad):
            clear()
            backward(model)
        assert [optimizer.step() for optimizer in optimizers] == [None] * 2
    assert watch.stepped == set()
    assert torch.equal(model.weight, weight)
    assert torch.allclose(model.weight.grad, 3 * once)


def test_after_accumulating_optimizers_step_again(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # it wraps `step` to count calls
    weight, attributes = model.weight.detach().clone(), (dict(vars(optimizer)), dict(vars(model)))
    backward(model)
    with pytest.raises(KeyError, match="labels"), accumulating([optimizer, optimizer], model):
        raise KeyError("labels")
    assert (dict(vars(optimizer)), dict(vars(model))) == attributes
    optimizer.step()
    scheduler.step()  # if the optimizer's step had not been counted, this would warn, and warnings are errors here
    assert not torch.equal(model.weight, weight)
