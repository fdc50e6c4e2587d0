"""A confirmation never ends early where the step counts its calls, whatever it counts with: each counter is made by the step."""

import pytest
import torch
from bed import forked
from counters import COUNTERS, ends
from torch import nn

import oomprobe

WIDTH, SAMPLES = 256, 420_000  # an epoch is 7 calls or so at the answer, and more than 50 at the size of the look
COUNTERS = COUNTERS | {"none": (lambda length: None, lambda held, length: False)}


def counting(name):
    make, is_last = COUNTERS[name]

    def build():
        model = nn.Sequential(nn.Linear(WIDTH, 1024), nn.ReLU(), nn.Linear(1024, WIDTH)).cuda()
        optimizer, counters = torch.optim.AdamW(model.parameters()), {}

        def step(model, batch_size):
            length = max(1, SAMPLES // batch_size)
            if batch_size not in counters:
                counters[batch_size] = make(length)
            optimizer.zero_grad()
            model(torch.randn(batch_size, WIDTH, device="cuda")).square().mean().backward()
            optimizer.step()
            if is_last(counters[batch_size], length):
                with torch.no_grad():
                    model(torch.randn(8 * batch_size, WIDTH, device="cuda"))
                if is_last is ends:
                    del counters[batch_size]

        return model, step

    return build


def counting_down():
    """Hold -1 and -2, which have one hash, when a confirmation checks what the step counts with: after 5 calls and after 6."""
    model, step = counting("none")()
    left = [4]

    def counted(model, batch_size):
        left[0] -= 1
        step(model, batch_size)

    return model, counted


def test_numbers_with_one_hash_are_two():
    trial = forked(lambda: oomprobe.find_max_batch(*counting_down(), progress="off", max_batch=32_768).trials[-1])
    assert (trial.steps, trial.settled_after) == (50, None)


@pytest.mark.parametrize(
    "name",
    ["none", "iter(DataLoader)", "generator", "numpy generator", "Queue", "file", "SimpleNamespace", "thread-local"],
)
def test_a_step_that_counts_makes_all_its_calls(name):
    """`tests/test_counted.py` has every counter."""
    # Near the limit, allocations that are tried again may keep a steady step from repeating.
    options = {"max_batch": 32_768} if name == "none" else {}
    trial = forked(lambda: oomprobe.find_max_batch(*counting(name)(), progress="off", **options).trials[-1])
    if name == "none":
        assert trial.steps == trial.settled_after <= 8
    else:
        assert (trial.steps, trial.settled_after) == (50, None)
