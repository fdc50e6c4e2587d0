"""Host memory beside a card: a child forked from a process whose autograd has started threads for the card has none."""

import pytest
import torch
from torch import nn

import oomprobe

from .bed import forked


def step(model, batch_size):
    model(torch.ones(batch_size, 4)).sum().backward()


def probed(*, after_a_backward):
    model = nn.Linear(4, 4)
    if after_a_backward:
        step(model, 1)
    return oomprobe.find_max_batch(model, step, device="cpu:256MiB", max_batch=4, progress="off")


def test_a_process_that_has_run_no_backward_forks():
    answer, cuda = forked(lambda: (probed(after_a_backward=False).batch_size, torch.cuda.is_initialized()))
    assert (answer, cuda) == (4, False)


def test_one_that_has_is_refused_with_what_to_type():
    with pytest.raises(oomprobe.InvalidArgumentError, match=r"cannot run a backward here.*oomprobe run"):
        forked(lambda: probed(after_a_backward=True))
