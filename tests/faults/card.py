"""A card that is not there, and that other processes can open: the probe's device and the target's step meet in it.

Every process has one of its own. Its books are exact: `ROOM` samples fit, or a share of them under a margin.
"""

import torch
from fake_accelerator import MIB, FakeModule, LedgerDevice
from torch import nn

SAMPLE_BYTES = 64 * MIB
ROOM = 10


class Card(LedgerDevice):
    def __reduce__(self):
        return "CARD"  # pickled as its name


CARD = Card(FakeModule(total_bytes=ROOM * SAMPLE_BYTES))


def trained(fault=None):
    """A target: a step of known memory, in the middle of which `fault` is called with the batch size.

    It has no optimizer: the first step of one imports the compiler, which costs every new process two seconds.
    """
    model = nn.Linear(2, 2)

    def step(model, batch_size):
        activations = CARD.fake.alloc(SAMPLE_BYTES * batch_size)
        if fault is not None:
            fault(batch_size)
        model(torch.randn(batch_size, 2)).square().sum().backward()
        return activations

    return model, step


def scanned(fits, largest=ROOM):
    """The truth, by trying every size: the largest that fits and has none below it, down to 1, that does not."""
    return max((size for size in range(1, largest + 1) if all(fits(n) for n in range(1, size + 1))), default=0)
