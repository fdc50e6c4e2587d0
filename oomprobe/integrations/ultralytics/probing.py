"""The probe itself: a model of Ultralytics, its own training step, and what the straight line would have said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

import oomprobe
from oomprobe.devices import choose_device
from oomprobe.errors import InvalidArgumentError
from oomprobe.integrations.ultralytics.asked import GRID, Asked, coarsest_stride, part
from oomprobe.integrations.ultralytics.training import prepare
from oomprobe.options import check_size
from oomprobe.result import Phase, ProbeResult, Trial
from oomprobe.state import preserved

LINE_SIZES = (1, 2, 4, 8, 16)  # what Ultralytics profiles on a card of less than 16 GiB
LINE = "Ultralytics' line"
LINE_CEILING = 1024  # and the most that it answers
NOT_COVERED = (
    "validation during training: batches twice as large (but for obb, semantic and depth), without gradients",
    "augmentations that add objects beyond max_num_obj (mixup, cutmix, copy_paste), and multi_scale beyond imgsz",
)


def find_max_batch(
    model: torch.nn.Module,
    *,
    imgsz: int = 640,
    amp: bool | str | torch.dtype = True,
    max_num_obj: int = 1,
    dataset_size: int = 0,
    device: Any = None,
    **options: Any,
) -> ProbeResult:
    """Find the largest batch that a model of Ultralytics trains with, by training.

    Runs the model's own loss on images with `max_num_obj` objects each, backward, gradient clipping and the optimizer
    that the trainer would build. All of that happens to a copy, in 32 bits, as the trainer's; the model that was given is
    only read, and stands for the average of the weights that the trainer keeps.

    Args:
        model: Such as ``YOLO("yolo11n.yaml").model``, or a trainer's.
        imgsz: Height and width of an image, pixels; as in training the largest of several, rounded up to a multiple of
            the model's stride, with Ultralytics' own warning.
        amp: Mixed precision, or its dtype (torch.float16, torch.bfloat16), or as for ``train()``: "fp16", "bf16", "fp32".
            Without effect on the CPU and MPS, as in training.
        max_num_obj: Objects in an image, as the trainer counts them: four times those of the fullest image of the data
            set, for its mosaics.
        dataset_size: Images of the training set: no larger batch is tried, and the choice of ``optimizer=auto`` rests
            on it. 0: not known.
        device: As for `oomprobe.find_max_batch`.
        **options: The others of `oomprobe.find_max_batch`, such as ``memory_fraction`` and ``time_limit_s``.

    Returns:
        The answer and everything it rests on; `estimates` has what a straight line through 1, 2, 4, 8 and 16, as
        Ultralytics draws it, would have answered.

    Raises:
        InvalidArgumentError: an argument is wrong, or no batch can be made for the model's task.
        SimulationError: a simulated card cannot run the loss of this model.
        FrameworkError: Ultralytics is not there, or older than 8.4.
        OomProbeError: as for `oomprobe.find_max_batch`.
    """
    _check(model)
    asked = Asked.of(model, imgsz=imgsz, amp=amp, max_num_obj=max_num_obj, dataset_size=dataset_size)
    if options.get("max_batch") is not None:
        check_size("max_batch", options["max_batch"])
    chosen = choose_device(device, model)
    training = prepare(model, chosen, asked)
    options = {**_limits(model, asked), **options}
    options["preserve"] = [model, training.average, *preserved(options.get("preserve", ()))]
    notes = list(training.notes)
    if dataset_size > 0:
        options["max_batch"] = min(options.get("max_batch") or dataset_size, dataset_size)
        notes.append(f"no batch larger than the data set of {dataset_size} images was tried")
    result = oomprobe.find_max_batch(
        training.model, training.step, device=None if device is None else chosen, **options
    )
    return replace(
        result,
        notes=(*result.notes, *notes),
        not_covered=(*result.not_covered, *NOT_COVERED),
        estimates={**result.estimates, **line(result, dataset_size)},
    )


def _check(model: Any) -> None:
    if isinstance(model, part("engine.model").Model):  # whose train() trains, and not: sets a mode
        raise InvalidArgumentError(
            f"model is a {type(model).__name__}, the wrapper that downloads and trains: pass what it wraps, "
            f"{type(model).__name__}(...).model"
        )
    plain = part("utils.torch_utils").unwrap_model(model) if isinstance(model, torch.nn.Module) else model
    if not isinstance(model, torch.nn.Module) or not hasattr(plain, "init_criterion"):
        raise InvalidArgumentError(
            f"model must be a model of Ultralytics, such as YOLO('yolo11n.yaml').model, not {type(model).__name__}"
        )


def _limits(model: torch.nn.Module, asked: Asked) -> dict[str, Any]:
    """Where the last feature map is a single point, batch norm cannot train on one image."""
    return {"min_batch": 2} if asked.imgsz < 2 * max(GRID, coarsest_stride(model)) and asked.dataset_size != 1 else {}


def line(result: ProbeResult, dataset_size: int) -> dict[str, float | None]:
    """What Ultralytics' straight line would have answered, had it been drawn through the peaks of these trials.

    Args:
        result: Its trials without a cap, up to 16, are those that the search starts with.
        dataset_size: What it would not go beyond; 0: nothing.

    Returns:
        One entry, named after the sizes that ran; None where there are not two.
    """
    grown = [t for t in result.trials if t.phase is Phase.GROW and t.batch_size in LINE_SIZES]
    points = [(t.batch_size, peak) for t in grown if t.passed and (peak := _peak(t)) is not None]
    name = f"{LINE} through {', '.join(str(size) for size, _ in points)}" if points else LINE
    if len(points) < 2:
        return {name: None}
    sizes = [size for size, _ in points]
    per_sample, fixed = np.polyfit(np.array(sizes), np.array([peak for _, peak in points]), deg=1)
    if per_sample <= 0:
        return {name: None}
    failed = [t.batch_size for t in grown if not t.passed]
    answer = int((result.budget_bytes - fixed) / per_sample)
    if failed and answer >= min(failed):
        answer = sizes[-1]
    answer = min(max(answer, sizes[0]), LINE_CEILING, dataset_size or LINE_CEILING)
    return {name: answer}


def _peak(trial: Trial) -> int | None:
    reserved = trial.peak_reserved_bytes
    return trial.peak_allocated_bytes if reserved is None else reserved


def line_in_words(estimates: Sequence[tuple[str, float | None]]) -> str:
    """The line's entry among others, for a log."""
    for name, answer in estimates:
        if name.startswith(LINE):
            return f"{name}: {'nothing' if answer is None else int(answer)} (not used)"
    return ""
