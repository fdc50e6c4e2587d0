"""`find_max_batch` for Lightning: takes a Trainer, a LightningModule and its data, as ``trainer.fit`` does.

Each trial is Lightning's own fit, by a private Trainer with logging, checkpoints and callbacks disabled.
"""

from __future__ import annotations

import importlib
import math
import signal
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import BatchSampler, DataLoader, Sampler

from oomprobe.devices import Device, choose_device, replays
from oomprobe.devices.choose import model_device
from oomprobe.errors import Caller, DeviceLostError, InvalidArgumentError, NotRunError
from oomprobe.integrations.framework import (
    LOOP_STEPS,
    drop_last_collectives,
    framework,
    last_batch,
    probe_loop,
    quiet_loggers,
    skipped_callbacks,
    state_kept,
    steps_to_calls,
    with_notes,
)
from oomprobe.records.options import Step, check_seconds
from oomprobe.records.result import ProbeResult
from oomprobe.runners.ranks_here import refuse_ranks
from oomprobe.worst_case import LargestFirst, largest_first

TRAIN, EVAL = "train_dataloader", "val_dataloader"  # methods; the arguments of Trainer.fit end in "s"
KIND = {TRAIN: "training data", EVAL: "validation data"}
MICRO_BATCHES = 2  # the second runs with the gradients of the first; later ones need no more
EVAL_BATCHES = 2
MANUAL_BATCHES = 64  # a module with manual optimization must step within these
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
    """Find the largest batch size that fits, by running the training; call it before ``trainer.fit``.

    Each call of the step is one `Trainer.fit` for two optimizer steps on batches of the largest examples, with the Trainer's
    accelerator, precision plugin, gradient clipping and accumulation. If the module validates, two validation batches
    follow. ``prepare_data``, ``setup`` and ``teardown`` run once.

    As with ``fast_dev_run``, callbacks are not called, and Lightning's `DummyLogger` replaces the loggers. Files written to
    ``log_dir`` are deleted when the probe ends.

    The module, the data module and random number generators, including those of data sets and collate functions, are
    restored: training gives the same losses as without a probe. Objects without ``state_dict`` that the module changes in
    place are not restored.

    Args:
        trainer: The ``Trainer`` that will train, on one device. Its settings are read; it never runs.
        module: A ``LightningModule``; it may be compiled.
        datamodule: A ``LightningDataModule``; None: the loaders are the module's own, or passed below.
        train_dataloaders: A DataLoader, or nested dicts and lists of DataLoaders. Each is rebuilt at each size.
        val_dataloaders: The same for validation; they keep their batch size.
        batch_size_name: Attribute of the module, the data module or the hyperparameters of either, that
            ``train_dataloader()`` reads.
        write_back: Set that attribute to the answer, wherever Lightning's own finder would.
        scan_s: Seconds to scan each data set for its largest examples; at least 0.
        options: Those of `oomprobe.find_max_batch`. `device` defaults to the Trainer's.

    Returns:
        The answer; one step of its trials is two optimizer steps.

    Raises:
        FrameworkError: Lightning is not installed or too old.
        InvalidArgumentError: the Trainer, the loaders or an option cannot be probed; nothing was trained.
        UnreliableError: the loaders did not yield batches of the requested size, or a fit did not train.
        OomProbeError: as for `oomprobe.find_max_batch`.
    """
    check_seconds("scan_s", scan_s)
    pl, plain = _checked(trainer, module, datamodule)
    strategy = f"Trainer(strategy={type(trainer.strategy).__name__})"
    refuse_ranks(f"{strategy} trains on", trainer.world_size, "lightning.model_and_step(trainer, module, datamodule)")
    if not isinstance(trainer.strategy, pl.strategies.SingleDeviceStrategy):
        raise InvalidArgumentError(f"{strategy} adds buffers that trials would not have: probe with strategy='auto'")
    owners = [plain] if datamodule is None else [datamodule, plain]  # in the order of Lightning's hook calls
    makers = _makers(pl, trainer, plain, owners[0], {TRAIN: train_dataloaders, EVAL: val_dataloaders})
    loaders_passed = train_dataloaders is not None
    device = _device_of(trainer, options.pop("device", None))
    accumulates = options.get("global_batch") is not None or trainer.accumulate_grad_batches > 1
    micro = MICRO_BATCHES if accumulates and plain.automatic_optimization else 1
    with (
        _quiet(),
        _in_host_memory(plain),
        state_kept(owners, plain, options.get("preserve", ())),  # also what `setup()` changes before the probe begins
        tempfile.TemporaryDirectory(prefix="oomprobe-", ignore_cleanup_errors=True) as folder,
    ):
        training = Training(
            pl=pl, module=module, owners=owners, makers=makers, folder=folder, micro=micro, name=batch_size_name,
            size_owners=[] if loaders_passed else _size_owners(batch_size_name, owners), user=trainer,
        )  # fmt: skip
        with _hooks_run_once(training):
            result = _search(training, device, options, scan_s)
    if write_back:
        training.set_size(result.batch_size)
    notes = [f"nothing was set: create your DataLoader with batch_size={result.batch_size}"] * loaders_passed
    skipped = []
    if names := skipped_callbacks(trainer.callbacks, tuple(getattr(pl.callbacks, name) for name in HARMLESS)):
        copies = " (weight averaging keeps a copy of the weights)" * ("WeightAveraging" in names)
        skipped = [f"callbacks, which trials do not call: {names}{copies}"]
    return with_notes(result, notes, skipped)


def model_and_step(
    trainer: Any,
    module: Any,
    datamodule: Any = None,
    *,
    train_dataloaders: Any = None,
    val_dataloaders: Any = None,
    batch_size_name: str = "batch_size",
    scan_s: float = 30.0,
) -> tuple[torch.nn.Module, Step]:
    """Return what a target's ``build()`` returns: the module, and Lightning's own fit as a step.

    For a Trainer on several ranks with ``strategy="ddp"``, which ``oomprobe run train.py:build --nproc-per-node 8`` starts. A call of
    the step is one `Trainer.fit` for two optimizer steps, as in `find_max_batch`; every rank reads batches of the largest examples.
    Nothing is restored: the process of a rank ends with the probe.

    Args:
        trainer: The ``Trainer`` that will train, with ``devices`` as many as there are ranks. It never runs.
        module: As for `find_max_batch`, like all other arguments.
        datamodule: As for `find_max_batch`.
        train_dataloaders: As for `find_max_batch`.
        val_dataloaders: As for `find_max_batch`.
        batch_size_name: As for `find_max_batch`.
        scan_s: As for `find_max_batch`.

    Returns:
        The module, on its device, and the step.

    Raises:
        FrameworkError: Lightning is not installed or too old.
        InvalidArgumentError: the Trainer or the loaders cannot be probed.

    Example:
        >>> def build():
        ...     trainer = lightning.pytorch.Trainer(strategy="ddp", devices=8)
        ...     return model_and_step(trainer, Module(), Data())
    """
    check_seconds("scan_s", scan_s)
    pl, plain = _checked(trainer, module, datamodule)
    strategy = trainer.strategy
    if isinstance(strategy, pl.strategies.DDPStrategy):
        are_started = strategy.cluster_environment.creates_processes_externally and strategy._start_method == "popen"
    else:
        are_started = isinstance(strategy, pl.strategies.SingleDeviceStrategy)
    if not are_started:
        raise InvalidArgumentError(
            f"Trainer(strategy={type(strategy).__name__}) cannot be probed as a target here: pass strategy='ddp', and let "
            "oomprobe run train.py:build --nproc-per-node start its ranks; or probe the command, oomprobe run -- python "
            "train.py ... {batch}"
        )
    owners = [plain] if datamodule is None else [datamodule, plain]
    training = Training(
        pl=pl, module=module, owners=owners, user=trainer, name=batch_size_name,
        makers=_makers(pl, trainer, plain, owners[0], {TRAIN: train_dataloaders, EVAL: val_dataloaders}),
        size_owners=[] if train_dataloaders is not None else _size_owners(batch_size_name, owners),
        micro=MICRO_BATCHES if trainer.accumulate_grad_batches > 1 and plain.automatic_optimization else 1,
        folder=tempfile.gettempdir(),
    )  # fmt: skip
    strategy.setup_environment()  # makes the group
    hooks = _hooks_run_once(training)
    with _quiet():
        hooks.__enter__()  # until the process ends
        with _scanned(training, scan_s) as (fit, sized):
            count = min(len(order.indices) for order in compress(fit.orders[TRAIN], sized))

    def step(model: torch.nn.Module, batch_size: int) -> None:
        with _quiet():
            fit.run(model, batch_size)
        if trainer.world_size > 1:
            drop_last_collectives(strategy.root_device)

    step.hooks = hooks  # type: ignore[attr-defined]  # otherwise Python would end them
    module.to(strategy.root_device)
    caller = Caller(alone="run trainer.fit with {batch_size} examples per batch under torchrun")
    return module, Step(run=step, caller=caller, starts_anew=True, is_timed=False, max_batch=count)


def _checked(trainer: Any, module: Any, datamodule: Any) -> tuple[Any, Any]:
    """Return Lightning, and the module without torch.compile's wrapper; refuse arguments of other kinds."""
    # lightning and pytorch_lightning define the same classes separately.
    roots = {kind.__module__.partition(".")[0] for kind in type(trainer).__mro__}
    package = "pytorch_lightning" if "pytorch_lightning" in roots else "lightning.pytorch"
    pl = framework(package, minimum="2.5", extra="lightning")
    if not isinstance(trainer, pl.Trainer):
        raise InvalidArgumentError(f"trainer must be a {package}.Trainer, not {type(trainer).__name__}")
    plain = getattr(module, "_orig_mod", module)  # torch.compile wraps the module
    if not isinstance(plain, pl.LightningModule):
        raise InvalidArgumentError(f"module must be a LightningModule of {package}, not {type(plain).__name__}")
    if datamodule is not None and not isinstance(datamodule, pl.LightningDataModule):
        raise InvalidArgumentError(
            f"datamodule must be a LightningDataModule of {package}, not {datamodule!r:.60}: pass loaders as "
            "train_dataloaders=..., val_dataloaders=..."
        )
    return pl, plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The user's arguments of ``Trainer.fit``, and the settings of a trial's Trainer."""

    pl: Any  # lightning.pytorch or pytorch_lightning
    module: Any  # as passed, possibly compiled
    owners: Sequence[Any]  # of hooks: the data module, if any, and then the LightningModule
    makers: Mapping[str, Hook]  # by TRAIN and EVAL; each returns the user's loaders
    folder: str  # where a trial's Trainer writes
    micro: int  # batches per optimizer step
    name: str  # batch size attribute
    size_owners: Sequence[Any]  # objects with that attribute; empty if loaders were passed
    user: Any  # the user's Trainer

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of a trial's Trainer, for one: a strategy belongs to a Trainer."""
        automatic = self.owners[-1].automatic_optimization
        return _trial_arguments(
            self.pl, self.user, self.micro, self.folder, validates=EVAL in self.makers, automatic=automatic
        )

    def set_size(self, batch_size: int) -> None:
        """Set the attribute that the user's ``train_dataloader()`` reads."""
        for owner in self.size_owners:
            setattr(owner, self.name, batch_size)


@contextmanager
def _hooks_run_once(training: Training) -> Iterator[None]:
    """Call the hooks that Lightning calls once per training, and disable them in trials."""
    trainer, stage = training.pl.Trainer(**training.arguments), training.pl.trainer.states.TrainerFn.FITTING
    for owner in training.owners:
        owner.trainer = trainer
    strategy = training.user.strategy
    for owner in training.owners if strategy.is_global_zero else []:
        owner.prepare_data()
    strategy.barrier()
    for owner in training.owners:
        owner.setup(stage=stage)
    teardowns = [owner.teardown for owner in training.owners]
    for owner in training.owners:  # undone by the caller's `state_kept`
        vars(owner).update(prepare_data=_nothing, setup=_nothing, teardown=_nothing)
    vars(training.owners[-1]).update(configure_callbacks=list)
    try:
        yield
    finally:
        for owner, teardown in zip(training.owners, teardowns, strict=True):
            owner.trainer = trainer
            teardown(stage=stage)


def _nothing(*_: object, **__: object) -> None:
    """Do nothing, in place of a hook."""


def _search(training: Training, device: Device, options: dict[str, Any], scan_s: float) -> ProbeResult:
    """Scan the data, search, and describe what the trials covered."""
    steps_to_calls(options)
    size_is = f"{training.name} = " if training.size_owners else "loaders of batch_size="
    caller = Caller(
        alone=f"run trainer.fit with {size_is}{{batch_size}}",
        more="As with fast_dev_run, the loggers of a trial are Lightning's DummyLogger, and no callback is called.",
    )
    with _scanned(training, scan_s) as (fit, sized):
        count = min(len(order.indices) for order in compress(fit.orders[TRAIN], sized))
        result = probe_loop(
            training.module,
            Step(run=fit.run, caller=caller, starts_anew=True, is_timed=False, max_batch=count),
            {**options, "device": device},
            scanned=[(order, KIND[name]) for name, found in fit.orders.items() for order in found],
            scan_s=scan_s,
            evaluates=EVAL in training.makers,
            last_batch=True,
        )
    accumulated = f" of {training.micro} accumulated batches each" if training.micro > 1 else ""
    validated = f", {EVAL_BATCHES} validation batches, and both again" if EVAL in training.makers else ""
    notes = [f"one step of a trial is Trainer.fit for {LOOP_STEPS} optimizer steps{accumulated}{validated}"]
    if fit.idle:
        notes.append(
            f"some optimizers ({fit.idle}) did not step within {MANUAL_BATCHES} batches: the result does not cover their state"
        )
    if not all(sized):
        notes.append(
            "a training loader that ignores the batch size kept its own: its batches take the same memory at every size"
        )
    if len(training.size_owners) > 1:
        kinds = ("hparams" if isinstance(owner, dict) else type(owner).__name__ for owner in training.size_owners)
        places = " and ".join(kinds)
        notes.append(
            f"{training.name} exists in several places ({places}), and was set in each: Lightning reads one of them"
        )
    return with_notes(result, notes)


@contextmanager
def _scanned(training: Training, scan_s: float) -> Iterator[tuple[Fit, list[bool]]]:
    """Scan the data, and yield the fit and whether each training loader follows the batch size; then restore the loaders."""
    training.set_size(1)
    loaders = {name: _loaders_at(training, name, 1)[0] for name in training.makers}
    sized = [not training.size_owners or _size_of(loader) == 1 for loader in loaders[TRAIN]]
    with state_kept([loader for found in loaders.values() for loader in found]):
        orders = {name: [_order_of(one, scan_s) for one in found] for name, found in loaders.items()}
        yield Fit(training=training, orders=orders), sized


@dataclass(slots=True, kw_only=True)
class Fit:
    """The fit that is a step of a trial: it stops itself once every optimizer has stepped."""

    training: Training
    orders: Mapping[str, list[LargestFirst]]
    batches: int = 0  # training batches of the current call
    idle: int = 0  # optimizers that have not stepped in it
    has_last: bool = False  # whether the smaller last batch of an epoch is among its batches
    steps: Counter[int] = field(default_factory=Counter)  # in it, by the id of the optimizer

    @property
    def wanted(self) -> int:
        """Training batches that a trial runs at least: of two optimizer steps, and of those after validation or a last batch."""
        validates = EVAL in self.training.makers
        return self.training.micro * (2 * LOOP_STEPS if validates else LOOP_STEPS + self.has_last)

    @property
    def most(self) -> int:
        """Training batches after which it stops; with manual optimization, only the module decides how many make a step."""
        is_automatic = self.training.owners[-1].automatic_optimization
        return self.wanted if is_automatic else max(self.wanted, MANUAL_BATCHES)

    def run(self, model: object, batch_size: int) -> None:
        """Fit for two optimizer steps, and if the module validates, validate, train on, and validate again."""
        self.batches, self.idle = 0, 0
        self.steps.clear()
        handle = register_optimizer_step_post_hook(self.after_step)
        try:
            _fit(self.training, batch_size, lambda name: self.loaders(name, batch_size), self.after_batch)
        finally:
            handle.remove()
        if self.batches < self.wanted:
            raise NotRunError(
                f"at batch {batch_size} Lightning ran {self.batches} training batches of the {self.wanted} that make a trial: "
                "check whether the module stops the Trainer, raises StopIteration, or skips batches in on_train_batch_start"
            )

    def after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Count the step of an optimizer."""
        self.steps[id(optimizer)] += 1

    def after_batch(self, trainer: Any, *_: object) -> None:
        """Stop once the trial is complete."""
        self.batches += 1
        made = [self.steps[id(optimizer)] for optimizer in trainer.optimizers]
        self.idle = made.count(0)
        if self.batches >= self.wanted and (min(made, default=0) >= LOOP_STEPS or self.batches >= self.most):
            trainer.should_stop = True

    def loaders(self, name: str, batch_size: int) -> Any:
        """Return the user's loaders with the largest examples first."""
        found, rebuild = _loaders_at(self.training, name, batch_size)
        was_passed = name == TRAIN and not self.training.size_owners
        orders = self.orders[name]
        sizes = [batch_size if was_passed else _size_of(loader) for loader in found]
        sizes = [min(size, len(order.indices)) for size, order in zip(sizes, orders, strict=True)]
        lasts = [0] * len(found)
        if name == TRAIN:
            lasts = [self._last_batch(*one) for one in zip(found, orders, sizes, strict=True)]
            self.has_last = any(lasts)
        count = self.most if name == TRAIN else EVAL_BATCHES
        place = LOOP_STEPS * self.training.micro - 1  # of a last batch: the second optimizer step ends with it
        batches = [_Batches(*one, count, place) for one in zip(orders, sizes, lasts, strict=True)]
        return rebuild([_trial_loader(*one) for one in zip(found, sizes, batches, strict=True)])

    def _last_batch(self, loader: Any, order: LargestFirst, size: int) -> int:
        """Return the size of an epoch's smaller last batch, after which training goes on; 0 if there is none."""
        user, count = self.training.user, len(order.indices)
        epochs = self.training.arguments["max_epochs"]
        epochs = math.inf if epochs == -1 else epochs
        if user.max_steps != -1:
            epochs = min(epochs, user.max_steps * size * user.accumulate_grad_batches / count)
        goes_on = epochs > 1 and user.limit_train_batches == 1.0 and not loader.drop_last
        return last_batch(count, size) if goes_on else 0


def _fit(training: Training, batch_size: int, make: Callable[[str], Any], after_batch: Hook) -> None:
    """Run ``Trainer.fit`` of a private Trainer on the loaders that ``make(name)`` returns."""
    training.set_size(batch_size)
    # These must be functions: Lightning compares a hook's __code__ with that of its own default.
    vars(training.owners[0]).update({name: lambda name=name: make(name) for name in training.makers})
    on_ctrl_c = signal.getsignal(signal.SIGINT)
    trainer = training.pl.Trainer(**training.arguments)
    trainer.callbacks = [training.pl.callbacks.LambdaCallback(on_train_batch_end=after_batch)]
    trainer.save_checkpoint = _nothing
    try:
        trainer.fit(training.module, datamodule=training.owners[0] if len(training.owners) > 1 else None)
    except SystemExit as ended:
        # Lightning exits on Ctrl-C; here the caller handles it.
        if isinstance(ended.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        raise
    finally:
        # After a Ctrl-C Lightning ignores further ones, and may not restore the handler.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, on_ctrl_c)
        # A Trainer is in reference cycles, and would keep its optimizers alive until garbage is collected.
        trainer.strategy.optimizers, trainer.strategy.lr_scheduler_configs, trainer.callbacks = [], [], []
        for owner in training.owners:
            owner.trainer = None


def _trial_arguments(
    pl: Any, trainer: Any, micro: int, folder: str, *, validates: bool, automatic: bool
) -> dict[str, Any]:
    """Return arguments for a Trainer that takes the same steps as the user's and writes only to `folder`.

    The numbers of epochs and steps are the user's own, since schedulers depend on them; a trial stops itself.
    """
    strategy = trainer.strategy
    index = strategy.root_device.index
    # Fewer, as with fast_dev_run, would end a trial early; with manual optimization each optimizer's step counts.
    least = 2 * LOOP_STEPS if automatic else MANUAL_BATCHES
    fabric = "lightning_fabric" if pl.__name__ == "pytorch_lightning" else "lightning.fabric"
    environments = importlib.import_module(f"{fabric}.plugins.environments")
    dummy = importlib.import_module(f"{pl.__name__}.loggers.logger").DummyLogger
    logger = type("SilentLogger", (dummy,), {"save_dir": folder, "root_dir": folder, "log_dir": folder})
    ranks: dict[str, Any] = {"devices": 1 if index is None else [index]}
    # Otherwise Lightning would detect a cluster, and handle the signals that requeue a job.
    environment = environments.LightningEnvironment()
    if isinstance(strategy, pl.strategies.DDPStrategy):
        again = type(strategy)(
            process_group_backend=strategy.process_group_backend,
            ddp_comm_state=strategy._ddp_comm_state,
            ddp_comm_hook=strategy._ddp_comm_hook,
            ddp_comm_wrapper=strategy._ddp_comm_wrapper,
            **strategy._ddp_kwargs,
        )
        ranks = {"devices": trainer.num_devices, "strategy": again, "use_distributed_sampler": False}
        environment = environments.TorchElasticEnvironment()
    return {
        **ranks,
        "accelerator": trainer.accelerator,
        "plugins": [trainer.precision_plugin, environment],
        "max_epochs": trainer.max_epochs if trainer.max_epochs == -1 else max(1, trainer.max_epochs or 1),
        "max_steps": trainer.max_steps if trainer.max_steps == -1 else max(least, trainer.max_steps),
        "accumulate_grad_batches": micro,
        "gradient_clip_val": trainer.gradient_clip_val,
        "gradient_clip_algorithm": trainer.gradient_clip_algorithm,
        "detect_anomaly": trainer._detect_anomaly,  # not public; anomaly detection keeps a traceback per operator
        "inference_mode": trainer.validate_loop.inference_mode,
        "logger": [logger() for _ in trainer.loggers] or False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": EVAL_BATCHES if validates else 0,
        **({"val_check_interval": LOOP_STEPS * micro, "check_val_every_n_epoch": None} if validates else {}),
        "default_root_dir": folder,
    }


def _loaders_at(training: Training, name: str, batch_size: int) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return the user's loaders at that batch size, checked, and a function that puts others into the same structure."""
    made = training.makers[name]()
    combines = isinstance(made, training.pl.utilities.CombinedLoader)
    found, structure = tree_flatten(made.iterables if combines else made)

    def rebuild(loaders: list[Any]) -> Any:
        tree = tree_unflatten(loaders, structure)
        return type(made)(tree, made._mode) if combines else tree

    for loader in found:
        if _size_of(loader) is None:
            raise InvalidArgumentError(
                f"the {type(loader).__name__} of the {KIND[name]} cannot be rebuilt with the largest examples: it has its "
                f"own batch_sampler or __iter__. Pass {name}s=DataLoader(dataset, batch_size=...)"
            )
    sizes = {_size_of(loader) for loader in found}
    if name == TRAIN and training.size_owners and batch_size not in sizes:
        made_sizes = " and ".join(map(str, sorted(sizes)))
        raise NotRunError(
            f"train_dataloader() made batches of {made_sizes} although {training.name}={batch_size} was set: write "
            f"DataLoader(..., batch_size=self.{training.name}), or pass batch_size_name=, the name of the attribute "
            "that it reads"
        )
    return found, rebuild


def _size_of(loader: Any) -> Any:
    """Return the batch size of a loader that can be rebuilt at another size, or None if it cannot."""
    if getattr(type(loader), "__iter__", None) is not DataLoader.__iter__:
        return None
    return loader.batch_sampler.batch_size if type(loader.batch_sampler) is BatchSampler else None


def _order_of(loader: Any, scan_s: float) -> LargestFirst:
    """Return the loader's examples, largest first."""
    subset = getattr(loader.sampler, "indices", None)
    return largest_first(loader.dataset, scan_s, None if subset is None else [int(index) for index in subset])


class _Batches(Sampler[list[int]]):
    """Batches of the largest examples, with one of `last` at `place`; as many as in the user's loader: schedulers count them."""

    def __init__(self, order: LargestFirst, size: int, last: int, least: int, place: int) -> None:
        self._order, self._size, self._last, self._place = order, size, last, place
        self._count = max(least, -(-len(order.indices) // size))

    def __iter__(self) -> Iterator[list[int]]:
        for number in range(self._count):
            is_last = self._last and number == self._place
            yield self._order.batch(self._last if is_last else self._size, number)

    def __len__(self) -> int:
        return self._count


def _trial_loader(loader: Any, size: int, batches: _Batches) -> Any:
    """Return a loader of the same data with those batches.

    It has no workers: starting them takes longer than a trial, and their memory is not part of the step.
    """
    made = DataLoader(loader.dataset, size, collate_fn=loader.collate_fn, pin_memory=loader.pin_memory)
    vars(made)["batch_sampler"] = batches  # as an argument, it would leave `batch_size` None, which modules read
    return made


def _makers(pl: Any, trainer: Any, plain: Any, holder: Any, passed: Mapping[str, Any]) -> dict[str, Hook]:
    """Return functions that return the user's loaders, by TRAIN and EVAL: those passed, or methods of `holder`."""
    overrides = pl.utilities.model_helpers.is_overridden
    makers: dict[str, Hook] = {}
    for name, loaders in passed.items():
        if loaders is not None:
            makers[name] = partial(passed.get, name)
        elif overrides(name, holder):
            makers[name] = getattr(holder, name)
    if TRAIN not in makers:
        raise InvalidArgumentError(
            f"there is no training data: {type(holder).__name__} has no train_dataloader(); pass datamodule=... or "
            "train_dataloaders=..."
        )
    if trainer.limit_val_batches == 0 or not overrides("validation_step", plain):
        makers.pop(EVAL, None)
    return makers


def _size_owners(name: str, owners: list[Any]) -> list[Any]:
    """Return the objects on which Lightning's own finder sets the batch size: modules and their hyperparameters."""
    found = [owner for owner in owners if hasattr(owner, name)]
    found += [owner.hparams for owner in owners if name in getattr(owner, "hparams", ())]
    if not found:
        raise InvalidArgumentError(
            f"neither {' nor '.join(type(owner).__name__ for owner in owners)} nor their hyperparameters have {name!r}: "
            f"write self.{name} = 1 in __init__ and DataLoader(..., batch_size=self.{name}) in train_dataloader(), or pass "
            "batch_size_name=, the name of the attribute that it reads"
        )
    return found


def _device_of(trainer: Any, device: object) -> Device:
    """Return the device on which the Trainer trains; each fit moves the parameters there and back."""
    root = trainer.strategy.root_device
    chosen = choose_device(str(root) if device is None else device, torch.nn.Module())
    asked = chosen.torch_device
    if not replays(chosen) and (asked.type, asked.index or 0) != (root.type, root.index or 0):
        raise InvalidArgumentError(
            f"device={device!r}, but the Trainer trains on {root}: leave it out, or pass Trainer(accelerator={asked.type!r})"
        )
    return chosen


@contextmanager
def _in_host_memory(module: torch.nn.Module) -> Iterator[None]:
    """Keep the module in host memory, where Lightning puts it after each fit, so that what is restored takes no device memory."""
    home = model_device(module) or torch.device("cpu")
    module.cpu()
    try:
        yield
    except DeviceLostError:
        home = torch.device("cpu")
        raise
    finally:
        module.to(home)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Lightning's messages about the trials' settings; the user sees them when training."""
    with warnings.catch_warnings(), quiet_loggers(*PACKAGES, "lightning.pytorch", "lightning.fabric"):
        warnings.filterwarnings("ignore", module=rf"({'|'.join(PACKAGES)})(\.|$)")
        yield
