"""Loops that strangers write, each a target: what hangs on parameters, what replaces them, and long accumulation."""

import torch
from composed import Trainer
from torch import nn
from zoo import numbered

WIDTH = 512


def layers(count=6):
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(count)]).cuda()


def batch(batch_size):
    return torch.randn(batch_size, WIDTH, device="cuda")


def loss_of(model, batch_size):
    return model(batch(batch_size)).square().mean()


def accumulates_64():
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters())

    @numbered
    def step(n, model, batch_size):
        (loss_of(model, batch_size) / 64).backward()
        if n % 64 == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return model, step


def gradients_per_sample():
    """As Opacus keeps them: until the next backward replaces them."""
    model = layers(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model, batch_size):
        x = torch.randn(batch_size, WIDTH, device="cuda")
        for layer in model:
            out = layer(x.detach())
            layer.weight.grad_sample = torch.einsum("bi,bj->bij", out.detach(), x.detach())
            layer.weight.grad = layer.weight.grad_sample.mean(0)
            x = out
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def composed():
    """A loop with the habits that keep state; it replaces parameters and their averages by longer ones."""
    trainer = Trainer(width=WIDTH, device="cuda")
    return trainer.model, trainer.step


LOOPS = [accumulates_64, gradients_per_sample, composed]
