"""A fake card shared by the probe's device and the target's step; each process has its own.

Exactly `ROOM` samples fit, or a share of them under a margin.
"""

import torch
from fake_accelerator import MIB, FakeAccelerator, FakeModule
from torch import nn

SAMPLE_BYTES = 64 * MIB
ROOM = 10


class Card(FakeAccelerator):
    def __reduce__(self):
        return "CARD"  # pickled as its name


CARD = Card(FakeModule(total_bytes=ROOM * SAMPLE_BYTES))


def trained(fault=None):
    """Return a model and a step of known memory that calls `fault(batch_size)`.

    It has no optimizer, because the first optimizer step imports the compiler, which costs each new process two seconds.
    """
    model = nn.Linear(2, 2)

    def step(model, batch_size):
        activations = CARD.fake.alloc(SAMPLE_BYTES * batch_size)
        if fault is not None:
            fault(batch_size)
        model(torch.randn(batch_size, 2)).square().sum().backward()
        return activations

    return model, step
