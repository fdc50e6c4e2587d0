import gc
import weakref

import pytest
import torch
from torch.optim import optimizer as torch_optimizer

from oomprobe.hooks import OptimizerWatch, accumulating


class PlainSteps(torch.optim.Optimizer):
    """What users write: no hooks, no super().step()."""

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


def global_hooks():
    return dict(torch_optimizer._global_optimizer_pre_hooks), dict(torch_optimizer._global_optimizer_post_hooks)


# --- state that a failed step has half made ---


class FailsAt(torch.optim.AdamW):
    """Runs out of memory when it makes the state of its nth parameter."""

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


def test_half_made_optimizer_state_is_dropped(model):
    optimizer = FailsAt(model.parameters(), nth=1)
    backward(model)
    with OptimizerWatch(lambda one: None) as watch:
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.step()
        assert len(optimizer.state) == 2
        watch.drop_half_made()
        assert dict(optimizer.state) == {}
        optimizer.nth = None
        optimizer.step()
    assert [sorted(state) for state in optimizer.state.values()] == [["exp_avg", "exp_avg_sq", "step"]] * 2


def test_state_from_before_the_step_that_failed_stays(model):
    optimizer = FailsAt(model.parameters(), nth=1)
    model.bias.requires_grad_(False)
    with OptimizerWatch(lambda one: None) as watch:
        optimizer.nth = None
        model.bias.grad = None
        backward(model)
        optimizer.step()
        before = optimizer.state[model.weight]["exp_avg"]
        watch.drop_half_made()  # nothing is
        assert model.weight in optimizer.state
        optimizer.nth = 1
        optimizer.state.pop(model.bias, None)
        model.bias.requires_grad_(True)
        backward(model)
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.step()
        watch.drop_half_made()
    assert optimizer.state[model.weight]["exp_avg"] is before
    assert model.bias not in optimizer.state


def test_a_look_at_state_that_is_not_made_yet_keeps_none_of_it(model):
    optimizer = FailsAt(model.parameters(), nth=1)
    assert optimizer.state[model.bias].get("exp_avg") is None  # as for a log of norms: an empty entry
    backward(model)
    with OptimizerWatch(lambda one: None) as watch:
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.step()
        watch.drop_half_made()
        optimizer.nth = None
        optimizer.step()
    assert all("exp_avg" in state for state in optimizer.state.values())


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


# --- seeing steps ---


@pytest.mark.parametrize(
    "kind", [sgd, lambda m: torch.optim.Adam(m.parameters()), lambda m: PlainSteps(m.parameters())]
)
def test_an_optimizer_that_steps_is_seen_before_and_after(model, kind):
    optimizer = kind(model)
    weight, weights_seen = model.weight.detach().clone(), []
    with OptimizerWatch(lambda one: weights_seen.append((one, model.weight.detach().clone()))) as watch:
        backward(model)
        assert (watch.stepped, weights_seen) == (set(), [])
        optimizer.step()
    assert watch.stepped == {id(optimizer)}
    [(seen, weight_before)] = weights_seen
    assert seen is optimizer
    assert torch.equal(weight_before, weight)
    assert not torch.equal(model.weight, weight)


def test_optimizers_are_told_apart_and_one_made_inside_is_seen(model):
    first, asleep, before = sgd(model), sgd(model), []
    with OptimizerWatch(before.append) as watch:
        backward(model)
        first.step()
        made_inside = sgd(model)
        made_inside.step()
    assert watch.stepped == {id(first), id(made_inside)}
    assert [id(one) for one in before] == [id(first), id(made_inside)]
    assert id(asleep) not in watch.stepped


def test_a_step_that_fails_half_way_has_not_stepped(model):
    class Breaks(PlainSteps):
        def step(self, closure=None):
            raise ValueError("half way")

    before = []
    with OptimizerWatch(before.append) as watch, pytest.raises(ValueError, match="half way"):
        Breaks(model.parameters()).step()
    assert len(before) == 1
    assert watch.stepped == set()


def test_a_step_that_a_grad_scaler_skips_is_no_step(model):
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with OptimizerWatch(lambda one: None) as watch:
        for factor, stepped in ((float("inf"), set()), (1.0, {id(optimizer)})):
            optimizer.zero_grad()
            scaler.scale(factor * model(torch.ones(4, 3)).square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            assert watch.stepped == stepped


@pytest.mark.parametrize("error", [None, KeyError])
def test_the_hooks_are_gone_afterwards(model, error):
    optimizer, before, calls = sgd(model), global_hooks(), []
    backward(model)
    try:
        with OptimizerWatch(calls.append) as watch:
            assert global_hooks() != before
            if error:
                raise error
    except KeyError:
        pass
    assert global_hooks() == before
    optimizer.step()
    assert (calls, watch.stepped) == ([], set())


# --- holding steps back ---


def test_inside_nothing_steps_and_gradients_accumulate(model):
    optimizer, weight = sgd(model), model.weight.detach().clone()
    backward(model)
    once = model.weight.grad.clone()
    with OptimizerWatch(lambda one: None) as watch, accumulating([optimizer], model):
        for clear in (optimizer.zero_grad, model.zero_grad):
            clear()
            optimizer.step()
            backward(model)
        assert optimizer.step() is None
    assert watch.stepped == set()
    assert torch.equal(model.weight, weight)
    assert torch.allclose(model.weight.grad, 3 * once)


def test_afterwards_steps_step_and_gradients_are_cleared(model):
    optimizer, weight = sgd(model), model.weight.detach().clone()
    backward(model)
    attributes = dict(vars(optimizer)), dict(vars(model))
    with pytest.raises(KeyError, match="labels"), accumulating([optimizer, optimizer], model):
        raise KeyError("labels")
    assert (dict(vars(optimizer)), dict(vars(model))) == attributes
    optimizer.step()
    assert not torch.equal(model.weight, weight)
    optimizer.zero_grad()
    assert model.weight.grad is None
    backward(model)
    model.zero_grad()
    assert model.weight.grad is None


def test_a_step_that_a_scheduler_replaced_is_put_back_itself(model):
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    own = vars(optimizer)["step"]  # the scheduler counts steps through it
    with accumulating([optimizer], model):
        assert vars(optimizer)["step"] is not own
    assert vars(optimizer)["step"] is own
    assert "zero_grad" not in vars(optimizer)
    backward(model)
    optimizer.step()
    scheduler.step()  # would warn, and warnings are errors here, if the optimizer's step had not been counted
    assert scheduler.get_last_lr() == [pytest.approx(0.01)]


def test_a_models_own_step_and_buffers_go_on_working():
    class Cell(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))

        def step(self, x):
            self.steps += 1
            return 2 * x

    class Counts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("step", torch.zeros(()))

    cell, counts = Cell(), Counts()
    with accumulating([], cell), accumulating([], counts):
        assert cell.step(21) == 42
        counts.step += 1
    assert (cell.steps, counts.step) == (1, 1)
