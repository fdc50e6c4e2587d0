"""Loops that strangers write, each a target: what hangs on parameters, what replaces them, and long accumulation."""

import torch
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


class Cloud(nn.Module):
    def __init__(self):
        super().__init__()
        self.xyz = nn.Parameter(torch.randn(200_000, 3, device="cuda"))
        self.features = nn.Parameter(torch.randn(200_000, 48, device="cuda"))


def densifies():
    """Gaussian splatting: at every fifth call the cloud grows, parameters and Adam's state are replaced by longer ones."""
    model = Cloud()
    named = [{"params": [p], "name": name} for name, p in model.named_parameters()]
    optimizer = torch.optim.Adam(named, lr=1e-3)

    def grow(count):
        for group in optimizer.param_groups:
            old = group["params"][0]
            state = optimizer.state.pop(old)
            new = nn.Parameter(torch.cat([old.detach(), old.detach()[:count]]))
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = torch.cat([state[key], torch.zeros_like(state[key][:count])])
            group["params"][0] = optimizer.state[new] = new
            optimizer.state[new] = state
            setattr(model, group["name"], new)

    @numbered
    def step(n, model, rays):
        optimizer.zero_grad()
        weights = torch.randn(rays, 48, device="cuda") @ model.features[:512].T
        loss = (torch.softmax(weights, -1) @ model.features[:512]).square().mean() + 0 * model.xyz.sum()
        loss.backward()
        optimizer.step()
        if n % 5 == 0 and n <= 20:
            grow(20_000)

    return model, step


LOOPS = [accumulates_64, gradients_per_sample, densifies]
