"""A driver for each framework: makes something tiny to train, probes it, trains it, and shows what a probe may not change.

The drivers have the same members, so that `test_contract.py` can hold all adapters to the same promises.
"""

import copy
import random
import signal
from typing import ClassVar

import accelerate
import lightning.pytorch as pl
import numpy as np
import torch
import torchmetrics
import transformers
from ledger import HERE, Log
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset
from ultralytics.nn.tasks import DetectionModel
from ultralytics.utils import DEFAULT_CFG_DICT

import oomprobe
from oomprobe.integrations import lightning as of_lightning
from oomprobe.integrations import transformers as of_transformers
from oomprobe.integrations import ultralytics as of_ultralytics
from oomprobe.integrations.accelerate import find_executable_batch_size

QUICK = {"device": HERE, "progress": "off", "memory_fraction": 1.0, "steps": 1, "confirm_steps": 1}
WIDTH = 8


class Watch:
    """Notes the sizes that train and validate, and ends a step of more than `room` examples.

    It belongs to this package, not to the user, so a probe does not put it back.
    """

    __module__ = "oomprobe.tests"

    def __init__(self, room=10**9, ending="out of memory"):
        self.room, self.ending, self.trained, self.validated = room, ending, [], []
        self.also = lambda: None  # what a step does besides

    def train(self, size):
        self.trained.append(size)
        self.also()
        self.take(size)

    def validate(self, size, cost=0):
        self.validated.append(size)
        self.take(size * cost)

    def take(self, size):
        if size <= self.room:
            return
        if self.ending == "bug":
            raise KeyError("labels")
        if self.ending in ("SIGINT", "SIGTERM"):
            signal.raise_signal(getattr(signal, self.ending))
        HERE.take(2**50)


def weights(model):
    return [value.tolist() for value in model.state_dict().values()]


class Driver:
    """What most drivers have in common: a loop of two optimizer steps, whose probe trains nothing that stays."""

    BUG, NAMED = oomprobe.StepFailedError, "batch 2 ran: pass max_batch=2"
    STEPS_PER_CALL = 2

    def without_a_probe(self, size):
        """Do what a probe that found `size` does besides."""


# --- transformers ---


class Sentences(Dataset):
    """Draws random numbers for each example, as image data sets do."""

    def __init__(self, count=40, longest=24):
        lengths = torch.randint(
            4, longest, (count,), generator=torch.Generator().manual_seed(3)
        ).tolist()
        lengths[count // 2] = longest
        self.lengths, self.generator = lengths, torch.Generator().manual_seed(7)

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        drawn = (
            torch.rand(self.lengths[index], generator=self.generator)
            + torch.rand(1)
            + random.random()
        )
        return {"input_ids": (30 * drawn).long()}


class Collator:
    generator = None

    def __call__(self, examples):
        self.generator = self.generator or torch.Generator().manual_seed(8)
        ids = pad_sequence([one["input_ids"] for one in examples], batch_first=True)
        ids[torch.rand(ids.shape, generator=self.generator) < 0.1] = 3
        return {"input_ids": ids, "labels": ids}


class WatchedTrainer(transformers.Trainer):
    """Draws from generators of its own and of its model."""

    def __init__(self, *, watch=None, **rest):
        super().__init__(**rest)
        self.watch, self.generator = watch or Watch(), torch.Generator().manual_seed(8)

    def training_step(self, model, inputs, *rest):
        self.watch.train(len(inputs["input_ids"]))
        drawn = torch.rand(1, generator=self.generator) + torch.rand(
            1, generator=self.model.generator
        )
        inputs["labels"] = inputs["labels"].where(drawn < 1, -100)
        return super().training_step(model, inputs, *rest)


def language_model():
    torch.manual_seed(0)
    sizes = {"vocab_size": 100, "n_positions": 256, "n_embd": 8, "n_layer": 1, "n_head": 2}
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2)
    )
    model.generator = torch.Generator().manual_seed(7)
    return model


def trainer(folder, kind=WatchedTrainer, given=None, **args):
    """Return a Trainer; `given` are its own arguments, `args` its TrainingArguments."""
    transformers.logging.set_verbosity_error()
    defaults = {
        "per_device_train_batch_size": 4,
        "max_steps": 9,
        "logging_steps": 1,
        "save_strategy": "no",
    }
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True}
    settings = transformers.TrainingArguments(
        output_dir=folder / "out", **{**defaults, **quiet, **args}
    )
    rest = {
        "model": language_model(),
        "data_collator": Collator(),
        "train_dataset": Sentences(),
    } | (given or {})
    if "model_init" in rest:
        del rest["model"]
    made = kind(args=settings, **rest)
    made.remove_callback(transformers.PrinterCallback)
    return made


def given_an_optimizer():
    model = language_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return {
        "given": {
            "model": model,
            "optimizers": (optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)),
        },
        "max_grad_norm": 0.1,
    }


def given_a_tokenizer():
    import tokenizers

    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<pad>": 0, "a": 1}, unk_token="<pad>")
    )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>")
    # The loop aligns the model's special tokens with it.
    given = {"processing_class": tokenizer, "eval_dataset": {"a": Sentences(6)}}
    return {"given": given, "eval_strategy": "steps", "eval_steps": 4}


class OfTransformers(Driver):
    ALONE = "create the Trainer with per_device_train_batch_size=4 and run trainer.train(). A trial begins with the longest"
    callback, kind = of_transformers.PeakMonitorCallback, transformers.TrainerCallback

    def __init__(self, folder, watch, examples=40, **args):
        given = {"train_dataset": Sentences(examples), **args.pop("given", {})}
        self.trainer = trainer(folder, given=given, **args)
        self.watch = self.trainer.watch = watch

    def find(self, **options):
        return of_transformers.find_max_batch(self.trainer, **QUICK | options)

    def train(self):
        self.trainer.train()
        return [one.get("loss") for one in self.trainer.state.log_history], weights(
            self.trainer.model
        )

    def state(self):
        made, configs = (
            self.trainer,
            (self.trainer.model.config, self.trainer.model.generation_config),
        )
        in_dataloader = made.accelerator.gradient_state.in_dataloader
        owners = [made, made.args, *configs, *made.model.modules()]
        return [in_dataloader, *(dict(vars(owner)) for owner in owners), weights(made.model)]

    @property
    def size(self):
        return self.trainer.args.per_device_train_batch_size, self.trainer._train_batch_size

    def add(self, callback):
        self.trainer.add_callback(callback)


# --- Lightning ---


def quiet_trainer(**settings):
    silent = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return pl.Trainer(
        **{"accelerator": "cpu", "max_epochs": 1, **dict.fromkeys(silent, False), **settings}
    )


def data(examples):
    return TensorDataset(torch.linspace(-1, 1, examples * WIDTH).reshape(examples, WIDTH))


class Module(pl.LightningModule):
    """Has room for so many examples; one of validation costs `eval_cost` of training."""

    def __init__(self, room=10**9, *, eval_cost=0, batch_size=4, examples=None, manual=False):
        super().__init__()
        self.layer = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1)
        )
        self.watch, self.eval_cost, self.examples, self.losses = (
            Watch(room),
            eval_cost,
            examples,
            Log(),
        )
        self.automatic_optimization = not manual
        if batch_size is not None:
            self.batch_size = batch_size

    def training_step(self, batch, batch_idx):
        self.watch.train(len(batch[0]))
        loss = self.layer(batch[0]).square().mean()
        self.losses.append(loss.item())
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch, batch_idx):
        self.watch.validate(len(batch[0]), self.eval_cost)
        self.log("val", self.layer(batch[0]).mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class OwnLoaders(Module):
    """Has its own train_dataloader()."""

    def train_dataloader(self):
        return DataLoader(data(self.examples), batch_size=self.batch_size, shuffle=True)


class Busy(Module):
    """Changes all sorts of attributes in setup() and training_step()."""

    def __init__(self, watch, **settings):
        super().__init__(**settings)
        self.watch, self.generator = watch, torch.Generator().manual_seed(4)
        self.count, self.by_name, self.other, self.metric = (
            0,
            {"a": [1]},
            object(),
            torchmetrics.MeanMetric(),
        )
        self.save_hyperparameters({"rate": 0.1})

    def setup(self, stage):
        self.other, self.made, self.hparams.rate = object(), torch.nn.Linear(WIDTH, WIDTH), 0.2

    def training_step(self, batch, batch_idx):
        self.count += 1
        self.by_name["a"].append(batch)
        self.metric.update(batch[0].float().mean())
        self.log("metric", self.metric, on_step=False, on_epoch=True)
        noise = torch.rand(batch[0].shape, generator=self.generator).to(batch[0])
        return super().training_step([self.made(batch[0] + noise)], batch_idx)


class Drawing(Dataset):
    """Draws from its own and from all global generators for each example."""

    def __init__(self, count):
        self.count = count
        self.torch, self.numpy = torch.Generator().manual_seed(1), np.random.default_rng(2)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        drawn = (
            torch.rand(WIDTH, generator=self.torch)
            + self.numpy.random()
            + torch.rand(WIDTH)
            + random.random()
        )
        return ((drawn + np.random.rand()).float(),)


class Data(pl.LightningDataModule):
    """Draws from its own generator in setup(), and records its hooks in `heard`."""

    heard: ClassVar[Log] = Log()

    def __init__(self, examples=64, *, batch_size=4, val_batch_size=2):
        super().__init__()
        self.batch_size, self.val_batch_size = batch_size, val_batch_size
        self.split, self.full = torch.Generator().manual_seed(5), Drawing(examples + 6)
        self.train_dataloader = self.train_dataloader  # a method set on the object

    def prepare_data(self):
        self.heard.append("prepare_data")

    def setup(self, stage):
        self.heard.append(f"setup {stage.value}")
        self.mean = sum(self.full[index][0].mean() for index in range(3))
        sizes = [len(self.full) - 6, 6]
        self.train_set, self.val_set = torch.utils.data.random_split(
            self.full, sizes, generator=self.split
        )

    def teardown(self, stage):
        self.heard.append(f"teardown {stage.value}")
        del self.train_set

    def train_dataloader(self):
        return DataLoader(
            self.train_set, batch_size=self.batch_size, shuffle=True, collate_fn=self.noisy
        )

    def noisy(self, examples):
        return [torch.stack([one[0] for one in examples]) + self.mean]

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=self.val_batch_size or self.batch_size)


class OfLightning(Driver):
    ALONE = "run trainer.fit with batch_size = 4. As with fast_dev_run"
    callback, kind = of_lightning.PeakMonitorCallback, pl.Callback

    def __init__(
        self,
        folder,
        watch,
        examples=24,
        passes_loaders=False,
        manual=False,
        drop_last=False,
        **settings,
    ):
        self.watch, self.module, datamodule = watch, Busy(watch, manual=manual), Data(examples)
        self.trainer, self.given = (
            quiet_trainer(**{"max_epochs": 2, **settings}),
            {"datamodule": datamodule},
        )
        if passes_loaders or drop_last:
            datamodule.setup(pl.trainer.states.TrainerFn.FITTING)
            train = DataLoader(
                datamodule.train_set, 4, drop_last=drop_last, collate_fn=datamodule.noisy
            )
            self.given = {
                "train_dataloaders": train,
                "val_dataloaders": datamodule.val_dataloader(),
            }
        self.owners = [self.module, datamodule]

    def find(self, **options):
        return of_lightning.find_max_batch(
            self.trainer, self.module, **self.given, **QUICK | options
        )

    def train(self):
        self.module.losses.clear()
        self.trainer.fit_loop.max_epochs = self.trainer.current_epoch + 2
        self.trainer.fit(self.module, **self.given)
        return list(self.module.losses), weights(self.module)

    def state(self):
        module, made = self.module, self.trainer
        owners = [dict(vars(owner)) for owner in (*self.owners, *module.modules())]
        held = [
            dict(module.hparams),
            copy.copy(module.by_name["a"]),
            module.metric._update_count,
            weights(module),
        ]
        return [
            made.state,
            made.global_step,
            made.current_epoch,
            made.train_dataloader,
            *owners,
            *held,
        ]

    @property
    def size(self):
        return [owner.batch_size for owner in self.owners]

    def add(self, callback):
        self.trainer.callbacks.append(callback)


# --- Ultralytics ---

TINY = {
    "nc": 5,
    "backbone": [[-1, 1, "Conv", [8, 3, 2]]] * 5,  # strides 2 to 32
    "head": [[[2, 3, 4], 1, "Detect", ["nc"]]],
}


def tiny_detector():
    torch.manual_seed(0)
    model = DetectionModel(copy.deepcopy(TINY), verbose=False)
    model.args = dict(DEFAULT_CFG_DICT)
    return model


def state_of(model):
    """Return everything that a probe could change, tensors as bytes."""
    return {
        "tensors": {name: value.numpy().tobytes() for name, value in model.state_dict().items()},
        "parameters": [(id(p), p.grad, p.requires_grad) for p in model.parameters()],
        "modules": [
            (m.training, set(vars(m)), len(m._forward_hooks) + len(m._forward_pre_hooks))
            for m in model.modules()
        ],
        "args": (id(model.args), copy.deepcopy(model.args)),
        "criterion": id(getattr(model, "criterion", None)),
        "rng": torch.get_rng_state().tolist(),
    }


def partly_frozen(model):
    model.model[3].eval()
    next(model.parameters()).requires_grad_(False)


class OfUltralytics(Driver):
    ALONE = "train with YOLO(...).train(batch=4, imgsz=64). A trial creates its own images"
    STEPS_PER_CALL = 1

    def __init__(self, folder, watch, examples=0, prepare=lambda model: None):
        self.watch, self.examples, self.model = watch, examples, tiny_detector()
        prepare(self.model)
        self.model.register_forward_pre_hook(
            lambda _, args: watch.train(len(args[0]["img"])) if args else None
        )

    def find(self, **options):
        options.pop("write_back", None)
        return of_ultralytics.find_max_batch(
            self.model, imgsz=64, dataset_size=self.examples, **QUICK | options
        )

    def train(self):
        """Training begins with what `state` shows; with a trainer, see test_ultralytics.py."""
        return {name: value for name, value in self.state().items() if name in ("tensors", "rng")}

    def state(self):
        return state_of(self.model)


# --- accelerate ---


class OfAccelerate(Driver):
    """Everything is made outside the function, but the probe calls it once more at the answer."""

    ALONE = "call train.__wrapped__(4, ...), the function without the decorator"
    BUG = KeyError  # its own, as with accelerate
    NAMED = "batch 2 ran: pass starting_batch_size=2 if"

    def __init__(self, folder, watch, scale=None, **settings):
        self.watch = watch
        self.accelerator = accelerate.Accelerator(
            cpu=True, gradient_accumulation_steps=2, **settings
        )
        layers = (
            torch.nn.Linear(4, 8),
            torch.nn.BatchNorm1d(8),
            torch.nn.Dropout(0.5),
            torch.nn.Linear(8, 1),
        )
        self.model, self.losses = torch.nn.Sequential(*layers), Log()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=scale or 1.0, growth_interval=3, enabled=scale is not None
        )

    def micro_batch(self, model, batch_size):
        with self.accelerator.accumulate(model):
            self.accelerator._models.append(model)
            loss = model(torch.randn(batch_size + 1, 4)).float().square().mean()
            self.scaler.scale(loss).backward()
            self.watch.train(batch_size)
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            self.scaler.step(self.optimizer)  # trials end in this call
            self.scaler.update()
            self.scheduler.step()
            self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def function(self, batch_size):
        self.losses.clear()
        for _ in range(9):
            self.micro_batch(self.model, batch_size)

    def find(self, *, write_back=True, max_batch=8, **options):
        def train(batch_size):
            self.function(batch_size)

        decorated = find_executable_batch_size(
            train, starting_batch_size=max_batch, **QUICK | options
        )
        decorated()
        return decorated.result

    def without_a_probe(self, size):
        self.function(size)

    def train(self):
        self.function(3)
        return (
            list(self.losses),
            weights(self.model),
            self.scaler.state_dict(),
            self.scheduler.get_last_lr(),
        )

    def state(self):
        made = self.accelerator
        return [
            made.step,
            list(made._models),
            made.sync_gradients,
            weights(self.model),
            self.scaler.state_dict(),
        ]


DRIVERS = [OfTransformers, OfLightning, OfUltralytics, OfAccelerate]
