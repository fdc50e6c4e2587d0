"""`find_max_batch` for Lightning: takes a Trainer, a LightningModule and its data, as ``trainer.fit`` does.

Each trial is Lightning's own fit, by a private Trainer with logging, checkpoints and callbacks disabled.
"""

from __future__ import annotations

import importlib
import math
import signal
import sys
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from itertools import chain, compress
from typing import Any, Unpack

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import BatchSampler, DataLoader, Sampler

from oomprobe.devices import Device, choose_device
from oomprobe.errors import Caller, InvalidArgumentError, NotRunError
from oomprobe.explaining.monitor import EVALUATION, TRAINING
from oomprobe.integrations import framework
from oomprobe.probing.order import SearchOptions
from oomprobe.probing.summary import LAST_BATCH, NO_EVALUATION
from oomprobe.records.options import Step, check_seconds
from oomprobe.results.result import ProbeResult
from oomprobe.runners.ranks_here import refuse_ranks
from oomprobe.worst_case import LargestFirst, largest_first

# Methods; the arguments of Trainer.fit end in "s".
TRAIN, EVAL = "train_dataloader", "val_dataloader"
KIND = {TRAIN: "training data", EVAL: "validation data"}
MICRO_BATCHES = 2  # the second runs with the gradients of the first; later ones need no more
EVAL_BATCHES = 2
MANUAL_BATCHES = 64  # a module with manual optimization must step within these
# Callbacks.
HARMLESS = (
    "ProgressBar",
    "ModelSummary",
    "Checkpoint",
    "LearningRateMonitor",
    "DeviceStatsMonitor",
)
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
    **options: Unpack[SearchOptions],
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

    Examples:
        >>> def train(trainer, module, data):
        ...     find_max_batch(trainer, module, data, batch_size_name="micro_batch")
        ...     trainer.fit(module, data)
    """
    check_seconds("scan_s", scan_s)
    framework.steps_to_calls(options)
    loaders = {TRAIN: train_dataloaders, EVAL: val_dataloaders}
    with (
        _quiet(),
        tempfile.TemporaryDirectory(prefix="oomprobe-", ignore_cleanup_errors=True) as folder,
    ):
        fit = Fit(trainer, module, datamodule, loaders, batch_size_name, folder)
        fit.accumulates |= options.get("global_batch") is not None
        strategy = f"Trainer(strategy={type(trainer.strategy).__name__})"
        refuse_ranks(
            f"{strategy} trains on",
            trainer.world_size,
            "lightning.model_and_step(trainer, module, datamodule)",
        )
        if not isinstance(trainer.strategy, fit.pl.strategies.SingleDeviceStrategy):
            raise InvalidArgumentError(
                f"{strategy} adds buffers that trials would not have: probe with strategy='auto'"
            )
        options["device"] = _device_of(trainer, options.get("device"))
        with (
            # Where each fit leaves it, so that what is restored takes no device memory.
            framework.placed(fit.plain, torch.device("cpu")),
            framework.state_kept(
                fit.owners, fit.plain, options.get("preserve", ())
            ),  # also what `setup()` changes
            closing(fit.set_up()),
            fit.data.scanned(scan_s),
        ):
            result = framework.probe(fit, options)
    if write_back:
        fit.data.set_size(result.batch_size)
    return result


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

    The arguments are those of `find_max_batch`, but the Trainer has as many ``devices`` as there are ranks.

    Returns:
        The module, on its device, and the step.

    Raises:
        FrameworkError: Lightning is not installed or too old.
        InvalidArgumentError: the Trainer or the loaders cannot be probed.

    Examples:
        >>> def build():
        ...     trainer = lightning.pytorch.Trainer(strategy="ddp", devices=8)
        ...     return model_and_step(trainer, Module(), Data())
    """
    check_seconds("scan_s", scan_s)
    loaders = {TRAIN: train_dataloaders, EVAL: val_dataloaders}
    fit = Fit(trainer, module, datamodule, loaders, batch_size_name, tempfile.gettempdir())
    strategy, kinds = trainer.strategy, fit.pl.strategies
    if isinstance(strategy, kinds.DDPStrategy):
        are_started = (
            strategy.cluster_environment.creates_processes_externally
            and strategy._start_method == "popen"
        )
    else:
        are_started = isinstance(strategy, kinds.SingleDeviceStrategy)
    if not are_started:
        raise InvalidArgumentError(
            f"Trainer(strategy={type(strategy).__name__}) cannot be probed as a target here: pass strategy='ddp', and let "
            "oomprobe run train.py:build --nproc-per-node start its ranks; or probe the command, oomprobe run -- python "
            "train.py ... {batch}"
        )
    strategy.setup_environment()  # makes the group
    with _quiet(), fit.set_up().data.scanned(scan_s):
        pass
    module.to(strategy.root_device)
    return fit.model, fit.steps()["fit"]


class PeakMonitorCallback(framework.PeakCallback):
    """Watches the peak of ``trainer.fit()`` with an `oomprobe.PeakMonitor`: a ``lightning.pytorch.Callback``.

    Args:
        result_or_path: As in `oomprobe.PeakMonitor`.
        batch_size: The batch size that is compared; None: that of the first training loader.
        warn: As in `oomprobe.PeakMonitor`.

    Attributes:
        monitor: The `oomprobe.PeakMonitor`.

    Raises:
        FrameworkError: Lightning is not installed or too old.
        InvalidArgumentError: the file cannot be read, or holds no result.

    Examples:
        >>> def train(module, data):
        ...     watch = PeakMonitorCallback("probe.json")
        ...     lightning.pytorch.Trainer(callbacks=[watch]).fit(module, data)
        ...     return watch.monitor.to_dict()
    """

    _stepped = 0  # optimizer steps until the last look

    @staticmethod
    def kind() -> type:
        package = "lightning.pytorch"
        if "pytorch_lightning" in sys.modules and package not in sys.modules:
            package = "pytorch_lightning"
        return framework.load(package, minimum="2.5", extra="lightning").Callback  # type: ignore[no-any-return]

    def on_train_start(self, trainer: Any, *rest: Any) -> None:
        loaders, _ = tree_flatten(trainer.train_dataloader)
        self._trains(getattr(loaders[0], "batch_size", None))
        self._stepped = trainer.global_step

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        if trainer.global_step == self._stepped:  # gradients only accumulate
            self.monitor.seen(TRAINING)
        else:
            self._stepped = trainer.global_step
            self.monitor.step(TRAINING)

    def on_validation_batch_end(self, *_: Any) -> None:
        self.monitor.seen(EVALUATION)


class Fit:
    """Lightning's fit as a step, which stops itself once every optimizer has stepped: a `Loop` of `framework`."""

    def __init__(
        self,
        trainer: Any,
        module: Any,
        datamodule: Any,
        loaders: Mapping[str, Any],
        name: str,
        folder: str,
    ) -> None:
        """Check the arguments of ``Trainer.fit``; the `loaders` are those passed, by TRAIN and EVAL.

        `name` is the batch size attribute, and a trial writes to `folder`.
        """
        self.pl, self.plain = _check_arguments(trainer, module, datamodule)
        self.user, self.model, self.folder = trainer, module, folder
        # In the order of Lightning's hook calls.
        self.owners = [self.plain] if datamodule is None else [datamodule, self.plain]
        self.data = Data(self.pl, trainer, self.owners, loaders, name)
        self.validates = EVAL in self.data.makers
        self.accumulates = trainer.accumulate_grad_batches > 1
        self.covered: tuple[str, ...] = (LAST_BATCH,)
        if self.validates:
            self.covered = (NO_EVALUATION, LAST_BATCH)
        self.teardowns: list[Callable[[], object]] = []
        # Of the current call: its training batches, whether a smaller last one is among them, the steps of each optimizer by id,
        # and how many optimizers have not stepped.
        self.batches, self.has_last, self.stepped, self.idle = 0, False, Counter[int](), 0

    @property
    def scanned(self) -> list[tuple[str, LargestFirst]]:
        """Each data set that trials read, with what it is called."""
        return [
            (KIND[name], order) for name, orders in self.data.orders.items() for order in orders
        ]

    @property
    def is_automatic(self) -> bool:
        """Whether Lightning steps the optimizers, not the module."""
        return bool(self.plain.automatic_optimization)

    @property
    def micro(self) -> int:
        """Batches per optimizer step."""
        return MICRO_BATCHES if self.accumulates and self.is_automatic else 1

    @property
    def wanted(self) -> int:
        """Training batches that a trial runs at least: of two optimizer steps, and of those after validation or a last batch."""
        if self.validates:
            return self.micro * 2 * framework.LOOP_STEPS
        return self.micro * (framework.LOOP_STEPS + self.has_last)

    @property
    def most(self) -> int:
        """Training batches after which it stops; with manual optimization, only the module decides how many make a step."""
        if self.is_automatic:
            return self.wanted
        return max(self.wanted, MANUAL_BATCHES)

    # --- what it tells ---

    def steps(self) -> dict[str, Step]:
        """Return the fit as a step."""
        size_is = "loaders of batch_size=" if self.data.was_passed else f"{self.data.name} = "
        alone = f"run trainer.fit with {size_is}{{batch_size}}"
        if self.user.world_size > 1:
            alone += " under torchrun"
        caller = Caller(
            alone=alone,
            more="As with fast_dev_run, the loggers of a trial are Lightning's DummyLogger, and no callback is called.",
        )
        count = min(
            len(order.indices) for order in compress(self.data.orders[TRAIN], self.data.sized)
        )
        return {
            "fit": Step(
                self.run,
                is_loop=False,
                caller=caller,
                starts_anew=True,
                is_timed=False,
                max_batch=count,
            )
        }

    def notes(self, result: ProbeResult) -> Iterator[str]:
        """Yield what a trial runs, and what it cannot show."""
        fit = f"one step of a trial is Trainer.fit for {framework.LOOP_STEPS} optimizer steps"
        if self.micro > 1:
            fit += f" of {self.micro} accumulated batches each"
        if self.validates:
            fit += f", {EVAL_BATCHES} validation batches, and both again"
        yield fit
        if self.idle:
            yield (
                f"some optimizers ({self.idle}) did not step within {MANUAL_BATCHES} batches: the result does not cover "
                "their state"
            )
        if not all(self.data.sized):
            yield "a training loader that ignores the batch size kept its own: its batches take the same memory at every size"
        if len(self.data.size_owners) > 1:
            kinds = (
                "hparams" if isinstance(one, dict) else type(one).__name__
                for one in self.data.size_owners
            )
            places = " and ".join(kinds)
            yield (
                f"{self.data.name} exists in several places ({places}), and was set in each: Lightning reads one of them"
            )
        if self.data.was_passed:
            yield f"nothing was set: create your DataLoader with batch_size={result.batch_size}"

    def not_covered(self) -> list[str]:
        """Return the callbacks that matter."""
        harmless = (*(getattr(self.pl.callbacks, name) for name in HARMLESS), PeakMonitorCallback)
        return framework.skipped_callbacks(self.user.callbacks, harmless)

    # --- before the trials, and after them ---

    def set_up(self) -> Fit:
        """Call the hooks that Lightning calls once per training, and disable them in trials; `state_kept` undoes that."""
        trainer, stage = (
            self.pl.Trainer(**self.arguments()),
            self.pl.trainer.states.TrainerFn.FITTING,
        )
        for owner in self.owners:
            owner.trainer = trainer
        if self.user.strategy.is_global_zero:
            for owner in self.owners:
                owner.prepare_data()
        self.user.strategy.barrier()
        for owner in self.owners:
            owner.setup(stage=stage)
        for owner in self.owners:
            self.teardowns += [
                partial(setattr, owner, "trainer", trainer),
                partial(owner.teardown, stage=stage),
            ]
            vars(owner).update(prepare_data=_nothing, setup=_nothing, teardown=_nothing)
        vars(self.plain).update(configure_callbacks=list)
        return self

    def close(self) -> None:
        """Call the teardown hooks."""
        for call in self.teardowns:
            call()

    # --- a trial ---

    def run(self, model: object, batch_size: int) -> None:
        """Fit for two optimizer steps, and if the module validates, validate, train on, and validate again."""
        self.batches, self.idle = 0, 0
        self.stepped.clear()
        self.data.set_size(batch_size)
        # These must be functions: Lightning compares a hook's __code__ with that of its own default.
        made = {
            name: lambda name=name: self._trial_loaders(name, batch_size)
            for name in self.data.makers
        }
        vars(self.owners[0]).update(made)
        on_ctrl_c = signal.getsignal(signal.SIGINT)
        with _quiet():
            trainer = self.pl.Trainer(**self.arguments())
            trainer.callbacks = [
                self.pl.callbacks.LambdaCallback(on_train_batch_end=self._after_batch)
            ]
            trainer.save_checkpoint = _nothing
            handle = register_optimizer_step_post_hook(
                lambda optimizer, *_: self.stepped.update([id(optimizer)])
            )
            try:
                trainer.fit(self.model, datamodule=self.owners[0] if len(self.owners) > 1 else None)
            except SystemExit as ended:
                # Lightning exits on Ctrl-C; here the caller handles it.
                if isinstance(ended.__context__, KeyboardInterrupt):
                    raise KeyboardInterrupt from None
                raise
            finally:
                handle.remove()
                # After a Ctrl-C Lightning ignores further ones, and may not restore the handler.
                if threading.current_thread() is threading.main_thread():
                    signal.signal(signal.SIGINT, on_ctrl_c)
                # A Trainer is in reference cycles, and would keep its optimizers alive until garbage is collected.
                (
                    trainer.strategy.optimizers,
                    trainer.strategy.lr_scheduler_configs,
                    trainer.callbacks,
                ) = [], [], []
                for owner in self.owners:
                    owner.trainer = None
        if self.batches < self.wanted:
            raise NotRunError(
                f"at batch {batch_size} Lightning ran {self.batches} training batches of the {self.wanted} that make a trial: "
                "check whether the module stops the Trainer, raises StopIteration, or skips batches in on_train_batch_start"
            )
        if self.user.world_size > 1:
            framework.drop_last_collectives(self.user.strategy.root_device)

    def _after_batch(self, trainer: Any, *_: object) -> None:
        """Stop once the trial is complete."""
        self.batches += 1
        made = [self.stepped[id(optimizer)] for optimizer in trainer.optimizers]
        self.idle = made.count(0)
        if self.batches >= self.wanted and (
            min(made, default=0) >= framework.LOOP_STEPS or self.batches >= self.most
        ):
            trainer.should_stop = True

    def arguments(self) -> dict[str, Any]:
        """Return arguments for a Trainer that takes the same steps as the user's and writes only to `folder`.

        They are for one Trainer, since a strategy belongs to one. The numbers of epochs and steps are the user's own, since
        schedulers depend on them; a trial stops itself.
        """
        trainer, strategy = self.user, self.user.strategy
        index = strategy.root_device.index
        # Fewer, as with fast_dev_run, would end a trial early; with manual optimization each optimizer's step counts.
        least = 2 * framework.LOOP_STEPS if self.is_automatic else MANUAL_BATCHES
        fabric = (
            "lightning_fabric" if self.pl.__name__ == "pytorch_lightning" else "lightning.fabric"
        )
        environments = importlib.import_module(f"{fabric}.plugins.environments")
        dummy = importlib.import_module(f"{self.pl.__name__}.loggers.logger").DummyLogger
        folders = dict.fromkeys(("save_dir", "root_dir", "log_dir"), self.folder)
        ranks: dict[str, Any] = {"devices": 1 if index is None else [index], "limit_val_batches": 0}
        # Otherwise Lightning would detect a cluster, and handle the signals that requeue a job.
        environment = environments.LightningEnvironment()
        if isinstance(strategy, self.pl.strategies.DDPStrategy):
            again = type(strategy)(
                process_group_backend=strategy.process_group_backend,
                ddp_comm_state=strategy._ddp_comm_state,
                ddp_comm_hook=strategy._ddp_comm_hook,
                ddp_comm_wrapper=strategy._ddp_comm_wrapper,
                **strategy._ddp_kwargs,
            )
            ranks |= {
                "devices": trainer.num_devices,
                "strategy": again,
                "use_distributed_sampler": False,
            }
            environment = environments.TorchElasticEnvironment()
        if self.validates:
            ranks |= {
                "limit_val_batches": EVAL_BATCHES,
                "val_check_interval": framework.LOOP_STEPS * self.micro,
                "check_val_every_n_epoch": None,
            }
        return {
            **ranks,
            "accelerator": trainer.accelerator,
            "plugins": [trainer.precision_plugin, environment],
            "max_epochs": _at_least(1, trainer.max_epochs),
            "max_steps": _at_least(least, trainer.max_steps),
            "accumulate_grad_batches": self.micro,
            "gradient_clip_val": trainer.gradient_clip_val,
            "gradient_clip_algorithm": trainer.gradient_clip_algorithm,
            "detect_anomaly": trainer._detect_anomaly,  # not public; anomaly detection keeps a traceback per operator
            "inference_mode": trainer.validate_loop.inference_mode,
            "logger": [type("SilentLogger", (dummy,), folders)() for _ in trainer.loggers] or False,
            "num_sanity_val_steps": 0,
            "default_root_dir": self.folder,
        }

    def _trial_loaders(self, name: str, batch_size: int) -> Any:
        """Return the user's loaders with the largest examples first."""
        loaders, rebuild = self.data.loaders(name, batch_size)
        trains, sizes, lasts = name == TRAIN, list[int](), list[int]()
        is_passed = trains and self.data.was_passed
        for loader, order in zip(loaders, self.data.orders[name], strict=True):
            size = min(batch_size if is_passed else _size_of(loader), len(order.indices))
            sizes.append(size)
            lasts.append(self._last_batch(loader, order, size) if trains else 0)
        count = EVAL_BATCHES
        if trains:
            self.has_last = any(lasts)
            count = self.most
        # Of a last batch: the second optimizer step ends with it.
        place = framework.LOOP_STEPS * self.micro - 1
        made = []
        for loader, order, size, last in zip(
            loaders, self.data.orders[name], sizes, lasts, strict=True
        ):
            # Without workers: starting them takes longer than a trial, and their memory is not part of the step.
            made.append(
                DataLoader(
                    loader.dataset, size, collate_fn=loader.collate_fn, pin_memory=loader.pin_memory
                )
            )
            # As an argument, it would leave `batch_size` None, which modules read.
            vars(made[-1])["batch_sampler"] = _Batches(order, size, last, count, place)
        return rebuild(made)

    def _last_batch(self, loader: Any, order: LargestFirst, size: int) -> int:
        """Return the size of an epoch's smaller last batch, after which training goes on; 0 if there is none."""
        user, count = self.user, len(order.indices)
        if loader.drop_last or user.limit_train_batches != 1.0:
            return 0
        epochs = math.inf if user.max_epochs == -1 else user.max_epochs or 1
        if user.max_steps != -1:
            epochs = min(epochs, user.max_steps * size * user.accumulate_grad_batches / count)
        return framework.last_batch(count, size, epochs)


class Data:
    """The user's loaders, and the attribute from which they read their batch size."""

    def __init__(
        self, pl: Any, trainer: Any, owners: list[Any], passed: Mapping[str, Any], name: str
    ) -> None:
        """Find what makes the loaders, `passed` or methods of `owners`, by TRAIN and EVAL."""
        self.pl, self.name, self.was_passed = pl, name, passed[TRAIN] is not None
        overrides, holder = pl.utilities.model_helpers.is_overridden, owners[0]
        self.makers: dict[str, Callable[[], Any]] = {}
        for kind, loaders in passed.items():
            if loaders is not None:
                self.makers[kind] = partial(passed.get, kind)
            elif overrides(kind, holder):
                self.makers[kind] = getattr(holder, kind)
        if TRAIN not in self.makers:
            raise InvalidArgumentError(
                f"there is no training data: {type(holder).__name__} has no train_dataloader(); pass datamodule=... or "
                "train_dataloaders=..."
            )
        if trainer.limit_val_batches == 0 or not overrides("validation_step", owners[-1]):
            self.makers.pop(EVAL, None)
        # Objects with the attribute.
        self.size_owners = [] if self.was_passed else _size_owners(name, owners)
        self.orders: dict[str, list[LargestFirst]] = {}
        self.sized: list[bool] = []  # whether each training loader follows the batch size

    def set_size(self, batch_size: int) -> None:
        """Set the attribute that the user's ``train_dataloader()`` reads."""
        for owner in self.size_owners:
            setattr(owner, self.name, batch_size)

    @contextmanager
    def scanned(self, scan_s: float) -> Iterator[None]:
        """Look for the largest examples of each data set; on exit, put back what reading them changes."""
        self.set_size(1)
        loaders = {name: self.loaders(name, 1)[0] for name in self.makers}
        self.sized = [self.was_passed or _size_of(loader) == 1 for loader in loaders[TRAIN]]
        with framework.state_kept(chain(*loaders.values())):
            for name, of_kind in loaders.items():
                self.orders[name] = [
                    largest_first(loader.dataset, scan_s, getattr(loader.sampler, "indices", None))
                    for loader in of_kind
                ]
            yield

    def loaders(self, name: str, batch_size: int) -> tuple[list[Any], Callable[[list[Any]], Any]]:
        """Return the user's loaders at that batch size, checked, and a function that puts others into the same structure."""
        made = self.makers[name]()
        combines = isinstance(made, self.pl.utilities.CombinedLoader)
        loaders, structure = tree_flatten(made.iterables if combines else made)

        def rebuild(loaders: list[Any]) -> Any:
            tree = tree_unflatten(loaders, structure)
            return type(made)(tree, made._mode) if combines else tree

        for loader in loaders:
            if _size_of(loader) is None:
                raise InvalidArgumentError(
                    f"the {type(loader).__name__} of the {KIND[name]} cannot be rebuilt with the largest examples: it has its "
                    f"own batch_sampler or __iter__. Pass {name}s=DataLoader(dataset, batch_size=...)"
                )
        sizes = {*map(_size_of, loaders)}
        if name == TRAIN and self.size_owners and batch_size not in sizes:
            made_sizes = " and ".join(map(str, sorted(sizes)))
            raise NotRunError(
                f"train_dataloader() made batches of {made_sizes} although {self.name}={batch_size} was set: write "
                f"DataLoader(..., batch_size=self.{self.name}), or pass batch_size_name=, the name of the attribute "
                "that it reads"
            )
        return loaders, rebuild


def _check_arguments(trainer: Any, module: Any, datamodule: Any) -> tuple[Any, Any]:
    """Return Lightning, and the module without torch.compile's wrapper; refuse arguments of other kinds."""
    # lightning and pytorch_lightning define the same classes separately.
    roots = {kind.__module__.partition(".")[0] for kind in type(trainer).__mro__}
    package = "pytorch_lightning" if "pytorch_lightning" in roots else "lightning.pytorch"
    pl = framework.load(package, minimum="2.5", extra="lightning")
    if not isinstance(trainer, pl.Trainer):
        raise InvalidArgumentError(
            f"trainer must be a {package}.Trainer, not {type(trainer).__name__}"
        )
    plain = getattr(module, "_orig_mod", module)  # torch.compile wraps the module
    if not isinstance(plain, pl.LightningModule):
        raise InvalidArgumentError(
            f"module must be a LightningModule of {package}, not {type(plain).__name__}"
        )
    if datamodule is not None and not isinstance(datamodule, pl.LightningDataModule):
        raise InvalidArgumentError(
            f"datamodule must be a LightningDataModule of {package}, not {datamodule!r:.60}: pass loaders as "
            "train_dataloaders=..., val_dataloaders=..."
        )
    return pl, plain


def _at_least(least: int, limit: int | None) -> int:
    """Return a Trainer's limit on epochs or steps, raised to what a trial needs; -1: there is none."""
    return -1 if limit == -1 else max(least, limit or 0)


def _nothing(*_: object, **__: object) -> None:
    """Do nothing, in place of a hook."""


def _size_of(loader: Any) -> Any:
    """Return the batch size of a loader that can be rebuilt at another size, or None if it cannot."""
    if getattr(type(loader), "__iter__", None) is not DataLoader.__iter__:
        return None
    if type(loader.batch_sampler) is not BatchSampler:
        return None
    return loader.batch_sampler.batch_size


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


def _size_owners(name: str, owners: list[Any]) -> list[Any]:
    """Return the objects on which Lightning's own finder sets the batch size: modules and their hyperparameters."""
    holders = [owner for owner in owners if hasattr(owner, name)]
    for owner in owners:
        # To read `hparams` where there are none would make some.
        if "_hparams" in vars(owner) and name in owner.hparams:
            holders.append(owner.hparams)
    if not holders:
        raise InvalidArgumentError(
            f"neither {' nor '.join(type(owner).__name__ for owner in owners)} nor their hyperparameters have {name!r}: "
            f"write self.{name} = 1 in __init__ and DataLoader(..., batch_size=self.{name}) in train_dataloader(), or pass "
            "batch_size_name=, the name of the attribute that it reads"
        )
    return holders


def _device_of(trainer: Any, device: object) -> Device:
    """Return the device on which the Trainer trains; each fit moves the parameters there and back."""
    root = trainer.strategy.root_device
    chosen = choose_device(str(root) if device is None else device, torch.nn.Module())
    asked = chosen.torch_device
    if not chosen.is_simulated and (asked.type, asked.index or 0) != (root.type, root.index or 0):
        raise InvalidArgumentError(
            f"device={device!r}, but the Trainer trains on {root}: leave it out, or pass Trainer(accelerator={asked.type!r})"
        )
    return chosen


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Lightning's messages about the trials' settings; the user sees them when training."""
    with (
        warnings.catch_warnings(),
        framework.quiet_loggers(*PACKAGES, "lightning.pytorch", "lightning.fabric"),
    ):
        warnings.filterwarnings("ignore", module=rf"({'|'.join(PACKAGES)})(\.|$)")
        yield
