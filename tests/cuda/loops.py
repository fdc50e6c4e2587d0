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


def keeps_its_batch():
    """As newcomers write it: the last batch is alive while the next is made."""
    model = nn.Sequential(
        nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(model, batch_size):
        x = batch(batch_size)
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def swaps_blocks():
    """Frozen blocks wait in host memory until they are needed, beside small ones that are trained."""
    blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(6)]).requires_grad_(False)
    model = nn.ModuleDict({"blocks": blocks, "trained": layers(6)})
    optimizer = torch.optim.AdamW(model["trained"].parameters())

    def step(model, batch_size):
        x = batch(batch_size)
        for block, trained in zip(model["blocks"], model["trained"], strict=True):
            for p in block.parameters():
                p.data = p.data.cuda()
            x = x + block(x) + trained(x)
        x.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for p in model["blocks"].parameters():
            p.data = p.data.cpu()

    return model, step


def composed():
    """A loop with the habits that keep state; it replaces parameters and their averages by longer ones."""
    trainer = Trainer(width=WIDTH, device="cuda")
    return trainer.model, trainer.step


LOOPS = [keeps_its_batch, swaps_blocks, accumulates_64, gradients_per_sample, composed]
