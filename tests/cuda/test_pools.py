"""A private memory pool keeps memory from later trials: they get a new process, or the probe says so."""

from pathlib import Path

import pytest
import torch
from bed import forked
from torch import nn
from workers.forks import install
from zoo import runs

import oomprobe

TARGET = f"{Path(__file__)}:rollouts"
OPTIONS = {"progress": "off", "resolution": 0.05}


def rollouts():
    """Every other call fills a cache in a pool of its own, as rollouts do, and drops it."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(4))).cuda()
    optimizer, pool, calls = torch.optim.AdamW(model.parameters()), torch.cuda.MemPool(), [0]

    def step(model, batch_size):
        calls[0] += 1
        if calls[0] % 2:
            with torch.cuda.use_mem_pool(pool):
                cache = [torch.zeros(batch_size, 4096, device="cuda") for _ in range(4)]
            del cache
        optimizer.zero_grad()
        model(torch.randn(batch_size, 512, device="cuda")).square().mean().backward()
        optimizer.step()

    return model, step


def isolated():
    install()
    return oomprobe.probe_target(TARGET, device="cuda", **OPTIONS)


def test_trials_of_a_target_get_new_pools():
    result = forked(isolated, memory="1GiB", limit_s=90)
    assert result.limited_by == "memory"
    for share, trains in ((1.0, True), (1.5, False)):
        batch_size = int(share * result.batch_size)
        assert forked(lambda b=batch_size: runs(rollouts, b, steps=20), memory="1GiB") is trains


def test_a_pool_in_this_process_is_named():
    def probe():
        return oomprobe.find_max_batch(*rollouts(), **OPTIONS)

    with pytest.raises(oomprobe.UnreliableError, match="stayed in a private memory pool"):
        forked(probe, memory="1GiB")
