"""What only the adapter for Lightning promises: loaders, settings, hooks, validation, and what trials write nowhere."""

import gc
import os
import tempfile
import warnings
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from ledger import Box, LedgerDevice, Log
from torch.utils.data import DataLoader, Dataset, IterableDataset

import oomprobe
from oomprobe.integrations.lightning import find_max_batch

from .drivers import QUICK, WIDTH, Data, Module, OwnLoaders, Watch, data, pl, quiet_trainer

pytestmark = pytest.mark.filterwarnings(
    "ignore"
)  # Lightning's own, about torch, loaders without workers and short runs
NO_EVAL = {"limit_val_batches": 0}


def probed(module, datamodule=None, trainer=None, **options):
    return find_max_batch(trainer or quiet_trainer(), module, datamodule, **{**QUICK, **options})


# --- where the batch size is read ---


@pytest.mark.parametrize(
    "places",
    [{"module"}, {"data"}, {"module.hparams", "data"}, {"data.hparams"}],
    ids=lambda places: " ".join(sorted(places)),
)
def test_answer_is_set_where_lightning_sets_it(places):
    from lightning.pytorch.utilities.parsing import lightning_setattr

    def made():
        module, datamodule = Module(9, batch_size=4 if "module" in places else None), Data()
        if "data" not in places:
            del datamodule.batch_size
        for name, owner in (("module", module), ("data", datamodule)):
            owner.save_hyperparameters(
                {"batch_size" if f"{name}.hparams" in places else "other": 4}
            )
        read = (
            module if "module" in places else datamodule if "data" in places else datamodule.hparams
        )
        datamodule.train_dataloader = lambda: DataLoader(data(64), batch_size=read.batch_size)
        return module, datamodule

    def values(*owners):
        return [(vars(owner).get("batch_size"), dict(owner.hparams)) for owner in owners]

    ours, theirs = made(), made()
    before = values(*ours)
    assert (
        probed(*ours, trainer=quiet_trainer(**NO_EVAL), max_batch=1, write_back=False).batch_size
        == 1
    )
    assert values(*ours) == before
    result = probed(*ours, trainer=quiet_trainer(**NO_EVAL))
    theirs[0].trainer = quiet_trainer()
    theirs[0].trainer.datamodule = theirs[1]
    lightning_setattr(theirs[0], "batch_size", 9)
    assert values(*ours) == values(*theirs)
    said = [
        "(Data and hparams)" in note for note in result.notes if "exists in several places" in note
    ]
    assert said == [True] * (len(places) - 1)


def test_batch_size_name():
    class Other(Data):
        def __init__(self):
            super().__init__()
            self.save_hyperparameters({"bs": 24})

        def train_dataloader(self):
            return DataLoader(self.train_set, batch_size=self.hparams.bs)

    said = r"made batches of 24 although batch_size=1 was set.*batch_size_name="
    with pytest.raises(oomprobe.UnreliableError, match=said):
        probed(Module(9), Other())
    datamodule = Other()
    found = probed(Module(9), datamodule, batch_size_name="bs", min_batch=8)
    assert (found.batch_size, datamodule.hparams.bs, datamodule.batch_size) == (9, 9, 4)


def test_loaders_passed_are_rebuilt_at_each_size():
    module, loader = Module(11), DataLoader(data(100), batch_size=3, shuffle=True, num_workers=2)
    for datamodule in (None, Data(val_batch_size=5)):
        result = probed(module, datamodule, train_dataloaders=loader, min_batch=8)
        assert (result.batch_size, module.batch_size, loader.batch_size) == (11, 4, 3)
        assert "nothing was set: create your DataLoader with batch_size=11" in result.notes
    assert set(module.watch.validated) == {5}  # only the training loader was passed
    subset = DataLoader(
        data(100), sampler=torch.utils.data.SubsetRandomSampler(range(30)), batch_size=2
    )
    assert probed(Module(1000), train_dataloaders=subset, min_batch=16).batch_size == 30
    module = OwnLoaders(20, examples=100, eval_cost=1)
    assert (
        probed(module, val_dataloaders=DataLoader(data(50), batch_size=16), min_batch=18).batch_size
        == 20
    )
    assert (module.batch_size, set(module.watch.validated)) == (
        20,
        {16},
    )  # validation keeps its size


class SemiSupervised(Module):
    """Has a loader of its batch size and one that ignores it, combined or not."""

    def __init__(self, combined, room):
        super().__init__(room)
        self.combined = combined

    def train_dataloader(self):
        loaders = {
            "labelled": DataLoader(data(100), self.batch_size),
            "unlabelled": DataLoader(data(40), 7),
        }
        return pl.utilities.CombinedLoader(loaders, "min_size") if self.combined else loaders

    def training_step(self, batch, batch_idx):
        assert len(batch["unlabelled"][0]) == 7
        return super().training_step(batch["labelled"], batch_idx)


@pytest.mark.parametrize("combined", [True, False])
def test_a_loader_that_ignores_the_size_keeps_its_own(combined):
    result = probed(SemiSupervised(combined, 9))
    assert result.batch_size == 9
    assert any("kept its own" in note for note in result.notes)


@pytest.mark.parametrize(
    ("settings", "manual"), [({"fast_dev_run": True}, False), ({"max_steps": 3}, True)], ids=str
)
def test_a_short_training_ends_no_trial(settings, manual):
    result = probed(
        Module(9, manual=manual), Data(100), trainer=quiet_trainer(**settings), min_batch=8
    )
    assert result.batch_size == 9


# --- what a trial does ---


@pytest.mark.parametrize(
    ("accumulated", "micro", "asked"), [(1, 1, {}), (9, 2, {}), (1, 2, {"global_batch": 24})]
)
def test_gradients_exist_while_they_accumulate(accumulated, micro, asked):
    class Watching(Module):
        def on_before_backward(self, loss):
            had.append(self.layer[0].weight.grad is not None)

    had, trainer = Log(), quiet_trainer(accumulate_grad_batches=accumulated, **NO_EVAL)
    result = probed(Watching(8), Data(), trainer, min_batch=8, max_batch=8, **asked)
    assert had[: 2 * micro] == [False, True][:micro] * 2
    assert any(
        note.startswith("one step of a trial is Trainer.fit for 2 optimizer steps")
        for note in result.notes
    )
    assert any("of 2 accumulated batches each" in note for note in result.notes) is (micro == 2)
    if asked:
        assert result.plan(24)[0].ran_accumulated


def test_a_trial_has_the_settings_of_the_trainer():
    class Watching(Module):
        def configure_gradient_clipping(
            self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None
        ):
            seen.held.add((gradient_clip_val, gradient_clip_algorithm.value))

        def training_step(self, batch, batch_idx):
            seen.held.add(self.layer(batch[0]).dtype)
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self):
            steps = self.trainer.estimated_stepping_batches
            seen.held.add((self.trainer.max_epochs, steps))
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            one_cycle = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, max_lr=0.1, total_steps=steps
            )
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": one_cycle, "interval": "step"},
            }

    seen = Box(set())
    clipping = {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}
    trainer = quiet_trainer(max_epochs=3, precision="bf16-mixed", **clipping)
    probed(Watching(8), Data(64), trainer, min_batch=8, max_batch=8)
    assert seen.held == {
        (0.5, "value"),
        torch.bfloat16,
        (3, 24),
    }  # the length is that of the real training


@pytest.mark.parametrize(
    ("every", "expected"),
    [((1, 5), [set(range(10)), {4, 9}]), ((1, 99), [set(range(64)), set()])],
    ids=["the second less often", "the second never"],
)
def test_manual_optimization_runs_until_each_optimizer_steps(every, expected):
    class Two(Module):
        def training_step(self, batch, batch_idx):
            self.manual_backward(self.layer(batch[0]).mean())
            for number, optimizer in enumerate(self.optimizers()):
                if (batch_idx + 1) % every[number] == 0:
                    stepped.held[number].add(batch_idx)
                    optimizer.step()
                    optimizer.zero_grad()

        def configure_optimizers(self):
            return [torch.optim.SGD(self.layer[i].parameters(), lr=0.1) for i in (0, 2)]

    stepped = Box([set(), set()])
    result = probed(
        Two(6, manual=True), Data(20), quiet_trainer(**NO_EVAL), min_batch=4, max_batch=4
    )
    assert result.batch_size == 4
    assert stepped.held == expected
    assert any(note.startswith("some optimizers (1) did not step") for note in result.notes) is (
        not expected[1]
    )


def test_a_module_that_skips_its_batches_is_reported():
    skips = type("Skips", (OwnLoaders,), {"on_train_batch_start": lambda *_: -1})
    with pytest.raises(oomprobe.UnreliableError, match="Lightning ran 0 training batches of the 2"):
        probed(skips(examples=20))


# --- validation ---


def test_validation_limits_the_answer_if_it_needs_more():
    class Plateau(Module):
        """The scheduler and the hook need a metric of validation."""

        def configure_optimizers(self):
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
                optimizer := super().configure_optimizers()
            )
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": plateau, "monitor": "val"},
            }

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
    result = probed(Plateau(20, eval_cost=4), Data(val_batch_size=None))
    assert (result.batch_size, resident.held) == (5, {True})
    assert max(phases.held, key=len) == "ttvvttvv", "training goes on after validation"
    assert not any("evaluation between epochs" in item for item in result.not_covered)


@pytest.mark.parametrize("how", ["limit", "no loader", "no step"])
def test_trials_without_validation(how):
    kind = type("NoStep", (Module,), {"validation_step": pl.LightningModule.validation_step})
    module = (kind if how == "no step" else Module)(20, eval_cost=4)
    data_kind = type("NoVal", (Data,), {"val_dataloader": pl.LightningDataModule.val_dataloader})
    datamodule = data_kind() if how == "no loader" else Data()
    result = probed(
        module, datamodule, quiet_trainer(limit_val_batches=0 if how == "limit" else 1.0)
    )
    assert (result.batch_size, module.watch.validated) == (20, [])
    assert any("evaluation between epochs" in item for item in result.not_covered)


# --- the worst case first ---


class Sentences(Dataset):
    """Sequences of several lengths."""

    lengths = (3,) * 50 + (20, 10) + (1,) * 48

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return torch.ones(self.lengths[index])


class Padded(Module):
    """Has room for so many elements."""

    def training_step(self, batch, batch_idx):
        self.watch.trained.append(tuple(batch.shape))
        self.watch.take(batch.numel())
        return self.layer(batch[:, :1].expand(-1, WIDTH)).mean()


def test_batches_hold_the_longest_examples():
    padded = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    loader, module = (
        DataLoader(Sentences(), batch_size=2, collate_fn=padded, shuffle=True),
        Padded(100),
    )
    result = probed(module, train_dataloaders=loader)
    assert (result.batch_size, {length for _, length in module.watch.trained}) == (5, {20})
    assert not any("longest sequence" in item for item in result.not_covered)
    result = probed(Padded(1000), train_dataloaders=loader, max_batch=4, scan_s=0)
    assert any(
        "1 of 100 examples of the training data were scanned in 0 s" in note
        for note in result.notes
    )
    assert any("longest sequence" in item for item in result.not_covered)


# --- devices ---


def test_a_compiled_module():
    module = OwnLoaders(examples=8)
    with torch.compiler.set_stance("force_eager"):  # wrapped, but not compiled
        result = probed(torch.compile(module, backend="eager"), max_batch=2)
    assert (result.batch_size, module.batch_size) == (2, 2)


def test_pytorch_lightning_is_recognised_by_its_trainer():
    other = pytest.importorskip("pytorch_lightning")
    trainer = other.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    with pytest.raises(
        oomprobe.InvalidArgumentError, match="a LightningModule of pytorch_lightning, not Module"
    ):
        probed(Module(), Data(), trainer)

    class Theirs(other.LightningModule):
        train_dataloader, configure_optimizers = (
            OwnLoaders.train_dataloader,
            Module.configure_optimizers,
        )

        def __init__(self):
            super().__init__()
            self.layer, self.watch, self.batch_size, self.examples = (
                torch.nn.Linear(8, 1),
                Watch(10),
                2,
                30,
            )

        def training_step(self, batch, batch_idx):
            self.watch.train(len(batch[0]))
            return self.layer(batch[0]).mean()

    assert probed(Theirs(), trainer=trainer).batch_size == 10


# --- refusals ---


class Stream(IterableDataset):
    def __iter__(self):
        return iter(data(20).tensors[0].split(1))


ELSEWHERE = LedgerDevice()
ELSEWHERE.torch_device = torch.device("cuda", 1)
BATCHED = DataLoader(data(9), batch_sampler=[[0, 1], [2]])
REBUILT = r"of the training data cannot be rebuilt .* Pass train_dataloaders=DataLoader\(dataset, batch_size="


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"trainer": 3}, "trainer must be a lightning.pytorch.Trainer, not int"),
        (
            {"module": torch.nn.Linear(1, 1)},
            "module must be a LightningModule of lightning.pytorch, not Linear",
        ),
        (
            {"datamodule": DataLoader(data(9))},
            "datamodule must be .*: pass loaders as train_dataloaders=",
        ),
        ({"datamodule": None}, r"no training data: Module has no train_dataloader\(\)"),
        (
            {"batch_size_name": "bs"},
            "neither Data nor Module nor their hyper.* have 'bs': write self.bs = 1 in __init__",
        ),
        ({"train_dataloaders": BATCHED}, REBUILT),
        ({"train_dataloaders": data(9)}, REBUILT),
        ({"train_dataloaders": DataLoader(Stream(), batch_size=2)}, "is a stream"),
        (
            {"val_dataloaders": BATCHED},
            r"of the validation data .* Pass val_dataloaders=DataLoader",
        ),
        (
            {"trainer": {"devices": 2, "strategy": "ddp_spawn"}},
            "trains on 2 ranks.*lightning.model_and_step",
        ),
        (
            {"trainer": {"devices": 1, "strategy": "ddp"}},
            "buffers that trials would not have: probe with strategy='auto'",
        ),
        ({"device": ELSEWHERE}, "but the Trainer trains on cpu.*accelerator='cuda'"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_arguments_are_refused_with_what_to_type(options, said):
    options = {"trainer": {}, "module": Module(), "datamodule": Data(), **options}
    if isinstance(options["trainer"], dict):
        options["trainer"] = quiet_trainer(**options["trainer"])
    module = options.pop("module")
    with pytest.raises(oomprobe.InvalidArgumentError, match=said):
        probed(module, **options)
    if isinstance(module, Module):
        assert (module.watch.trained, module.batch_size) == ([], 4)


# --- what is restored ---


def test_setup_and_teardown_run_once():
    for room in (5, 0):
        Data.heard.clear()
        with nullcontext() if room else pytest.raises(oomprobe.NothingFitsError):
            probed(Module(room), Data())
        assert Data.heard == ["prepare_data", "setup fit", "teardown fit"]


def test_the_scaler_of_a_precision_plugin_is_restored():
    scaler, module = torch.amp.GradScaler("cpu", growth_interval=1), Module(5)
    plugin, before = (
        pl.plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler),
        scaler.state_dict(),
    )
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
        probed(Watched(5), Data(), min_batch=4, max_batch=4, confirm_steps=12)
    finally:
        gc.enable()
    assert max(alive) <= 1


# --- logging and checkpoints ---


def test_trials_log_and_save_nothing(tmp_path, monkeypatch, caplog, capsys):
    class Own(Module):
        def configure_callbacks(self):
            return [pl.callbacks.LambdaCallback(on_train_start=lambda *_: seen.held.add("called"))]

        def training_step(self, batch, batch_idx):
            seen.held.add(len(self.trainer.loggers))
            self.logger.log_metrics({"a": 1}, step=self.global_step)
            self.logger.experiment.add_image("a", torch.zeros(1))
            self.log("loss", 1.0, logger=True)
            self.trainer.save_checkpoint("now.ckpt")
            for folder in (
                self.logger.log_dir,
                self.trainer.log_dir,
                self.trainer.default_root_dir,
            ):
                open(os.path.join(folder, "image.png"), "a").close()
            return super().training_step(batch, batch_idx)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen, loggers = (
        Box(set()),
        [pl.loggers.CSVLogger(tmp_path / "logs"), pl.loggers.CSVLogger(tmp_path / "more")],
    )
    trainer = pl.Trainer(accelerator="cpu", logger=loggers, default_root_dir=tmp_path)
    caplog.clear()
    capsys.readouterr()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = probed(Own(5), Data(), trainer)
    assert (list(tmp_path.iterdir()), seen.held) == ([], {2})
    assert (caplog.text, capsys.readouterr()) == ("", ("", ""))
    assert not any(
        "callbacks" in item for item in result.not_covered
    )  # neither the progress bar nor checkpoints


# --- compared with Lightning's own finder on the same module, where that one is wrong (Lightning 2.6.6) ---


@pytest.mark.parametrize(
    ("room", "examples", "mode", "theirs", "ours"),
    [
        (37, 1000, "binsearch", 35, 37),
        (5000, 20_000, "power", 8192, 4992),
        (10**9, 20, "power", 32, 20),
        (0, 9, "binsearch", 1, 0),
    ],
)
def test_our_answer_ran_and_theirs_did_not(room, examples, mode, theirs, ours, tmp_path):
    module = OwnLoaders(room, examples=examples)
    with nullcontext() if ours else pytest.raises(oomprobe.NothingFitsError):
        assert probed(module).batch_size == module.batch_size == ours
        assert ours in module.watch.trained
    module, tuner = (
        OwnLoaders(room, examples=examples),
        pl.tuner.Tuner(quiet_trainer(default_root_dir=tmp_path)),
    )
    assert tuner.scale_batch_size(module, val_dataloaders=DataLoader(data(9)), mode=mode) == theirs
    assert theirs == 1 or theirs not in module.watch.trained
