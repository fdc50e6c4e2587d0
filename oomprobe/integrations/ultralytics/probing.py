"""The probe itself: a model of Ultralytics, its own training step, and what the straight line would have said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

import oomprobe
from oomprobe.devices import choose_device
from oomprobe.errors import InvalidArgumentError
from oomprobe.integrations.ultralytics.training import part, prepare
from oomprobe.options import check_size
from oomprobe.result import Phase, ProbeResult
from oomprobe.state import preserved

GRID = 32  # pixels: the least that the trainer makes images a multiple of
# The trainer's words for its `amp`.
PRECISIONS: dict[str, bool | torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": False}
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
    _check_model(model)
    asked = checked(model, imgsz=imgsz, amp=amp, max_num_obj=max_num_obj, dataset_size=dataset_size)
    if options.get("max_batch") is not None:
        check_size("max_batch", options["max_batch"])
    chosen = choose_device(device, model)
    training = prepare(model, chosen, **asked)
    if asked["imgsz"] < 2 * _grid(model) and dataset_size != 1:
        options.setdefault("min_batch", 2)  # the last feature map is a point, and batch norm cannot train on one image
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


def _check_model(model: Any) -> None:
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


def checked(model: Any, *, imgsz: Any, amp: Any, max_num_obj: Any, dataset_size: Any) -> dict[str, Any]:
    """What says what a batch is, as Ultralytics' trainer would take it, or refused before anything runs.

    The image is as large as the largest of several sizes, rounded up to the stride, with the trainer's warnings.
    """
    for name, value in (("max_num_obj", max_num_obj), ("dataset_size", dataset_size)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InvalidArgumentError(f"{name} must be an integer of at least 0, not {value!r}")
    sizes = imgsz if isinstance(imgsz, list | tuple) and imgsz else [imgsz]
    for size in sizes:
        check_size("imgsz", size)
    if isinstance(amp, str):
        amp = PRECISIONS.get(amp.lower(), amp)
    if not isinstance(amp, bool | np.bool_) and not any(amp is dtype for dtype in (torch.float16, torch.bfloat16)):
        raise InvalidArgumentError(
            f"amp must be True, False, torch.float16 or torch.bfloat16, or a word that train(amp=...) takes "
            f"({', '.join(map(repr, PRECISIONS))}), not {amp!r}"
        )
    grid = _grid(model)
    pixels = int(part("utils.checks").check_imgsz(list(sizes), stride=grid, floor=grid, max_dim=1))
    precision = amp if isinstance(amp, torch.dtype) else bool(amp)
    return {"imgsz": pixels, "amp": precision, "max_num_obj": max_num_obj, "dataset_size": dataset_size}


def _grid(model: Any) -> int:
    """Pixels that images are a multiple of: those for one of the coarsest feature map, at least 32."""
    stride = getattr(part("utils.torch_utils").unwrap_model(model), "stride", None)
    return GRID if stride is None else max(GRID, int(stride.max()))


def line(result: ProbeResult, dataset_size: int) -> dict[str, float | None]:
    """What Ultralytics' straight line would have answered, had it been drawn through the peaks of these trials.

    The entry is named after the sizes that ran, and None where there are not two.
    """
    grown = [t for t in result.trials if t.phase is Phase.GROW and t.batch_size in LINE_SIZES]
    points: dict[int, int] = {}
    for trial in grown:
        peak = trial.peak_allocated_bytes if trial.peak_reserved_bytes is None else trial.peak_reserved_bytes
        if trial.passed and peak is not None:
            points[trial.batch_size] = peak
    sizes = list(points)
    name = f"{LINE} through {', '.join(map(str, sizes))}" if points else LINE
    if len(points) < 2:
        return {name: None}
    per_sample, fixed = np.polyfit(np.array(sizes), np.array(list(points.values())), deg=1)
    if per_sample <= 0:
        return {name: None}
    failed = [t.batch_size for t in grown if not t.passed]
    answer = int((result.budget_bytes - fixed) / per_sample)
    if failed and answer >= min(failed):
        answer = sizes[-1]
    return {name: min(max(answer, sizes[0]), LINE_CEILING, dataset_size or LINE_CEILING)}
