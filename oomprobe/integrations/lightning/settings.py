"""What a trial's Trainer takes over from the user's, and which Trainers cannot be probed."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from typing import Any

from oomprobe.errors import InvalidArgumentError
from oomprobe.integrations.framework import LOOP_STEPS, framework, refuse_several

MINIMUM = "2.5"
MICRO_BATCHES = 2  # during the second, gradients are there already; further ones are like it


def lightning_of(trainer: object) -> Any:
    """The package that the Trainer is of: one of two, with the same classes under different names.

    Raises:
        FrameworkError: it is too old.
        InvalidArgumentError: this is no Trainer.
    """
    roots = {kind.__module__.partition(".")[0] for kind in type(trainer).__mro__}
    name = "pytorch_lightning" if "pytorch_lightning" in roots else "lightning.pytorch"
    pl = framework(name, minimum=MINIMUM, extra="lightning")
    if not isinstance(trainer, pl.Trainer):
        raise InvalidArgumentError(f"trainer must be a {name}.Trainer, not {type(trainer).__name__}")
    return pl


def check_trainer(pl: Any, trainer: Any) -> None:
    """Refuse what trains on several ranks, or not at all.

    Raises:
        InvalidArgumentError: so it is.
    """
    strategy = type(trainer.strategy).__name__
    refuse_several(f"Trainer(strategy={strategy})", trainer.world_size)
    if not isinstance(trainer.strategy, pl.strategies.SingleDeviceStrategy):
        raise InvalidArgumentError(
            f"Trainer(strategy={strategy}) adds buffers of its own even on one rank, which would not be part of the "
            "trials. Probe with a Trainer(devices=1, strategy='auto'), and keep room for what the strategy adds (DDP: "
            "buckets as large as the gradients), by a smaller memory_fraction"
        )
    if trainer.fast_dev_run:
        raise InvalidArgumentError(
            "Trainer(fast_dev_run=...) runs a batch or so to look for bugs, and has no batch size to find: remove it"
        )
    if trainer.limit_train_batches == 0:
        raise InvalidArgumentError("Trainer(limit_train_batches=0) does not train: there is nothing to probe")


def micro_batches(trainer: Any, module: Any, *, planned: bool) -> int:
    """Batches for one optimizer step of a trial; with manual optimization that is the module's own business."""
    if not module.automatic_optimization:
        return 1
    return MICRO_BATCHES if planned or trainer.accumulate_grad_batches > 1 else 1


def trial_arguments(pl: Any, trainer: Any, micro: int, loggers: list[Any]) -> Mapping[str, Any]:
    """Arguments of a quiet Trainer that takes the same steps as the user's.

    The lengths (epochs, steps) are the user's own, since schedulers are made for them; a trial stops itself.
    """
    index = trainer.strategy.root_device.index
    return {
        "accelerator": trainer.accelerator,
        "devices": 1 if index is None else [index],
        # Otherwise it would look for a cluster, and take over the signals of a job that may be requeued.
        "plugins": [trainer.precision_plugin, _environment(pl)],
        "max_epochs": trainer.max_epochs if trainer.max_epochs == -1 else max(1, trainer.max_epochs or 1),
        "max_steps": trainer.max_steps if trainer.max_steps == -1 else max(LOOP_STEPS, trainer.max_steps),
        "accumulate_grad_batches": micro,
        "gradient_clip_val": trainer.gradient_clip_val,
        "gradient_clip_algorithm": trainer.gradient_clip_algorithm,
        "detect_anomaly": trainer._detect_anomaly,  # has no public name; it keeps a traceback for each operator
        "inference_mode": trainer.validate_loop.inference_mode,
        "logger": loggers or False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
        "log_every_n_steps": trainer.log_every_n_steps,
        "default_root_dir": trainer.default_root_dir,
    }


def _environment(pl: Any) -> Any:
    """One process that no cluster started."""
    fabric = "lightning_fabric" if pl.__name__ == "pytorch_lightning" else "lightning.fabric"
    return importlib.import_module(f"{fabric}.plugins.environments").LightningEnvironment()


def unheard(pl: Any, callbacks: Iterable[type]) -> list[str]:
    """Names of those of the user's callbacks, none of which is called, that do more than show or save."""
    shown = ("ProgressBar", "ModelSummary", "Checkpoint", "LearningRateMonitor", "DeviceStatsMonitor")
    kinds = tuple(getattr(pl.callbacks, name) for name in shown)
    return sorted({one.__name__ for one in callbacks if not issubclass(one, kinds)})
