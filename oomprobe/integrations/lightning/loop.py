"""One call of a step: Lightning's own fit, of a Trainer that nobody hears of, for two optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from oomprobe.errors import InvalidArgumentError, NotRunError
from oomprobe.integrations.framework import LOOP_STEPS
from oomprobe.integrations.generators import Generators
from oomprobe.integrations.lightning.batch_size import BatchSize
from oomprobe.integrations.lightning.loaders import Batches, each, flat
from oomprobe.integrations.lightning.quiet import ctrl_c_as_it_was
from oomprobe.integrations.lightning.sources import EVAL, TRAIN, Source
from oomprobe.integrations.lightning.standins import StandIns, lacking
from oomprobe.integrations.lightning.undone import replaced
from oomprobe.integrations.worst_case import Order

EVAL_BATCHES = 2
SMALL_EVAL = 2  # examples: of one, what squeezes its tensors breaks that never sees one in training
MANUAL_BATCHES = 64  # in which a module with manual optimization must have stepped twice
NO_OPTIMIZER = (
    "configure_optimizers() returned no optimizer, so this module does not train, and memory for it is not what training "
    "takes: return one, or probe what the module does by oomprobe.find_max_batch(module, step_fn)"
)
_NO_STEPS: dict[str, Any] = {"max_steps": 0, "limit_val_batches": 0}
_ONCE = ("prepare_data", "setup", "teardown")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """The user's objects, and the Trainer of a trial.

    Attributes:
        pl: The package.
        module: As it was passed, maybe compiled.
        own: The LightningModule itself.
        datamodule: Or None.
        arguments: Of a trial's Trainer.
        stand_ins: For the user's loggers and callbacks.
        micro: Batches for one optimizer step.
        batch_size: The attribute.
        sources: Of the loaders, by `TRAIN` and `EVAL`.
        generators: Given back when the probe ends; those of the loaders are added.
        orders: Of the examples, by the same and the place of the loader.
        own_sizes: Filled with batch sizes of validation loaders that do not follow.
    """

    pl: Any
    module: Any
    own: Any
    datamodule: Any
    arguments: Mapping[str, Any]
    stand_ins: StandIns
    micro: int
    batch_size: BatchSize
    sources: Mapping[str, Source]
    generators: Generators
    orders: dict[str, dict[int, Order]] = field(default_factory=dict)
    own_sizes: dict[str, set[int]] = field(default_factory=dict)

    def look(self, size: int, meet: Callable[[str, Any], None]) -> None:
        """Prepare and set up, ask for the loaders of that batch size, and train nothing."""

        def met(name: str) -> Any:
            loaders = self.sources[name].give()
            self.generators.add(flat(loaders))
            meet(name, loaders)
            return each(lambda place, loader: [], loaders)

        def all_met() -> Any:
            for name in self.sources:
                met(name)
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
        self._check(size, seen, given, evaluating=bool(eval_batches))

    def _batches(self, name: str, size: int, least: int, most: int | None = None) -> Batches:
        orders = self.orders.get(name, {})
        # Validation loaders that were handed in keep the size that they will have in training.
        handed_in = name == TRAIN and self.sources[name].holder is None
        return Batches(size=size, least=least, orders=orders, most=most, handed_in=handed_in)

    def _check(self, size: int, seen: _Seen, given: Mapping[str, Batches], *, evaluating: bool) -> None:
        if seen.batches < seen.wanted:
            raise NotRunError(
                f"at batch {size} Lightning ran {seen.batches} training batches of the {seen.wanted} that make a trial: "
                "does the module stop the Trainer, raise StopIteration, or skip batches in on_train_batch_start?"
            )
        if not given[TRAIN].followed:
            raise NotRunError(unfollowed(self.batch_size, size, given[TRAIN].own_sizes))
        if evaluating and not seen.eval_batches:
            raise NotRunError(f"at batch {size} Lightning ran no validation batch: does val_dataloader() give any?")
        for name, batches in given.items():
            self.own_sizes.setdefault(name, set()).update(batches.own_sizes)

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
                self.stand_ins.give(trainer, list(watch))
                self._call(trainer, loaders)
            finally:
                self._let_go(trainer)

    def _call(self, trainer: Any, loaders: Mapping[str, Callable[[], Any]]) -> None:
        handed_in = {
            argument: loaders[name]()
            for name, argument in ((TRAIN, "train_dataloaders"), (EVAL, "val_dataloaders"))
            if name in loaders and self.sources[name].holder is None
        }
        given = handed_in if self.datamodule is None else {"datamodule": self.datamodule}
        try:
            trainer.fit(self.module, **given)
        except SystemExit as ended:
            # Lightning answers Ctrl-C by leaving the process; here it is the caller's to handle.
            if isinstance(ended.__context__, KeyboardInterrupt):
                raise KeyboardInterrupt from None
            raise
        except AttributeError as error:
            if said := lacking(error, trainer):
                raise InvalidArgumentError(said) from error
            raise

    def _replacements(
        self, loaders: Mapping[str, Callable[[], Any]], live: tuple[str, ...]
    ) -> Iterator[tuple[Any, dict[str, Callable[..., Any]]]]:
        """What runs once for a training runs once for a probe."""
        once = {name: _nothing for name in _ONCE if name not in live}
        # A scheduler cannot be made for no steps.
        configure = _nothing if live else self._configured(self.own.configure_optimizers)
        callbacks = self._stood_in(self.own.configure_callbacks)
        yield self.own, {**once, "configure_optimizers": configure, "configure_callbacks": callbacks}
        if self.datamodule is not None:
            yield self.datamodule, once
        for name, give in loaders.items():
            if self.sources[name].holder is not None:
                yield self.sources[name].holder, {name: _as_method(give)}

    def _stood_in(self, configure: Callable[[], Any]) -> Callable[[], list[Any]]:
        return lambda: self.stand_ins.callbacks(configure())

    def _configured(self, configure: Callable[[], Any]) -> Callable[[], Any]:
        """With automatic optimization, None would be trained with an optimizer that does nothing."""

        def configure_optimizers() -> Any:
            made = configure()
            if made is None and self.own.automatic_optimization:
                raise InvalidArgumentError(NO_OPTIMIZER)
            return made

        return configure_optimizers

    def _let_go(self, trainer: Any) -> None:
        """A Trainer is in cycles: without this it would hold its optimizers until garbage is collected."""
        trainer.strategy.optimizers = []
        trainer.strategy.lr_scheduler_configs = []
        trainer.callbacks = []
        self.own.trainer = None
        if self.datamodule is not None:
            self.datamodule.trainer = None


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
    own = min(own_sizes, default=None)
    others = batch_size.names_of(own)
    named = f", or pass batch_size_name={others[0]!r}, which is {own}" if others else ""
    return (
        f"train_dataloader() made batches of {own} where {batch_size.name}={size} was set: it does not read that "
        f"attribute. Write DataLoader(..., batch_size=self.{batch_size.name}){named}"
    )


def _nothing(*args: object, **kwargs: object) -> None:
    return None


def _as_method(give: Callable[[], Any]) -> Callable[..., Any]:
    """Lightning looks for the code of a hook to see that it is not its own: only a function has some."""

    def hook() -> Any:
        return give()

    return hook
