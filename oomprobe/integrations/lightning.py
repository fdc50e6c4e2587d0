"""`find_max_batch` for Lightning: a Trainer, a LightningModule and its data, as they are before ``trainer.fit``.

Each trial is Lightning's own fit, by a private Trainer with logging, checkpoints and callbacks disabled.
"""

from __future__ import annotations

import importlib
import signal
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import BatchSampler, DataLoader

import oomprobe
from oomprobe.devices import Device, choose_device, replay_of
from oomprobe.devices.choose import model_device
from oomprobe.errors import Caller, DeviceLostError, InvalidArgumentError, NotRunError
from oomprobe.integrations.framework import (
    LOOP_STEPS,
    attributes_kept,
    count_calls,
    framework,
    limit_to_data,
    notes_of_data,
    quiet_loggers,
    refuse_several,
    uncalled,
    untimed,
)
from oomprobe.integrations.worst_case import LargestFirst, largest_first
from oomprobe.options import Step, check_seconds
from oomprobe.result import ProbeResult
from oomprobe.state import Snapshot

TRAIN, EVAL = "train_dataloader", "val_dataloader"  # methods; the arguments of Trainer.fit have an s more
KIND = {TRAIN: "training data", EVAL: "validation data"}
MICRO_BATCHES = 2  # the second meets the gradients of the first; further ones are like it
EVAL_BATCHES = 2
MANUAL_BATCHES = 64  # within which a module with manual optimization must have stepped
HARMLESS = ("ProgressBar", "ModelSummary", "Checkpoint", "LearningRateMonitor", "DeviceStatsMonitor")  # callbacks
Hook = Callable[..., Any]
PACKAGES = ("lightning", "pytorch_lightning", "lightning_fabric")


def find_max_batch(
    trainer: Any,
    module: Any,
    datamodule: Any = None,
    *,
    train_dataloaders: Any = None,
    val_dataloaders: Any = None,
    batch_size_name: str = "batch_size",
    write_back: bool = True,
    scan_s: float = 30.0,
    **options: Any,
) -> ProbeResult:
    """Find the largest batch size that this training fits with, by running it; call it before ``trainer.fit``.

    Each call of the step is one `Trainer.fit` for two optimizer steps on batches of the largest examples, with the Trainer's
    accelerator, precision plugin, gradient clipping and accumulation. If the module validates, two validation batches
    follow. ``prepare_data``, ``setup`` and ``teardown`` run once.

    As with ``fast_dev_run``, callbacks are not called, and the module finds Lightning's `DummyLogger` in place of its
    loggers. What it writes into ``log_dir`` is deleted when the probe ends.

    The module, the data module and random number generators, also those of data sets and collate functions, are restored:
    training gives the losses of training without a probe. Objects without ``state_dict`` that the module changes in place
    are not restored.

    Args:
        trainer: The ``Trainer`` that will train, on one device. Its settings are read; it never runs.
        module: A ``LightningModule``, maybe compiled.
        datamodule: A ``LightningDataModule``; None: the loaders are the module's own, or passed below.
        train_dataloaders: A DataLoader, or dicts and lists of some. Each is made again at each size.
        val_dataloaders: The same for validation; they keep their batch size.
        batch_size_name: Attribute of the module, the data module or the hyperparameters of either, that
            ``train_dataloader()`` reads.
        write_back: Set that attribute to the answer, wherever Lightning's own finder would.
        scan_s: Seconds to look for the largest examples of each data set; at least 0.
        options: Those of `oomprobe.find_max_batch`. `device` defaults to the Trainer's.

    Returns:
        The answer; one step of its trials is two optimizer steps.

    Raises:
        FrameworkError: Lightning is not installed or too old.
        InvalidArgumentError: the Trainer, the loaders or an option cannot be probed; nothing was trained.
        UnreliableError: the loaders did not give batches of the size asked for, or a fit did not train.
        OomProbeError: as for `oomprobe.find_max_batch`.
    """
    check_seconds("scan_s", scan_s)
    # The two packages have the same classes under different names.
    roots = {kind.__module__.partition(".")[0] for kind in type(trainer).__mro__}
    package = "pytorch_lightning" if "pytorch_lightning" in roots else "lightning.pytorch"
    pl = framework(package, minimum="2.5", extra="lightning")
    if not isinstance(trainer, pl.Trainer):
        raise InvalidArgumentError(f"trainer must be a {package}.Trainer, not {type(trainer).__name__}")
    own = getattr(module, "_orig_mod", module)  # where torch.compile keeps the module
    if not isinstance(own, pl.LightningModule):
        raise InvalidArgumentError(f"module must be a LightningModule of {package}, not {type(own).__name__}")
    if datamodule is not None and not isinstance(datamodule, pl.LightningDataModule):
        raise InvalidArgumentError(
            f"datamodule must be a LightningDataModule of {package}, not {datamodule!r:.60}: pass loaders as "
            "train_dataloaders=..., val_dataloaders=..."
        )
    strategy = f"Trainer(strategy={type(trainer.strategy).__name__})"
    refuse_several(strategy, trainer.world_size)
    if not isinstance(trainer.strategy, pl.strategies.SingleDeviceStrategy):
        raise InvalidArgumentError(f"{strategy} adds buffers that trials would lack: probe with strategy='auto'")
    owners = [own] if datamodule is None else [datamodule, own]  # in the order in which Lightning calls their hooks
    makers = _makers(pl, trainer, own, owners[0], {TRAIN: train_dataloaders, EVAL: val_dataloaders})
    is_handed_in = train_dataloaders is not None
    device = _device_of(trainer, options.pop("device", None))
    accumulates = options.get("global_batch") is not None or trainer.accumulate_grad_batches > 1
    micro = MICRO_BATCHES if accumulates and own.automatic_optimization else 1
    with (
        _quiet(),
        attributes_kept([*own.modules(), *owners]),
        _undone(own, owners, options.get("preserve", ()), device.torch_device.type),
        tempfile.TemporaryDirectory(prefix="oomprobe-", ignore_cleanup_errors=True) as folder,
    ):
        arguments = _trial_arguments(pl, trainer, micro, folder, validates=EVAL in makers)
        training = Training(
            pl=pl, module=module, owners=owners, makers=makers, arguments=arguments, micro=micro, name=batch_size_name,
            places=[] if is_handed_in else _places_of(batch_size_name, owners),
        )  # fmt: skip
        with _set_up(training):
            result = _probe(training, device, options, scan_s)
    if write_back:
        training.set_size(result.batch_size)
    notes = [f"nothing was set: make your DataLoader with batch_size={result.batch_size}"] * is_handed_in
    missed = []
    if names := uncalled(trainer.callbacks, tuple(getattr(pl.callbacks, name) for name in HARMLESS)):
        missed = [f"callbacks, which trials do not call: {names} (weight averaging keeps a copy)"]
    return replace(untimed(result), notes=(*result.notes, *notes), not_covered=(*result.not_covered, *missed))


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What the user passes to ``Trainer.fit``, and the settings of a trial's Trainer."""

    pl: Any  # lightning.pytorch or pytorch_lightning
    module: Any  # as it was passed, maybe compiled
    owners: Sequence[Any]  # of hooks: the data module, where there is one, and the LightningModule
    makers: Mapping[str, Hook]  # return the user's loaders, by TRAIN and EVAL
    arguments: Mapping[str, Any]
    micro: int  # batches for one optimizer step
    name: str  # of the batch size attribute
    places: Sequence[Any]  # objects that have it; none where loaders were handed in

    def set_size(self, batch_size: int) -> None:
        """Set the attribute that the user's ``train_dataloader()`` reads."""
        for place in self.places:
            setattr(place, self.name, batch_size)


@contextmanager
def _set_up(training: Training) -> Iterator[None]:
    """Call the hooks that Lightning calls once for a training, and have trials not call them again."""
    trainer, stage = training.pl.Trainer(**training.arguments), training.pl.trainer.states.TrainerFn.FITTING
    for owner in training.owners:
        owner.trainer = trainer
    for owner in training.owners:
        owner.prepare_data()
    for owner in training.owners:
        owner.setup(stage=stage)
    teardowns = [owner.teardown for owner in training.owners]
    for owner in training.owners:  # the caller's `attributes_kept` puts this back
        vars(owner).update(prepare_data=_nothing, setup=_nothing, teardown=_nothing)
    vars(training.owners[-1]).update(configure_callbacks=list)
    try:
        yield
    finally:
        for owner, teardown in zip(training.owners, teardowns, strict=True):
            owner.trainer = trainer
            teardown(stage=stage)


def _nothing(*_: object, **__: object) -> None:
    """Do nothing, in the place of a hook."""


def _probe(training: Training, device: Device, options: dict[str, Any], scan_s: float) -> ProbeResult:
    """Look at the data, and search."""
    count_calls(options)
    training.set_size(1)
    loaders = {name: _loaders_at(training, name, 1)[0] for name in training.makers}
    with attributes_kept([loader for found in loaders.values() for loader in found]):
        orders = {name: [_order_of(one, scan_s) for one in found] for name, found in loaders.items()}
        count = min(len(order.indices) for order in orders[TRAIN])
        limit_to_data(options, count)

        def run(model: object, batch_size: int) -> None:
            _run_trial(training, orders, batch_size)

        size_is = f"{training.name} = " if training.places else "loaders of batch_size="
        caller = Caller(
            alone=f"run trainer.fit with {size_is}{{batch_size}}",
            more="As with fast_dev_run, the loggers of a trial are Lightning's DummyLogger, and no callback is called.",
        )
        result = oomprobe.find_max_batch(training.module, Step(run=run, caller=caller), device=device, **options)
    micro = f" of {training.micro} accumulated batches each" if training.micro > 1 else ""
    more = f", and {EVAL_BATCHES} validation batches" if EVAL in training.makers else ""
    notes = [f"one step of a trial is Trainer.fit for {LOOP_STEPS} optimizer steps{micro}{more}"]
    of_each = [(order, name) for name, found in orders.items() for order in found]
    notes += [note for order, name in of_each for note in order.notes(scan_s, KIND[name])]
    are_largest = all(order.leads(result.batch_size) for order, _ in of_each)
    covered = ("longest sequence",) * are_largest + ("evaluation between epochs",) * (EVAL in training.makers)
    not_covered = [item for item in result.not_covered if not item.startswith(covered)]
    notes += notes_of_data(result, count)
    return replace(result, notes=(*result.notes, *notes), not_covered=tuple(not_covered))


def _run_trial(training: Training, orders: Mapping[str, list[LargestFirst]], batch_size: int) -> None:
    """Fit for two optimizer steps of that batch size, then validate where the module does."""
    batches = 0
    wanted = LOOP_STEPS * training.micro
    # With manual optimization, only the module knows how many batches make a step.
    most = wanted if training.owners[-1].automatic_optimization else max(wanted, MANUAL_BATCHES)

    def trained(trainer: Any, *_: object) -> None:
        nonlocal batches
        batches += 1
        if batches >= wanted and (trainer.global_step >= LOOP_STEPS or batches >= most):
            trainer.should_stop = True

    def make(name: str) -> Any:
        found, shape = _loaders_at(training, name, batch_size)
        pairs = zip(found, orders[name], strict=True)
        if name == TRAIN:
            made = [_trial_loader(loader, order, batch_size, most) for loader, order in pairs]
        else:
            made = [_trial_loader(loader, order, _size_of(loader), EVAL_BATCHES) for loader, order in pairs]
        return tree_unflatten(made, shape)

    _fit(training, batch_size, make, trained)
    if batches < wanted:
        raise NotRunError(
            f"at batch {batch_size} Lightning ran {batches} training batches of the {wanted} that make a trial: look whether "
            "the module stops the Trainer, raises StopIteration, or skips batches in on_train_batch_start"
        )


def _fit(training: Training, batch_size: int, make: Callable[[str], Any], after_batch: Hook) -> None:
    """Run ``Trainer.fit`` of a private Trainer on the loaders that ``make(name)`` returns."""
    training.set_size(batch_size)
    # Lightning looks for the code of a hook to tell it from its own: only a function has some.
    vars(training.owners[0]).update({name: lambda name=name: make(name) for name in training.makers})
    on_ctrl_c = signal.getsignal(signal.SIGINT)
    trainer = training.pl.Trainer(**training.arguments)
    trainer.callbacks = [training.pl.callbacks.LambdaCallback(on_train_batch_end=after_batch)]
    trainer.save_checkpoint = _nothing
    try:
        trainer.fit(training.module, datamodule=training.owners[0] if len(training.owners) > 1 else None)
    except SystemExit as ended:
        # Lightning answers Ctrl-C by leaving the process; here the caller handles it.
        if isinstance(ended.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        raise
    finally:
        # Lightning ignores Ctrl-C from the first one on, and may not get to undo that.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, on_ctrl_c)
        # A Trainer is part of reference cycles: it would hold its optimizers until garbage is collected.
        trainer.strategy.optimizers, trainer.strategy.lr_scheduler_configs, trainer.callbacks = [], [], []
        for owner in training.owners:
            owner.trainer = None


def _trial_arguments(pl: Any, trainer: Any, micro: int, folder: str, *, validates: bool) -> dict[str, Any]:
    """Arguments of a Trainer that takes the same steps as the user's and writes into `folder` only.

    The lengths (epochs, steps) are the user's own, since schedulers are made for them; a trial stops itself.
    """
    index = trainer.strategy.root_device.index
    fabric = "lightning_fabric" if pl.__name__ == "pytorch_lightning" else "lightning.fabric"
    environments = importlib.import_module(f"{fabric}.plugins.environments")
    dummy = importlib.import_module(f"{pl.__name__}.loggers.logger").DummyLogger
    logger = type("SilentLogger", (dummy,), {"save_dir": folder, "root_dir": folder, "log_dir": folder})
    return {
        "accelerator": trainer.accelerator,
        "devices": 1 if index is None else [index],
        # Lightning would look for a cluster otherwise, and take over the signals of a job that may be requeued.
        "plugins": [trainer.precision_plugin, environments.LightningEnvironment()],
        "max_epochs": trainer.max_epochs if trainer.max_epochs == -1 else max(1, trainer.max_epochs or 1),
        "max_steps": trainer.max_steps if trainer.max_steps == -1 else max(LOOP_STEPS, trainer.max_steps),
        "accumulate_grad_batches": micro,
        "gradient_clip_val": trainer.gradient_clip_val,
        "gradient_clip_algorithm": trainer.gradient_clip_algorithm,
        "detect_anomaly": trainer._detect_anomaly,  # has no public name; it keeps a traceback for each operator
        "inference_mode": trainer.validate_loop.inference_mode,
        "logger": [logger() for _ in trainer.loggers] or False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": EVAL_BATCHES if validates else 0,
        "default_root_dir": folder,
    }


def _loaders_at(training: Training, name: str, batch_size: int) -> tuple[list[Any], Any]:
    """The loaders that the user makes at that size, checked, and the shape of their collection."""
    found, shape = tree_flatten(training.makers[name]())
    for loader in found:
        size = _size_of(loader)
        if size is None:
            raise InvalidArgumentError(
                f"the {type(loader).__name__} of the {KIND[name]} cannot be made again with the largest examples: it has a "
                f"batch_sampler or an __iter__ of its own. Pass {name}s=DataLoader(dataset, batch_size=...)"
            )
        if name == TRAIN and training.places and size != batch_size:
            raise NotRunError(
                f"train_dataloader() made batches of {size} where {training.name}={batch_size} was set: write "
                f"DataLoader(..., batch_size=self.{training.name}), or pass batch_size_name=, the name of the attribute "
                "that it reads"
            )
    return found, shape


def _size_of(loader: Any) -> Any:
    """The batch size of a loader that can be made again at any other; None for one that cannot."""
    if getattr(type(loader), "__iter__", None) is not DataLoader.__iter__:
        return None
    return loader.batch_sampler.batch_size if type(loader.batch_sampler) is BatchSampler else None


def _order_of(loader: Any, scan_s: float) -> LargestFirst:
    """The loader's examples, largest first."""
    subset = getattr(loader.sampler, "indices", None)
    return largest_first(loader.dataset, scan_s, None if subset is None else [int(index) for index in subset])


def _trial_loader(loader: Any, order: LargestFirst, size: int, least: int) -> Any:
    """A loader of at least so many batches of that size with the largest examples first.

    It has no workers: starting them takes longer than a trial, and their memory is not the step's.
    """
    size = min(size, len(order.indices))
    largest = [index for number in range(least) for index in order.batch(size, number)]
    # The rest gives the loader its real length: schedulers and loops ask.
    sampler = [*largest, *order.indices[len(largest) :]]
    return DataLoader(loader.dataset, size, sampler=sampler, collate_fn=loader.collate_fn, pin_memory=loader.pin_memory)


def _makers(pl: Any, trainer: Any, own: Any, holder: Any, handed_in: Mapping[str, Any]) -> dict[str, Hook]:
    """What returns the user's loaders, by TRAIN and EVAL: those handed in, or else the methods of `holder`."""
    overrides = pl.utilities.model_helpers.is_overridden
    makers: dict[str, Hook] = {}
    for name, loaders in handed_in.items():
        if loaders is not None:
            makers[name] = partial(handed_in.get, name)
        elif overrides(name, holder):
            makers[name] = getattr(holder, name)
    if TRAIN not in makers:
        raise InvalidArgumentError(
            f"there is no training data: {type(holder).__name__} has no train_dataloader(); pass datamodule=... or "
            "train_dataloaders=..."
        )
    if trainer.limit_val_batches == 0 or not overrides("validation_step", own):
        makers.pop(EVAL, None)
    return makers


def _places_of(name: str, owners: list[Any]) -> list[Any]:
    """The objects where Lightning's own finder sets the batch size: module, data module and the hyperparameters of each."""
    places = [owner for owner in owners if hasattr(owner, name)]
    places += [owner.hparams for owner in owners if name in getattr(owner, "hparams", ())]
    if not places:
        raise InvalidArgumentError(
            f"neither {' nor '.join(type(owner).__name__ for owner in owners)} nor their hyperparameters have {name!r}: "
            f"write self.{name} = 1 in __init__ and DataLoader(..., batch_size=self.{name}) in train_dataloader(), or pass "
            "batch_size_name=, the name of the attribute that it reads"
        )
    return places


def _device_of(trainer: Any, device: object) -> Device:
    """Where the Trainer trains, not where the parameters are: each fit moves them there and back."""
    root = trainer.strategy.root_device
    chosen = choose_device(str(root) if device is None else device, torch.nn.Module())
    there = chosen.torch_device
    if replay_of(chosen) is None and (there.type, there.index or 0) != (root.type, root.index or 0):
        raise InvalidArgumentError(
            f"device={device!r}, but the Trainer trains on {root}: leave it out, or pass Trainer(accelerator={there.type!r})"
        )
    return chosen


@contextmanager
def _undone(module: torch.nn.Module, others: Iterable[Any], preserve: object, device_type: str) -> Iterator[None]:
    """Undo what is done inside: ``setup()`` and other hooks run before the probe itself keeps anything.

    The module stays in host memory, where Lightning puts it after each fit: a snapshot on the device would need room that
    training has.
    """
    home, lost = model_device(module) or torch.device("cpu"), False
    module.cpu()
    try:
        snapshot = Snapshot(module, others, preserve, device_type)
        try:
            yield
        except DeviceLostError:
            home, lost = torch.device("cpu"), True
            raise
        finally:
            snapshot.restore(device_lost=lost)
    finally:
        module.to(home)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence what Lightning says of the trials' settings, and would say again when the user trains."""
    with warnings.catch_warnings(), quiet_loggers(*PACKAGES, "lightning.pytorch", "lightning.fabric"):
        warnings.filterwarnings("ignore", module=rf"({'|'.join(PACKAGES)})(\.|$)")
        yield
