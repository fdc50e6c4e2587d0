"""A device shared by the probe and the target's step, of which each process has its own: exactly `ROOM` samples fit."""

import torch
from ledger import MIB, LedgerDevice
from torch import nn

ROOM = 10


class Card(LedgerDevice):
    def __reduce__(self):
        return "CARD"  # pickled as its name


CARD = Card(ROOM * MIB)


def trained(fault=lambda batch_size: None):
    """Return a model and a step of known memory that calls `fault(batch_size)`.

    It has no optimizer, because the first optimizer step imports the compiler, which costs each new process two seconds.
    """

    def step(model, batch_size):
        CARD.take(batch_size * MIB)
        fault(batch_size)
        model(torch.randn(batch_size, 2)).square().sum().backward()

    return nn.Linear(2, 2), step
