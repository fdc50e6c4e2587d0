"""transformers: the largest per-device batch of a `Trainer`, found by its own training loop on its longest examples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from oomprobe import probe
from oomprobe.errors import Caller, InvalidArgumentError, NotRunError
from oomprobe.integrations.framework import check_flag, framework, is_simulated, refuse_several
from oomprobe.integrations.generators import generators_kept
from oomprobe.integrations.lent import lent, shared_state, sources_of, stateful
from oomprobe.integrations.longest import Longest, longest_of
from oomprobe.integrations.loops import LOOP_STEPS, loops_of, untimed
from oomprobe.integrations.positions import positions_of, refuse_too_long
from oomprobe.integrations.said import caller_of, not_covered, notes_of
from oomprobe.integrations.splits import running_split
from oomprobe.options import StepFn, check_seconds, check_size
from oomprobe.plan import PlanEntry
from oomprobe.result import ProbeResult
from oomprobe.state import preserved

TRAINED, EVAL = "train_dataset", "eval_dataset"
SEARCH_ACCUMULATION = 2  # micro-batches: the second runs beside the gradients of the first


def find_max_batch(
    trainer: Any,
    *,
    write_back: bool = True,
    max_length: int | None = None,
    scan_s: float = 30.0,
    global_batch: int | None = None,
    max_batch: int | None = None,
    steps: int = 2,
    confirm_steps: int = 5,
    preserve: Iterable[Any] = (),
    **options: Any,
) -> ProbeResult:
    """Find the largest ``per_device_train_batch_size`` with which a `transformers.Trainer` really trains.

    Each call of the step is the Trainer's own loop for two optimizer steps: its optimizer, collator, precision, loss,
    gradient checkpointing and accumulation, on a batch of the longest examples of its data set. Where evaluation is on,
    each trial evaluates too, at the Trainer's own evaluation batch size. A copy of the Trainer is trained; the model, the
    optimizer, the scheduler and the random number generators, also those in attributes of the Trainer, the model, the
    collator and the data sets, come back as they were: training afterwards is bit-equal to training without a probe. Not
    given back: lists and dicts of a Trainer of your own that it changes in place. What has ``state_dict`` is, also in them;
    where nothing of the Trainer refers to it, pass it in `preserve`.

    Args:
        trainer: Set up as for ``trainer.train()``.
        write_back: Set ``per_device_train_batch_size`` and ``gradient_accumulation_steps`` in ``trainer.args`` so that the
            global batch stays the same, in the fewest accumulation steps that ran.
        max_length: Elements of the longest sequence there can be; None: as long as the longest example. A data set
            without length (streaming) has to say it, unless all of its examples have one size.
        scan_s: Seconds for looking for the longest examples.
        global_batch: Samples for one optimizer step; None: the product of the two arguments as they are.
        max_batch: Largest size to try; never more than the data set has.
        steps: As for `oomprobe.find_max_batch`: optimizer steps of a trial, rounded up to whole loops of two.
        confirm_steps: As there, rounded up likewise.
        preserve: As there.
        options: The other options of `oomprobe.find_max_batch`.

    Returns:
        Its `batch_size` is the largest micro-batch; notes say what was written back.

    Raises:
        FrameworkError: transformers is not installed, or too old.
        InvalidArgumentError: the Trainer trains on several ranks, its data set gives no example, or sequences are longer
            than the model has positions for.
        OomProbeError: as for `oomprobe.find_max_batch`.

    Source:
        https://github.com/huggingface/transformers/issues/33281 asks that the global batch be kept.
    """
    framework("transformers", minimum="5.0", extra="transformers")
    args = _checked(trainer)
    steps, confirm_steps = loops_of("steps", steps), loops_of("confirm_steps", confirm_steps)
    for name, value in {"max_length": max_length, "global_batch": global_batch, "max_batch": max_batch}.items():
        if value is not None:
            check_size(name, value)
    check_seconds("scan_s", scan_s)
    check_flag("write_back", write_back)
    with generators_kept(sources_of(trainer)):  # a data set may draw numbers as it gives an example
        longest = longest_of(trainer.train_dataset, max_length=max_length, scan_s=scan_s)
        named = _evaluated(trainer, max_length, scan_s)
    evaluated = list(named.values())
    max_batch = _limited(max_batch, longest.total, options.get("min_batch", 1))
    whole = (
        args.per_device_train_batch_size * args.gradient_accumulation_steps if global_batch is None else global_batch
    )
    accumulation = min(args.gradient_accumulation_steps, SEARCH_ACCUMULATION)
    with lent(trainer, simulated=is_simulated(options.get("device"))) as copied:
        positions, sets = positions_of(trainer.model), {TRAINED: longest, **named}
        refuse_too_long(positions, sets.items(), max_length=max_length, loader_of=partial(_loader, copied))
        callers = {name: caller_of(trainer, name) for name in ("train", "eval")}
        loop = _Loop(copied, longest, evaluated, callers)
        preserve = (*preserved(preserve), *stateful(trainer))
        common: dict[str, Any] = {"confirm_steps": confirm_steps, "preserve": preserve}
        result = probe.find_max_batch(
            trainer.model, loop.steps(accumulation), max_batch=max_batch, steps=steps, **common, **options
        )
        notes = [
            *longest.notes,
            *(note for one in evaluated for note in one.notes),
            *notes_of(trainer, accumulation, longest, result),
        ]
        if write_back:
            left = _with_time_left(options, result.elapsed_s)
            entry = running_split(trainer.model, loop.steps, whole, result.batch_size, {**common, **left})
            notes.append(_written(args, entry, whole))
    if write_back and entry is not None:
        _write(trainer, entry)
    return _told(result, notes, not_covered(trainer, evaluates=bool(evaluated)))


def _checked(trainer: Any) -> Any:
    args = getattr(trainer, "args", None)
    if args is None or not hasattr(trainer, "train_dataset"):
        raise InvalidArgumentError(f"trainer must be a transformers.Trainer, not {type(trainer).__name__}")
    refuse_several("torchrun, or accelerate launch,", args.world_size)
    refuse_several(f"torch.nn.DataParallel (n_gpu={args.n_gpu}; hide the others by CUDA_VISIBLE_DEVICES=0)", args.n_gpu)
    for name in ("deepspeed", "fsdp"):
        if getattr(args, name, None):
            raise InvalidArgumentError(
                f"{name}={getattr(args, name)!r} spreads the model over ranks, and ranks are not supported yet: an "
                "out-of-memory error on one would leave the others waiting. Probe without it, on one device"
            )
    if trainer.train_dataset is None:
        raise InvalidArgumentError("the Trainer has no train_dataset, and so nothing to make a batch of: pass it one")
    return args


def _limited(max_batch: int | None, total: int | None, min_batch: Any) -> int | None:
    """Never more than the data set has."""
    if total is None:
        return max_batch
    if isinstance(min_batch, int) and min_batch > total:
        raise InvalidArgumentError(
            f"min_batch={min_batch} is more than the {total} examples of the data set, and no batch has more: lower it"
        )
    return total if max_batch is None else min(max_batch, total)


def _evaluated(trainer: Any, max_length: int | None, scan_s: float) -> dict[str, Longest]:
    """The longest examples of each data set it will be evaluated on, by its name; none where it is not."""
    if trainer.args.eval_strategy == "no" and not getattr(trainer.args, "eval_on_start", False):
        return {}
    given = trainer.eval_dataset
    several = (
        {f"eval_dataset[{key!r}]": one for key, one in given.items()} if isinstance(given, dict) else {EVAL: given}
    )
    if not several:
        raise InvalidArgumentError("eval_dataset is an empty dict, and evaluation is on: give it a data set")
    return {name: longest_of(one, max_length=max_length, scan_s=scan_s) for name, one in several.items()}


def _loader(copied: Any, name: str, dataset: Any) -> Any:
    """The loader that the loop would read that data set with."""
    if name != TRAINED:
        return copied.get_eval_dataloader(dataset)
    copied.train_dataset = dataset
    return copied.get_train_dataloader()


class _Loop:
    """The Trainer's own loop, as a step.

    Args:
        trainer: A copy that may be trained.
        longest: Examples to train on.
        evaluated: Examples of each data set to evaluate on; none: it does not.
        callers: What the user types instead, by the name of the step.
    """

    def __init__(self, trainer: Any, longest: Longest, evaluated: list[Longest], callers: Mapping[str, Caller]) -> None:
        self._trainer, self._longest, self._evaluated, self._callers = trainer, longest, evaluated, callers
        self._collate, self._collated = trainer.data_collator, [0]
        trainer.data_collator = self._counted

    def steps(self, accumulation: int) -> dict[str, StepFn]:
        """The step, and the evaluation where there is one, by name."""

        def train(model: torch.nn.Module, batch_size: int) -> None:
            self._train(batch_size, accumulation)

        def evaluate(model: torch.nn.Module, batch_size: int) -> None:
            for longest in self._evaluated:
                self._evaluate(longest)

        evaluate.oomprobe_max_calls = 1  # type: ignore[attr-defined]  # it has no optimizer to wait for
        steps: dict[str, Any] = {"train": train} | ({"eval": evaluate} if self._evaluated else {})
        for name, step in steps.items():
            step.oomprobe_caller = self._callers[name]
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
        shared = self._trainer.accelerator.gradient_state
        self._collated, loaders = [], shared_state(shared)
        try:
            loop()
        finally:
            vars(shared).update(loaders)
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


# --- writing back ---


def _write(trainer: Any, entry: PlanEntry) -> None:
    trainer.args.per_device_train_batch_size = entry.micro_batch
    trainer.args.gradient_accumulation_steps = entry.accumulation_steps
    trainer._train_batch_size = trainer.args.train_batch_size  # its own copy, made at the start


def _written(args: Any, entry: PlanEntry | None, whole: int) -> str:
    before = f"per_device_train_batch_size={args.per_device_train_batch_size}, gradient_accumulation_steps="
    before += str(args.gradient_accumulation_steps)
    if entry is None:
        return f"nothing was written back, {before} stay: no split of the global batch of {whole} was found that runs"
    return (
        f"written back: per_device_train_batch_size={entry.micro_batch}, gradient_accumulation_steps="
        f"{entry.accumulation_steps} (before: {before}); the global batch is {whole}, and this split was run"
    )


# --- what is said ---


def _with_time_left(options: dict[str, Any], elapsed_s: float) -> dict[str, Any]:
    limit_s = options.get("time_limit_s")
    return options if limit_s is None else {**options, "time_limit_s": limit_s - elapsed_s}


def _told(result: ProbeResult, notes: list[str], missing: list[str]) -> ProbeResult:
    own = [note for note in result.notes if not (note.startswith("no optimizer stepped") and "'eval'" in note)]
    return replace(untimed(result), notes=(*own, *notes), not_covered=(*result.not_covered, *missing))
