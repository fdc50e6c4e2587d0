"""A table over lengths on a card, and training in buckets with its sizes; call each function in a process of its own."""

import random

import torch
from torch import nn

import oomprobe
from gpu_check.recording import loop_of

LENGTHS, WIDTH, STEPS = (128, 256, 512, 1024, 2048), 512, 100
ORDERS = 10


class Attention(nn.Module):
    """Attention that keeps its weights, so memory grows with the square of the length."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.inner, self.outer = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        query, key, value = self.inner(x).chunk(3, -1)
        return x + self.outer((query @ key.transpose(1, 2)).softmax(-1) @ value)


def model_and_step():
    model = nn.Sequential(*(Attention() for _ in range(6))).cuda()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(model, batch_size, length):
        optimizer.zero_grad()
        model(torch.randn(batch_size, length, WIDTH, device="cuda")).square().mean().backward()
        optimizer.step()

    return model, step


def table(hold):
    """Return the sizes of each length alone, and those that train in turn, on a card that `hold` limits."""
    hold()
    model, step = model_and_step()
    drawn = random.Random(0).choices(LENGTHS, k=2000)
    epoch = oomprobe.Epoch({"length": drawn}, calls=STEPS, orders=ORDERS)
    found = oomprobe.find_max_batches(model, step, {"length": LENGTHS}, epoch=epoch, progress="off")
    calls = [
        sum(trial.steps for trial in result.trials) for result in found.rows.values() if result
    ]
    return {
        "alone": {
            length: result.epoch.longest_only_batch_size for length, result in found.fitting()
        },
        "mixed": found.batch_sizes(),
        "notes": found.notes,
        "calls": calls,
    }


def in_buckets(hold, sizes, seed):
    """Return how training in random buckets ended in this process, which has done nothing else."""
    hold()
    model, step = model_and_step()
    loop = loop_of(step)
    for number, length in enumerate(random.Random(seed).choices([*sizes], k=STEPS), 1):
        try:
            with loop.keeping():
                step(model, sizes[length], length)
        except torch.OutOfMemoryError:
            return {"ended": f"out of memory at step {number}, length {length}"}
    torch.cuda.synchronize()
    return {"ended": "ran"}
