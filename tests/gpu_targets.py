"""Targets that only a card can fail at, for tests/test_gpu.py and scripts/gpu_check.py."""

import torch
from torch import nn

POISONED_FROM = 11
GIB = 2**30


def out_of_bounds():
    """Above ten samples a kernel reads out of bounds: a device-side assert, and every later call of the process fails."""
    model = nn.Linear(64, 64, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model, batch_size):
        if batch_size >= POISONED_FROM:
            torch.zeros(4, device="cuda").index_select(0, torch.full((1,), 10**9, device="cuda")).sum().item()
        optimizer.zero_grad()
        model(torch.randn(batch_size, 64, device="cuda")).square().mean().backward()
        optimizer.step()

    return model, step


def gibibytes():
    """A sample takes half a gibibyte, in pieces; an optimizer steps, or each trial would be 32 calls that wait for one."""
    model = nn.Linear(64, 64, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model, batch_size):
        held = [torch.zeros(GIB // 16, dtype=torch.float16, device="cuda") for _ in range(4 * batch_size)]
        optimizer.zero_grad()
        (model(torch.randn(8, 64, device="cuda")).square().mean() + held[-1][0].float()).backward()
        optimizer.step()

    return model, step
