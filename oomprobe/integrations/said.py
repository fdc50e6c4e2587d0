"""What is said of a probe by the loop of a transformers Trainer: what its trials were, and what they leave out."""

from __future__ import annotations

from typing import Any

from oomprobe.errors import Caller
from oomprobe.integrations.lent import callbacks
from oomprobe.integrations.longest import Longest
from oomprobe.integrations.loops import LOOP_STEPS
from oomprobe.result import ProbeResult


def caller_of(trainer: Any, name: str) -> Caller:
    """How its user runs the step of that name, ``"train"`` or ``"eval"``, without a probe."""
    if name == "eval":
        alone = (
            f"run trainer.evaluate(), which is at per_device_eval_batch_size={trainer.args.per_device_eval_batch_size}"
        )
    else:
        alone = "make the Trainer with per_device_train_batch_size={batch_size} and run trainer.train()"
    missed = uncalled(trainer)
    more = "A trial begins with the longest examples, which a Trainer may meet late."
    return Caller(alone=alone, more=more + (f" Its callbacks ({', '.join(missed)}) are not called." if missed else ""))


def uncalled(trainer: Any) -> list[str]:
    """Names of its callbacks that do more than steer or show: trials call none."""
    own = callbacks()
    known = (own.DefaultFlowCallback, own.ProgressCallback, own.PrinterCallback)
    return [type(one).__name__ for one in trainer.callback_handler.callbacks if not isinstance(one, known)]


def notes_of(trainer: Any, accumulation: int, longest: Longest, result: ProbeResult) -> list[str]:
    """What a reader of the result should know of its trials."""
    notes = [f"a trial is the Trainer's own loop for {LOOP_STEPS} optimizer steps a call, on its longest examples"]
    if trainer.args.gradient_accumulation_steps > accumulation:
        notes.append(
            f"the search accumulated {accumulation} micro-batches, not {trainer.args.gradient_accumulation_steps}: the memory "
            "of a step is that of its second, but for inputs that are on the device together"
        )
    if result.limited_by == "max_batch" and result.batch_size == longest.total:
        notes.append(f"the data set ends the search: it has {longest.total} examples")
    return notes


def _keeps_predictions(trainer: Any) -> bool:
    args = trainer.args
    dropped = args.prediction_loss_only or args.batch_eval_metrics
    return trainer.compute_metrics is not None and args.eval_accumulation_steps is None and not dropped


def not_covered(trainer: Any, *, evaluates: bool) -> list[str]:
    """What training does, and no trial did."""
    missed = uncalled(trainer)
    told = [f"callbacks of the Trainer, which were not called: {', '.join(missed)}"] if missed else []
    if trainer.args.dataloader_num_workers:
        told.append("workers of data loaders: batches were made in this process")
    if evaluates and _keeps_predictions(trainer):
        told.append(
            "the predictions of the whole evaluation set, which stay on the device until its end: set "
            "eval_accumulation_steps to have them moved"
        )
    return told
