"""What cannot be probed is refused before anything runs, with what to type."""

import pytest
import torch

import oomprobe
from integrations.lightning_models import (
    FRAMEWORK_WARNINGS,
    HOOKS,
    MIB,
    WIDTH,
    Data,
    DataLoader,
    LedgerDevice,
    Module,
    OwnLoaders,
    data,
    quiet_trainer,
)
from oomprobe.integrations.lightning import find_max_batch

pytestmark = [pytest.mark.filterwarnings(line) for line in FRAMEWORK_WARNINGS]


def refused(match, *, trainer=None, module=None, datamodule=None, error=oomprobe.InvalidArgumentError, **options):
    """Nothing of the module ran, and nothing was set."""
    module = Module() if module is None else module
    options = {"device": LedgerDevice(9 * MIB), "progress": "off", **options}
    with pytest.raises(error, match=match):
        find_max_batch(trainer or quiet_trainer(), module, datamodule, **options)
    if isinstance(module, Module):
        assert module.told.trained == []
        assert getattr(module, "batch_size", 4) == 4


def test_an_option_that_the_contract_does_not_have():
    HOOKS.clear()
    refused("unexpected keyword argument 'batchsize'", datamodule=Data(), batchsize=3, error=TypeError)
    assert HOOKS == []  # no setup() either


@pytest.mark.parametrize("value", ["no", 0, None])
def test_write_back_is_yes_or_no(value):
    refused(f"write_back must be True or False, not {value!r}", datamodule=Data(), write_back=value)


@pytest.mark.parametrize("scan_s", [-1, float("nan"), True, "3"])
def test_seconds_that_are_none(scan_s):
    refused("scan_s must be a number of seconds", datamodule=Data(), scan_s=scan_s)


def test_what_is_no_trainer_or_no_module():
    refused(r"trainer must be a lightning.pytorch.Trainer, not int", trainer=3)
    refused(
        r"module must be a LightningModule of lightning.pytorch, as the Trainer is, not Linear",
        module=torch.nn.Linear(1, 1),
    )


@pytest.mark.parametrize("settings", [{"devices": 2, "strategy": "ddp_spawn"}, {"devices": 2}], ids=str)
def test_several_ranks(settings):
    refused(r"trains on 2 ranks", trainer=quiet_trainer(**settings), datamodule=Data())


@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn"])
def test_a_strategy_with_buffers_of_its_own_on_one_rank(strategy):
    refused("strategy='auto'", trainer=quiet_trainer(devices=1, strategy=strategy), datamodule=Data())


def test_fast_dev_run_and_no_training():
    refused("fast_dev_run.*remove it", trainer=quiet_trainer(fast_dev_run=True), datamodule=Data())
    refused("does not train", trainer=quiet_trainer(limit_train_batches=0), datamodule=Data())


def test_no_training_data():
    refused(r"no training data: neither Module nor a data module has train_dataloader\(\)")
    refused("no training data", module=Module(), val_dataloaders=DataLoader(data(9)))


def test_loaders_beside_a_data_module():
    refused("pass either datamodule or val_dataloaders", datamodule=Data(), val_dataloaders=DataLoader(data(9)))


def test_no_attribute_to_set():
    datamodule = Data()
    del datamodule.batch_size
    refused(r"have 'batch_size'.*batch_size_name=", module=Module(batch_size=None), datamodule=datamodule)
    refused(
        r"neither Module nor Data nor their hyperparameters have 'bs'.*self.bs = 1 in __init__",
        datamodule=Data(),
        batch_size_name="bs",
    )


@pytest.mark.parametrize("name", [5, "", None, "batch size"])
def test_a_name_that_is_none(name):
    refused(
        r"batch_size_name must be the name of an attribute, .*not " + repr(name),
        datamodule=Data(),
        batch_size_name=name,
    )


@pytest.mark.parametrize(("name", "kind"), [("layer", "Sequential"), ("forward", "method")])
def test_a_name_of_what_is_no_number(name, kind):
    refused(
        f"batch_size_name='{name}' names something of type {kind}, not a batch size",
        datamodule=Data(),
        batch_size_name=name,
    )


@pytest.mark.parametrize(
    ("datamodule", "said"),
    [("x", "not 'x'"), (Data, "not <class .*Data'>"), (3, "not 3")],
)
def test_what_is_no_data_module(datamodule, said):
    refused(f"datamodule must be a LightningDataModule of lightning.pytorch.*{said}", datamodule=datamodule)


@pytest.mark.parametrize("argument", ["train_dataloaders", "val_dataloaders"])
@pytest.mark.parametrize(
    ("loaders", "said"),
    [
        ("x", "there is 'x' in it"),
        ({"a": [7]}, "there is 7 in it"),
        (data(9), "there is <.*TensorDataset.*DataLoader\\(data_set"),
    ],
    ids=["x", "7", "data set"],
)
def test_what_is_no_loader(argument, loaders, said):
    handed_in = {"train_dataloaders": DataLoader(data(9)), argument: loaders}
    refused(f"{argument} .*{said}", **handed_in)


def test_an_attribute_that_nothing_reads_names_the_one_that_may_be_read():
    class Other(Data):
        def __init__(self):
            super().__init__()
            self.save_hyperparameters({"bs": 24})

        def train_dataloader(self):
            return DataLoader(self.train_set, batch_size=self.hparams.bs)

    refused(r"made batches of 24 where batch_size=1 was set.*batch_size_name=", datamodule=Other())
    device = LedgerDevice(9 * MIB)
    datamodule = Other()
    found = find_max_batch(
        quiet_trainer(), Module(device), datamodule, device=device, batch_size_name="bs", progress="off"
    )
    assert (found.batch_size, datamodule.hparams.bs, datamodule.batch_size) == (8, 8, 4)


def test_a_loader_that_stops_following_is_no_silent_answer():
    class Clamped(Data):
        def train_dataloader(self):
            return DataLoader(self.train_set, batch_size=min(self.batch_size, 6))

    device = LedgerDevice(50 * MIB)
    with pytest.raises(oomprobe.UnreliableError, match="made batches of 6 where batch_size=8 was set"):
        find_max_batch(quiet_trainer(), Module(device), Clamped(), device=device, progress="off")


@pytest.mark.parametrize("kind", ["batch sampler", "opaque"])
def test_loaders_handed_in_that_cannot_be_made_again(kind):
    class Buckets:
        def __iter__(self):
            return iter([[0, 1], [2]])

    loaders = {"batch sampler": DataLoader(data(9), batch_sampler=Buckets()), "opaque": [torch.zeros(2, 8)]}
    what = {
        "batch sampler": r"batch sampler of its own \(Buckets\)",
        "opaque": "a Tensor that makes its batches itself",
    }
    refused(f"{what[kind]}.*LightningDataModule", train_dataloaders=loaders[kind])


def test_fewer_examples_than_the_smallest_batch():
    refused(
        "the data set has 5 examples, fewer than the smallest batch asked for, 8", datamodule=Data(5), multiple_of=8
    )


def test_a_device_where_the_trainer_does_not_train():
    elsewhere = LedgerDevice()
    elsewhere.torch_device = torch.device("cuda", 1)
    refused("but the Trainer trains on cpu.*accelerator='cuda'", datamodule=Data(), device=elsewhere)


def test_no_optimizer():
    class NoOptimizer(OwnLoaders):
        def configure_optimizers(self):
            return None

    module = NoOptimizer(LedgerDevice(9 * MIB), examples=30)
    with pytest.raises(oomprobe.UnreliableError, match=r"configure_optimizers\(\) returned no optimizer"):
        find_max_batch(quiet_trainer(), module, device=module.ledger, progress="off")


@pytest.mark.parametrize("how", ["skips", "stops"])
def test_trials_of_no_steps(how):
    class Idle(OwnLoaders):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if how == "skips" else None

        def on_train_start(self):
            self.trainer.should_stop = how == "stops"

    module = Idle(LedgerDevice(9 * MIB), examples=30)
    with pytest.raises(oomprobe.UnreliableError, match=r"at batch 1 Lightning ran \d training batches of the 2"):
        find_max_batch(quiet_trainer(), module, device=module.ledger, progress="off")


def test_a_bug_of_the_step_is_the_users_own():
    class Bug(OwnLoaders):
        def training_step(self, batch, batch_idx):
            raise KeyError("labels")

    module = Bug(examples=30)
    with pytest.raises(oomprobe.StepFailedError, match="labels"):
        find_max_batch(quiet_trainer(), module, device=LedgerDevice(9 * MIB), progress="off")
    assert module.batch_size == 4


def test_the_other_package_of_lightning_is_known_by_its_trainer():
    other = pytest.importorskip("pytorch_lightning")
    trainer = other.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    refused("a LightningModule of pytorch_lightning, as the Trainer is, not Module", trainer=trainer, datamodule=Data())

    class Theirs(other.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer, self.batch_size = torch.nn.Linear(8, 1), 2

        def training_step(self, batch, batch_idx):
            device.take(len(batch[0]) * MIB)
            return self.layer(batch[0]).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def train_dataloader(self):
            return DataLoader(data(30), batch_size=self.batch_size)

    device = LedgerDevice(10 * MIB)
    assert find_max_batch(trainer, Theirs(), device=device, progress="off").batch_size == 9


def test_the_framework_is_not_imported_with_the_adapter():
    import subprocess
    import sys

    code = (
        "import sys, oomprobe.integrations.lightning; print([m for m in sys.modules if 'lightning' in m.split('.')[0]])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_data_that_can_be_read_only_once_is_not_used_up():
    class Once(torch.utils.data.IterableDataset):
        def __init__(self):
            self.rest = iter([torch.zeros(WIDTH)] * 9)

        def __iter__(self):
            return self.rest

    class Streamed(Data):
        def train_dataloader(self):
            return DataLoader(once, batch_size=self.batch_size)

    once = Once()
    with pytest.raises(oomprobe.InvalidArgumentError, match="read only once"):
        find_max_batch(quiet_trainer(limit_val_batches=0), Module(), Streamed(), max_batch=2, device="cpu:1GiB")
    assert len(list(once.rest)) == 9
