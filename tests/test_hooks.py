"""Hooks that a step registers are gone afterwards; those that were there before are back, in the same dictionaries."""

import pytest
import torch
from torch import nn

import oomprobe
from oomprobe.state import Keeper
MODULE_HOOKS=TENSOR_HOOKS=()


def nothing(*args, **kwargs):
    return None


REGISTER = {
    "forward": lambda model: model.register_forward_hook(nothing),
    "forward, with keywords, always": lambda model: model.register_forward_hook(
        nothing, with_kwargs=True, always_call=True
    ),
    "forward pre": lambda model: model.register_forward_pre_hook(nothing, with_kwargs=True),
    "full backward": lambda model: model.register_full_backward_hook(nothing),
    "full backward pre": lambda model: model.register_full_backward_pre_hook(nothing),
    "state_dict pre": lambda model: model.register_state_dict_pre_hook(nothing),
    "state_dict post": lambda model: model.register_state_dict_post_hook(nothing),
    "load_state_dict pre": lambda model: model.register_load_state_dict_pre_hook(nothing),
    "load_state_dict post": lambda model: model.register_load_state_dict_post_hook(nothing),
    "of a tensor": lambda model: model.weight.register_hook(nothing),
    "of a tensor, after accumulation": lambda model: model.weight.register_post_accumulate_grad_hook(nothing),
}


def hooks(model):
    """An independent picture of them."""
    of_module = {name: value for name, value in vars(model).items() if "hook" in name}
    of_tensor = {name: getattr(model.weight, name) for name in TENSOR_HOOKS}
    return {k: (id(v), dict(v)) if isinstance(v, dict) else v for k, v in {**of_module, **of_tensor}.items()}


def test_the_names_are_all_that_this_torch_has():
    assert set(MODULE_HOOKS) == {name for name in vars(nn.Linear(1, 1)) if "hook" in name}


@pytest.mark.parametrize("kind", REGISTER)
def test_a_hook_registered_in_each_call_is_gone_afterwards(kind):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = hooks(model)

    def step(model, batch_size):
        REGISTER[kind](model)
        optimizer.zero_grad()
        model(torch.randn(batch_size, 3, requires_grad=True)).sum().backward()
        optimizer.step()

    result = oomprobe.find_max_batch(model, step, device="cpu:256MiB", max_batch=2, progress="off")
    assert result.state_verified
    assert hooks(model) == before


@pytest.mark.parametrize("kind", REGISTER)
def test_a_hook_that_was_there_and_was_removed_is_back_and_its_handle_works(kind):
    model = nn.Linear(3, 2)
    before = hooks(model)
    handle = REGISTER[kind](model)
    with_it = hooks(model)
    assert with_it != before
    keeper = Keeper(model, [], [], "cpu")
    handle.remove()
    assert len(keeper.differences()) == 1
    keeper.put_back()
    assert keeper.differences() == []
    assert hooks(model) == with_it
    handle.remove()
    assert not any(pair[1] for pair in hooks(model).values() if isinstance(pair, tuple))


def test_a_tensors_hook_does_not_fire_after_it_was_taken_away_and_fires_after_it_came_back():
    model = nn.Linear(2, 1)
    fired = []
    model.weight.register_hook(lambda grad: fired.append("before"))
    keeper = Keeper(model, [], [], "cpu")
    model.weight.register_hook(lambda grad: fired.append("in the step"))
    model.bias.register_hook(lambda grad: fired.append("in the step"))
    model.bias.register_post_accumulate_grad_hook(lambda bias: fired.append("in the step"))
    assert keeper.differences() == ["hooks of Parameter"] * 2
    keeper.put_back()
    model(torch.ones(1, 2)).sum().backward()
    assert fired == ["before"]
    model.bias._backward_hooks, model.weight._backward_hooks = None, None
    keeper.put_back()
    model(torch.ones(1, 2)).sum().backward()
    assert fired == ["before"] * 2


def test_a_dictionary_that_was_replaced_is_back():
    model = nn.Linear(2, 1)
    before = model._forward_hooks
    keeper = Keeper(model, [], [], "cpu")
    model._forward_hooks = {1: nothing}
    assert keeper.differences() == ["hooks of Linear"]
    keeper.put_back()
    assert model._forward_hooks is before
    assert before == {}


def test_the_other_kind_of_backward_hook_may_be_registered_again():
    model = nn.Linear(2, 1)
    keeper = Keeper(model, [], [], "cpu")
    model.register_full_backward_hook(nothing)
    keeper.put_back()
    model.register_backward_hook(nothing)
