"""find_max_batch for Lightning, on a ledger that knows the truth, and on real host memory."""

import copy
import time

import pytest
import torch

import oomprobe
from integrations.lightning_models import (
    FRAMEWORK_WARNINGS,
    MIB,
    WIDTH,
    Data,
    DataLoader,
    LedgerDevice,
    Module,
    OwnLoaders,
    Sentences,
    data,
    padded,
    pl,
    quiet_trainer,
)
from oomprobe.integrations.lightning import find_max_batch

pytestmark = [pytest.mark.filterwarnings(line) for line in FRAMEWORK_WARNINGS]
QUIET = {"progress": "off", "memory_fraction": 1.0}


def ledger(mib):
    return LedgerDevice(mib * MIB)


# --- the answer ---


@pytest.mark.parametrize("room", [1, 2, 3, 37, 64])
def test_the_answer_is_what_the_memory_holds(room):
    device = ledger(room)
    module = Module(device)
    result = find_max_batch(quiet_trainer(), module, Data(1000), device=device, **QUIET)
    assert result.batch_size == room
    assert result.limited_by == "memory"
    assert room in module.told.trained
    assert result.first_failing_batch_size == room + 1


def test_it_is_written_where_lightning_would_and_training_then_uses_it():
    device = ledger(37)
    module, datamodule = Module(device), Data(1000)
    module.save_hyperparameters({"batch_size": 4, "width": 8})
    assert find_max_batch(quiet_trainer(), module, datamodule, device=device, **QUIET).batch_size == 37
    assert (module.batch_size, module.hparams.batch_size, datamodule.batch_size) == (37, 37, 37)
    del module.told.trained[:]
    quiet_trainer(max_steps=3, limit_val_batches=0).fit(module, datamodule=datamodule)
    assert module.told.trained == [37, 37, 37]


@pytest.mark.parametrize("where", range(1, 16))
def test_the_places_are_those_that_lightning_sets(where):
    """Each way to have the attribute in some of the four places, beside lightning_setattr itself."""
    from lightning.pytorch.utilities.parsing import lightning_setattr

    from oomprobe.integrations.lightning.batch_size import BatchSize

    def made():
        module, datamodule = Module(batch_size=4 if where & 1 else None), Data()
        if not where & 4:
            del datamodule.batch_size
        for owner, bit in ((module, 2), (datamodule, 8)):
            owner.save_hyperparameters({"batch_size": 4} if where & bit else {"other": 4})
        return module, datamodule

    def values(module, datamodule):
        return [vars(o).get("batch_size") for o in (module, datamodule)] + [
            dict(o.hparams) for o in (module, datamodule)
        ]

    ours, theirs = made(), made()
    BatchSize("batch_size", *ours).write(9)
    theirs[0].trainer = quiet_trainer()
    theirs[0].trainer.datamodule = theirs[1]
    lightning_setattr(theirs[0], "batch_size", 9)
    assert values(*ours) == values(*theirs)


def test_nothing_is_written_when_that_is_asked():
    device = ledger(9)
    datamodule = Data()
    assert find_max_batch(quiet_trainer(), Module(device), datamodule, device=device, write_back=False, **QUIET)
    assert datamodule.batch_size == 4


def test_loaders_of_the_module_itself():
    device = ledger(11)
    module = OwnLoaders(device, examples=100)
    assert find_max_batch(quiet_trainer(), module, device=device, **QUIET).batch_size == 11
    assert module.batch_size == 11


def test_loaders_that_are_handed_in_are_made_again_at_each_size():
    device = ledger(11)
    module = Module(device)
    loader = DataLoader(data(100), batch_size=3, shuffle=True)
    result = find_max_batch(quiet_trainer(), module, train_dataloaders=loader, device=device, **QUIET)
    assert (result.batch_size, module.batch_size, loader.batch_size) == (11, 4, 3)
    assert "nothing was set: make your DataLoader with batch_size=11" in result.notes


def test_loaders_and_data_modules_are_taken_where_fit_takes_them():
    device = ledger(11)
    found = find_max_batch(quiet_trainer(), Module(device), DataLoader(data(100), batch_size=3), device=device, **QUIET)
    assert (found.batch_size, "make your DataLoader with batch_size=11" in str(found.notes)) == (11, True)
    datamodule = Data(100)
    find_max_batch(quiet_trainer(), Module(device), train_dataloaders=datamodule, device=device, **QUIET)
    assert datamodule.batch_size == 11


def test_a_subset_sampler_says_which_examples_there_are():
    device = ledger(1000)
    loader = DataLoader(data(100), sampler=torch.utils.data.SubsetRandomSampler(range(30)), batch_size=2)
    result = find_max_batch(quiet_trainer(), Module(device), train_dataloaders=loader, device=device, **QUIET)
    assert result.batch_size == 30


def test_several_loaders_at_once():
    class Both(Module):
        def training_step(self, batch, batch_idx):
            assert len(batch["a"][0]) == len(batch["b"][0])
            return super().training_step(batch["a"], batch_idx)

    device = ledger(7)
    loaders = {"a": DataLoader(data(100), batch_size=2), "b": DataLoader(data(50), batch_size=2)}
    assert (
        find_max_batch(quiet_trainer(), Both(device), train_dataloaders=loaders, device=device, **QUIET).batch_size == 7
    )


def test_no_batch_is_larger_than_the_data_set():
    device = ledger(1000)
    result = find_max_batch(quiet_trainer(), Module(device), Data(50), device=device, **QUIET)
    assert result.batch_size == 50
    assert result.limited_by == "max_batch"
    assert any("it has 50 examples" in note for note in result.notes)
    assert (
        find_max_batch(quiet_trainer(), Module(device), Data(50), device=device, max_batch=80, **QUIET).batch_size == 50
    )
    asked = find_max_batch(quiet_trainer(), Module(device), Data(50), device=device, max_batch=20, **QUIET)
    assert asked.batch_size == 20
    assert not any("50 examples" in note for note in asked.notes)


# --- what a trial does ---


def test_a_trial_takes_two_steps_of_the_size_asked_for():
    device = ledger(8)
    module = Module(device)
    result = find_max_batch(
        quiet_trainer(limit_val_batches=0), module, Data(100), device=device, max_batch=8, min_batch=8, **QUIET
    )
    # Until the optimizer stepped, 2 steps (one fit), and 5 steps to confirm (three fits), with one before each; and one
    # fit after the search, in which the core counts for its rules of thumb.
    assert module.told.trained == [8] * 2 * ((1 + 1) + (1 + 3) + 1)
    assert {trial.samples_per_s for trial in result.trials} == {None}  # a call takes more than one batch
    assert result.options["steps"] == 1
    assert result.options["confirm_steps"] == 3


def test_steps_and_confirm_steps_are_optimizer_steps():
    module, device = Module(ledger(8)), ledger(8)
    result = find_max_batch(
        quiet_trainer(), module, Data(), device=device, max_batch=8, steps=5, confirm_steps=6, **QUIET
    )
    assert (result.options["steps"], result.options["confirm_steps"]) == (3, 3)


@pytest.mark.parametrize(("accumulated", "micro"), [(1, 1), (2, 2), (9, 2)])
def test_gradients_are_there_during_the_second_backward_of_an_accumulation(accumulated, micro):
    class Watching(Module):
        def on_before_backward(self, loss):
            had.append(self.layer[0].weight.grad is not None)

    had, device = [], ledger(8)
    trainer = quiet_trainer(accumulate_grad_batches=accumulated, limit_val_batches=0)
    result = find_max_batch(trainer, Watching(device), Data(), device=device, min_batch=8, max_batch=8, **QUIET)
    assert had == [False, True][:micro] * (len(had) // micro)
    assert any("of 2 accumulated batches each" in note for note in result.notes) is (micro == 2)


def test_a_plan_for_a_global_batch_is_run_with_gradients_accumulating():
    class Watching(Module):
        def on_before_backward(self, loss):
            had.append(self.layer[0].weight.grad is not None)

    had, device = [], ledger(8)
    trainer = quiet_trainer(limit_val_batches=0)
    result = find_max_batch(trainer, Watching(device), Data(), device=device, global_batch=24, **QUIET)
    assert result.plan(24)[0].ran_accumulated
    assert had[:2] == [False, True]


def test_clipping_and_precision_are_those_of_the_trainer():
    class Clipped(Module):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            clipped.append((gradient_clip_val, str(getattr(gradient_clip_algorithm, "value", None))))
            super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)

        def training_step(self, batch, batch_idx):
            dtypes.add(self.layer(batch[0]).dtype)
            return super().training_step(batch, batch_idx)

    clipped, dtypes, device = [], set(), ledger(4)
    trainer = quiet_trainer(precision="bf16-mixed", gradient_clip_val=0.5, gradient_clip_algorithm="value")
    find_max_batch(trainer, Clipped(device), Data(), device=device, **QUIET)
    assert set(clipped) == {(0.5, "value")}
    assert dtypes == {torch.bfloat16}


def test_a_precision_that_converts_the_module_gives_it_back():
    module, device = Module(ledger(4)), ledger(4)
    weights = copy.deepcopy(module.state_dict())
    find_max_batch(quiet_trainer(precision="64-true"), SixtyFour.of(module), Data64(), device=device, **QUIET)
    assert module.layer[0].weight.dtype is torch.float32
    assert all(torch.equal(weights[name], value) for name, value in module.state_dict().items())


class SixtyFour(Module):
    @classmethod
    def of(cls, module):
        module.__class__ = cls
        return module

    def training_step(self, batch, batch_idx):
        assert batch[0].dtype is torch.float64
        assert self.layer[0].weight.dtype is torch.float64
        return super().training_step(batch, batch_idx)


class Data64(Data):
    pass


def test_manual_optimization():
    device = ledger(13)
    module = Module(device, manual=True)
    result = find_max_batch(quiet_trainer(), module, Data(), device=device, **QUIET)
    assert result.batch_size == 13
    assert not any("no optimizer" in note for note in result.notes)


def test_manual_optimization_with_its_own_accumulation_is_run_until_it_steps():
    class Every5(Module):
        def training_step(self, batch, batch_idx):
            self.ledger.take(len(batch[0]) * MIB)
            self.manual_backward(self.layer(batch[0]).mean())
            if (batch_idx + 1) % 5 == 0:
                self.optimizers().step()
                self.optimizers().zero_grad()
                stepped.append(batch_idx)

    stepped, device = [], ledger(6)
    result = find_max_batch(quiet_trainer(), Every5(device, manual=True), Data(20), device=device, **QUIET)
    assert result.batch_size == 6
    assert set(stepped) == {4, 9}


def test_two_optimizers():
    class Two(Module):
        def training_step(self, batch, batch_idx):
            self.ledger.take(len(batch[0]) * MIB)
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(self.layer(batch[0]).mean())
                optimizer.step()

        def configure_optimizers(self):
            return [torch.optim.SGD(self.layer[i].parameters(), lr=0.1) for i in (0, 2)]

    device = ledger(6)
    assert find_max_batch(quiet_trainer(), Two(device, manual=True), Data(), device=device, **QUIET).batch_size == 6


def test_schedulers_see_the_length_of_the_real_training():
    class Scheduled(Module):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            seen.append((self.trainer.max_epochs, self.trainer.estimated_stepping_batches))
            one_cycle = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, max_lr=0.1, total_steps=self.trainer.estimated_stepping_batches
            )
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": one_cycle, "interval": "step"}}

    seen, device = [], ledger(8)
    find_max_batch(
        quiet_trainer(max_epochs=3), Scheduled(device), Data(64), device=device, min_batch=8, max_batch=8, **QUIET
    )
    assert set(seen[1:-1]) == {(3, 24)}


# --- validation ---


def test_validation_limits_where_it_needs_more():
    device = ledger(100)
    result = find_max_batch(quiet_trainer(), Module(device, eval_mib=4), Data(), device=device, **QUIET)
    assert (result.batch_size, result.limiting_step) == (25, "eval")
    assert not any("evaluation between epochs" in item for item in result.not_covered)


@pytest.mark.parametrize("how", ["limit", "no loader", "no step"])
def test_without_validation_it_is_no_part_of_the_trials(how):
    device = ledger(20)
    module = Module(device, eval_mib=4)
    if how == "no step":
        module.validation_step = None
        type_of = type("NoStep", (Module,), {"validation_step": pl.LightningModule.validation_step})
        module = type_of(device)
    trainer = quiet_trainer(limit_val_batches=0 if how == "limit" else 1.0)
    data_kind = type("NoVal", (Data,), {"val_dataloader": pl.LightningDataModule.val_dataloader})
    datamodule = data_kind() if how == "no loader" else Data()
    result = find_max_batch(trainer, module, datamodule, device=device, **QUIET)
    assert result.batch_size == 20
    assert module.told.validated == []
    assert result.limiting_step is None


def test_validation_runs_beside_the_optimizer_state():
    class Watching(Module):
        def validation_step(self, batch, batch_idx):
            resident.append(len(self.trainer.optimizers[0].state) > 0)

    resident, device = [], ledger(4)
    find_max_batch(quiet_trainer(), Watching(device), Data(), device=device, **QUIET)
    assert set(resident) == {True}


def test_a_validation_loader_with_a_size_of_its_own_keeps_it():
    device = ledger(30)
    module = Module(device, eval_mib=1)
    result = find_max_batch(quiet_trainer(), module, Data(val_batch_size=16), device=device, **QUIET)
    assert result.batch_size == 30
    assert set(module.told.validated) == {2, 16}  # two examples, where training is the trial
    assert "a validation loader keeps its own batch size of 16" in result.notes


def test_validation_loaders_may_be_handed_in_alone():
    device = ledger(30)
    module = OwnLoaders(device, examples=100, eval_mib=3)
    validation = DataLoader(data(50), batch_size=8)
    result = find_max_batch(quiet_trainer(), module, val_dataloaders=validation, device=device, **QUIET)
    assert (result.batch_size, module.batch_size, set(module.told.validated)) == (30, 30, {2, 8})


def test_validation_that_gives_no_batch_is_no_silent_pass():
    class Empty(Data):
        def val_dataloader(self):
            return []

    with pytest.raises(oomprobe.UnreliableError, match="ran no validation batch"):
        find_max_batch(quiet_trainer(), Module(), Empty(), device=ledger(30), **QUIET)


# --- the worst case first ---


def test_the_longest_examples_make_the_batch():
    class Padded(Module):
        def training_step(self, batch, batch_idx):
            shapes.append(tuple(batch.shape))
            self.ledger.take(batch.numel() * MIB)
            return self.layer(batch[:, :1].expand(-1, WIDTH)).mean()

    shapes, device = [], ledger(100)
    sentences = Sentences([3] * 50 + [20, 10] + [1] * 48)
    loader = DataLoader(sentences, batch_size=2, collate_fn=padded, shuffle=True)
    result = find_max_batch(quiet_trainer(), Padded(device), train_dataloaders=loader, device=device, **QUIET)
    assert result.batch_size == 5
    assert {length for _, length in shapes} == {20}
    assert "training batches were made of the largest examples" in result.notes
    assert not any("longest sequence" in item for item in result.not_covered)


def test_what_was_not_looked_at_in_time_is_said():
    loader = DataLoader(Sentences(list(range(1, 41))), batch_size=2, collate_fn=padded)

    class Padded(Module):
        def training_step(self, batch, batch_idx):
            return self.layer(batch[:, :1].expand(-1, WIDTH)).mean()

    result = find_max_batch(
        quiet_trainer(), Padded(), train_dataloaders=loader, device=ledger(9), max_batch=4, scan_s=0, **QUIET
    )
    assert any("1 of 40 training examples were looked at in 0 s" in note for note in result.notes)
    assert any("longest sequence" in item for item in result.not_covered)


def test_a_stream_is_read_as_it_comes_and_begins_again():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(data(5).tensors[0].split(1))

    class Streamed(Module):
        def training_step(self, batch, batch_idx):
            return super().training_step([batch], batch_idx)

    device = ledger(17)
    loader = DataLoader(Stream(), batch_size=2)
    result = find_max_batch(quiet_trainer(), Streamed(device), train_dataloaders=loader, device=device, **QUIET)
    assert result.batch_size == 17
    assert any("a stream in its own order" in note for note in result.notes)
    assert any("the number of examples is not known" in note for note in result.notes)


def test_batches_that_are_made_elsewhere_are_checked():
    class Elsewhere:
        def __init__(self, size, last):
            self.size, self.last = size, last

        def __iter__(self):
            return iter([torch.zeros(min(self.size, self.last), WIDTH)] * 8)

    class Opaque(Module):
        def train_dataloader(self):
            return Elsewhere(self.batch_size, last)

    device, last = ledger(9), 100
    assert find_max_batch(quiet_trainer(), Opaque(device), device=device, **QUIET).batch_size == 9
    last = 6
    with pytest.raises(oomprobe.UnreliableError, match=r"a batch of 8 was asked for, and the Elsewhere gave .* \[6\]"):
        find_max_batch(quiet_trainer(), Opaque(device), device=device, **QUIET)


# --- real memory ---


HOLES = (
    0.5  # a heap that other tests have used is charged up to a quarter of the cap for its holes, and may lack an arena
)


def test_on_real_memory_it_answers_what_a_bare_loop_does():
    class Heavy(Module):
        def training_step(self, batch, batch_idx):
            activations = torch.empty(len(batch[0]), 4 * MIB)  # 16 MiB each, of the address space
            activations[:, 0] = 1
            return self.layer(batch[0]).mean() + activations[:, 0].mean()

    module = Heavy()
    result = find_max_batch(
        quiet_trainer(limit_val_batches=0), module, Data(40), device="cpu:384MiB", memory_fraction=0.9, progress="off"
    )
    expected = int(0.9 * 384) // 16
    assert HOLES * expected <= result.batch_size <= expected
    assert result.limited_by == "memory"
    assert result.first_failing_batch_size > result.batch_size


def test_a_bare_loop_with_the_same_memory_gets_the_same_answer():
    """The number that Lightning's own loop can have, and the number of a loop written by hand."""

    class Heavy(Module):
        def training_step(self, batch, batch_idx):
            return self.layer(batch[0]).mean() + drawn(len(batch[0]))

    def drawn(size):
        activations = torch.empty(size, 4 * MIB)
        activations[:, 0] = 1
        return activations[:, 0].mean()

    def step(model, size):
        optimizer.zero_grad()
        (model(torch.zeros(size, WIDTH)).mean() + drawn(size)).backward()
        optimizer.step()

    model = torch.nn.Linear(WIDTH, 1)
    optimizer = torch.optim.Adam(model.parameters())
    options = {"device": "cpu:384MiB", "progress": "off"}
    bare = oomprobe.find_max_batch(model, step, max_batch=40, **options).batch_size
    ours = find_max_batch(quiet_trainer(limit_val_batches=0), Heavy(), Data(40), **options).batch_size
    assert HOLES <= ours / bare <= 1 / HOLES


def test_on_a_card_that_is_not_there():
    module = Module()
    result = find_max_batch(quiet_trainer(), module, Data(64), device="sim:64MiB", multiple_of=16, progress="off")
    assert result.batch_size == 64
    assert result.device == "simulated GPU, 64.0 MiB"
    wide = torch.nn.Sequential(torch.nn.Linear(WIDTH, 4096), torch.nn.Linear(4096, 4096), torch.nn.Linear(4096, 1))
    module.layer = wide
    with pytest.raises(oomprobe.NothingFitsError):
        find_max_batch(quiet_trainer(), module, Data(64), device="sim:64MiB", multiple_of=16, progress="off")


def test_an_unused_field_hides_no_longer_sentence():
    """At one example a batch, each field's largest leads a batch of its own."""
    seen = []

    class Sentences(Data):
        def setup(self, stage):
            unused = [500 if place == 3 else 1 for place in range(16)]
            lengths = [200 if place == 7 else 5 for place in range(16)]
            self.train_set = [(torch.zeros(n), torch.zeros(m)) for n, m in zip(lengths, unused, strict=True)]

    class Reads(Module):
        def training_step(self, batch, batch_idx):
            seen.append(batch[0].shape[1])
            return self.layer(torch.zeros(1, WIDTH)).mean() * batch[0].mean()

    options = {"device": LedgerDevice(), "max_batch": 1, "progress": "off"}
    result = find_max_batch(quiet_trainer(limit_val_batches=0), Reads(), Sentences(), **options)
    assert max(seen) == 200
    assert not any("longest" in item for item in result.not_covered)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own, of its tracing
def test_a_compiled_module():
    module = OwnLoaders(examples=8)
    compiled = torch.compile(module, backend="eager")
    result = find_max_batch(
        quiet_trainer(limit_val_batches=0), compiled, device="cpu:256MiB", max_batch=2, progress="off"
    )
    assert (result.batch_size, module.batch_size) == (2, 2)


def test_layers_that_setup_makes_are_part_of_the_trials():
    class Made(Module):
        def setup(self, stage):
            made.append(stage)
            self.extra = torch.nn.Linear(WIDTH, WIDTH)

        def training_step(self, batch, batch_idx):
            trained.append(id(self.extra))
            return super().training_step([self.extra(batch[0])], batch_idx)

    made, trained, device = [], [], ledger(9)
    module = Made(device)
    assert find_max_batch(quiet_trainer(), module, Data(), device=device, **QUIET).batch_size == 9
    assert len(made) == 1
    assert len(set(trained)) == 1
    assert not hasattr(module, "extra")


def test_metrics_of_validation_are_there_for_hooks_and_schedulers():
    class Plateau(Module):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val"}}

        def on_train_epoch_end(self):
            seen.append(self.trainer.callback_metrics["val"])

    seen, device = [], ledger(40)
    module = Plateau(device, eval_mib=4)
    result = find_max_batch(quiet_trainer(), module, Data(), device=device, **QUIET)
    assert (result.batch_size, result.limiting_step) == (10, "eval")
    assert seen


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # time is up in a weak reference's callback
def test_the_time_limit_ends_a_trial():
    class Slow(Module):
        def training_step(self, batch, batch_idx):
            time.sleep(0.05)
            return super().training_step(batch, batch_idx)

    device = ledger(10**6)
    with pytest.raises(oomprobe.TimeLimitError):
        find_max_batch(quiet_trainer(), Slow(device), Data(10**5), device=device, time_limit_s=1, scan_s=0, **QUIET)
