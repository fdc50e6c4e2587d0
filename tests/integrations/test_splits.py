import time

import pytest
import torch
from ledger import MIB, LedgerDevice

from oomprobe.integrations.transformers import running_split


def split(global_batch, largest, *, room=64, per_step=1, step_s=0.0, **options):
    """Steps that need `per_step` MiB more for each micro-batch to an optimizer step, and `step_s`."""
    device, ran = LedgerDevice(room * MIB), []

    def steps(accumulation):
        def train(model, batch_size):
            torch.ones(1)
            time.sleep(step_s)
            device.take((batch_size + per_step * accumulation) * MIB)
            ran.append((batch_size, accumulation))

        return {"train": train}

    defaults = {"device": device, "memory_fraction": 1.0, "confirm_steps": 1, "progress": "off"}
    entry = running_split(torch.nn.Linear(1, 1), steps, global_batch, largest, defaults | options)
    return None if entry is None else (entry.micro_batch, entry.accumulation_steps), ran


def test_the_fewest_accumulation_steps_that_ran():
    entry, ran = split(96, 40)
    assert entry == (32, 3)
    assert set(ran) == {entry}


def test_a_split_that_does_not_run_is_not_the_answer():
    """96 = 48 x 2 needs more than there is beside its second micro-batch."""
    entry, ran = split(96, 48, per_step=10)
    assert entry == (32, 3)
    assert set(ran) == {entry}


@pytest.mark.parametrize(
    ("global_batch", "largest", "options"),
    [
        (96, 48, {"per_step": 60}),  # nothing runs
        (97, 40, {"min_batch": 2}),  # a prime
        (96, 40, {"multiple_of": 5}),
        (96, 40, {"time_limit_s": 1e-9, "step_s": 0.01}),
        (1, 0, {}),
    ],
)
def test_none_where_there_is_none(global_batch, largest, options):
    assert split(global_batch, largest, **options)[0] is None


def test_a_global_batch_smaller_than_what_fits_needs_no_accumulation():
    assert split(8, 40)[0] == (8, 1)
