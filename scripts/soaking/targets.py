"""What the probes of the soak probe. A step's closure is the same in every run, as a journal demands."""

import json
import os
from pathlib import Path

import torch
from torch import nn

from soaking import faults, ledger


def _card():
    return json.loads(Path(faults.folder(), "run.json").read_text())["card"]


def on_ledger():
    """Real training of a small net, and memory in the books."""
    return on_card(_card())


def on_card(card):
    """The same for a card that is described here."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())

    def step(model, batch_size):
        here = ledger.HERE
        faults.at_call(here)
        here.take(ledger.need_bytes(card, batch_size))
        optimizer.zero_grad()
        model(torch.randn(batch_size, 4)).square().mean().backward()
        optimizer.step()

    step.optimizer = optimizer
    return model, step


def on_host():
    """Real memory: wide activations over a small net."""
    model = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 64))
    optimizer = torch.optim.AdamW(model.parameters())

    def step(model, batch_size):
        faults.at_call(None)
        optimizer.zero_grad()
        model(torch.randn(batch_size, 64)).square().mean().backward()
        optimizer.step()

    step.optimizer = optimizer
    return model, step


def survives(batch_size, budget_bytes, steps=6):
    """Written without oomprobe on purpose: fresh process, warm step, address space held to the budget, six steps."""
    import resource

    os.environ.pop(faults.MARK, None)
    model, step = on_host()
    step(model, 1)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + budget_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    for _ in range(steps):
        step(model, batch_size)
