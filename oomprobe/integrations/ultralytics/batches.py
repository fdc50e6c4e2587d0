"""Batches as Ultralytics' trainers hand them to the loss, with as many objects in every image as there can be."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from oomprobe.errors import InvalidArgumentError

SIDE = 0.5  # of an object, as a share of the image's; see `Batches`
MASKS_IN_A_BYTE = 255  # objects that an overlapping mask of 8 bits can number

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """What makes batches of any size.

    The trainer counts four times the objects of the fullest image, since a mosaic is made of four. No point of a mosaic
    lies in more than those of one image: in a quarter of them. So each object here covers a quarter of the image, and
    their middles are spread, so that the assigner meets as many pairs of object and anchor as a batch can have.

    """

    task: str
    imgsz: int  # height and width of an image, pixels
    channels: int
    classes: int
    objects: int  # in every image, at least 1
    mask_ratio: int = 4  # an image is so many times as wide as its mask
    overlap_mask: bool = True  # whether the objects of an image share one mask
    keypoints: int = 0  # of an object
    texts: tuple[int, ...] = ()  # how many there are with each image, and numbers to each
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        if self.task not in _TARGETS:
            raise InvalidArgumentError(
                f"a model for the task {self.task!r}: this makes batches for {', '.join(_TARGETS)}. Write a step of your "
                "own, and call oomprobe.find_max_batch(model, step_fn)"
            )

    def make(self, batch_size: int) -> Batch:
        """One batch, its images already as the loss takes them: of floating point, between 0 and 1."""
        shape = (batch_size, self.channels, self.imgsz, self.imgsz)
        if self.task == "classify":  # its data set hands out floating point
            images = torch.rand(shape, device=self.device)
        else:
            images = torch.randint(256, shape, dtype=torch.uint8, device=self.device).float() / 255
        texts = {"txt_feats": torch.ones(batch_size, *self.texts, device=self.device)} if self.texts else {}
        return {"img": images, **texts, **_TARGETS[self.task](self, batch_size)}


def _boxes(batches: Batches, batch_size: int, numbers: int = 4) -> Batch:
    """Middle, width and height of each object, as shares of the image's; an angle of 0 where there are five numbers."""
    count = batches.objects
    rows = math.ceil(math.sqrt(count))
    place = torch.arange(count)
    spread = SIDE / rows
    middles = (torch.stack((place % rows, place // rows), 1) + 0.5) * spread + SIDE / 2
    boxes = torch.cat((middles, torch.full((count, 2), SIDE), torch.zeros(count, numbers - 4)), 1)
    return {
        "batch_idx": torch.arange(batch_size).repeat_interleave(count).float().to(batches.device),
        "cls": (place % batches.classes).float().repeat(batch_size)[:, None].to(batches.device),
        "bboxes": boxes.repeat(batch_size, 1).to(batches.device),
    }


def _masks(batches: Batches, batch_size: int) -> Batch:
    side = batches.imgsz // batches.mask_ratio
    count = batch_size if batches.overlap_mask else batch_size * batches.objects
    dtype = torch.int32 if batches.overlap_mask and batches.objects > MASKS_IN_A_BYTE else torch.uint8
    return {
        **_boxes(batches, batch_size),
        "masks": torch.ones(count, side, side, dtype=dtype, device=batches.device),
        "sem_masks": torch.zeros(batch_size, side, side, device=batches.device),
    }


def _keypoints(batches: Batches, batch_size: int) -> Batch:
    """All of them visible, in the middle of the image."""
    shape = (batch_size * batches.objects, batches.keypoints, 3)
    return {**_boxes(batches, batch_size), "keypoints": torch.full(shape, 0.5, device=batches.device)}


_TARGETS: dict[str, Callable[[Batches, int], Batch]] = {
    "detect": _boxes,
    "segment": _masks,
    "pose": _keypoints,
    "obb": lambda made, size: _boxes(made, size, numbers=5),
    "classify": lambda made, size: {"cls": (torch.arange(size) % made.classes).to(made.device)},
    "semantic": lambda made, size: {
        "semantic_mask": torch.zeros((size, made.imgsz, made.imgsz), dtype=torch.int32, device=made.device)
    },
    "depth": lambda made, size: {"depth": torch.ones(size, made.imgsz, made.imgsz, device=made.device)},
}


def batches_for(model: Any, args: Any, task: str, imgsz: int, max_num_obj: int, device: torch.device | str) -> Batches:
    """What makes batches for an unwrapped model; 0 objects, as the trainer says for classification, are taken for 1."""
    head = model.model[-1]
    return Batches(
        task=task,
        imgsz=imgsz,
        channels=int(model.yaml.get("channels", 3)),
        classes=max(1, int(getattr(head, "nc", 0) or len(getattr(model, "names", None) or ()))),
        objects=max(1, max_num_obj),
        mask_ratio=int(args.mask_ratio),
        overlap_mask=bool(args.overlap_mask),
        keypoints=int(getattr(head, "kpt_shape", (0,))[0]),
        texts=tuple(getattr(model, "txt_feats", torch.empty(1)).shape[1:]),
        device=device,
    )
