"""`find_max_batch` for Lightning: a Trainer, a LightningModule and its data, as they are before ``trainer.fit``.

Each trial is Lightning's own fit, by a private Trainer with logging, checkpoints and callbacks disabled.
"""

from __future__ import annotations

import importlib
import inspect
import signal
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

import oomprobe
from oomprobe.devices import Device, choose_device, replay_of
from oomprobe.devices.choose import model_device
from oomprobe.errors import Caller, DeviceLostError, InvalidArgumentError, NotRunError
from oomprobe.integrations.framework import (
    LOOP_STEPS,
    attributes_kept,
    count_calls,
    framework,
    quiet_loggers,
    refuse_several,
    uncalled,
    untimed,
)
from oomprobe.integrations.worst_case import Order, largest_first, refuse_once
from oomprobe.options import Options, Step, check_seconds
from oomprobe.result import ProbeResult
from oomprobe.state import Snapshot

TRAIN, EVAL = "train_dataloader", "val_dataloader"  # methods; the arguments of Trainer.fit have an s more
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
    are not restored, nor is the position of a stream.

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
    inspect.signature(oomprobe.find_max_batch).bind(None, None, **options)  # the TypeError names an unknown option
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
    strategy = f"Trainer(strategy={type(trainer.strategy).__name__})"
    refuse_several(strategy, trainer.world_size)
    if not isinstance(trainer.strategy, pl.strategies.SingleDeviceStrategy):
        raise InvalidArgumentError(f"{strategy} adds buffers that trials would lack: probe with strategy='auto'")
    makers, holders = _data_of(pl, trainer, own, datamodule, train_dataloaders, val_dataloaders)
    owners = [own] if datamodule is None else [own, datamodule]
    device = _device_of(trainer, options.pop("device", None))
    accumulates = options.get("global_batch") is not None or trainer.accumulate_grad_batches > 1
    micro = MICRO_BATCHES if accumulates and own.automatic_optimization else 1
    with (
        _quiet(),
        attributes_kept([*own.modules(), *owners]),
        _undone(own, owners[1:], options.get("preserve", ()), device.torch_device.type),
        tempfile.TemporaryDirectory(prefix="oomprobe-", ignore_cleanup_errors=True) as folder,
    ):
        training = Training(
            pl=pl,
            module=module,
            own=own,
            datamodule=datamodule,
            makers=makers,
            holders=holders,
            arguments=_trial_arguments(pl, trainer, micro, folder),
            micro=micro,
            name=batch_size_name,
            places=_places_of(batch_size_name, owners, needed=TRAIN in holders),
            callbacks=uncalled(trainer.callbacks, tuple(getattr(pl.callbacks, name) for name in HARMLESS)),
        )
        result = _probe(training, device, options, scan_s)
    if write_back and TRAIN in holders:
        for place in training.places:
            setattr(place, batch_size_name, result.batch_size)
    return untimed(result)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What the user passes to ``Trainer.fit``, and the settings of a trial's Trainer."""

    pl: Any  # lightning.pytorch or pytorch_lightning
    module: Any  # as it was passed, maybe compiled
    own: Any  # the LightningModule itself
    datamodule: Any
    makers: Mapping[str, Hook]  # return the user's loaders, by TRAIN and EVAL
    holders: Mapping[str, Any]  # whose methods they are; nobody's for loaders that were handed in
    arguments: Mapping[str, Any]
    micro: int  # batches for one optimizer step
    name: str  # of the batch size attribute
    places: Sequence[Any]  # objects that have it
    callbacks: str  # names of the Trainer's, but for those that only show or save
    # Found by a look before the first trial. None: batches come as the loader makes them.
    orders: dict[str, list[Order | None]] = field(default_factory=dict)


def _probe(training: Training, device: Device, options: dict[str, Any], scan_s: float) -> ProbeResult:
    """Set up, look at the data, search, tear down."""
    limits = {name: options[name] for name in ("min_batch", "multiple_of", "max_batch") if name in options}
    first = Options(**limits).sizes.first
    count_calls(options)
    loaders: dict[str, list[Any]] = {}

    def look(*_: object) -> None:
        loaders.update({name: _loaders_at(training, name, first)[0] for name in training.makers})

    # on_fit_start comes after setup() and before training, of which there is none.
    _fit(training, first, live=("prepare_data", "setup"), on_fit_start=look)
    try:
        with attributes_kept([loader for found in loaders.values() for loader in found]):
            training.orders.update({name: [_order_of(one, scan_s) for one in found] for name, found in loaders.items()})
            count = min((len(order.indices) for order in training.orders[TRAIN] if order is not None), default=None)
            if count is not None and count < first:
                raise InvalidArgumentError(
                    f"the data set has {count} examples, fewer than the smallest batch asked for, {first}: lower min_batch "
                    "or multiple_of, or look at what train_dataloader() reads"
                )
            if count is not None:
                options["max_batch"] = min(count, options.get("max_batch") or count)

            def run(model: object, batch_size: int) -> None:
                _run_trial(training, batch_size)

            size_is = f"{training.name} = " if TRAIN in training.holders else "loaders of batch_size="
            more = "Trials run a plain Trainer whose loggers are Lightning's DummyLogger, as with fast_dev_run"
            more += f", without callbacks ({training.callbacks})." if training.callbacks else "."
            caller = Caller(alone=f"run trainer.fit with {size_is}{{batch_size}}", more=more)
            step = Step(run=run, caller=caller)
            result = oomprobe.find_max_batch(training.module, step, device=device, **options)
    except DeviceLostError:
        raise
    except Exception:  # an interrupted probe ends at once
        _fit(training, first, live=("teardown",))
        raise
    _fit(training, first, live=("teardown",))
    return _told(training, result, count, scan_s)


def _run_trial(training: Training, batch_size: int) -> None:
    """Fit for two optimizer steps of that batch size, then validate where the module does."""
    batches = 0
    wanted = LOOP_STEPS * training.micro
    # With manual optimization, only the module knows how many batches make a step.
    most = wanted if training.own.automatic_optimization else max(wanted, MANUAL_BATCHES)

    def trained(trainer: Any, *_: object) -> None:
        nonlocal batches
        batches += 1
        if batches >= wanted and (trainer.global_step >= LOOP_STEPS or batches >= most):
            trainer.should_stop = True

    def make(name: str) -> Any:
        found, shape = _loaders_at(training, name, batch_size)
        made = []
        for loader, order in zip(found, training.orders[name], strict=True):
            if name == TRAIN:
                made.append(_trial_loader(loader, order, batch_size, most))
            else:
                made.append(loader if order is None else _trial_loader(loader, order, _size_of(loader), EVAL_BATCHES))
        return tree_unflatten(made, shape)

    _fit(training, batch_size, make=make, on_train_batch_end=trained)
    if batches < wanted:
        raise NotRunError(
            f"at batch {batch_size} Lightning ran {batches} training batches of the {wanted} that make a trial. If the "
            "data are a stream, it may end before: pass a smaller max_batch. Otherwise look whether the module stops the "
            "Trainer, raises StopIteration, or skips batches in on_train_batch_start"
        )


def _fit(
    training: Training, batch_size: int, *, make: Hook | None = None, live: Iterable[str] = (), **hooks: Hook
) -> None:
    """Run ``Trainer.fit`` of a private Trainer with a callback's `hooks`, on the loaders that ``make(name)`` returns.

    Of ``prepare_data``, ``setup`` and ``teardown`` those in `live` run. Without `make`, nothing is trained.
    """

    def nothing(*_: object, **__: object) -> None:
        return None

    own, holders = training.own, training.holders
    owners = [own] if training.datamodule is None else [own, training.datamodule]
    makers: dict[str, Hook] = {TRAIN: list} if make is None else {name: partial(make, name) for name in training.makers}
    once = dict.fromkeys({"prepare_data", "setup", "teardown"} - set(live), nothing)
    optimizers = {"configure_optimizers": nothing} if make is None else {}  # no scheduler can be made for no steps
    changes: list[tuple[Any, dict[str, Any]]] = [(owner, once) for owner in owners]
    changes.append((own, {**optimizers, "configure_callbacks": list}))
    # Lightning looks for the code of a hook to tell it from its own: only a function has some.
    changes += [(holders[name], {name: lambda name=name: makers[name]()}) for name in makers if name in holders]
    on_ctrl_c = signal.getsignal(signal.SIGINT)
    for place in training.places:
        setattr(place, training.name, batch_size)  # `_undone` puts it back
    with ExitStack() as stack:
        for holder, methods in changes:
            stack.enter_context(_replaced(holder, methods))
        trainer = training.pl.Trainer(**training.arguments, limit_val_batches=EVAL_BATCHES if EVAL in makers else 0)
        trainer.callbacks = [training.pl.callbacks.LambdaCallback(**hooks)]
        trainer.save_checkpoint = nothing
        try:
            handed_in: dict[str, Any] = {f"{name}s": makers[name]() for name in makers if name not in holders}
            trainer.fit(training.module, datamodule=training.datamodule, **handed_in)
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
            for owner in owners:
                owner.trainer = None


def _trial_arguments(pl: Any, trainer: Any, micro: int, folder: str) -> dict[str, Any]:
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
        "default_root_dir": folder,
    }


def _loaders_at(training: Training, name: str, batch_size: int) -> tuple[list[Any], Any]:
    """The loaders that the user makes at that size, checked, and the shape of their collection."""
    found, shape = tree_flatten(training.makers[name]())
    for loader in found if name == TRAIN else []:
        size = _size_of(loader)
        if size is None:
            raise InvalidArgumentError(
                f"the training data has a {type(loader).__name__} that cannot be made again with another batch size: use a "
                "DataLoader(dataset, batch_size=...) without a batch_sampler, or a dict or list of some"
            )
        if name in training.holders and size != batch_size:
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


def _order_of(loader: Any, scan_s: float) -> Order | None:
    """The loader's examples, largest first; None for a stream, and for a loader that cannot be made again."""
    if _size_of(loader) is None:
        return None
    if isinstance(loader.dataset, IterableDataset):
        refuse_once(loader.dataset)
        return None
    subset = getattr(loader.sampler, "indices", None)
    indices = range(len(loader.dataset)) if subset is None else [int(index) for index in subset]
    return largest_first(loader.dataset, indices, scan_s)


def _trial_loader(loader: Any, order: Order | None, size: int, least: int) -> Any:
    """A loader of batches of that size, of a stream, or of at least so many with the largest examples first.

    It has no workers: starting them takes longer than a trial, and their memory is not the step's.
    """
    make = partial(DataLoader, loader.dataset, collate_fn=loader.collate_fn, pin_memory=loader.pin_memory)
    if order is None:
        return make(batch_size=size, drop_last=True)
    size = min(size, len(order.indices)) or 1
    largest = [index for number in range(least) for index in order.batch(size, number)]
    # The rest gives the loader its real length: schedulers and loops ask.
    return make(batch_size=size, sampler=[*largest, *order.indices[len(largest) :]])


def _told(training: Training, result: ProbeResult, count: int | None, scan_s: float) -> ProbeResult:
    """The result, with what a careful reader should know of a trial and of the data behind the number."""
    micro = f" of {training.micro} accumulated batches each" if training.micro > 1 else ""
    more = f", and {EVAL_BATCHES} validation batches" if EVAL in training.makers else ""
    notes = [f"one step of a trial is Trainer.fit for {LOOP_STEPS} optimizer steps{micro}{more}"]
    if TRAIN not in training.holders:
        notes.append(f"nothing was set: make your DataLoader with batch_size={result.batch_size}")
    drawn = result.batch_size * LOOP_STEPS * training.micro
    are_largest = True
    for name, order in ((name, order) for name, orders in training.orders.items() for order in orders):
        what = "training data" if name == TRAIN else "validation data"
        if order is None:
            are_largest = False
            notes.append(f"batches of the {what} came as their loader makes them: longer examples may come later")
            continue
        notes += order.notes(scan_s, what)
        are_largest = are_largest and order.complete and order.known and (name == EVAL or order.leaders <= drawn)
    if result.limited_by == "max_batch" and result.options["max_batch"] == count:
        notes.append(f"the data set ends the search: it has {count} examples, and no larger batch is possible")
    covered = ("longest sequence",) * are_largest + ("evaluation between epochs",) * (EVAL in training.makers)
    not_covered = [item for item in result.not_covered if not item.startswith(covered)]
    if training.callbacks:
        why = "which trials do not call"
        not_covered.append(f"callbacks, {why}: {training.callbacks} (weight averaging keeps a copy)")
    return replace(result, notes=(*result.notes, *notes), not_covered=tuple(not_covered))


def _data_of(
    pl: Any, trainer: Any, own: Any, datamodule: Any, train: Any, validation: Any
) -> tuple[dict[str, Hook], dict[str, Any]]:
    """The makers and holders of a `Training`."""
    if datamodule is not None and not isinstance(datamodule, pl.LightningDataModule):
        raise InvalidArgumentError(
            f"datamodule must be a LightningDataModule of {pl.__name__}, not {datamodule!r:.60}: pass loaders as "
            "train_dataloaders=..., val_dataloaders=..."
        )

    overrides = pl.utilities.model_helpers.is_overridden
    makers: dict[str, Hook] = {}
    holders: dict[str, Any] = {}
    for name, loaders in ((TRAIN, train), (EVAL, validation)):
        if loaders is not None:
            makers[name] = partial({name: loaders}.get, name)
        elif datamodule is not None and overrides(name, datamodule):
            holders[name] = datamodule
        elif overrides(name, own):
            holders[name] = own
    makers |= {name: getattr(holder, name) for name, holder in holders.items()}
    if TRAIN not in makers:
        raise InvalidArgumentError(
            f"there is no training data: neither {type(own).__name__} nor a data module has train_dataloader(); pass "
            "datamodule=... or train_dataloaders=..."
        )
    if trainer.limit_val_batches == 0 or not overrides("validation_step", own):
        makers.pop(EVAL, None)
    return makers, holders


def _places_of(name: str, owners: list[Any], *, needed: bool) -> list[Any]:
    """The objects where Lightning's own finder sets the batch size: module, data module and the hyperparameters of each."""
    places = [owner for owner in owners if hasattr(owner, name)]
    places += [owner.hparams for owner in owners if name in getattr(owner, "hparams", ())]
    if needed and not places:
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
def _replaced(holder: Any, methods: Mapping[str, Hook]) -> Iterator[None]:
    """Set methods on an object, and put back its own, or its class's, at the end."""
    own = vars(holder)
    before = {name: own[name] for name in methods if name in own}
    try:
        own.update(methods)
        yield
    finally:
        for name in methods:
            own.pop(name, None)
        own.update(before)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence what Lightning says of the trials' settings, and would say again when the user trains."""
    with warnings.catch_warnings(), quiet_loggers(*PACKAGES, "lightning.pytorch", "lightning.fabric"):
        warnings.filterwarnings("ignore", module=rf"({'|'.join(PACKAGES)})(\.|$)")
        yield
