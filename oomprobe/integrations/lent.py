"""A copy of a transformers Trainer, to be trained in its place."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch

from oomprobe.integrations.framework import framework
from oomprobe.integrations.generators import generators_kept
from oomprobe.integrations.loops import LOOP_STEPS
from oomprobe.scope import scope

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


@scope
def lent(trainer: Any, *, simulated: bool) -> Iterator[Any]:
    """A copy of the Trainer; what the two share is put back.

    Args:
        trainer: A `transformers.Trainer`, set up.
        simulated: Whether it is to train on a card that is not there.
    """
    config = getattr(trainer.model, "config", None)
    objects = [one for one in (config, getattr(trainer.model, "generation_config", None)) if one is not None]
    before = [(one, dict(vars(one))) for one in objects]  # shallow: parts of the model hold the same sub-configs
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


def shared_state(shared: Any) -> dict[str, Any]:
    """What all accelerators of a process share; a loop that failed leaves its loader in it."""
    return {name: list(value) if isinstance(value, list) else value for name, value in vars(shared).items()}


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
        copied.compute_metrics = _no_metrics
    return copied


def callbacks() -> Any:
    """The module of transformers that has its own callbacks."""
    return framework("transformers.trainer_callback", minimum="5.0", extra="transformers")


def _no_metrics(*_: object, **__: object) -> dict[str, float]:
    return {}


def stateful(trainer: Any) -> list[Any]:
    """The optimizer and the scheduler it was given, or trained with before."""
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # without accelerate's wrapper
    scheduler = getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)
    return [one for one in (optimizer, scheduler) if one is not None]
