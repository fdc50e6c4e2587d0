"""What a step drops is freed in the trial, as in training: its peak is that of a fresh process, to the byte.

Loops of every kind that drop something are in `test_training_goes_on.py`, which counts what is alive.
"""

import copy
import types

import pytest
import torch
from bed import forked
from torch import nn
from zoo import numbered, peaks

import oomprobe

from .loops import composed, keeps_its_batch

WIDTH, EPOCH = 512, 10


def keeps():
    """Keep outputs in a list of the model, which is replaced after each epoch."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    model.kept = []

    @numbered
    def step(n, model, batch_size):
        output = model(torch.randn(batch_size, WIDTH, device="cuda"))
        output.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if n % EPOCH == 1 and n > 1:
            model.kept = []  # in the middle of a call, which still peaks afterwards
        model.kept.append(output.detach())

    return model, step


def replaced_models():
    """A target network, and an optimizer with its schedule, made anew."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).cuda()
    held = types.SimpleNamespace()

    def begin():
        held.target = copy.deepcopy(model)
        held.optimizer = torch.optim.AdamW(model.parameters())
        held.schedule = torch.optim.lr_scheduler.StepLR(held.optimizer, 5)

    begin()

    @numbered
    def step(n, model, batch_size):
        x = torch.randn(batch_size, WIDTH, device="cuda")
        (model(x) - held.target(x).detach()).square().mean().backward()
        held.optimizer.step()
        held.schedule.step()
        held.optimizer.zero_grad()
        if n % EPOCH == 0:
            begin()

    return model, step


ELSEWHERE = []


def held_elsewhere():
    """Something that the step does not reach holds the first list too, so it stays alive."""
    model, step = keeps()
    ELSEWHERE.append(model.kept)
    return model, step


def passed_on():
    """The last two lists are kept by a container that a trial makes."""
    model, step = keeps()

    def passing(model, batch_size):
        before = model.kept
        step(model, batch_size)
        if model.kept is not before:
            model.history = [*getattr(model, "history", [])[-1:], before]

    return model, passing


@pytest.mark.parametrize(
    "build", [keeps, keeps_its_batch, held_elsewhere, passed_on, replaced_models, composed]
)
def test_what_a_step_drops_is_freed_at_once(build):
    def check():
        trial = oomprobe.check(*build(), 2048, confirm_steps=25, progress="off").trials[-1]
        return trial.steps, trial.peak_allocated_bytes, trial.peak_reserved_bytes

    steps, *peak_bytes = forked(check)
    assert tuple(peak_bytes) == forked(peaks, build, 2048, steps)[-1]
