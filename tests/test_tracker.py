import pytest
import torch
from test_watch import ComparedByValue
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import oomprobe
from oomprobe.state.resident import bytes_left_by_steps, state_tensors
from oomprobe.state.seen import Seen


def test_modes_gradients_and_optimizers():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout())
    model[1].eval()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(model, n):
        optimizer.step()

    seen = Seen(model, [step])
    assert seen.optimizers == [optimizer]
    model.eval()
    seen.restore_modes()
    assert (model.training, model[1].training) == (True, False)
    model(torch.ones(2, 4)).sum().backward()
    assert seen.state_bytes("cpu") == 80
    optimizer.step()
    assert seen.state_bytes("cpu") == 80 + 160  # two moments; step counts are single numbers
    seen.drop_gradients()
    assert model[0].weight.grad is None
    assert seen.state_bytes("cpu") == 160


@pytest.mark.parametrize(
    ("gradient", "held_bytes"),
    [
        (torch.ones(3, 4).to_sparse(), 12 * (4 + 16)),  # a value and two indices
        (TwoTensor(torch.ones(3, 4), torch.ones(3, 4)), 2 * 48),
        (torch.ones(3, 4, device="meta"), 0),
    ],
    ids=["sparse", "wrapped", "elsewhere"],
)
def test_gradients_without_a_storage_of_their_own_are_counted_by_their_parts(gradient, held_bytes):
    weight = torch.ones_like(gradient) if gradient.layout is torch.strided else torch.ones(3, 4)
    weight.grad = gradient
    assert bytes_left_by_steps([weight], [], "cpu") == held_bytes


def test_sparse_gradients_are_probed_on_the_host():
    model = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(list(model.parameters()))

    def step(model, n):
        optimizer.zero_grad()
        model(torch.zeros(n, dtype=torch.long)).sum().backward()
        optimizer.step()

    assert oomprobe.find_max_batch(model, step, device="cpu:100MiB", max_batch=2, progress="off").batch_size == 2


@pytest.mark.parametrize(
    ("state", "count"), [(None, 0), ({"w": torch.ones(2)}, 1), ({"w": 3, "v": [torch.ones(2)]}, 0), ([], 0)]
)
def test_optimizers_may_keep_their_state_in_another_way(state, count):
    optimizer = torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=1.0)
    optimizer.state = state
    assert len(list(state_tensors(optimizer))) == count


def test_an_optimizer_that_is_met_lives_no_longer_for_it():
    model = nn.Linear(2, 2)
    seen = Seen(model, [])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    seen.add(optimizer)
    assert seen.optimizers == [optimizer]
    del optimizer
    assert seen.optimizers == []


def test_optimizers_that_are_equal_and_have_no_hash_are_two():
    model = nn.Linear(2, 2)
    seen = Seen(model, [])
    both = [ComparedByValue(model.parameters()) for _ in range(2)]
    for one in (*both, both[0]):
        seen.add(one)
    assert [id(one) for one in seen.optimizers] == [id(one) for one in both]


def test_a_scheduler_does_not_run_off_its_end():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=4)

    def step(model, n):
        optimizer.step()
        scheduler.step()

    seen = Seen(model, [step])
    for _ in range(5):
        for _ in range(3):
            step(model, 1)
        seen.restart_counts()
    assert scheduler.last_epoch == 0


def test_a_scaler_forgets_a_step_that_failed_half_way():
    scaler = torch.amp.GradScaler("cpu")
    seen = Seen(nn.Linear(1, 1), [lambda model, n: scaler])
    scaler._per_optimizer_states[7] = "half-way"
    seen.restart_counts()
    assert not scaler._per_optimizer_states
