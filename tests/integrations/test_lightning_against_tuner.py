"""Beside Lightning's own finder, on the same module: where that one is wrong (seen in 2.6.6), and what ours says.

Neither knows that the capacity is a raise in the step: both run the same module.
"""

import re
from functools import partial

import pytest
import torch

import oomprobe
from integrations.lightning_models import (
    FRAMEWORK_WARNINGS,
    DataLoader,
    LedgerDevice,
    Module,
    data,
    pl,
    quiet_trainer,
)
from oomprobe.integrations.lightning import find_max_batch

pytestmark = [pytest.mark.filterwarnings(line) for line in FRAMEWORK_WARNINGS]

CUDA_TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB"  # one that both know
NOT_KNOWN_THERE = [
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "HIP out of memory. Tried to allocate 2.00 GiB",
    "MPS backend out of memory (MPS allocated: 1.00 GiB, other allocations: 1.00 GiB, max allowed: 2.00 GiB)",
    "could not create a primitive",  # oneDNN's, out of memory where the device is under pressure
]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Lightning's finder writes a checkpoint where it is."""
    monkeypatch.chdir(tmp_path)


class Limited(Module):
    """With loaders of its own, shuffled, and a capacity; above it the step fails, and the device is under pressure."""

    def __init__(self, capacity, text=CUDA_TEXT, examples=20_000, is_skipping=False):
        super().__init__(examples=examples)
        self.capacity, self.text, self.is_skipping, self.card = capacity, text, is_skipping, LedgerDevice()

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if self.is_skipping else None

    def training_step(self, batch, batch_idx):
        self.card.pressure = len(batch[0]) > self.capacity
        if self.card.pressure:
            raise RuntimeError(self.text)
        return super().training_step(batch, batch_idx)

    def train_dataloader(self):
        return DataLoader(data(self.examples), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(data(100), batch_size=self.batch_size)


def ours(module):
    return find_max_batch(quiet_trainer(), module, device=module.card, progress="off", memory_fraction=1.0).batch_size


def theirs(module, mode="power"):
    return pl.tuner.Tuner(quiet_trainer()).scale_batch_size(module, mode=mode)


@pytest.mark.parametrize(
    ("capacity", "examples", "mode", "their_answer", "our_answer"),
    [
        (37, 20_000, "binsearch", 35, 37),
        (5000, 20_000, "binsearch", 7782, 5000),
        (5000, 20_000, "power", 8192, 5000),
        (10**9, 20, "power", 32, 20),
    ],
)
def test_our_answer_ran_and_theirs_did_not(capacity, examples, mode, their_answer, our_answer):
    for find, answer in ((partial(theirs, mode=mode), their_answer), (ours, our_answer)):
        module, random_numbers = Limited(capacity, examples=examples), torch.get_rng_state()
        assert find(module) == module.batch_size == answer
        assert (answer in module.told.trained) is (find is ours)
        assert torch.equal(random_numbers, torch.get_rng_state()) is (find is ours)


@pytest.mark.parametrize(
    ("settings", "mode", "their_answer", "our_error"),
    [
        ({"capacity": 0}, "binsearch", 1, oomprobe.NothingFitsError),
        ({"capacity": 37, "is_skipping": True}, "power", 1024, oomprobe.UnreliableError),
    ],
    ids=["nothing fits", "no steps"],
)
def test_ours_is_an_error_where_theirs_is_an_answer(settings, mode, their_answer, our_error):
    assert theirs(Limited(**settings, examples=1000), mode) == their_answer
    module = Limited(**settings, examples=1000)
    with pytest.raises(our_error):
        ours(module)
    assert (module.batch_size, module.told.trained) == (4, [])


@pytest.mark.parametrize("text", NOT_KNOWN_THERE)
def test_an_out_of_memory_text_that_is_not_recognised(text):
    """A crash, and the failing size is left on the module."""
    module = Limited(37, text)
    with pytest.raises(RuntimeError, match=re.escape(text)):
        theirs(module)
    assert module.batch_size == 64
    module = Limited(37, text)
    assert ours(module) == module.batch_size == 37
