"""transformers: the largest per-device batch of a `Trainer`, found by its own training loop on its longest examples."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from oomprobe import probe
from oomprobe.errors import Caller, InvalidArgumentError, NothingFitsError, TimeLimitError
from oomprobe.integrations.framework import (
    LOOP_STEPS,
    check_flag,
    framework,
    is_simulated,
    loops_of,
    refuse_several,
    untimed,
)
from oomprobe.integrations.generators import generators_kept
from oomprobe.integrations.transformers.loop import Loop, callbacks, lent, sources_of, stateful
from oomprobe.integrations.worst_case import Longest, longest_of
from oomprobe.options import Step, check_seconds, check_size
from oomprobe.report.plan import PlanEntry, plan
from oomprobe.result import ProbeResult
from oomprobe.state import preserved

SEARCH_ACCUMULATION = 2  # micro-batches: the second runs beside the gradients of the first
SPLIT_TRIALS = 4
TABLES = ("pos", "wpe")  # of positions: position_embeddings, embed_positions, pos_emb, wpe
SPLIT_OPTIONS = ("device", "memory_fraction", "confirm_steps", "preserve", "time_limit_s", "progress")
MOMENT_S = 1e-3  # a limit has to be positive


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
        InvalidArgumentError: the Trainer trains on several ranks, its data set gives no example, or `max_length` is longer
            than the model has positions for.
        OomProbeError: as for `oomprobe.find_max_batch`; examples of the data set that are too long fail as in training.

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
    if max_length is not None:
        refuse_too_long(trainer.model, max_length)
    with generators_kept(sources_of(trainer)):  # a data set may draw numbers as it gives an example
        longest = longest_of(trainer.train_dataset, max_length=max_length, scan_s=scan_s)
        evaluated = [longest_of(one, max_length=max_length, scan_s=scan_s) for one in _evaluated_on(trainer)]
    if longest.total is not None:
        max_batch = longest.total if max_batch is None else min(max_batch, longest.total)
    own_accumulation = args.gradient_accumulation_steps
    whole = args.per_device_train_batch_size * own_accumulation if global_batch is None else global_batch
    accumulation = min(own_accumulation, SEARCH_ACCUMULATION)
    entry = None
    with lent(trainer, simulated=is_simulated(options.get("device"))) as copied:
        loop = Loop(copied, longest, evaluated, {name: _caller(trainer, name) for name in ("train", "eval")})
        preserve = (*preserved(preserve), *stateful(trainer))
        options |= {"confirm_steps": confirm_steps, "preserve": preserve}
        result = probe.find_max_batch(
            trainer.model, loop.steps(accumulation), max_batch=max_batch, steps=steps, **options
        )
        if write_back:
            if options.get("time_limit_s") is not None:
                options["time_limit_s"] -= result.elapsed_s
            entry = running_split(trainer.model, loop.steps, whole, result.batch_size, options)
    notes = [*longest.notes, *(note for one in evaluated for note in one.notes)]
    notes += _notes(trainer, accumulation, longest, result)
    if write_back:
        notes.append(_written(args, entry, whole))
    if entry is not None:
        args.per_device_train_batch_size = entry.micro_batch
        args.gradient_accumulation_steps = entry.accumulation_steps
        trainer._train_batch_size = args.train_batch_size  # its own copy, made at the start
    own = [note for note in result.notes if not (note.startswith("no optimizer stepped") and "'eval'" in note)]
    missing = _not_covered(trainer, evaluates=bool(evaluated))
    return replace(untimed(result), notes=(*own, *notes), not_covered=(*result.not_covered, *missing))


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


def refuse_too_long(model: torch.nn.Module, max_length: int) -> None:
    """Beyond a table of positions a kernel asserts, on CUDA for good; rotary and relative positions have no such end."""
    config = getattr(model, "config", None)
    stated = getattr(config, "max_position_embeddings", None)
    if not isinstance(stated, int) or getattr(config, "position_embedding_type", None) not in (None, "absolute"):
        return
    for name, table in model.named_modules():
        if not isinstance(table, torch.nn.Embedding) or not any(word in name.rpartition(".")[2] for word in TABLES):
            continue
        if not 0 <= table.num_embeddings - stated <= 2:  # OPT's and BART's kinds have two rows more
            continue
        # Models of RoBERTa's kind count positions from the row after the padding's.
        padded = 0 if type(table) is not torch.nn.Embedding or table.padding_idx is None else table.padding_idx + 1
        count = min(stated, table.num_embeddings - padded)
        if max_length > count:
            raise InvalidArgumentError(
                f"max_length={max_length} is longer than the model has positions for: {count} "
                f"(max_position_embeddings={stated} in its config, and {name} has no row for more). Pass max_length={count}"
            )


def _evaluated_on(trainer: Any) -> list[Any]:
    """The data sets it will be evaluated on; none where it is not."""
    if trainer.args.eval_strategy == "no" and not trainer.args.eval_on_start:
        return []
    given = trainer.eval_dataset
    return list(given.values()) if isinstance(given, dict) else [given]


def running_split(
    model: torch.nn.Module,
    steps: Callable[[int], Mapping[str, Step]],
    global_batch: int,
    largest: int,
    options: Mapping[str, Any],
) -> PlanEntry | None:
    """The split of exactly `global_batch` with the fewest accumulation steps that runs; None where none was found in time.

    The options are those of the probe that found the largest micro-batch; their `time_limit_s` is what is left of it.
    """
    smallest, multiple = options.get("min_batch", 1), options.get("multiple_of", 1)
    checked = {name: options[name] for name in SPLIT_OPTIONS if name in options}
    limit_s, began_s = checked.get("time_limit_s"), time.monotonic()
    for _ in range(SPLIT_TRIALS):
        if largest < smallest:
            return None
        entries = plan(
            global_batch, world_size=1, max_micro_batch=largest, min_micro_batch=smallest, multiple_of=multiple
        )
        entry = next((one for one in entries if one.exact), None)
        if entry is None:
            return None
        if limit_s is not None:
            checked["time_limit_s"] = max(MOMENT_S, began_s + limit_s - time.monotonic())
        try:
            probe.check(model, steps(entry.accumulation_steps), entry.micro_batch, **checked)
        except NothingFitsError:
            largest = entry.micro_batch - 1
        except TimeLimitError:
            return None
        else:
            return replace(entry, ran=True)
    return None


# --- what is said ---


def _written(args: Any, entry: PlanEntry | None, whole: int) -> str:
    before = f"per_device_train_batch_size={args.per_device_train_batch_size}, gradient_accumulation_steps="
    before += str(args.gradient_accumulation_steps)
    if entry is None:
        return f"nothing was written back, {before} stay: no split of the global batch of {whole} was found that runs"
    return (
        f"written back: per_device_train_batch_size={entry.micro_batch}, gradient_accumulation_steps="
        f"{entry.accumulation_steps} (before: {before}); the global batch is {whole}, and this split was run"
    )


def _caller(trainer: Any, name: str) -> Caller:
    """How its user runs the step of that name, ``"train"`` or ``"eval"``, without a probe."""
    size = trainer.args.per_device_eval_batch_size
    alone = {
        "train": "make the Trainer with per_device_train_batch_size={batch_size} and run trainer.train()",
        "eval": f"run trainer.evaluate(), which is at per_device_eval_batch_size={size}",
    }
    missed = _uncalled(trainer)
    more = "A trial begins with the longest examples, which a Trainer may meet late."
    more += f" Its callbacks ({', '.join(missed)}) are not called." if missed else ""
    return Caller(alone=alone[name], more=more)


def _uncalled(trainer: Any) -> list[str]:
    """Names of its callbacks that do more than steer or show: trials call none."""
    own = callbacks()
    known = (own.DefaultFlowCallback, own.ProgressCallback, own.PrinterCallback)
    return [type(one).__name__ for one in trainer.callback_handler.callbacks if not isinstance(one, known)]


def _notes(trainer: Any, accumulation: int, longest: Longest, result: ProbeResult) -> Iterator[str]:
    yield f"a trial is the Trainer's own loop for {LOOP_STEPS} optimizer steps a call, on its longest examples"
    if trainer.args.gradient_accumulation_steps > accumulation:
        yield (
            f"the search accumulated {accumulation} micro-batches, not {trainer.args.gradient_accumulation_steps}: the memory "
            "of a step is that of its second, but for inputs that are on the device together"
        )
    if result.limited_by == "max_batch" and result.batch_size == longest.total:
        yield f"the data set ends the search: it has {longest.total} examples"


def _not_covered(trainer: Any, *, evaluates: bool) -> Iterator[str]:
    """What training does, and no trial did."""
    args = trainer.args
    if missed := _uncalled(trainer):
        yield f"callbacks of the Trainer, which were not called: {', '.join(missed)}"
    if args.dataloader_num_workers:
        yield "workers of data loaders: batches were made in this process"
    drops = args.prediction_loss_only or args.batch_eval_metrics or args.eval_accumulation_steps is not None
    if evaluates and trainer.compute_metrics is not None and not drops:
        yield (
            "the predictions of the whole evaluation set, which stay on the device until its end: set "
            "eval_accumulation_steps to have them moved"
        )
