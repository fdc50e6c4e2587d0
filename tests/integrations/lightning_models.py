"""Lightning modules and data for the tests, each with what it is a test of."""

import pytest
import torch
from calibration import torchvision_names
from ledger import MIB, LedgerDevice
from torch.utils.data import DataLoader, Dataset, TensorDataset

torchvision_names.declare()

pl = pytest.importorskip("lightning.pytorch")  # it imports torchvision, where that is installed
torchmetrics = pytest.importorskip("torchmetrics")

WIDTH = 8
# What Lightning itself says of torch 2.13, of a Trainer without workers, and of short runs.
FRAMEWORK_WARNINGS = (
    "ignore:.*does not have many workers:",
    "ignore:.*smaller than the logging interval:",
    "ignore:.*LeafSpec.*:FutureWarning",
    "ignore:.*torch.jit.*:DeprecationWarning",
    "ignore:.*litlogger.*",
    "ignore:.*`isinstance.*treespec.*",
    "ignore:.*Trying to infer the `batch_size`:",
    "ignore:.*Checkpoint directory .* exists:",
    "ignore:.*early stopping:",
    "ignore:.*GPU available but not used:",
    "ignore:.*defined a `validation_step` but have no `val_dataloader`:",
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
    """Notes which batch sizes trained and validated, and asks a ledger for memory.

    Args:
        ledger: Serves `MIB` a training example, or refuses.
        eval_mib: For each validation example.
        fails_above: Instead: examples beyond which the step raises `error`.
        batch_size: None: no such attribute.
        examples: None: no loaders of its own.
    """

    def __init__(
        self, ledger=None, *, eval_mib=0, fails_above=None, error=None, batch_size=4, examples=None, manual=False
    ):
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(WIDTH, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
        self.ledger, self.eval_mib, self.fails_above, self.error = ledger, eval_mib, fails_above, error
        self.automatic_optimization = not manual
        if batch_size is not None:
            self.batch_size = batch_size
        self.examples = examples
        self.told = Told()

    def training_step(self, batch, batch_idx):
        x = batch[0] if isinstance(batch, (list, tuple)) else batch
        size = len(x)
        if self.fails_above is not None and size > self.fails_above:
            raise self.error
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
    """What a module notes: an object that a probe does not look into, so that its trials can be seen."""

    def __init__(self):
        self.trained, self.validated, self.losses = [], [], []


class OwnLoaders(Module):
    """With train_dataloader() of its own."""

    def train_dataloader(self):
        return DataLoader(data(self.examples), batch_size=self.batch_size, shuffle=True)


class Data(pl.LightningDataModule):
    """Reads `batch_size`; notes its hooks."""

    def __init__(self, examples=64, *, batch_size=4, val_batch_size=None, validates=True):
        super().__init__()
        self.examples, self.batch_size, self.val_batch_size = examples, batch_size, val_batch_size
        if not validates:
            self.val_dataloader = super().val_dataloader

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


HOOKS: list[str] = []  # no attribute, which a probe would put back


def data(examples):
    return TensorDataset(torch.linspace(-1, 1, examples * WIDTH).reshape(examples, WIDTH))


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


class Sentences(Dataset):
    """Sequences of the lengths given, with the length as the value."""

    def __init__(self, lengths):
        self.lengths, self.read = lengths, []

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        self.read.append(index)
        return torch.full((self.lengths[index],), float(self.lengths[index]))


def padded(sentences):
    return torch.nn.utils.rnn.pad_sequence(sentences, batch_first=True)


__all__ = ["HOOKS", "MIB", "WIDTH", "Data", "DataLoader", "LedgerDevice", "Module", "OwnLoaders", "pl", "torchmetrics"]
