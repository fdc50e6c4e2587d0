"""Probes of host memory on a machine with a card: a child forked after a backward has no autograd threads."""

import pytest
import torch
from bed import forked
from torch import nn

import oomprobe


def step(model, batch_size):
    model(torch.ones(batch_size, 4)).sum().backward()


def probed(*, after_a_backward):
    model = nn.Linear(4, 4)
    if after_a_backward:
        step(model, 1)
    return oomprobe.find_max_batch(model, step, device="cpu:256MiB", max_batch=4, progress="off")


def left_on_the_cpu():
    return oomprobe.find_max_batch(nn.Linear(4, 4), step, max_batch=4, progress="off")


def test_a_model_left_on_the_cpu_is_refused_before_anything_runs():
    with pytest.raises(oomprobe.InvalidArgumentError, match=r"call model.to\('cuda'\) before .* device='sim:24GiB'"):
        forked(left_on_the_cpu)


def test_a_process_that_has_run_no_backward_forks():
    answer, cuda = forked(lambda: (probed(after_a_backward=False).batch_size, torch.cuda.is_initialized()))
    assert (answer, cuda) == (4, False)


def test_a_process_that_has_run_a_backward_is_refused():
    with pytest.raises(oomprobe.InvalidArgumentError, match=r"cannot run a backward pass.*oomprobe run"):
        forked(lambda: probed(after_a_backward=True))
