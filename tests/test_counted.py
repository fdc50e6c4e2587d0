"""What the user's code counts with is seen, or something that may count unseen is met; what stands still is the same twice."""

import csv
import functools
import logging
import random
import re
import threading
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from counters import COUNTERS
from torch import nn

from oomprobe.state.counted import counted


@dataclass(frozen=True)
class Config:
    rate: float = 0.1
    classes: int = field(default=4, metadata={"help": "of the head"})


@pytest.mark.parametrize("name", COUNTERS)
def test_each_call_is_counted(name):
    make, count = COUNTERS[name]
    random.seed(0)
    counters = {7: make()}

    def step(model, batch_size):
        count(counters[batch_size])

    step(None, 7)
    before = counted([step])
    step(None, 7)
    assert before is None or counted([step]) != before
    if name == "file":
        counters[7].close()


def test_a_step_of_training_counts_nothing(tmp_path):
    """Weights, averages of batch norm, optimizer state, schedules and torch's random numbers decide nothing about memory."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    loss_of = functools.partial(nn.functional.mse_loss, reduction="sum")
    log, lock, pattern, seen = (
        logging.getLogger(),
        threading.Lock(),
        re.compile("a"),
        {"loss": None, "shape": (2, 4)},
    )
    rows, data = np.zeros(1000), torch.zeros(2000)  # larger ones hold data
    library, losses = (
        type("Library", (), {"__module__": "torch.a_test", "calls": 0}),
        (tmp_path / "losses").open("w"),
    )

    table, config = csv.writer(losses), Config()

    def step(model, batch_size):
        losses.write("0.1\n")
        table.writerow([0.1])
        library.calls += 1
        rows[0] += 1
        data.data[0] += 1
        with lock:
            log.debug(pattern)
        optimizer.zero_grad(set_to_none=False)
        loss_of(
            model(torch.randn(batch_size, 4)), torch.zeros(batch_size, config.classes)
        ).backward()
        optimizer.step()
        schedule.step()
        return seen

    with losses:
        step(model, 2)
        before = counted([model, step])
        step(model, 2)
        assert before is not None
        assert counted([model, step]) == before
