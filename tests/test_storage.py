"""Memory that several tensors look at: shared before, shared afterwards, with the same bits."""

import gc
import weakref

import pytest
import torch
from torch import nn

import oomprobe
from oomprobe.state import Keeper
from oomprobe.state.tensors import StorageCopy


def flat_gradients(model):
    """Gradients as a bucket of DDP or of a flat optimizer has them: views of one buffer."""
    flat = torch.arange(sum(p.numel() for p in model.parameters()), dtype=torch.float32)
    start = 0
    for parameter in model.parameters():
        parameter.grad = flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    return flat


def places(model):
    return [(p.grad.untyped_storage()._cdata, p.grad.storage_offset(), p.grad.stride()) for p in model.parameters()]


def train(model, *, set_to_none):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model, batch_size):
        optimizer.zero_grad(set_to_none=set_to_none)
        model(torch.randn(batch_size, 3)).sum().backward()
        optimizer.step()

    result = oomprobe.find_max_batch(model, step, device="cpu:256MiB", max_batch=4, progress="off")
    assert result.state_verified


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("buffer_lives", [True, False])
def test_gradients_that_are_views_of_one_buffer_are_so_again(set_to_none, buffer_lives):
    model = nn.Linear(3, 2)
    flat = flat_gradients(model)
    bits, before = flat.clone(), places(model)
    if not buffer_lives:
        flat = None
    train(model, set_to_none=set_to_none)
    after = places(model)
    assert [place[1:] for place in after] == [place[1:] for place in before]
    assert len({storage for storage, *_ in after}) == 1
    assert torch.equal(torch.cat([p.grad.reshape(-1) for p in model.parameters()]), bits)
    if buffer_lives:
        assert after == before
        assert torch.equal(flat, bits)


def keep_flat():
    model = nn.Linear(3, 2)
    flat = flat_gradients(model)
    return model, flat, Keeper(model, [], [], "cpu")


def test_a_gradient_given_other_memory_comes_back_to_its_own():
    model, flat, keeper = keep_flat()
    before = places(model)
    model.weight.grad.data = model.weight.grad.clone()
    assert keeper.differences() == ["a gradient of shape (2, 3)"]
    keeper.put_back()
    assert keeper.differences() == []
    assert places(model) == before
    assert model.weight.grad.data_ptr() == flat.data_ptr()


def test_memory_that_nobody_else_holds_is_not_kept_alive_and_made_anew_once():
    model, flat, keeper = keep_flat()
    gone = weakref.ref(flat.untyped_storage())
    del flat
    model.zero_grad(set_to_none=True)
    assert gone() is None
    keeper.put_back()
    assert keeper.differences() == []
    assert len({p.grad.untyped_storage()._cdata for p in model.parameters()}) == 1


def test_a_storage_lives_as_long_as_a_tensor_looks_at_it():
    tensor = torch.arange(4.0)
    kept = KeptStorage(tensor.untyped_storage())
    view = tensor[1:3]
    gc.collect()
    assert kept.is_under(view)
    assert not kept.is_under(view.clone())
    tensor.zero_()
    assert kept.differs(tensor.untyped_storage())
    assert kept.put_back() is view.untyped_storage()
    assert view.tolist() == [1.0, 2.0]


def test_it_is_compared_once_however_many_look(monkeypatch):
    tensor = torch.zeros(4)
    kept = KeptStorage(tensor.untyped_storage())
    compared = []
    equal = torch.equal
    monkeypatch.setattr(torch, "equal", lambda *args: compared.append(1) or equal(*args))
    with once_per_storage():
        for _ in range(3):
            assert not kept.differs(tensor.untyped_storage())
    assert len(compared) == 1


def test_a_storage_that_was_resized_gets_its_size_back():
    tensor = torch.arange(4.0)
    kept = KeptStorage(tensor.untyped_storage())
    tensor.untyped_storage().resize_(0)
    kept.put_back()
    assert tensor.tolist() == [0.0, 1.0, 2.0, 3.0]
