"""One call of a step: Lightning's own fit, of a Trainer that nobody hears of, for two optimizer steps."""

from __future__ import annotations

import copy
import importlib
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from oomprobe.errors import NotRunError
from oomprobe.integrations.framework import LOOP_STEPS
from oomprobe.integrations.generators import Generators
from oomprobe.integrations.lightning.batch_size import BatchSize
from oomprobe.integrations.lightning.kept import ctrl_c_as_it_was, replaced
from oomprobe.integrations.lightning.loaders import DATA_LOADERS, EVAL, TRAIN, Batches, Source, each, flat
from oomprobe.integrations.worst_case import Order

MICRO_BATCHES = 2  # during the second, gradients are there already; further ones are like it
EVAL_BATCHES = 2
SMALL_EVAL = 2  # examples: of one, what squeezes its tensors breaks that never sees one in training
MANUAL_BATCHES = 64  # in which a module with manual optimization must have stepped twice
NO_OPTIMIZER = (
    "configure_optimizers() returned no optimizer, so this module does not train, and memory for it is not what training "
    "takes: return one, or probe what the module does by oomprobe.find_max_batch(module, step_fn)"
)
_NO_STEPS: dict[str, Any] = {"max_steps": 0, "limit_val_batches": 0}
_ONCE = ("prepare_data", "setup", "teardown")
_CONTAINERS = (list, dict, set, deque)  # which a module may fill in place


def trial_arguments(pl: Any, trainer: Any, micro: int, folder: str) -> Mapping[str, Any]:
    """Arguments of a quiet Trainer that takes the same steps as the user's; what it writes is written to `folder`.

    The lengths (epochs, steps) are the user's own, since schedulers are made for them; a trial stops itself.
    """
    index = trainer.strategy.root_device.index
    fabric = "lightning_fabric" if pl.__name__ == "pytorch_lightning" else "lightning.fabric"
    environments = importlib.import_module(f"{fabric}.plugins.environments")
    # What fast_dev_run logs with, and folders.
    dummy = importlib.import_module(f"{pl.__name__}.loggers.logger").DummyLogger
    paths = {"save_dir": folder, "root_dir": folder, "log_dir": folder}
    silent = type("SilentLogger", (dummy,), paths)
    return {
        "accelerator": trainer.accelerator,
        "devices": 1 if index is None else [index],
        # Otherwise it would look for a cluster, and take over the signals of a job that may be requeued.
        "plugins": [trainer.precision_plugin, environments.LightningEnvironment()],
        "max_epochs": trainer.max_epochs if trainer.max_epochs == -1 else max(1, trainer.max_epochs or 1),
        "max_steps": trainer.max_steps if trainer.max_steps == -1 else max(LOOP_STEPS, trainer.max_steps),
        "accumulate_grad_batches": micro,
        "gradient_clip_val": trainer.gradient_clip_val,
        "gradient_clip_algorithm": trainer.gradient_clip_algorithm,
        "detect_anomaly": trainer._detect_anomaly,  # has no public name; it keeps a traceback for each operator
        "inference_mode": trainer.validate_loop.inference_mode,
        "logger": [silent() for _ in trainer.loggers] or False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
        "log_every_n_steps": trainer.log_every_n_steps,
        "default_root_dir": folder,
    }


class Callbacks:
    """For the user's callbacks, others of their classes to look at, whose hooks do nothing."""

    def __init__(self, pl: Any, trainer: Any, folder: str) -> None:
        self._folder = folder
        self._hooks = [name for name in vars(pl.Callback) if name in ("setup", "teardown") or name.startswith("on_")]
        # Out of the sight of what keeps the state of all that a step reaches: trials have no part in it.
        self._trainer = weakref.ref(trainer)
        self.kinds: set[type] = set()

    def of_trainer(self) -> list[Any]:
        """For those of the user's Trainer."""
        trainer: Any = self._trainer()
        return self.of(trainer.callbacks)

    def of(self, callbacks: Any) -> list[Any]:
        """Each as it is now, in an object of its own."""
        return [self._silent(one) for one in (callbacks if isinstance(callbacks, Iterable) else [callbacks])]

    def _silent(self, callback: Any) -> Any:
        self.kinds.add(type(callback))
        silent = copy.copy(callback)
        now = vars(silent)
        now.update({name: copy.copy(value) for name, value in now.items() if type(value) in _CONTAINERS})
        now.update(dict.fromkeys(self._hooks, _nothing))
        # A ModelCheckpoint finds its own when it is set up; what lies in that of an OnExceptionCheckpoint is resumed from.
        now.update({"dirpath": self._folder} if "dirpath" in now else {})
        return silent


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """The user's objects, and the Trainer of a trial."""

    pl: Any  # the package
    module: Any  # as it was passed, maybe compiled
    own: Any  # the LightningModule itself
    datamodule: Any
    arguments: Mapping[str, Any]  # of a trial's Trainer
    callbacks: Callbacks
    micro: int  # batches for one optimizer step
    batch_size: BatchSize
    sources: Mapping[str, Source]  # of the loaders, by TRAIN and EVAL
    generators: Generators  # given back when the probe ends; those of the loaders are added
    orders: dict[str, dict[int, Order]] = field(default_factory=dict)  # of the examples, by the place of the loader
    own_sizes: dict[str, set[int]] = field(default_factory=dict)  # of loaders that do not follow

    def look(self, size: int, meet: Callable[[str, Any], None]) -> None:
        """Prepare and set up, ask for the loaders of that batch size, and train nothing."""

        def all_met() -> Any:
            for name, source in self.sources.items():
                loaders = source.give()
                self.generators.add(flat(loaders))
                meet(name, loaders)
            return []

        self._fit(size, {TRAIN: all_met}, live=("prepare_data", "setup"), **_NO_STEPS)

    def end(self, size: int) -> None:
        """Let the hooks called ``teardown`` have their turn, once."""
        self._fit(size, {TRAIN: list}, live=("teardown",), **_NO_STEPS)

    def train(self, size: int) -> None:
        """Two optimizer steps on batches of one size.

        Where training validates, hooks and schedulers may want its metrics, so it does, on the smallest of batches.
        """
        self._run(size, steps=LOOP_STEPS, eval_batches=int(EVAL in self.sources), eval_most=SMALL_EVAL)

    def evaluate(self, size: int) -> None:
        """One optimizer step, and validation beside the optimizer state that it leaves (Lightning drops gradients before)."""
        self._run(size, steps=1, eval_batches=EVAL_BATCHES)

    def _run(self, size: int, *, steps: int, eval_batches: int, eval_most: int | None = None) -> None:
        seen = _Seen(wanted=steps * self.micro, steps=steps, manual=not self.own.automatic_optimization)
        given = {TRAIN: self._batches(TRAIN, size, seen.most), EVAL: self._batches(EVAL, size, EVAL_BATCHES, eval_most)}
        loaders = {name: lambda name=name: each(given[name].of, self.sources[name].give()) for name in self.sources}
        # Of a class of its own: one that the module configures takes the place of those of its class.
        kind = type("Watch", (self.pl.callbacks.LambdaCallback,), {})
        watch = kind(on_train_batch_end=seen.trained, on_validation_batch_end=seen.evaluated)
        self._fit(size, loaders, watch=[watch], limit_val_batches=eval_batches)
        if seen.batches < seen.wanted:
            raise NotRunError(
                f"at batch {size} Lightning ran {seen.batches} training batches of the {seen.wanted} that make a trial: "
                "does the module stop the Trainer, raise StopIteration, or skip batches in on_train_batch_start?"
            )
        if not given[TRAIN].followed:
            raise NotRunError(unfollowed(self.batch_size, size, given[TRAIN].own_sizes))
        if eval_batches and not seen.eval_batches:
            raise NotRunError(f"at batch {size} Lightning ran no validation batch: does val_dataloader() give any?")
        for name, batches in given.items():
            self.own_sizes.setdefault(name, set()).update(batches.own_sizes)

    def _batches(self, name: str, size: int, least: int, most: int | None = None) -> Batches:
        # Validation loaders that were handed in keep the size that they will have in training.
        handed_in = name == TRAIN and self.sources[name].holder is None
        return Batches(size=size, least=least, orders=self.orders.get(name, {}), most=most, handed_in=handed_in)

    def _fit(
        self,
        size: int,
        loaders: Mapping[str, Callable[[], Any]],
        *,
        live: tuple[str, ...] = (),
        watch: Sequence[Any] = (),
        **settings: Any,
    ) -> None:
        with ExitStack() as stack:
            stack.enter_context(ctrl_c_as_it_was())
            stack.enter_context(self.batch_size.at(size))
            for holder, functions in self._replacements(loaders, live):
                stack.enter_context(replaced(holder, functions))
            trainer = self.pl.Trainer(**{**self.arguments, **settings})
            try:
                trainer.callbacks = [*self.callbacks.of_trainer(), *watch]
                trainer.save_checkpoint = _nothing
                handed_in = {
                    argument: loaders[name]()
                    for name, argument in DATA_LOADERS.items()
                    if name in loaders and self.sources[name].holder is None
                }
                trainer.fit(self.module, **(handed_in if self.datamodule is None else {"datamodule": self.datamodule}))
            except SystemExit as ended:
                # Lightning answers Ctrl-C by leaving the process; here it is the caller's to handle.
                if isinstance(ended.__context__, KeyboardInterrupt):
                    raise KeyboardInterrupt from None
                raise
            finally:
                # A Trainer is in cycles: it would hold its optimizers until garbage is collected.
                trainer.strategy.optimizers, trainer.strategy.lr_scheduler_configs, trainer.callbacks = [], [], []
                self.own.trainer = None
                if self.datamodule is not None:
                    self.datamodule.trainer = None

    def _replacements(
        self, loaders: Mapping[str, Callable[[], Any]], live: tuple[str, ...]
    ) -> Iterator[tuple[Any, dict[str, Callable[..., Any]]]]:
        """What runs once for a training runs once for a probe."""
        once = {name: _nothing for name in _ONCE if name not in live}
        configure, callbacks = self.own.configure_optimizers, self.own.configure_callbacks

        def configure_optimizers() -> Any:
            """With automatic optimization, None would be trained with an optimizer that does nothing."""
            made = configure()
            if made is None and self.own.automatic_optimization:
                raise NotRunError(NO_OPTIMIZER)
            return made

        # A scheduler cannot be made for no steps.
        own = {"configure_optimizers": _nothing if live else configure_optimizers}
        yield self.own, {**once, **own, "configure_callbacks": lambda: self.callbacks.of(callbacks())}
        if self.datamodule is not None:
            yield self.datamodule, once
        for name, give in loaders.items():
            if self.sources[name].holder is not None:
                # Lightning looks for the code of a hook to see that it is not its own: only a function has some.
                yield self.sources[name].holder, {name: lambda give=give: give()}


@dataclass(slots=True, kw_only=True)
class _Seen:
    """Counts the batches of one fit, and ends it; called as hooks of a callback."""

    wanted: int
    steps: int
    manual: bool
    batches: int = 0
    eval_batches: int = 0

    @property
    def most(self) -> int:
        """With manual optimization only the module knows how many batches make a step."""
        return max(self.wanted, MANUAL_BATCHES) if self.manual else self.wanted

    def trained(self, trainer: Any, *_: Any) -> None:
        self.batches += 1
        if self.batches >= self.wanted and (trainer.global_step >= self.steps or self.batches >= self.most):
            trainer.should_stop = True

    def evaluated(self, *_: Any) -> None:
        self.eval_batches += 1


def unfollowed(batch_size: BatchSize, size: int, own_sizes: set[int]) -> str:
    """What to say of train loaders that do not have the size that the attribute says."""
    return (
        f"train_dataloader() made batches of {min(own_sizes, default=None)} where {batch_size.name}={size} was set: it does "
        f"not read that attribute. Write DataLoader(..., batch_size=self.{batch_size.name}), or pass batch_size_name=, the "
        "name of the attribute that it reads"
    )


def _nothing(*args: object, **kwargs: object) -> None:
    return None
