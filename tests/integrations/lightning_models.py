"""Lightning modules and data for the tests."""

import random
from typing import ClassVar

import numpy as np
import pytest
import torch
from ledger import MIB, LedgerDevice, Log
from torch.utils.data import DataLoader, Dataset, TensorDataset

pl = pytest.importorskip("lightning.pytorch")
torchmetrics = pytest.importorskip("torchmetrics")

WIDTH = 8
# Lightning's own warnings about torch 2.13, loaders without workers, and short runs.
FRAMEWORK_WARNINGS = (
    "ignore:.*(does not have many workers|smaller than the logging interval|early stopping|GPU available but not used):",
    "ignore:.*(Trying to infer the `batch_size`|Checkpoint directory .* exists|but have no `val_dataloader`):",
    "ignore:.*(LeafSpec|torch.jit|litlogger|`isinstance.*treespec)",
)


def quiet_trainer(**settings):
    quiet = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(**{**quiet, **settings})


class Module(pl.LightningModule):
    """Records the batch sizes of training and validation; `ledger` serves or refuses `MIB` per training example."""

    def __init__(self, ledger=None, *, eval_mib=0, batch_size=4, examples=None, manual=False):
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(WIDTH, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
        self.ledger, self.eval_mib = ledger, eval_mib
        self.automatic_optimization = not manual
        if batch_size is not None:
            self.batch_size = batch_size
        self.examples = examples
        self.told = Told()

    def training_step(self, batch, batch_idx):
        x = batch[0] if isinstance(batch, (list, tuple)) else batch
        size = len(x)
        if self.ledger is not None:
            self.ledger.take(size * MIB)
        loss = self.layer(x.reshape(size, -1)[:, :WIDTH]).square().mean()
        self.told.trained.append(size)
        self.told.losses.append(loss.item())
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch, batch_idx):
        if self.ledger is not None:
            self.ledger.take(len(batch[0]) * self.eval_mib * MIB)
        self.told.validated.append(len(batch[0]))
        self.log("val", self.layer(batch[0]).mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Told:
    """Records of a module. It belongs to this package, not to the user, so a probe does not put it back."""

    __module__ = "oomprobe.tests"

    def __init__(self):
        self.trained, self.validated, self.losses = [], [], []


class OwnLoaders(Module):
    """Has its own train_dataloader()."""

    def train_dataloader(self):
        return DataLoader(data(self.examples), batch_size=self.batch_size, shuffle=True)


class Data(pl.LightningDataModule):
    """Records its hooks in HOOKS."""

    def __init__(self, examples=64, *, batch_size=4, val_batch_size=None):
        super().__init__()
        self.examples, self.batch_size, self.val_batch_size = examples, batch_size, val_batch_size

    def prepare_data(self):
        HOOKS.append("prepare_data")

    def setup(self, stage):
        HOOKS.append(f"setup {stage.value}")
        self.train_set = data(self.examples)

    def teardown(self, stage):
        HOOKS.append(f"teardown {stage.value}")
        del self.train_set

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.val_batch_size or self.batch_size)


HOOKS = Log()


def data(examples):
    return TensorDataset(torch.linspace(-1, 1, examples * WIDTH).reshape(examples, WIDTH))


class Sentences(Dataset):
    """Sequences of the given lengths, filled with the length."""

    def __init__(self, lengths):
        self.lengths = lengths

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return torch.full((self.lengths[index],), float(self.lengths[index]))


def padded(sentences):
    return torch.nn.utils.rnn.pad_sequence(sentences, batch_first=True)


class Padded(Module):
    """Takes `MIB` per element; records shapes."""

    def training_step(self, batch, batch_idx):
        self.told.trained.append(tuple(batch.shape))
        self.ledger.take(batch.numel() * MIB)
        return self.layer(batch[:, :1].expand(-1, WIDTH)).mean()


class Drawing(Dataset):
    """Draws from its own and from all global generators for each example."""

    def __init__(self, count):
        self.count = count
        self.torch, self.numpy = torch.Generator().manual_seed(1), np.random.default_rng(2)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        drawn = torch.rand(WIDTH, generator=self.torch) + self.numpy.random() + torch.rand(WIDTH) + random.random()
        return ((drawn + np.random.rand()).float(),)


class DrawingData(Data):
    """Draws from its own generator in setup()."""

    def __init__(self):
        super().__init__()
        self.split, self.full = torch.Generator().manual_seed(5), Drawing(30)

    def setup(self, stage):
        self.mean = sum(self.full[index][0].mean() for index in range(3))
        self.train_set, self.val_set = torch.utils.data.random_split(self.full, [24, 6], generator=self.split)

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True, collate_fn=self.noisy)

    def noisy(self, examples):
        return [torch.stack([one[0] for one in examples]) + self.mean]

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=2)


class Noisy(Module):
    """Draws from its own generator in training_step()."""

    def __init__(self, ledger):
        super().__init__(ledger)
        self.generator = torch.Generator().manual_seed(4)

    def training_step(self, batch, batch_idx):
        noise = torch.rand(batch[0].shape, generator=self.generator).to(batch[0])
        return super().training_step([batch[0] + noise], batch_idx)


class Listening(pl.Callback):
    """Records each hook that is called."""

    heard: ClassVar[Log] = Log()


for hook in ("setup", "teardown", *(name for name in dir(pl.Callback) if name.startswith("on_"))):
    setattr(Listening, hook, lambda *_, hook=hook: Listening.heard.append(hook))


def ledger(mib):
    return LedgerDevice(mib * MIB)
