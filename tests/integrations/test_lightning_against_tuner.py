"""Beside Lightning's own finder, on the same module: where that one is wrong (seen in 2.6.6), and what ours says.

Neither knows that the capacity is a raise in the step: both run the same module.
"""

import pytest
import torch
from torch.utils.data import Dataset

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
]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Lightning's finder writes a checkpoint where it is."""
    monkeypatch.chdir(tmp_path)


class Rows(Dataset):
    """The same for large batches: they are fetched at once, and `one_tensor` makes a batch of them."""

    def __init__(self, examples):
        self.rows = data(examples).tensors[0]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]

    def __getitems__(self, indices):
        return self.rows[indices]


def one_tensor(rows):
    return [rows]


class OwnData(Module):
    """With loaders of its own, shuffled, and a capacity."""

    def __init__(self, capacity, text=CUDA_TEXT, examples=20_000, **settings):
        super().__init__(fails_above=capacity, error=RuntimeError(text), examples=examples, **settings)

    def train_dataloader(self):
        rows = Rows(self.examples)
        return DataLoader(rows, batch_size=self.batch_size, shuffle=True, collate_fn=one_tensor)

    def val_dataloader(self):
        return DataLoader(data(100), batch_size=self.batch_size)


def ours(module, trainer=None):
    options = {"device": LedgerDevice(), "progress": "off", "memory_fraction": 1.0}
    return find_max_batch(trainer or quiet_trainer(), module, **options)


def theirs(module, trainer=None, **options):
    return pl.tuner.Tuner(trainer or quiet_trainer()).scale_batch_size(module, **options)


def full_batches(module):
    """Sizes that trained; of a data set that the size does not divide, the rest is one too."""
    return set(module.told.trained)


@pytest.mark.parametrize("capacity", [37, 5000])
def test_a_size_that_never_ran(capacity):
    module = OwnData(capacity)
    found = theirs(module, mode="binsearch")
    assert found == {37: 35, 5000: 7782}[capacity]
    assert found not in full_batches(module)

    module = OwnData(capacity)
    assert ours(module).batch_size == module.batch_size == capacity
    assert capacity in full_batches(module)


def test_a_size_above_the_capacity():
    module = OwnData(5000)
    assert theirs(module) == module.batch_size == 8192
    with pytest.raises(RuntimeError, match="CUDA out of memory"):
        quiet_trainer().fit(module)

    module = OwnData(5000)
    assert ours(module).batch_size == 5000
    quiet_trainer(max_steps=2).fit(module)


def test_nothing_fits():
    module = OwnData(0)
    with pytest.raises(ValueError, match="batch_size=0"):
        theirs(module)
    assert module.batch_size == 0
    assert theirs(OwnData(0), mode="binsearch") == 1

    module = OwnData(0)
    with pytest.raises(oomprobe.NothingFitsError):
        ours(module)
    assert module.batch_size == 4


@pytest.mark.parametrize("text", NOT_KNOWN_THERE)
def test_an_out_of_memory_text_that_is_not_recognised(text):
    """A crash, and the failing size is left on the module."""
    module = OwnData(37, text)
    with pytest.raises(RuntimeError, match=text.replace("(", r"\(").replace(")", r"\)")):
        theirs(module)
    assert module.batch_size == 64

    module = OwnData(37, text)
    assert ours(module).batch_size == module.batch_size == 37


def test_what_onednn_says_when_memory_is_short():
    """A text without the word memory: where the device is under pressure, it is an out of memory; else a bug."""
    text, device = "could not create a primitive", LedgerDevice()

    class Short(OwnData):
        def training_step(self, batch, batch_idx):
            device.pressure = self.short and len(batch[0]) > 37
            return super().training_step(batch, batch_idx)

    def short(*, pressure):
        Short.short = pressure
        return Short(37, text)

    module = short(pressure=True)
    with pytest.raises(RuntimeError, match=text):
        theirs(module)
    assert module.batch_size == 64

    options = {"device": device, "progress": "off", "memory_fraction": 1.0}
    assert find_max_batch(quiet_trainer(), short(pressure=True), **options).batch_size == 37
    with pytest.raises(oomprobe.StepFailedError, match=text):
        find_max_batch(quiet_trainer(), short(pressure=False), **options)


def test_trials_of_no_steps():
    class Skipping(OwnData):
        def on_train_batch_start(self, batch, batch_idx):
            return -1

    module = Skipping(37, examples=1000)
    assert theirs(module) == 1024
    assert module.told.trained == []

    with pytest.raises(oomprobe.UnreliableError, match="ran 0 training batches"):
        ours(Skipping(37, examples=1000))


def test_a_batch_larger_than_the_data_set():
    module = OwnData(10**9, examples=20)
    assert theirs(module) == 32
    assert max(full_batches(module)) == 20

    module = OwnData(10**9, examples=20)
    assert ours(module).batch_size == 20

    assert theirs(OwnData(17, examples=20)) == 32  # where 20 fail
    assert ours(OwnData(17, examples=20)).batch_size == 17


def test_random_numbers_are_others_afterwards():
    before = torch.get_rng_state()
    theirs(OwnData(37))
    assert not torch.equal(before, torch.get_rng_state())

    module = OwnData(37)
    before = torch.get_rng_state()
    ours(module)
    assert torch.equal(before, torch.get_rng_state())
