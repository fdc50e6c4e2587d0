"""A target that fails only on a real card, for tests/test_gpu.py."""

import torch
from torch import nn

POISONED_FROM = 11


def out_of_bounds():
    """Above ten samples a kernel reads out of bounds: a device-side assert, after which every call of the process fails."""
    model = nn.Linear(64, 64, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model, batch_size):
        if batch_size >= POISONED_FROM:
            torch.zeros(4, device="cuda").index_select(0, torch.full((1,), 10**9, device="cuda")).sum().item()
        optimizer.zero_grad()
        model(torch.randn(batch_size, 64, device="cuda")).square().mean().backward()
        optimizer.step()

    return model, step
