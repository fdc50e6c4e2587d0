"""find_max_batch for Lightning: its answers, its trials, what it refuses, and what it restores."""

import gc
import logging
import os
import pickle
import random
import signal
import tempfile
import warnings
import weakref
from contextlib import nullcontext
from functools import partial
from typing import ClassVar

import numpy as np
import pytest
import torch
from ledger import MIB, Box, LedgerDevice, Log
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import oomprobe
from oomprobe.integrations import framework
from oomprobe.integrations.lightning import PeakMonitorCallback, find_max_batch

pl = pytest.importorskip("lightning.pytorch")
torchmetrics = pytest.importorskip("torchmetrics")

pytestmark = pytest.mark.filterwarnings(
    "ignore"
)  # Lightning's own, about torch, loaders without workers and short runs
WIDTH = 8
QUIET = {"progress": "off", "memory_fraction": 1.0}
NO_EVAL = {"limit_val_batches": 0}


# --- modules and data ---


def quiet_trainer(**settings):
    silent = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return pl.Trainer(**{"accelerator": "cpu", "max_epochs": 1, **dict.fromkeys(silent, False), **settings})


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


# --- probes ---


def probed(module, datamodule=None, trainer=None, **options):
    """Probe with the module's ledger as the device."""
    options = {"device": module.ledger, **QUIET, **options}
    return find_max_batch(trainer or quiet_trainer(), module, datamodule, **options)


def refused(match, *, error=oomprobe.InvalidArgumentError, trainer=None, module=None, datamodule=None, **options):
    """Assert that the probe raises, and that nothing was trained or set."""
    module = Module(ledger(9)) if module is None else module
    trainer = quiet_trainer(**trainer) if isinstance(trainer, dict) else trainer
    with pytest.raises(error, match=match):
        find_max_batch(trainer or quiet_trainer(), module, datamodule, **{"device": ledger(9), **QUIET, **options})
    if isinstance(module, Module):
        assert (module.told.trained, getattr(module, "batch_size", 4)) == ([], 4)


# --- the answer ---


@pytest.mark.parametrize("room", [1, 37])
def test_the_answer_is_what_the_memory_holds(room):
    module = Module(ledger(room))
    result = probed(module, Data(1000))
    assert (result.batch_size, result.limited_by, result.first_failing_batch_size) == (room, "memory", room + 1)
    assert room in module.told.trained
    assert {trial.samples_per_s for trial in result.trials} == {None}  # a call takes more than one batch


@pytest.mark.parametrize(
    "places",
    [{"module"}, {"data"}, {"module.hparams", "data"}, {"data.hparams"}],
    ids=lambda places: " ".join(sorted(places)),
)
def test_answer_is_set_where_lightning_sets_it(places):
    from lightning.pytorch.utilities.parsing import lightning_setattr

    def made():
        module, datamodule = Module(ledger(9), batch_size=4 if "module" in places else None), Data()
        if "data" not in places:
            del datamodule.batch_size
        for name, owner in (("module", module), ("data", datamodule)):
            owner.save_hyperparameters({"batch_size" if f"{name}.hparams" in places else "other": 4})
        read = module if "module" in places else datamodule if "data" in places else datamodule.hparams
        datamodule.train_dataloader = lambda: DataLoader(data(64), batch_size=read.batch_size)
        return module, datamodule

    def values(*owners):
        return [(vars(owner).get("batch_size"), dict(owner.hparams)) for owner in owners]

    ours, theirs = made(), made()
    before = values(*ours)
    assert probed(*ours, trainer=quiet_trainer(**NO_EVAL), max_batch=1, write_back=False).batch_size == 1
    assert values(*ours) == before
    result = probed(*ours, trainer=quiet_trainer(**NO_EVAL))
    theirs[0].trainer = quiet_trainer()
    theirs[0].trainer.datamodule = theirs[1]
    lightning_setattr(theirs[0], "batch_size", 9)
    assert values(*ours) == values(*theirs)
    said = ["(Data and hparams)" in note for note in result.notes if "exists in several places" in note]
    assert said == [True] * (len(places) - 1)


def test_batch_size_name():
    class Other(Data):
        def __init__(self):
            super().__init__()
            self.save_hyperparameters({"bs": 24})

        def train_dataloader(self):
            return DataLoader(self.train_set, batch_size=min(self.hparams.bs, 30))

    said = r"made batches of 24 although batch_size=1 was set.*batch_size_name="
    refused(said, datamodule=Other(), error=oomprobe.UnreliableError)
    datamodule = Other()
    found = probed(Module(ledger(9)), datamodule, batch_size_name="bs", min_batch=8)
    assert (found.batch_size, datamodule.hparams.bs, datamodule.batch_size) == (9, 9, 4)
    with pytest.raises(oomprobe.UnreliableError, match="made batches of 30 although bs=32 was set"):  # capped at 30
        probed(Module(ledger(50)), Other(), batch_size_name="bs", min_batch=16)


def test_loaders_passed_are_rebuilt_at_each_size():
    module, loader = Module(ledger(11)), DataLoader(data(100), batch_size=3, shuffle=True, num_workers=2)
    for datamodule in (None, Data(val_batch_size=5)):
        result = probed(module, datamodule, train_dataloaders=loader, min_batch=8)
        assert (result.batch_size, module.batch_size, loader.batch_size) == (11, 4, 3)
        assert "nothing was set: create your DataLoader with batch_size=11" in result.notes
    assert set(module.told.validated) == {5}  # only the training loader was passed
    subset = DataLoader(data(100), sampler=torch.utils.data.SubsetRandomSampler(range(30)), batch_size=2)
    assert probed(Module(ledger(1000)), train_dataloaders=subset, min_batch=16).batch_size == 30
    module = OwnLoaders(ledger(20), examples=100, eval_mib=1)
    assert probed(module, val_dataloaders=DataLoader(data(50), batch_size=16), min_batch=18).batch_size == 20
    assert (module.batch_size, set(module.told.validated)) == (20, {16})  # validation keeps its size


class SemiSupervised(Module):
    """Has a loader of its batch size and one that ignores it, combined or not."""

    def __init__(self, combined, room):
        super().__init__(ledger(room))
        self.combined = combined

    def train_dataloader(self):
        loaders = {"labelled": DataLoader(data(100), self.batch_size), "unlabelled": DataLoader(data(40), 7)}
        return pl.utilities.CombinedLoader(loaders, "min_size") if self.combined else loaders

    def training_step(self, batch, batch_idx):
        assert len(batch["unlabelled"][0]) == 7
        return super().training_step(batch["labelled"], batch_idx)


@pytest.mark.parametrize("combined", [True, False])
def test_a_loader_that_ignores_the_size_keeps_its_own(combined):
    result = probed(SemiSupervised(combined, 9))
    assert result.batch_size == 9
    assert any("kept its own" in note for note in result.notes)


@pytest.mark.parametrize(("settings", "manual"), [({"fast_dev_run": True}, False), ({"max_steps": 3}, True)], ids=str)
def test_a_short_training_ends_no_trial(settings, manual):
    result = probed(Module(ledger(9), manual=manual), Data(100), trainer=quiet_trainer(**settings), min_batch=8)
    assert result.batch_size == 9


def test_weight_averaging_is_said_to_copy_the_weights():
    trainer = quiet_trainer(callbacks=[pl.callbacks.StochasticWeightAveraging(swa_lrs=0.1)])
    not_covered = probed(Module(ledger(5)), Data(), trainer, max_batch=1).not_covered
    assert any("StochasticWeightAveraging (weight averaging keeps a copy" in item for item in not_covered)


@pytest.mark.parametrize(
    ("asked", "found", "by_data"), [({}, 20, True), ({"max_batch": 9}, 9, False), ({"multiple_of": 8}, 16, True)]
)
def test_no_batch_is_larger_than_the_data_set(asked, found, by_data):
    result = probed(Module(ledger(1000)), Data(20), **asked)
    assert (result.batch_size, result.limited_by) == (found, "max_batch")
    assert ("the data set limits the batch size: it has 20 examples" in result.notes) is by_data


# --- what a trial does ---


def test_trial_takes_two_steps_of_the_requested_size():
    module = Module(ledger(8))
    result = probed(module, Data(100), quiet_trainer(**NO_EVAL), max_batch=8, min_batch=8, steps=5, confirm_steps=6)
    assert len(module.told.trained) % 2 == 0
    assert set(module.told.trained) == {8}
    assert (result.options["steps"], result.options["confirm_steps"]) == (3, 3)  # calls of two steps
    assert "one step of a trial is Trainer.fit for 2 optimizer steps" in result.notes


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({}, [7, 5, 7]),
        ({"accumulate_grad_batches": 4}, [7, 7, 7, 5, 7, 7]),
        ({"max_epochs": -1, "max_steps": 6}, [7, 5, 7]),
        ({"max_epochs": -1, "max_steps": 5}, [7, 7]),  # within the first epoch
        ({"limit_train_batches": 3}, [7, 7]),
        ({"drop_last": True}, [7, 7]),
        ({"limit_val_batches": 1.0}, [7, 5, 7, 7]),
    ],
)
def test_a_smaller_last_batch_runs_if_an_epoch_follows(settings, sizes):
    settings = {**NO_EVAL, "max_epochs": 2, **settings}
    drops, module = settings.pop("drop_last", False), Module(ledger(8))
    passed = {"train_dataloaders": DataLoader(data(40), batch_size=7, drop_last=drops)}
    if settings["limit_val_batches"]:
        passed["val_dataloaders"] = DataLoader(data(8), batch_size=2)
    result = probed(
        module, trainer=quiet_trainer(**settings), min_batch=7, max_batch=7, steps=1, confirm_steps=1, **passed
    )
    trained = list(module.told.trained)
    assert trained == sizes * (len(trained) // len(sizes))
    assert not any("last batch" in item for item in result.not_covered)


@pytest.mark.parametrize(("accumulated", "micro", "asked"), [(1, 1, {}), (9, 2, {}), (1, 2, {"global_batch": 24})])
def test_gradients_exist_while_they_accumulate(accumulated, micro, asked):
    class Watching(Module):
        def on_before_backward(self, loss):
            had.append(self.layer[0].weight.grad is not None)

    had, trainer = Log(), quiet_trainer(accumulate_grad_batches=accumulated, **NO_EVAL)
    result = probed(Watching(ledger(8)), Data(), trainer, min_batch=8, max_batch=8, **asked)
    assert had[: 2 * micro] == [False, True][:micro] * 2
    assert any("of 2 accumulated batches each" in note for note in result.notes) is (micro == 2)
    if asked:
        assert result.plan(24)[0].ran_accumulated


def test_a_trial_has_the_settings_of_the_trainer():
    class Watching(Module):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            seen.held.add((gradient_clip_val, gradient_clip_algorithm.value))

        def training_step(self, batch, batch_idx):
            seen.held.add(self.layer(batch[0]).dtype)
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self):
            steps = self.trainer.estimated_stepping_batches
            seen.held.add((self.trainer.max_epochs, steps))
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            one_cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": one_cycle, "interval": "step"}}

    seen = Box(set())
    clipping = {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}
    trainer = quiet_trainer(max_epochs=3, precision="bf16-mixed", **clipping)
    probed(Watching(ledger(8)), Data(64), trainer, min_batch=8, max_batch=8)
    assert seen.held == {(0.5, "value"), torch.bfloat16, (3, 24)}  # the length is that of the real training


@pytest.mark.parametrize(
    ("every", "expected"),
    [((1, 5), [set(range(10)), {4, 9}]), ((1, 99), [set(range(64)), set()])],
    ids=["the second less often", "the second never"],
)
def test_manual_optimization_runs_until_each_optimizer_steps(every, expected):
    class Two(Module):
        def training_step(self, batch, batch_idx):
            self.ledger.take(len(batch[0]) * MIB)
            self.manual_backward(self.layer(batch[0]).mean())
            for number, optimizer in enumerate(self.optimizers()):
                if (batch_idx + 1) % every[number] == 0:
                    stepped.held[number].add(batch_idx)
                    optimizer.step()
                    optimizer.zero_grad()

        def configure_optimizers(self):
            return [torch.optim.SGD(self.layer[i].parameters(), lr=0.1) for i in (0, 2)]

    stepped = Box([set(), set()])
    result = probed(Two(ledger(6), manual=True), Data(20), quiet_trainer(**NO_EVAL), min_batch=4, max_batch=4)
    assert result.batch_size == 4
    assert stepped.held == expected
    assert any(note.startswith("some optimizers (1) did not step") for note in result.notes) is (not expected[1])


# --- validation ---


def test_validation_limits_the_answer_if_it_needs_more():
    class Plateau(Module):
        """The scheduler and the hook need a metric of validation."""

        def configure_optimizers(self):
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer := super().configure_optimizers())
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val"}}

        def on_fit_start(self):
            phases.held.append("")

        def training_step(self, batch, batch_idx):
            phases.held[-1] += "t"
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            phases.held[-1] += "v"
            resident.held.add(len(self.trainer.optimizers[0].state) > 0)
            super().validation_step(batch, batch_idx)

        def on_train_epoch_end(self):
            assert "val" in self.trainer.callback_metrics

    phases, resident = Box([]), Box(set())
    result = probed(Plateau(ledger(100), eval_mib=4), Data())
    assert (result.batch_size, resident.held) == (25, {True})
    assert max(phases.held, key=len) == "ttvvttvv", "training goes on after validation"
    assert not any("evaluation between epochs" in item for item in result.not_covered)


@pytest.mark.parametrize("how", ["limit", "no loader", "no step"])
def test_trials_without_validation(how):
    kind = type("NoStep", (Module,), {"validation_step": pl.LightningModule.validation_step})
    module = (kind if how == "no step" else Module)(ledger(20), eval_mib=4)
    data_kind = type("NoVal", (Data,), {"val_dataloader": pl.LightningDataModule.val_dataloader})
    datamodule = data_kind() if how == "no loader" else Data()
    result = probed(module, datamodule, quiet_trainer(limit_val_batches=0 if how == "limit" else 1.0))
    assert (result.batch_size, module.told.validated) == (20, [])
    assert any("evaluation between epochs" in item for item in result.not_covered)


# --- the worst case first ---


def test_batches_hold_the_longest_examples():
    sentences = Sentences([3] * 50 + [20, 10] + [1] * 48)
    loader, module = DataLoader(sentences, batch_size=2, collate_fn=padded, shuffle=True), Padded(ledger(100))
    result = probed(module, train_dataloaders=loader)
    assert (result.batch_size, {length for _, length in module.told.trained}) == (5, {20})
    assert not any("longest sequence" in item for item in result.not_covered)
    result = probed(Padded(ledger(1000)), train_dataloaders=loader, max_batch=4, scan_s=0)
    assert any("1 of 100 examples of the training data were scanned in 0 s" in note for note in result.notes)
    assert any("longest sequence" in item for item in result.not_covered)


# --- devices ---


def test_on_a_simulated_card():
    module, options = Module(), {"device": "sim:64MiB", "max_batch": 8, "min_batch": 4, "progress": "off"}
    result = find_max_batch(quiet_trainer(), module, Data(64), **options)
    assert (result.batch_size, result.device) == (8, "simulated GPU, 64.0 MiB")
    wide = torch.nn.Sequential(torch.nn.Linear(WIDTH, 4096), torch.nn.Linear(4096, 4096), torch.nn.Linear(4096, 1))
    module.layer = wide
    with pytest.raises(oomprobe.NothingFitsError):
        find_max_batch(quiet_trainer(), module, Data(64), **options)


def test_a_compiled_module():
    module = OwnLoaders(examples=8)
    compiled = torch.compile(module, backend="eager")
    result = find_max_batch(quiet_trainer(**NO_EVAL), compiled, device=ledger(9), max_batch=2, progress="off")
    assert (result.batch_size, module.batch_size) == (2, 2)


def test_pytorch_lightning_is_recognised_by_its_trainer():
    other = pytest.importorskip("pytorch_lightning")
    trainer = other.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    refused("a LightningModule of pytorch_lightning, not Module", trainer=trainer, datamodule=Data())

    class Theirs(other.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer, self.batch_size, self.ledger = torch.nn.Linear(8, 1), 2, ledger(10)

        def training_step(self, batch, batch_idx):
            self.ledger.take(len(batch[0]) * MIB)
            return self.layer(batch[0]).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def train_dataloader(self):
            return DataLoader(data(30), batch_size=self.batch_size)

    assert probed(Theirs(), trainer=trainer).batch_size == 10


# --- refusals ---


class Chunks(DataLoader):
    def __iter__(self):
        return iter(data(2).tensors[0].split(1))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(data(20).tensors[0].split(1))


ELSEWHERE = ledger(9)
ELSEWHERE.torch_device = torch.device("cuda", 1)
BATCHED = DataLoader(data(9), batch_sampler=[[0, 1], [2]])
REBUILT = r"of the training data cannot be rebuilt .* Pass train_dataloaders=DataLoader\(dataset, batch_size="


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"scan_s": -1}, "scan_s must be a number of seconds"),
        ({"trainer": 3}, "trainer must be a lightning.pytorch.Trainer, not int"),
        ({"module": torch.nn.Linear(1, 1)}, "module must be a LightningModule of lightning.pytorch, not Linear"),
        ({"datamodule": DataLoader(data(9))}, "datamodule must be .*: pass loaders as train_dataloaders="),
        ({"datamodule": None}, r"no training data: Module has no train_dataloader\(\)"),
        (
            {"batch_size_name": "bs"},
            "neither Data nor Module nor their hyper.* have 'bs': write self.bs = 1 in __init__",
        ),
        ({"datamodule": Data(5), "multiple_of": 8}, "5 examples, too few for multiple_of=8"),
        ({"train_dataloaders": BATCHED}, REBUILT),
        ({"train_dataloaders": Chunks(data(9))}, REBUILT),
        ({"train_dataloaders": data(9)}, REBUILT),
        ({"train_dataloaders": DataLoader(Stream(), batch_size=2)}, "is a stream"),
        ({"val_dataloaders": BATCHED}, r"of the validation data .* Pass val_dataloaders=DataLoader"),
        ({"trainer": {"devices": 2, "strategy": "ddp_spawn"}}, "trains on 2 ranks.*lightning.model_and_step"),
        (
            {"trainer": {"devices": 1, "strategy": "ddp"}},
            "buffers that trials would not have: probe with strategy='auto'",
        ),
        ({"device": ELSEWHERE}, "but the Trainer trains on cpu.*accelerator='cuda'"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_arguments_are_refused_with_what_to_type(options, said):
    refused(said, **{"datamodule": Data(), **options})


# --- what is restored ---


ENDINGS = {
    "bug": (oomprobe.StepFailedError, r"(?s)labels.*run trainer.fit with batch_size = 8. As with fast_dev_run"),
    "ctrl-c": (KeyboardInterrupt, None),
    "sigterm": (SystemExit, None),
    "nothing fits": (oomprobe.NothingFitsError, "does not fit"),
}


class Ending(Noisy):
    ending = "none"

    def training_step(self, batch, batch_idx):
        if len(batch[0]) >= 8 and self.ending == "bug":
            raise KeyError("labels")
        if len(batch[0]) >= 8 and self.ending in ("ctrl-c", "sigterm"):
            signal.raise_signal(signal.SIGINT if self.ending == "ctrl-c" else signal.SIGTERM)
        if self.ending == "nothing fits":
            self.ledger.take(2**50)
        return super().training_step(batch, batch_idx)


def trained(ending, *, passes_loaders=False, **settings):
    """Return losses, weights and random numbers after a probe with that ending; "none": without a probe."""
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(3)
    module, trainer, given = Ending(ledger(9)), quiet_trainer(max_epochs=2, **settings), {"datamodule": DrawingData()}
    if passes_loaders:
        given["datamodule"].setup("fit")
        loaders = given["datamodule"].train_dataloader(), given["datamodule"].val_dataloader()
        given = dict(zip(("train_dataloaders", "val_dataloaders"), loaders, strict=True))
    on_ctrl_c = signal.getsignal(signal.SIGINT)
    if ending != "none":
        module.ending = ending
        error, said = ENDINGS.get(ending, (None, None))
        with pytest.raises(error, match=said) if error else nullcontext():
            probed(module, trainer=trainer, write_back=False, **given)
        module.ending = "none"
    assert signal.getsignal(signal.SIGINT) is on_ctrl_c
    del module.told.losses[:]
    module.ledger = None
    trainer.fit(module, **given)
    weights = [parameter.tolist() for parameter in module.parameters()]
    return module.told.losses, weights, torch.rand(1).item(), random.random(), np.random.rand()


@pytest.mark.parametrize(
    ("ending", "settings"),
    [
        *((ending, {}) for ending in ("answer", *ENDINGS)),
        ("answer", {"passes_loaders": True, "precision": "64-true"}),
        ("answer", {"precision": "bf16-mixed", "accumulate_grad_batches": 3, "gradient_clip_val": 0.1}),
    ],
    ids=str,
)
def test_training_after_a_probe_gives_the_same_losses(ending, settings):
    expected = trained("none", **settings)
    assert len(expected[0]) == 12
    assert trained(ending, **settings) == expected


def test_a_trainer_in_use_continues_as_without_a_probe():
    def losses(*, probing):
        torch.manual_seed(3)
        module, trainer = OwnLoaders(ledger(9), examples=30, manual=True), quiet_trainer(max_epochs=1)
        trainer.fit(module)
        if probing:
            before = trainer.state, trainer.global_step, trainer.current_epoch, trainer.train_dataloader
            probed(module, trainer=trainer, write_back=False)
            assert (trainer.state, trainer.global_step, trainer.current_epoch, trainer.train_dataloader) == before
            assert module.trainer is trainer
        del module.told.losses[:]
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module)
        return module.told.losses

    assert losses(probing=True) == losses(probing=False)


def test_each_attribute_is_the_same_object():
    class Busy(Module):
        def __init__(self):
            super().__init__(ledger(5))
            self.count, self.by_name, self.other = 0, {"a": [1]}, object()
            self.metric = torchmetrics.MeanMetric()
            self.save_hyperparameters({"rate": 0.1})

        def setup(self, stage):
            self.other, self.made, self.hparams.rate = object(), torch.nn.Linear(WIDTH, WIDTH), 0.2

        def training_step(self, batch, batch_idx):
            self.count += 1
            self.by_name["a"].append(batch)
            self.metric.update(batch[0].mean())
            self.log("metric", self.metric, on_step=False, on_epoch=True)
            return super().training_step([self.made(batch[0])], batch_idx)

    module, datamodule = Busy(), Data()
    datamodule.train_dataloader = datamodule.train_dataloader  # a method set on the object
    attributes = {part: dict(vars(part)) for part in module.modules()}
    of_data = dict(vars(datamodule))
    probed(module, datamodule, write_back=False)
    assert {part: dict(vars(part)) for part in module.modules()} == attributes
    assert vars(datamodule) == of_data
    assert (module.by_name, dict(module.hparams)) == ({"a": [1]}, {"rate": 0.1})
    assert (module.metric._update_count, float(module.metric.weight)) == (0, 0)


def test_setup_and_teardown_run_once():
    for room in (5, 0):
        HOOKS.clear()
        with nullcontext() if room else pytest.raises(oomprobe.NothingFitsError):
            probed(Module(ledger(room)), Data())
        assert HOOKS == ["prepare_data", "setup fit", "teardown fit"]


def test_the_scaler_of_a_precision_plugin_is_restored():
    scaler, module = torch.amp.GradScaler("cpu", growth_interval=1), Module(ledger(5))
    plugin, before = pl.plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler), scaler.state_dict()
    assert probed(module, Data(), quiet_trainer(plugins=[plugin])).batch_size == 5
    assert scaler.state_dict() == before


def test_a_trial_frees_its_optimizer_at_once():
    class Watched(Module):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            alive.append(sum(one() is not None for one in optimizers))
            optimizers.append(weakref.ref(optimizer))
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    optimizers, alive = Log(), Log()
    gc.collect()
    gc.disable()
    try:
        probed(Watched(ledger(5)), Data(), min_batch=4, max_batch=4, confirm_steps=12)
    finally:
        gc.enable()
    assert max(alive) <= 1


# --- logging, checkpoints and callbacks ---


def test_trials_log_save_and_call_nothing(tmp_path, monkeypatch, caplog, capsys):
    class Own(Module):
        def configure_callbacks(self):
            return [Listening(), pl.callbacks.ModelCheckpoint(save_last=True)]

        def training_step(self, batch, batch_idx):
            seen.held.add(len(self.trainer.loggers))
            self.logger.log_metrics({"a": 1}, step=self.global_step)
            self.logger.experiment.add_image("a", torch.zeros(1))
            self.log("loss", 1.0, logger=True)
            self.trainer.save_checkpoint("now.ckpt")
            for folder in (self.logger.log_dir, self.trainer.log_dir, self.trainer.default_root_dir):
                with open(os.path.join(folder, "image.png"), "a") as file:
                    file.write("x")
            return super().training_step(batch, batch_idx)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen, loggers = Box(set()), [pl.loggers.CSVLogger(tmp_path / "logs"), pl.loggers.CSVLogger(tmp_path / "more")]
    trainer = pl.Trainer(accelerator="cpu", callbacks=[Listening()], logger=loggers, default_root_dir=tmp_path)
    before = [dict(vars(one)) for one in (*trainer.loggers, *trainer.callbacks)]
    caplog.clear()
    capsys.readouterr()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        result = probed(Own(ledger(5)), Data(), trainer)
    assert [str(warning.message) for warning in warned] == []
    assert (Listening.heard, list(tmp_path.iterdir()), seen.held) == ([], [], {2})
    assert (caplog.text, capsys.readouterr()) == ("", ("", ""))
    assert [vars(one) for one in (*trainer.loggers, *trainer.callbacks)] == before
    [missed] = [item for item in result.not_covered if "callbacks" in item]
    # Neither the progress bar nor checkpoints.
    assert missed == "callbacks, which trials do not call: Listening"
    assert logging.getLogger("lightning.pytorch").level == logging.INFO


# --- compared with Lightning's own finder on the same module, where that one is wrong (Lightning 2.6.6) ---


CUDA_TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB"  # known to both
UNKNOWN_TO_LIGHTNING = [
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "HIP out of memory. Tried to allocate 2.00 GiB",
    "MPS backend out of memory (MPS allocated: 1.00 GiB, other allocations: 1.00 GiB, max allowed: 2.00 GiB)",
    "could not create a primitive",  # oneDNN's, out of memory if the device is under pressure
]


class Limited(OwnLoaders):
    """Above `capacity` examples the step fails with `text`, and the device is under pressure."""

    def __init__(self, capacity, examples, text=CUDA_TEXT, is_skipping=False):
        super().__init__(examples=examples)
        self.capacity, self.text, self.is_skipping, self.card = capacity, text, is_skipping, LedgerDevice()

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if self.is_skipping else None

    def training_step(self, batch, batch_idx):
        self.card.pressure = len(batch[0]) > self.capacity
        if self.card.pressure:
            raise RuntimeError(self.text)
        return super().training_step(batch, batch_idx)

    def val_dataloader(self):
        return DataLoader(data(100), batch_size=self.batch_size)


def ours(module):
    return find_max_batch(quiet_trainer(), module, device=module.card, progress="off", memory_fraction=1.0).batch_size


def theirs(module, mode):
    with tempfile.TemporaryDirectory() as folder:  # for its checkpoint
        return pl.tuner.Tuner(quiet_trainer(default_root_dir=folder)).scale_batch_size(module, mode=mode)


@pytest.mark.parametrize(
    ("settings", "theirs_by_mode", "our_outcome"),
    [
        ({"capacity": 37}, {"binsearch": 35}, 37),
        ({"capacity": 5000, "examples": 20_000}, {"binsearch": 7782, "power": 8192}, 4992),
        ({"capacity": 10**9, "examples": 20}, {"power": 32}, 20),
        ({"capacity": 0, "examples": 1000}, {"binsearch": 1}, "NothingFitsError"),
        ({"capacity": 37, "is_skipping": True}, {"power": 1024}, "Lightning ran 0 training batches of the 4"),
        *(({"capacity": 37, "text": text}, {"power": text}, 37) for text in UNKNOWN_TO_LIGHTNING),
    ],
    ids=str,
)
def test_our_answer_ran_and_theirs_did_not(settings, theirs_by_mode, our_outcome):
    finders = [(partial(theirs, mode=mode), expected) for mode, expected in theirs_by_mode.items()]
    for find, expected in (*finders, (ours, our_outcome)):
        module, random_numbers = Limited(**{"examples": 1000, **settings}), torch.get_rng_state()
        try:
            outcome = find(module)
        except (RuntimeError, MemoryError) as error:
            outcome = f"{type(error).__name__}: {error}"
        if isinstance(expected, int):
            assert outcome == module.batch_size == expected
            assert (outcome in module.told.trained) is (find is ours)
        else:
            assert expected in outcome
            assert module.batch_size == (4 if find is ours else 64)  # theirs leaves the size that failed
        assert torch.equal(random_numbers, torch.get_rng_state()) is (find is ours)


# --- the monitor of the real run ---


@pytest.fixture
def probe():
    return oomprobe.check_target("oomprobe.demo:wide_mlp", 4, device="sim:1GiB", progress="off")


class Noted(oomprobe.PeakMonitor):
    """Notes what the callback tells it."""

    def seen(self, phase):
        vars(self).setdefault("heard", []).append((self.steps, phase))
        super().seen(phase)


@pytest.fixture
def watch(probe, monkeypatch):
    monkeypatch.setattr(framework, "PeakMonitor", Noted)
    return PeakMonitorCallback(probe)


@pytest.mark.parametrize("manual", [False, True])
def test_the_callback_tells_steps_and_validation(watch, manual):
    trainer = quiet_trainer(callbacks=[watch], accumulate_grad_batches=1 if manual else 2, num_sanity_val_steps=1)
    trainer.fit(Module(manual=manual), Data(16, val_batch_size=8))
    steps = [1, 2, 3, 4] if manual else [0, 1, 1, 2]  # after each batch
    trained = [(step, "training") for step in steps]
    assert watch.monitor.heard == [(0, "evaluation"), *trained, *[(steps[-1], "evaluation")] * 2]
    assert watch.monitor.batch_size == 4
    assert watch.monitor.probed_bytes is not None


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("asked", "expected"), [(None, 2), (4, 4)])
def test_the_callback_compares_at_the_loaders_size_unless_told(probe, asked, expected, nested):
    watch = PeakMonitorCallback(probe, batch_size=asked)
    monitor = watch.monitor
    loader = DataLoader(data(8), batch_size=2)

    class Nested(Module):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch["a"] if nested else batch, batch_idx)

    quiet_trainer(callbacks=[watch], max_steps=1).fit(Nested(), {"a": loader, "b": loader} if nested else loader)
    assert watch.monitor is monitor
    assert (monitor.batch_size, monitor.steps) == (expected, 1)
    assert (monitor.probed_bytes is None) == (expected == 2)  # of the probe's one size


def test_a_loader_without_a_size_leaves_the_answer(probe):
    watch = PeakMonitorCallback(probe)
    loader = DataLoader(data(8), batch_sampler=[[0, 1], [2]])
    quiet_trainer(callbacks=[watch]).fit(Module(), loader)
    assert (watch.monitor.batch_size, watch.monitor.steps) == (4, 2)


def test_the_callback_is_a_callback_that_pickles(probe):
    for watch in (
        PeakMonitorCallback(probe, 4, False),
        pickle.loads(pickle.dumps(PeakMonitorCallback(probe, 4, False))),
    ):
        assert isinstance(watch, pl.Callback)
        assert isinstance(watch, PeakMonitorCallback)
        assert watch.state_key == "PeakMonitorCallback"
        assert watch.monitor.ok


def test_the_callback_is_not_said_to_be_missed(probe):
    trainer = quiet_trainer(callbacks=[PeakMonitorCallback(probe)])
    result = probed(Module(ledger(2)), Data(16), trainer)
    assert not [item for item in result.not_covered if "callbacks" in item]
