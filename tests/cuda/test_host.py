"""Probes of host memory on a machine with a card: a child forked after a backward has no autograd threads."""

import pytest
import torch
from bed import forked
from torch import nn
from zoo import training_step

import oomprobe
from oomprobe.ground.torch_versions import VERSION


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
    with pytest.raises(
        oomprobe.InvalidArgumentError, match=r"call model.to\('cuda'\) before .* device='sim:24GiB'"
    ):
        forked(left_on_the_cpu)


def test_a_process_that_has_run_no_backward_forks():
    answer, cuda = forked(
        lambda: (probed(after_a_backward=False).batch_size, torch.cuda.is_initialized())
    )
    assert (answer, cuda) == (4, False)


@pytest.mark.parametrize("used", ["asked", "used"])
def test_a_process_that_has_used_cuda_is_refused_where_the_step_needs_that(used):
    def probe(optimizer):
        torch.cuda.is_available() if used == "asked" else torch.zeros(1, device="cuda")
        model = nn.Linear(4, 4)
        step = training_step(optimizer(model.parameters()), lambda n: torch.randn(n, 4))
        return oomprobe.find_max_batch(
            model, step, device="cpu:1GiB", max_batch=4, progress="off"
        ).batch_size

    used_by_driver = {"PYTORCH_NVML_BASED_CUDA_CHECK": "0"}
    assert forked(probe, torch.optim.SGD, **used_by_driver) == 4
    if VERSION >= (2, 14):
        with pytest.raises(
            oomprobe.InvalidArgumentError,
            match=r"cannot train: .*is_available.*Hide the accelerator",
        ):
            forked(probe, torch.optim.AdamW, **used_by_driver)


def test_a_process_that_has_run_a_backward_is_refused():
    with pytest.raises(
        oomprobe.InvalidArgumentError, match=r"cannot train: .*threading.*oomprobe run"
    ):
        forked(lambda: probed(after_a_backward=True))
