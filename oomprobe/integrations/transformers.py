"""transformers: the largest per-device batch of a `Trainer`, found by running its own training loop."""

from __future__ import annotations

import copy
import importlib
import math
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

import torch

from oomprobe.errors import (
    Caller,
    InvalidArgumentError,
    NothingFitsError,
    NotRunError,
    TimeLimitError,
    check_size,
)
from oomprobe.explaining.monitor import EVALUATION, TRAINING
from oomprobe.integrations import framework
from oomprobe.integrations.accelerate import unchanged
from oomprobe.probe import check
from oomprobe.probing.order import SearchOptions
from oomprobe.probing.summary import LAST_BATCH
from oomprobe.records.notes import remark
from oomprobe.records.options import Step, is_simulated
from oomprobe.records.plan import PlanEntry, plan
from oomprobe.results.log import log_notes
from oomprobe.results.result import ProbeResult
from oomprobe.runners.ranks_here import refuse_ranks
from oomprobe.worst_case import LargestFirst, largest_first

SEARCH_ACCUMULATION = (
    2  # micro-batches: the second runs with the gradients of the first; later ones need no more
)
PLAN_ACCUMULATION = 4  # the same, of the split that is written back
EVAL = "eval"  # the name of the step that evaluates
# Disable what training writes, reports, evaluates or decides by itself.
QUIET: dict[str, Any] = {
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
}


def find_max_batch(
    trainer: Any,
    *,
    write_back: bool = True,
    scan_s: float = 30.0,
    **options: Unpack[SearchOptions],
) -> ProbeResult:
    """Find the largest ``per_device_train_batch_size`` with which a `transformers.Trainer` trains.

    Each call of the step is the Trainer's own loop for two optimizer steps: its optimizer, collator, precision, loss,
    gradient checkpointing and accumulation, on a batch of the longest examples of its data set. If evaluation is on, each
    trial evaluates too, at the Trainer's own evaluation batch size. A copy of the Trainer is trained. The model, the
    optimizer, the scheduler and random number generators, including those of the collator and the data sets, are restored:
    training afterwards is bit-equal to training without a probe. Not restored: lists and dicts that your own Trainer class
    changes in place (pass objects with ``state_dict`` as ``preserve=``).

    Args:
        trainer: Set up as for ``trainer.train()``.
        write_back: Set ``per_device_train_batch_size`` and ``gradient_accumulation_steps`` in ``trainer.args``: the split
            with the fewest accumulation steps that keeps the global batch, after one confirmed trial of it.
        scan_s: Seconds to scan each data set for its longest examples.
        options: Those of `oomprobe.find_max_batch`; steps are rounded up to whole loops of two, and no batch is larger than the
            data set. `global_batch` is in samples per optimizer step; None: the product of the two arguments above.

    Returns:
        A result. Its `batch_size` is the largest micro-batch that fits; its notes say what was written back.

    Raises:
        FrameworkError: transformers is not installed, or too old.
        InvalidArgumentError: an argument or the Trainer's set-up cannot be probed.
        OomProbeError: as for `oomprobe.find_max_batch`.

    Examples:
        >>> def train(trainer):
        ...     find_max_batch(trainer, global_batch=256)
        ...     trainer.train()
    """
    framework.steps_to_calls(options)
    global_batch = options.pop("global_batch", None)
    if global_batch is not None:
        check_size("global_batch", global_batch)
    args = _check_trainer(trainer)
    refuse_ranks(
        "torchrun, or accelerate launch, trains on",
        args.world_size,
        "transformers.model_and_step(trainer)",
    )
    home, device = next(trainer.model.parameters()).device, options.get("device")
    moves = device is None and home.type == "cpu" and args.device.type != "cpu"
    simulated = is_simulated(device)
    with (
        framework.state_kept(_shared(trainer)),
        framework.placed(trainer.model, args.device) if moves else nullcontext(),
    ):
        loop = _Loop(trainer, scan_s, simulated=simulated)
        try:
            result = framework.probe(loop, options)
        except NothingFitsError as error:
            if error.trials and error.trials[-1].step_name == EVAL:
                size = args.per_device_eval_batch_size
                error.add_note(
                    f"evaluation is what does not fit, at per_device_eval_batch_size={size}: make that smaller"
                )
            raise
        split = None
        if write_back:
            split, text = _split_that_runs(loop, global_batch, result, options)
            log_notes([remark(text)])
            result = result._with_notes(after=[remark(text)])
    if split is not None:
        result = replace(result, written=f"{split.micro_batch} x {split.accumulation_steps}")
        args.per_device_train_batch_size, args.gradient_accumulation_steps = (
            split.micro_batch,
            split.accumulation_steps,
        )
        trainer._train_batch_size = (
            args.train_batch_size
        )  # the Trainer copies it when it is created
    return result


def model_and_step(
    trainer: Any, *, scan_s: float = 30.0
) -> tuple[torch.nn.Module, dict[str, Step]]:
    """Return what a target's ``build()`` returns: the model of a `transformers.Trainer` and its training loop as a step.

    For a Trainer on several ranks with DDP, which ``oomprobe run train.py:build --nproc-per-node 8`` starts. A call of the step is
    the Trainer's own loop for two optimizer steps, and if evaluation is on an evaluation too, as in `find_max_batch`; each rank's
    batches hold the longest examples of its data set. Nothing is restored: the process of a rank ends with the probe.

    Args:
        trainer: Set up as for ``trainer.train()``. Its own batch size is not used.
        scan_s: Seconds to scan each data set for its longest examples.

    Returns:
        The model, on its device, and the steps by name.

    Raises:
        FrameworkError: transformers is not installed, or too old.
        InvalidArgumentError: the Trainer's set-up cannot be probed.

    Examples:
        >>> def build():
        ...     trainer = transformers.Trainer(model=model, args=args, train_dataset=data)
        ...     return model_and_step(trainer)
    """
    args = _check_trainer(trainer)
    trainer.model.to(args.device)  # some settings leave it on the CPU until it trains
    loop = _Loop(trainer, scan_s)
    return loop.model, loop.steps()


class PeakMonitorCallback(framework.PeakCallback):
    """Watches the peak of ``trainer.train()`` with an `oomprobe.PeakMonitor`: a ``transformers.TrainerCallback``.

    Args:
        result_or_path: As in `oomprobe.PeakMonitor`.
        batch_size: The micro-batch that is compared; None: the Trainer's ``per_device_train_batch_size``.
        warn: As in `oomprobe.PeakMonitor`.

    Attributes:
        monitor: The `oomprobe.PeakMonitor`.

    Raises:
        FrameworkError: transformers is not installed, or too old.
        InvalidArgumentError: the file cannot be read, or holds no result.

    Examples:
        >>> def train(model, args, data):
        ...     watch = PeakMonitorCallback("probe.json")
        ...     transformers.Trainer(model, args, train_dataset=data, callbacks=[watch]).train()
        ...     return watch.monitor.to_dict()
    """

    @staticmethod
    def kind() -> type:
        return framework.load("transformers", minimum="5.0", extra="transformers").TrainerCallback  # type: ignore[no-any-return]

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self._trains(args.per_device_train_batch_size)

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.monitor.step(TRAINING)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.monitor.seen(EVALUATION)

    def on_evaluate(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.monitor.seen(EVALUATION)

    def on_save(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.monitor.seen("saving a checkpoint")


def _check_trainer(trainer: Any) -> Any:
    """Return the arguments of the Trainer; refuse those that cannot be probed."""
    framework.load("transformers", minimum="5.0", extra="transformers")
    args = getattr(trainer, "args", None)
    if args is None or not hasattr(trainer, "train_dataset"):
        raise InvalidArgumentError(
            f"trainer must be a transformers.Trainer, not {type(trainer).__name__}"
        )
    refuse_ranks(
        f"torch.nn.DataParallel (n_gpu={args.n_gpu}; hide the others by CUDA_VISIBLE_DEVICES=0) trains on",
        args.n_gpu,
    )
    for name in ("deepspeed", "fsdp"):
        if getattr(args, name, None):
            raise InvalidArgumentError(
                f"{name}={getattr(args, name)!r} spreads the model over ranks: probe the command that starts them, "
                "oomprobe run -- accelerate launch ... {batch}; or probe without it, on one device"
            )
    if trainer.train_dataset is None:
        raise InvalidArgumentError(
            "the Trainer has no train_dataset: create it with train_dataset=..."
        )
    return args


def _list_of(datasets: Any) -> list[Any]:
    return list(datasets.values()) if isinstance(datasets, dict) else [datasets]


def _shared(trainer: Any) -> list[Any]:
    """Return the objects that a copy of the Trainer shares with it and that training may change."""
    modules = trainer.model.modules() if isinstance(trainer.model, torch.nn.Module) else ()
    configs = [getattr(trainer.model, name, None) for name in ("config", "generation_config")]
    # Without the wrappers that accelerate adds once the Trainer has trained.
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    scheduler = getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)
    data = [trainer.data_collator, trainer.train_dataset, *_list_of(trainer.eval_dataset)]
    return [trainer, *modules, *configs, optimizer, scheduler, *data]


def _copy_trainer(trainer: Any, *, simulated: bool) -> Any:
    """Return a copy of the Trainer with logging, saving and callbacks disabled."""
    copied = copy.copy(trainer)
    copied.args = copy.copy(trainer.args)
    for name, value in QUIET.items():
        if hasattr(copied.args, name):
            setattr(copied.args, name, value)
    if simulated:
        vars(copied.args)["_setup_devices"] = torch.device(
            "cuda", 0
        )  # the cached property behind args.device
    copied.args.accelerator_config = copy.deepcopy(trainer.args.accelerator_config)
    kwargs = getattr(copied.args.accelerator_config, "gradient_accumulation_kwargs", None)
    if kwargs:  # the Trainer adds it, and raises if it is already there
        kwargs.pop("num_steps", None)
    copied.create_accelerator_and_postprocess()
    # The Trainer's own sampler was made for its whole data set; a trial reads its batches in order.
    copied._get_train_sampler = lambda *_, **__: torch.utils.data.SequentialSampler(
        copied.train_dataset
    )
    copied.model_init, copied.model_wrapped = None, trainer.model
    copied.control = type(trainer.control)()
    copied.callback_handler = copy.copy(trainer.callback_handler)
    copied.callback_handler.callbacks = [
        importlib.import_module("transformers").DefaultFlowCallback()
    ]
    if trainer.compute_metrics is not None:  # predictions are still gathered, as in training
        copied.compute_metrics = lambda *_, **__: {}
    return copied


class _Loop:
    """The training loop of a copied Trainer, on the longest examples: a `Loop` of `framework`."""

    covered: tuple[str, ...] = (LAST_BATCH,)

    def __init__(self, trainer: Any, scan_s: float, *, simulated: bool = False) -> None:
        """Copy the Trainer, and scan its data."""
        self.user, self.model, self.args = trainer, trainer.model, trainer.args
        self.evaluates = self.args.eval_strategy != "no" or self.args.eval_on_start
        self.accumulation = min(self.args.gradient_accumulation_steps, SEARCH_ACCUMULATION)
        datasets = [trainer.train_dataset]
        if self.evaluates:
            datasets += _list_of(trainer.eval_dataset)
        self.trainer = _copy_trainer(trainer, simulated=simulated)
        self.trainer.data_collator = self._collate
        self.longest, *self.evaluated = (largest_first(one, scan_s) for one in datasets)
        self.collated: list[int] = []  # batch sizes of the current call

    @property
    def scanned(self) -> list[tuple[str, LargestFirst]]:
        """The training data, and those of evaluation."""
        return [("data set", one) for one in (self.longest, *self.evaluated)]

    def steps(self, accumulation: int | None = None) -> dict[str, Step]:
        """Return the training step, and the evaluation step if the Trainer evaluates, by name."""
        more = "A trial begins with the longest examples, which training may reach late, and calls none of the callbacks."

        alone = "create the Trainer with per_device_train_batch_size={batch_size} and run trainer.train()"
        caller, count = Caller(alone=alone, more=more), len(self.longest.indices)
        train = partial(self._train, accumulation or self.accumulation)
        steps = {
            "train": Step(
                train,
                is_loop=False,
                caller=caller,
                starts_anew=True,
                is_timed=False,
                max_batch=count,
            )
        }
        if self.evaluated:  # no optimizer to wait for
            size = self.args.per_device_eval_batch_size
            caller = Caller(
                alone=f"run trainer.evaluate() with per_device_eval_batch_size={size}", more=more
            )
            steps[EVAL] = Step(
                self._evaluate,
                is_loop=False,
                caller=caller,
                max_calls=1,
                starts_anew=True,
                is_timed=False,
            )
        return steps

    def notes(self, result: ProbeResult) -> list[str]:
        """Return what a trial runs."""
        notes = [
            f"one step of a trial is the Trainer's loop for {framework.LOOP_STEPS} optimizer steps, on its longest examples"
        ]
        if self.args.gradient_accumulation_steps > self.accumulation:
            notes.append(
                f"the search accumulated {self.accumulation} micro-batches: further ones need no more memory"
            )
        return notes

    def not_covered(self) -> list[str]:
        """Return the callbacks that matter, and predictions that evaluation keeps."""
        args, kinds = self.args, importlib.import_module("transformers.trainer_callback")
        harmless = (
            kinds.DefaultFlowCallback,
            kinds.ProgressCallback,
            kinds.PrinterCallback,
            PeakMonitorCallback,
        )
        missed = framework.skipped_callbacks(self.user.callback_handler.callbacks, harmless)
        drops = (
            args.prediction_loss_only
            or args.batch_eval_metrics
            or args.eval_accumulation_steps is not None
        )
        if self.evaluates and self.user.compute_metrics is not None and not drops:
            missed.append(
                "the predictions of the whole evaluation set, which stay on the device until evaluation ends: set "
                "eval_accumulation_steps to move them to the host earlier"
            )
        return missed

    def _train(self, accumulation: int, model: object, batch_size: int) -> None:
        trainer, args, last = self.trainer, self.trainer.args, self._last_batch(batch_size)
        steps = epoch_steps = framework.LOOP_STEPS
        if last:
            if (
                self.longest.leaders <= batch_size * accumulation
            ):  # one step reads all of the longest
                epoch_steps = 1
            steps = epoch_steps + 2  # that of the last batch, and the first of the next epoch
        args.max_steps, args.gradient_accumulation_steps = steps, accumulation
        args.per_device_train_batch_size = trainer._train_batch_size = (
            batch_size  # the Trainer reads its args once
        )
        count = accumulation * epoch_steps * args.world_size  # each rank reads its share of them
        trainer.train_dataset = self.longest.batches(batch_size, count, last)
        self._run(batch_size, trainer.train, last)
        if trainer.state.global_step != steps:
            raise NotRunError(
                f"at batch {batch_size} the Trainer's loop made {trainer.state.global_step} of {steps} optimizer steps: "
                "check what in your Trainer ends it early"
            )

    def _last_batch(self, batch_size: int) -> int:
        """Return the size of an epoch's smaller last batch, after which training goes on; 0 if there is none.

        With several ranks, accelerate fills it up with examples from the beginning.
        """
        args, count = self.args, len(self.longest.indices)
        if args.world_size > 1 or args.dataloader_drop_last:
            return 0
        epochs = args.num_train_epochs
        if args.max_steps > 0:
            epochs = args.max_steps * batch_size * args.gradient_accumulation_steps / count
        return framework.last_batch(count, batch_size, epochs)

    def _evaluate(self, model: object, batch_size: int) -> None:
        """Evaluate each data set at the Trainer's own batch size."""
        trainer, args = self.trainer, self.trainer.args
        own_size, dataset = args.per_device_eval_batch_size, trainer.eval_dataset
        try:
            for longest in self.evaluated:
                size = min(own_size, len(longest.indices))
                trainer.is_in_train, args.per_device_eval_batch_size = (
                    True,
                    size,
                )  # else full_eval would cast the model
                # As an argument, subclasses would prepare it again.
                trainer.eval_dataset = longest.batches(size, framework.LOOP_STEPS * args.world_size)
                self._run(size, trainer.evaluate)
        finally:
            trainer.is_in_train, args.per_device_eval_batch_size, trainer.eval_dataset = (
                False,
                own_size,
                dataset,
            )

    def _run(self, batch_size: int, loop: Callable[[], object], last: int = 0) -> None:
        """Run the loop. Raise NotRunError unless it collated batches of that size, and perhaps a last one of `last`."""
        self.collated.clear()
        try:
            with (
                unchanged()
            ):  # a failed loop leaves its loader in the state that accelerators share
                loop()
            # The next call makes another DDP model, with buckets as large as the gradients.
            if self.args.world_size > 1:
                self.trainer.model_wrapped = self.trainer.model
                self.trainer.accelerator.free_memory()
                framework.drop_last_collectives(self.args.device)
        finally:
            # Drop this call's sum of losses: a block of 512 bytes that a cold start does not have can decide near the limit.
            for name in list(vars(self.trainer)):
                if isinstance(vars(self.trainer)[name], torch.Tensor):
                    delattr(self.trainer, name)
            hook = vars(self.trainer).pop("neftune_hook_handle", None)
            if hook is not None:  # a failed loop leaves its hook, and the next would add another
                hook.remove()
        if not {batch_size} <= set(self.collated) <= {batch_size, last}:
            reason = f"batches of {sorted(set(self.collated))} examples were collated instead of {batch_size}"
            if not self.collated:
                reason = "the data_collator of the Trainer was never called"
            raise NotRunError(
                f"{reason}: in your get_train_dataloader or get_eval_dataloader, use self.data_collator and self._train_batch_size"
            )

    def _collate(self, examples: Any) -> Any:
        """Collate, and record the number of examples."""
        self.collated.append(len(examples))
        return self.user.data_collator(examples)


def _split_that_runs(
    loop: _Loop, global_batch: int | None, result: ProbeResult, options: Mapping[str, Any]
) -> tuple[PlanEntry | None, str]:
    """Return the split of the global batch with the fewest accumulation steps, None unless it runs, and a note."""
    micro, accumulation = (
        loop.args.per_device_train_batch_size,
        loop.args.gradient_accumulation_steps,
    )
    before = f"per_device_train_batch_size={micro}, gradient_accumulation_steps={accumulation}"
    total = global_batch or micro * accumulation
    sizes = {
        "min_micro_batch": options.get("min_batch", 1),
        "multiple_of": options.get("multiple_of", 1),
    }
    names = ("device", "memory_fraction", "confirm_steps", "preserve", "progress")
    kept = {name: options[name] for name in names if name in options}
    limit_s = options.get("time_limit_s")
    until_s = math.inf if limit_s is None else time.monotonic() + limit_s - result.elapsed_s
    largest, failed = result.batch_size, ""
    while largest:
        splits = plan(total, world_size=1, max_micro_batch=largest, **sizes)
        split = next((one for one in splits if one.exact), None)
        if split is None:
            break
        left_s = None if limit_s is None else max(1e-3, until_s - time.monotonic())
        made = min(split.accumulation_steps, PLAN_ACCUMULATION)
        try:
            check(
                loop.model,
                loop.steps(made),
                split.micro_batch,
                time_limit_s=left_s,
                **kept,
            )
        except (
            NothingFitsError
        ) as error:  # accumulated gradients and optimizer state are in memory together
            largest = split.micro_batch - 1
            failed = f"; {split.micro_batch} x {split.accumulation_steps} failed ({error})"
        except TimeLimitError as error:
            return None, f"nothing was written back, {before} stay ({error})"
        else:
            note = (
                f"written back: per_device_train_batch_size={split.micro_batch}, gradient_accumulation_steps="
                f"{split.accumulation_steps} (before: {before}); the global batch is {total}, and this split ran"
            )
            if made < split.accumulation_steps:
                note += f" with {made} micro-batches a step: further ones need no more memory"
            if global_batch is None and split.micro_batch < result.batch_size:
                note += f". To train with {result.batch_size} instead, pass global_batch={result.batch_size}"
            return split, note
    return None, (
        f"nothing was written back, {before} stay: no size up to {result.batch_size} divides the global batch of {total} and "
        f"runs{failed}"
    )
