"""What a probe is asked for: as Ultralytics' trainer would take it, or refused before anything runs."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from oomprobe.errors import InvalidArgumentError
from oomprobe.integrations.framework import framework
from oomprobe.options import check_size

MINIMUM = "8.4"
GRID = 32  # pixels: the least that the trainer makes images a multiple of
# The trainer's words for its `amp`.
PRECISIONS: dict[str, bool | torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": False}


def part(name: str) -> Any:
    """A module of Ultralytics.

    Raises:
        FrameworkError: it is not there, or too old.
    """
    return framework(f"ultralytics.{name}", minimum=MINIMUM, extra="ultralytics")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The arguments that say what a batch is.

    Attributes:
        imgsz: Height and width of an image in pixels, a multiple of the model's stride.
        amp: False, or the dtype of autocast where there is any.
        max_num_obj: Objects in an image.
        dataset_size: Images of the training set; 0: not known.
    """

    imgsz: int
    amp: bool | torch.dtype
    max_num_obj: int
    dataset_size: int

    @classmethod
    def of(cls, model: Any, *, imgsz: Any, amp: Any, max_num_obj: Any, dataset_size: Any) -> Asked:
        """Check them, and bring them to one form.

        Raises:
            InvalidArgumentError: one is wrong.
            FrameworkError: Ultralytics is not there, or too old.
        """
        check_count("max_num_obj", max_num_obj, "objects in an image")
        check_count("dataset_size", dataset_size, "images, or 0 where it is not known")
        return cls(
            imgsz=image_size(model, imgsz), amp=precision(amp), max_num_obj=max_num_obj, dataset_size=dataset_size
        )


def image_size(model: Any, imgsz: Any) -> int:
    """Pixels, as the trainer takes them: the largest of several, rounded up to the stride, with its warnings."""
    sizes = imgsz if isinstance(imgsz, list | tuple) and imgsz else [imgsz]
    for size in sizes:
        check_size("imgsz", size)
    grid = max(GRID, coarsest_stride(model))
    size = part("utils.checks").check_imgsz(list(sizes), stride=grid, floor=grid, max_dim=1)
    return int(size)


def coarsest_stride(model: Any) -> int:
    """Pixels of the image for one of the coarsest feature map; 32 where the model does not say."""
    stride = getattr(part("utils.torch_utils").unwrap_model(model), "stride", None)
    return GRID if stride is None else int(stride.max())


def precision(amp: Any) -> bool | torch.dtype:
    """What ``amp`` asks for; the words of the trainer's own argument are understood too."""
    if isinstance(amp, str) and amp.lower() in PRECISIONS:
        return PRECISIONS[amp.lower()]
    if isinstance(amp, torch.dtype) and amp in (torch.float16, torch.bfloat16):
        return amp
    if isinstance(amp, int | np.bool_) and amp in (0, 1):
        return bool(amp)
    raise InvalidArgumentError(
        f"amp must be True, False, torch.float16 or torch.bfloat16, or a word that train(amp=...) takes "
        f"({', '.join(map(repr, PRECISIONS))}), not {amp!r}"
    )


def share_of(name: str, value: Any, wanted: str) -> float:
    """A finite number.

    Args:
        name: Of the argument.
        value: Of it.
        wanted: What it should be, in words.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise InvalidArgumentError(f"{name} must be {wanted}, not {value!r}")
    return float(value)


def check_count(name: str, value: Any, unit: str) -> None:
    """Refuse what is no number of things, which may be 0."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidArgumentError(f"{name} must be a number of {unit}, an integer of at least 0, not {value!r}")
