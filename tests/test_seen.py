import torch
from torch import nn

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


def test_an_optimizer_that_is_met_lives_no_longer_for_it():
    model = nn.Linear(2, 2)
    seen = Seen(model, [])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    seen.add(optimizer)
    assert seen.optimizers == [optimizer]
    del optimizer
    assert seen.optimizers == []


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
        seen.start_over()
    assert scheduler.last_epoch == 0


def test_a_scaler_forgets_a_step_that_failed_half_way():
    scaler = torch.amp.GradScaler("cpu")
    seen = Seen(nn.Linear(1, 1), [lambda model, n: scaler])
    scaler._per_optimizer_states[7] = "half-way"
    seen.start_over()
    assert not scaler._per_optimizer_states
