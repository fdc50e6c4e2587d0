"""Found by the table, and red until mended."""

import os

import torch
from torch import nn

from faults.card import CARD, trained
from oomprobe import probe_target


class Aborts(nn.Module):
    def forward(self, x):
        if len(x) > 4:
            os.write(2, b"terminate called after throwing an instance of 'std::bad_alloc'\n")
            os.abort()
        return x


def aborted():
    """Inside a model as deep as models are: three frames of Python for each of ten levels."""
    nested = Aborts()
    for _ in range(10):
        nested = nn.Sequential(nested)
    return trained(lambda batch_size: nested(torch.ones(batch_size, 2)))


def test_row_16_an_abort_for_memory_is_a_ceiling():
    """Python's own trace comes after the words, and is longer than what is read of them."""
    result = probe_target(aborted, device=CARD, memory_fraction=1.0, min_batch=4, max_batch=5, progress="off")
    assert (result.batch_size, result.limited_by) == (4, "host_memory")
