"""The training loop of a transformers Trainer, as a step: run on a copy of the Trainer, on its longest examples."""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from oomprobe.errors import Caller, NotRunError
from oomprobe.integrations.accelerate import unchanged
from oomprobe.integrations.framework import LOOP_STEPS
from oomprobe.integrations.generators import generators_kept
from oomprobe.integrations.worst_case import Longest
from oomprobe.options import Step

# Whatever a training run writes, reports, evaluates or decides by itself.
QUIET: dict[str, Any] = {
    "max_steps": LOOP_STEPS,
    "logging_strategy": "no",
    "eval_strategy": "no",
    "save_strategy": "no",
    "eval_on_start": False,
    "load_best_model_at_end": False,
    "push_to_hub": False,
    "report_to": [],
    "disable_tqdm": True,
    "auto_find_batch_size": False,
    "train_sampling_strategy": "sequential",
    "dataloader_drop_last": False,
    "dataloader_num_workers": 0,
    "dataloader_persistent_workers": False,
    "dataloader_prefetch_factor": None,
    "skip_memory_metrics": True,
}


@contextmanager
def lent(trainer: Any, *, simulated: bool) -> Iterator[Any]:
    """A copy of the Trainer, on a card that is not there if `simulated`; what the two share is put back."""
    configs = (getattr(trainer.model, name, None) for name in ("config", "generation_config"))
    before = [
        (one, dict(vars(one))) for one in configs if one is not None
    ]  # shallow: sub-configs are the modules', too
    patched = [(one, vars(one).get("step")) for one in stateful(trainer) if isinstance(one, torch.optim.Optimizer)]
    try:
        with generators_kept(sources_of(trainer)):
            yield _copied(trainer, simulated)
    finally:
        for one, attributes in before:
            vars(one).clear()
            vars(one).update(attributes)
        for optimizer, step in patched:  # a scaler that failed in the midst of a step leaves its own there
            vars(optimizer).pop("step", None)
            vars(optimizer).update({} if step is None else {"step": step})


def sources_of(trainer: Any) -> list[Any]:
    """Whatever trains or makes its batches, and may draw random numbers as it does."""
    evaluated = trainer.eval_dataset.values() if isinstance(trainer.eval_dataset, dict) else [trainer.eval_dataset]
    modules = trainer.model.modules() if isinstance(trainer.model, torch.nn.Module) else ()
    return [trainer, *modules, trainer.data_collator, trainer.train_dataset, *evaluated]


def stateful(trainer: Any) -> list[Any]:
    """The optimizer and the scheduler it was given, or trained with before."""
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # without accelerate's wrapper
    scheduler = getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)
    return [one for one in (optimizer, scheduler) if one is not None]


def callbacks() -> Any:
    """The module of transformers that has its own callbacks."""
    return importlib.import_module("transformers.trainer_callback")


def _copied(trainer: Any, simulated: bool) -> Any:
    """Its attributes are its own, what they refer to is the Trainer's: but for all that a loop changes in place."""
    copied = copy.copy(trainer)
    copied.args = copy.copy(trainer.args)
    for name, value in QUIET.items():
        if hasattr(copied.args, name):
            setattr(copied.args, name, value)
    if simulated:
        vars(copied.args)["_setup_devices"] = torch.device("cuda", 0)  # where args.device looks, once it has been asked
    copied.args.accelerator_config = copy.deepcopy(trainer.args.accelerator_config)
    kwargs = getattr(copied.args.accelerator_config, "gradient_accumulation_kwargs", None)
    if kwargs:  # the Trainer itself put it there, and refuses to find it
        kwargs.pop("num_steps", None)
    copied.create_accelerator_and_postprocess()
    # A sampler of the Trainer's own knows another data set; here the order is ours.
    copied._get_train_sampler = lambda *_, **__: torch.utils.data.SequentialSampler(copied.train_dataset)
    if hasattr(copied, "_memory_tracker"):  # made for the argument that QUIET overrules; it starts threads
        copied._memory_tracker = type(copied._memory_tracker)(True)
    copied.model_init, copied.model_wrapped = None, trainer.model
    copied.control = type(trainer.control)()
    copied.callback_handler = copy.copy(trainer.callback_handler)
    copied.callback_handler.callbacks = [callbacks().DefaultFlowCallback()]
    if trainer.compute_metrics is not None:  # predictions are gathered for it as ever, and it does not hear of trials
        copied.compute_metrics = lambda *_, **__: {}
    return copied


class Loop:
    """The loop of a copied Trainer; `callers` says what the user types instead, by the name of the step."""

    def __init__(self, trainer: Any, longest: Longest, evaluated: list[Longest], callers: Mapping[str, Caller]) -> None:
        self._trainer, self._longest, self._evaluated, self._callers = trainer, longest, evaluated, callers
        self._collate, self._collated = trainer.data_collator, [0]
        trainer.data_collator = self._counted

    def steps(self, accumulation: int) -> dict[str, Step]:
        """The step, and the evaluation where there is one, by name."""

        def train(model: torch.nn.Module, batch_size: int) -> None:
            self._train(batch_size, accumulation)

        def evaluate(model: torch.nn.Module, batch_size: int) -> None:
            for longest in self._evaluated:
                self._evaluate(longest)

        steps = {"train": Step(run=train, caller=self._callers["train"])}
        if self._evaluated:  # it has no optimizer to wait for
            steps["eval"] = Step(run=evaluate, caller=self._callers["eval"], max_calls=1)
        return steps

    def _evaluate(self, longest: Longest) -> None:
        """As in the midst of training: outside it, full_eval would cast the model."""
        trainer = self._trainer
        own = trainer.args.per_device_eval_batch_size
        size = own if longest.total is None else min(own, longest.total)
        batches = longest.batches(size, max(LOOP_STEPS, longest.order.batches_of_leaders(size)))
        trainer.is_in_train, trainer.args.per_device_eval_batch_size = True, size
        try:
            self._run(size, lambda: trainer.evaluate(batches))
        finally:
            trainer.is_in_train, trainer.args.per_device_eval_batch_size = False, own

    def _train(self, batch_size: int, accumulation: int) -> None:
        trainer = self._trainer
        trainer.args.per_device_train_batch_size = batch_size
        trainer.args.gradient_accumulation_steps = accumulation
        trainer._train_batch_size = batch_size  # what its loader is made with: the argument is read once, at the start
        steps = max(LOOP_STEPS, math.ceil(self._longest.order.batches_of_leaders(batch_size) / accumulation))
        trainer.args.max_steps = steps
        trainer.train_dataset = self._longest.batches(batch_size, accumulation * steps)
        self._run(batch_size, trainer.train)
        if trainer.state.global_step != steps:
            raise NotRunError(
                f"the Trainer's loop made {trainer.state.global_step} optimizer steps where {steps} were asked for, so "
                f"batch {batch_size} was not really run. Something of the Trainer's own ends it early"
            )

    def _run(self, batch_size: int, loop: Callable[[], object]) -> None:
        self._collated = []
        try:
            with unchanged():  # a loop that failed leaves its loader in what all accelerators share
                loop()
        finally:
            noise = vars(self._trainer).pop("neftune_hook_handle", None)
            if noise is not None:  # a loop that failed leaves its hook, and the next would add another
                noise.remove()
        if set(self._collated) != {batch_size}:
            raise NotRunError(
                f"batches of {sorted(set(self._collated)) or 'no'} examples were collated where {batch_size} were asked for, "
                "so that size was not really run. The Trainer's get_train_dataloader or get_eval_dataloader makes batches of "
                "its own: use data_collator and _train_batch_size there, as the Trainer's own does"
            )

    def _counted(self, examples: Any) -> Any:
        self._collated.append(len(examples))
        return self._collate(examples)
