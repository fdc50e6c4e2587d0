"""Steps that ignore their batch size."""

import pytest
import torch
from ledger import HERE
from torch import nn

import oomprobe


def grown(rows_of):
    """Grow without end a step whose work is that of so many rows; how often each size was called."""
    calls = {}

    def step(model, batch_size):
        calls[batch_size] = calls.get(batch_size, 0) + 1
        model(torch.ones(rows_of(batch_size), 2))

    with pytest.raises(oomprobe.UnreliableError) as error:
        oomprobe.find_max_batch(nn.Linear(2, 2), step, device=HERE, progress="off")
    return str(error.value), calls


def test_data_that_ends_is_told_with_its_last_example():
    text, _ = grown(lambda size: min(size, 100))
    assert "pass max_batch=100;" in text


def test_the_work_of_a_size_is_counted_once():
    _, calls = grown(lambda size: min(size, 2**10))
    assert (calls[2**6], calls[2**7]) == (3, 2), "a trial, and the count of its work"
