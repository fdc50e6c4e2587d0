"""What is the user's is as it was: training after a probe gives the losses of training without one, bit for bit."""

import gc
import logging
import random
import signal
import warnings
import weakref
from contextlib import nullcontext
from typing import ClassVar

import numpy as np
import pytest
import torch

import oomprobe
from integrations.lightning_models import (
    FRAMEWORK_WARNINGS,
    HOOKS,
    MIB,
    Data,
    DataLoader,
    LedgerDevice,
    Module,
    OwnLoaders,
    data,
    pl,
    quiet_trainer,
    torchmetrics,
)
from oomprobe.integrations.lightning import find_max_batch
from oomprobe.integrations.lightning.batch_size import BatchSize
from oomprobe.integrations.lightning.kept import ctrl_c_as_it_was, replaced

pytestmark = [pytest.mark.filterwarnings(line) for line in FRAMEWORK_WARNINGS]
QUIET = {"progress": "off", "memory_fraction": 1.0}


def trained(ending, **settings):
    """Losses of a training with dropout and shuffling, after a probe that ended in that way, or after none."""
    torch.manual_seed(3)
    device = LedgerDevice(23 * MIB)
    module, datamodule = Ending(device), Data(40)
    trainer = quiet_trainer(max_epochs=2, **settings)
    if ending != "none":
        module.ending = ending
        with pytest.raises(ENDINGS[ending]) if ending in ENDINGS else nullcontext():
            find_max_batch(trainer, module, datamodule, device=device, write_back=False, **QUIET)
        module.ending = "none"
    del module.told.losses[:]
    module.ledger = None
    trainer.fit(module, datamodule=datamodule)
    return (
        module.told.losses,
        [p.clone() for p in module.parameters()],
        torch.rand(1),
        random.random(),
        np.random.rand(),
    )


ENDINGS = {
    "bug": oomprobe.StepFailedError,
    "ctrl-c": KeyboardInterrupt,
    "sigterm": SystemExit,
    "nothing fits": oomprobe.NothingFitsError,
}


class Ending(Module):
    ending = "none"

    def training_step(self, batch, batch_idx):
        if len(batch[0]) >= 8 and self.ending == "bug":
            raise KeyError("labels")
        if len(batch[0]) >= 8 and self.ending == "ctrl-c":
            signal.raise_signal(signal.SIGINT)
        if len(batch[0]) >= 8 and self.ending == "sigterm":
            signal.raise_signal(signal.SIGTERM)
        if self.ending == "nothing fits":
            self.ledger.take(2**50)
        return super().training_step(batch, batch_idx)


def is_same(one, other):
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(is_same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize("ending", ["answer", "bug", "ctrl-c", "sigterm", "nothing fits"])
def test_training_gives_the_losses_of_a_training_without_a_probe(ending):
    random.seed(1)
    np.random.seed(1)
    expected = trained("none")
    random.seed(1)
    np.random.seed(1)
    assert len(expected[0]) == 20
    assert is_same(trained(ending), expected)


@pytest.mark.parametrize(
    "settings",
    [{"precision": "bf16-mixed"}, {"precision": "bf16-true"}, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}],
    ids=str,
)
def test_so_it_does_with_other_settings(settings):
    assert is_same(trained("answer", **settings)[:3], trained("none", **settings)[:3])


def test_so_it_does_with_manual_optimization_and_loaders_of_its_own():
    def losses(*, probed):
        torch.manual_seed(3)
        module = OwnLoaders(LedgerDevice(9 * MIB), examples=30, manual=True)
        if probed:
            find_max_batch(quiet_trainer(), module, device=module.ledger, write_back=False, **QUIET)
        del module.told.losses[:]
        quiet_trainer(max_epochs=2).fit(module)
        return module.told.losses

    assert losses(probed=True) == losses(probed=False)


class Drawing(torch.utils.data.Dataset):
    """Draws from generators of its own and from all that there are, as it gives an example."""

    def __init__(self, count):
        self.count = count
        self.torch, self.numpy = torch.Generator().manual_seed(1), np.random.default_rng(2)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        drawn = torch.rand(8, generator=self.torch) + self.numpy.random() + torch.rand(8) + random.random()
        return ((drawn + np.random.rand()).float(),)


class Split(pl.LightningDataModule):
    """Draws from one of its own as it is set up, and has data sets in others."""

    def __init__(self):
        super().__init__()
        self.batch_size, self.split, self.full = 4, torch.Generator().manual_seed(5), Drawing(30)

    def setup(self, stage):
        self.mean = sum(self.full[index][0].mean() for index in range(3))
        self.parts = torch.utils.data.random_split(self.full, [24, 6], generator=self.split)

    def train_dataloader(self):
        return DataLoader(self.parts[0], batch_size=self.batch_size, shuffle=True, collate_fn=self.noisy)

    def val_dataloader(self):
        return DataLoader(ONE_FOR_ALL, batch_size=2)

    def noisy(self, examples):
        return [torch.stack([one[0] for one in examples]) + self.mean]


class Noisy(Module):
    """Draws from one of its own as it trains."""

    def __init__(self):
        super().__init__()
        self.layer.insert(0, Noise())

    def validation_step(self, batch, batch_idx):
        self.told.losses.append(self.layer(batch[0]).mean().item())


class Noise(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(4)

    def forward(self, x):
        return x + torch.rand(x.shape, generator=self.generator)


ONE_FOR_ALL = Drawing(6)


@pytest.mark.parametrize("handed_in", [False, True])
def test_generators_of_the_users_own_are_where_they_were(handed_in):
    def losses(*, probed):
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(3)
        ONE_FOR_ALL.__init__(6)
        module, given = Noisy(), {"datamodule": Split()}
        if handed_in:
            given["datamodule"].setup("fit")
            loaders = given["datamodule"].train_dataloader(), given["datamodule"].val_dataloader()
            given = dict(zip(("train_dataloaders", "val_dataloaders"), loaders, strict=True))
        if probed:
            find_max_batch(quiet_trainer(), module, **given, device="cpu:1GiB", max_batch=8, write_back=False, **QUIET)
            del module.told.losses[:]
        quiet_trainer(max_epochs=2).fit(module, **given)
        return module.told.losses

    expected = losses(probed=False)
    assert len(expected) == 20
    assert losses(probed=True) == expected


def test_a_probe_of_a_training_that_has_begun():
    """The Trainer that fitted goes on as it would have: it is never run."""

    def losses(*, probed):
        torch.manual_seed(3)
        module, trainer = OwnLoaders(LedgerDevice(9 * MIB), examples=30), quiet_trainer(max_epochs=1)
        trainer.fit(module)
        if probed:
            before = trainer.state, trainer.global_step, trainer.current_epoch, trainer.train_dataloader
            find_max_batch(trainer, module, device=module.ledger, write_back=False, **QUIET)
            assert (trainer.state, trainer.global_step, trainer.current_epoch, trainer.train_dataloader) == before
            assert module.trainer is trainer
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module)
        return module.told.losses[8:][-16:]

    assert losses(probed=True) == losses(probed=False)


def test_each_attribute_is_the_object_that_it_was():
    class Busy(Module):
        def __init__(self, device):
            super().__init__(device)
            self.count, self.seen, self.by_name, self.other = 0, [], {"a": [1]}, object()
            self.metric = torchmetrics.MeanMetric()
            self.save_hyperparameters({"rate": 0.1})

        def setup(self, stage):
            self.made = torch.nn.Linear(2, 2)
            self.other = object()
            self.hparams.rate = 0.2

        def training_step(self, batch, batch_idx):
            self.count += 1
            self.seen.append(batch)
            self.by_name["a"].append(batch_idx)
            self.metric.update(batch[0].mean())
            self.log("metric", self.metric, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    module, datamodule = Busy(LedgerDevice(5 * MIB)), Data()
    attributes = {part: dict(vars(part)) for part in module.modules()}
    of_data = dict(vars(datamodule))
    find_max_batch(quiet_trainer(), module, datamodule, device=module.ledger, write_back=False, **QUIET)
    assert {part: dict(vars(part)) for part in module.modules()} == attributes
    assert vars(datamodule) == of_data
    assert (module.count, module.seen, module.by_name, dict(module.hparams)) == (0, [], {"a": [1]}, {"rate": 0.1})
    assert module.metric._update_count == 0
    assert float(module.metric.weight) == 0


def test_hooks_that_run_once_for_a_training_run_once_for_a_probe():
    HOOKS.clear()
    module, datamodule = Module(LedgerDevice(5 * MIB)), Data()
    find_max_batch(quiet_trainer(), module, datamodule, device=module.ledger, **QUIET)
    assert HOOKS == ["prepare_data", "setup fit", "teardown fit"]


def test_teardown_also_has_its_turn_when_nothing_fits():
    HOOKS.clear()
    module, datamodule = Module(LedgerDevice(5)), Data()
    with pytest.raises(oomprobe.NothingFitsError):
        find_max_batch(quiet_trainer(), module, datamodule, device=module.ledger, **QUIET)
    assert HOOKS[-1] == "teardown fit"


class Listening(pl.Callback):
    heard: ClassVar[list] = []


for hook in ("setup", "teardown", *(name for name in dir(pl.Callback) if name.startswith("on_"))):
    setattr(Listening, hook, lambda *_, hook=hook: Listening.heard.append(hook))


def test_nobody_hears_of_trials_and_no_file_is_made(tmp_path, monkeypatch, caplog, capsys):
    class Own(Module):
        def configure_callbacks(self):
            return [Listening(), pl.callbacks.ModelCheckpoint(save_last=True)]

        def training_step(self, batch, batch_idx):
            self.logger.experiment.anything()
            self.logger.log_metrics({"a": 1})
            return super().training_step(batch, batch_idx)

    monkeypatch.chdir(tmp_path)
    logger = pl.loggers.CSVLogger(tmp_path / "logs")
    trainer = pl.Trainer(accelerator="cpu", callbacks=[Listening()], logger=logger, default_root_dir=tmp_path)
    Listening.heard.clear()
    caplog.clear()
    capsys.readouterr()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        module = Own(LedgerDevice(5 * MIB))
        result = find_max_batch(trainer, module, Data(), device=module.ledger, **QUIET)
    assert [str(warning.message) for warning in warned] == []
    assert Listening.heard == []
    assert list(tmp_path.iterdir()) == []
    assert caplog.text == ""
    assert capsys.readouterr() == ("", "")
    assert any("callbacks, which trials do not call: Listening" in item for item in result.not_covered)
    assert logging.getLogger("lightning.pytorch").level == logging.INFO


def test_a_scaler_is_as_it_was():
    plugin = pl.plugins.MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", growth_interval=1))
    trainer = quiet_trainer(plugins=[plugin])
    before = plugin.scaler.state_dict()
    module = Module(LedgerDevice(5 * MIB))
    find_max_batch(trainer, module, Data(), device=module.ledger, **QUIET)
    assert plugin.scaler.state_dict() == before


def test_the_sampler_of_a_loader_that_was_handed_in_is_where_it_was():
    generator = torch.Generator().manual_seed(5)
    loader = DataLoader(data(20), batch_size=2, shuffle=True, generator=generator, num_workers=2)
    before = generator.get_state()
    module = Module(LedgerDevice(5 * MIB))
    find_max_batch(quiet_trainer(), module, train_dataloaders=loader, device=module.ledger, **QUIET)
    assert torch.equal(generator.get_state(), before)


def test_a_trial_lets_go_of_its_optimizer_at_once():
    class Watched(Module):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            alive.append(sum(one() is not None for one in optimizers))
            optimizers.append(weakref.ref(optimizer))
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    optimizers, alive = [], []
    module = Watched(LedgerDevice(5 * MIB))
    gc.collect()
    gc.disable()
    try:
        find_max_batch(
            quiet_trainer(), module, Data(), device=module.ledger, min_batch=4, max_batch=4, confirm_steps=12, **QUIET
        )
    finally:
        gc.enable()
    assert max(alive) <= 1


def test_ctrl_c_while_data_are_set_up():
    class Interrupted(Data):
        def setup(self, stage):
            super().setup(stage)
            signal.raise_signal(signal.SIGINT)

    module, datamodule = Module(), Interrupted()
    before = dict(vars(datamodule))
    with pytest.raises(KeyboardInterrupt):
        find_max_batch(quiet_trainer(), module, datamodule, device=LedgerDevice(MIB), **QUIET)
    assert vars(datamodule) == before
    assert module._trainer is None


def test_ctrl_c_goes_on_working_whenever_lightning_stopped_it():
    before = signal.getsignal(signal.SIGINT)
    with ctrl_c_as_it_was():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_method_that_was_on_the_object_is_there_again():
    holder = Holder()
    holder.one = one = lambda: 1
    with replaced(holder, {"one": lambda: 2, "two": lambda: 3}):
        assert (holder.one(), holder.two()) == (2, 3)
    assert vars(holder) == {"one": one}


class Holder:
    pass


def test_class_methods_of_the_user_are_as_they_were():
    module, datamodule = Module(LedgerDevice(5 * MIB)), Data()
    datamodule.train_dataloader = own = datamodule.train_dataloader
    find_max_batch(quiet_trainer(), module, datamodule, device=module.ledger, **QUIET)
    assert vars(datamodule)["train_dataloader"] == own
    assert "val_dataloader" not in vars(datamodule)
    assert "configure_callbacks" not in vars(module)


def test_the_batch_size_is_put_back_after_each_fit():
    module = Module()
    module.save_hyperparameters({"batch_size": 8})
    batch_size = BatchSize("batch_size", module, None)
    with batch_size.at(16):
        assert batch_size.values == [16, 16]
    assert batch_size.values == [4, 8]
