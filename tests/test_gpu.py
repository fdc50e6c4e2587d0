"""Tests that need CUDA: scripts/gpu-check runs them on a card, tests/cuda/test_gpu_check.py on the bed."""

import gc
import re

import pytest
import torch
import torch._dynamo  # otherwise the first optimizer imports it after the objects so far were frozen
from processes import run_python
from torch import nn
from zoo import training_step

from oomprobe import find_max_batch
from oomprobe.devices.accelerator import AcceleratorDevice

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings(
        "default"
    ),  # warnings of drivers and libraries differ from card to card
]

MIB = 2**20
GIB = 2**30
CARD = torch.device("cuda", 0)
SMALL_BYTES = 2 * GIB


def clean():
    gc.collect()
    torch.cuda.synchronize(CARD)
    torch.cuda.empty_cache()


@pytest.fixture
def card():
    """The card, limited to 2 GiB by a memory fraction, so that trials are fast."""
    clean()
    before = torch.cuda.get_per_process_memory_fraction(CARD)
    device = AcceleratorDevice(CARD)
    torch.cuda.set_per_process_memory_fraction(min(1.0, SMALL_BYTES / device.total_bytes), CARD)
    yield device
    torch.cuda.set_per_process_memory_fraction(before, CARD)
    clean()


def two_mebibytes_per_sample():
    """Return a model and a step of known memory: one block of the allocator's granularity per sample, and no cuBLAS."""
    model = nn.Linear(8, 8).to(CARD)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(model, batch_size):
        block = torch.empty(2 * MIB * batch_size, dtype=torch.uint8, device=CARD)
        optimizer.zero_grad()
        sum(parameter.square().sum() for parameter in model.parameters()).backward()
        optimizer.step()
        del block

    return model, step


# --- whole probes ---


@pytest.mark.parametrize("memory_fraction", [0.9, 1.0])
def test_a_step_of_known_memory_is_answered_to_the_segment(card, memory_fraction):
    model, step = two_mebibytes_per_sample()
    result = find_max_batch(model, step, memory_fraction=memory_fraction, progress="off")
    held_bytes = (
        torch.cuda.memory_reserved(CARD) + 8 * MIB
    )  # small tensors live in segments of 2 MiB
    assert result.budget_bytes == pytest.approx(memory_fraction * SMALL_BYTES, abs=4)
    assert (
        result.budget_bytes - held_bytes - 64 * MIB
        <= 2 * MIB * result.batch_size
        <= result.budget_bytes
    )
    assert (result.limited_by, result.state_verified) == ("memory", True)


def test_the_state_and_the_cards_generator_are_restored(card):
    torch.cuda.manual_seed(7)
    model = nn.Sequential(
        nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(0.5), nn.Linear(64, 1)
    ).to(CARD)
    optimizer = torch.optim.AdamW(model.parameters())
    step = training_step(optimizer, lambda n: torch.randn(n, 64, device=CARD))
    model[2].eval()
    kept = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    random_state, host_state = torch.cuda.get_rng_state(CARD), torch.get_rng_state()
    result = find_max_batch(model, step, min_batch=2, max_batch=64, progress="off")
    assert result.state_verified
    assert torch.equal(torch.cuda.get_rng_state(CARD), random_state)
    assert torch.equal(torch.get_rng_state(), host_state)
    assert all(torch.equal(value.cpu(), kept[name]) for name, value in model.state_dict().items())
    assert not optimizer.state_dict()["state"]
    assert [module.training for module in model] == [True, True, False, True]


def test_a_scaler_may_skip_the_first_steps(card):
    model = nn.Linear(64, 64).to(CARD)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler(
        "cuda", init_scale=2.0**30
    )  # so large that several steps overflow and are skipped

    def step(model, batch_size):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(torch.ones(batch_size, 64, device=CARD)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    before = scaler.state_dict()
    result = find_max_batch(model, step, max_batch=4, steps=2, progress="off")
    assert scaler.state_dict() == before
    assert result.trials[0].steps > 1 + 2
    assert not any("no optimizer stepped" in note for note in result.notes)
    assert result.state_verified


# --- lost devices, in new processes ---


def out_of_bounds():
    """Above ten samples a kernel reads out of bounds: a device-side assert, after which every call of the process fails."""
    model = nn.Linear(64, 64, device="cuda")

    def step(model, batch_size):
        if batch_size > 10:
            torch.zeros(4, device="cuda").index_select(
                0, torch.full((1,), 10**9, device="cuda")
            ).sum().item()
        model(torch.randn(batch_size, 64, device="cuda")).square().mean().backward()

    return model, step


IN_PROCESS = """
import os, oomprobe, test_gpu
try:
    oomprobe.find_max_batch(*test_gpu.out_of_bounds(), max_batch=64, progress="off")
except oomprobe.DeviceLostError as error:
    print([trial.batch_size for trial in error.trials], error.trials[-1].verdict.name, error, flush=True)
os._exit(0)  # a lost context may hang at exit
"""
RUN_TARGET = """
import torch, oomprobe
result = oomprobe.probe_target("tests/test_gpu.py:out_of_bounds", device="cuda", progress="off", max_batch=64)
print(result.batch_size, result.limited_by, any(t.verdict is oomprobe.Verdict.POISONED for t in result.trials))
print(torch.cuda.is_initialized())
"""


def test_poisoned_children_are_replaced():
    assert (
        run_python(RUN_TARGET, timeout_s=240, warnings="default") == "10 size_limit True\nFalse\n"
    )


def test_a_lost_device_ends_the_probe():
    out = run_python(IN_PROCESS, timeout_s=180, warnings="default")
    # Batch 64, of which small sizes say that memory suffices, is the first large one that runs.
    assert re.match(
        r"\[1, 2, .*64\] POISONED after batch \d+ ran .*, a sticky error \(batch 64", out
    )
