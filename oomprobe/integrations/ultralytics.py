"""Ultralytics' AutoBatch, by running the batch: the real loss and optimizer on worst-case targets.

`find_max_batch` returns all that was measured. `install` makes the trainer use `check_train_batch_size`, and so the largest
batch whose step runs in 60 % of the free memory::

    with install():
        YOLO("yolo11n.yaml").train(data="coco8.yaml", batch=-1)
"""

from __future__ import annotations

import copy
import math
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

import oomprobe
from oomprobe.devices import Device, choose_device, replay_of
from oomprobe.errors import Caller, InvalidArgumentError
from oomprobe.integrations.framework import framework, limit_to_data, notes_of_data, quiet_loggers
from oomprobe.options import Step, check_size
from oomprobe.result import ProbeResult

GRID = 32  # pixels: the least that the trainer makes images a multiple of
SIDE = 0.5  # of an object, as a share of the image's side; see `_worst_batch`
MASKS_IN_A_BYTE = 255  # objects that an overlapping mask of 8 bits can number
CLIPPED_NORM = 10.0  # what the trainer clips gradients to
DEFAULT_FRACTION, DEFAULT_BATCH = 0.6, 16  # of Ultralytics' own `check_train_batch_size`
ASSIGNED = ("detect", "segment", "pose", "obb")  # tasks whose losses match anchors with objects
TASKS = (*ASSIGNED, "classify", "semantic", "depth")
AUTOCAST: dict[object, torch.dtype | None] = {  # of what `amp` may be
    True: torch.float16, "fp16": torch.float16, torch.float16: torch.float16,
    "bf16": torch.bfloat16, torch.bfloat16: torch.bfloat16,
    False: None, "fp32": None,
}  # fmt: skip
NOT_COVERED = (
    "validation during training: batches twice as large (but for obb, semantic and depth), without gradients",
    "augmentations that add objects beyond max_num_obj (mixup, cutmix, copy_paste), and multi_scale beyond imgsz",
)


def _part(name: str) -> Any:
    """A module of Ultralytics."""
    return framework(f"ultralytics.{name}", minimum="8.4", extra="ultralytics")


# --- the probe ---


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
    that the trainer would build. A copy of the model is trained; the model that you pass is only read, and its memory
    stands for the averaged weights that the trainer keeps.

    Args:
        model: Such as ``YOLO("yolo11n.yaml").model``; it is trained in float32.
        imgsz: Height and width of an image, pixels, rounded up to the model's stride.
        amp: Mixed precision, or its dtype (torch.float16, torch.bfloat16, "fp16", "bf16", "fp32"). As in training, it has
            no effect on the CPU and MPS.
        max_num_obj: Objects in an image, as the trainer counts them: four times those of the fullest image of the data
            set, since a mosaic is made of four.
        dataset_size: Images in the training set, the largest batch to try; ``optimizer=auto`` depends on it. 0: unknown.
        device: As for `oomprobe.find_max_batch`, but for simulated cards.
        **options: The others of `oomprobe.find_max_batch`, such as ``memory_fraction`` and ``time_limit_s``.

    Returns:
        The answer and everything it rests on.

    Raises:
        InvalidArgumentError: an argument is wrong, or no batch can be made for the model's task.
        FrameworkError: Ultralytics is not installed, or older than 8.4.
        OomProbeError: as for `oomprobe.find_max_batch`.
    """
    if isinstance(model, _part("engine.model").Model) or not hasattr(_unwrapped(model), "init_criterion"):
        raise InvalidArgumentError(
            f"model must be a model of Ultralytics, such as YOLO('yolo11n.yaml').model, not {type(model).__name__}: pass "
            "the .model of a YOLO object"
        )
    check_size("imgsz", imgsz)
    check_size("max_num_obj", max_num_obj or 1)
    if amp not in AUTOCAST:
        raise InvalidArgumentError(
            f"amp must be True, False, torch.float16, torch.bfloat16, 'fp16', 'bf16' or 'fp32', not {amp!r}"
        )
    chosen = choose_device(device, model)
    if replay_of(chosen) is not None:
        raise InvalidArgumentError(
            "a simulated card cannot run Ultralytics' losses, which select by values that do not exist there: probe on the "
            "card itself, or in host memory with device='cpu:8GiB'"
        )
    stride = getattr(_unwrapped(model), "stride", None)
    grid = GRID if stride is None else max(GRID, int(stride.max()))  # the pixels of a point of the coarsest feature map
    pixels = math.ceil(imgsz / grid) * grid
    trained, step, notes = _training(model, chosen, pixels, AUTOCAST[amp], max(1, max_num_obj), dataset_size)
    if pixels == grid and dataset_size != 1:
        options.setdefault("min_batch", 2)  # the last feature map is a point, and batch norm cannot train on one image
    if dataset_size:
        check_size("dataset_size", dataset_size)
        limit_to_data(options, dataset_size)
    result = oomprobe.find_max_batch(trained, step, device=None if device is None else chosen, **options)
    notes += notes_of_data(result, dataset_size)
    return replace(result, notes=(*result.notes, *notes), not_covered=(*result.not_covered, *NOT_COVERED))


def _unwrapped(model: Any) -> Any:
    """The model itself, where it was compiled or wrapped."""
    return _part("utils.torch_utils").unwrap_model(model)


def _training(
    model: torch.nn.Module, device: Device, imgsz: int, dtype: torch.dtype | None, objects: int, dataset_size: int
) -> tuple[torch.nn.Module, Step, list[str]]:
    """A copy of the model, the step that trains it as the trainer would, and what to say of it."""
    kind = device.torch_device.type
    with quiet_loggers("ultralytics"):  # it logs the optimizer that it builds, which is not the one of your training
        trained = copy.deepcopy(model).float().train()
        if not any(parameter.requires_grad for parameter in trained.parameters()):  # as in a checkpoint
            for name, parameter in trained.named_parameters():
                parameter.requires_grad_(parameter.is_floating_point() and ".dfl" not in name)
        net = _unwrapped(trained)
        if isinstance(getattr(net, "args", {}), dict):  # a model that no trainer has had yet
            utils = _part("utils")
            net.args = utils.IterableSimpleNamespace(**{**utils.DEFAULT_CFG_DICT, **getattr(net, "args", {})})
        task = str(_part("nn.tasks").guess_model_task(net))
        if task not in TASKS:
            raise InvalidArgumentError(
                f"a model for the task {task!r}: this makes batches for {', '.join(TASKS)}. Write a step of your own, and "
                "call oomprobe.find_max_batch(model, step_fn)"
            )
        net.criterion = net.init_criterion()
        for criterion in (net.criterion, *vars(net.criterion).values()):  # an end-to-end loss has two
            if hasattr(criterion, "assigner"):
                _match_as_many_as_can_be(criterion.assigner)
        optimizer = _optimizer(trained, net, dataset_size)
    if kind in ("cpu", "mps"):  # where the trainer switches autocast off
        dtype = None
    scaler: Any = torch.amp.GradScaler(kind, enabled=dtype is torch.float16)

    def step(model: torch.nn.Module, batch_size: int) -> None:
        with device.torch_device:
            batch = _worst_batch(net, task, batch_size, imgsz=imgsz, objects=objects)
        refused: BaseException | None = None
        with torch.autocast(kind, dtype=dtype, enabled=dtype is not None):
            try:
                loss = model(batch)
            except _EscapedError as escaped:
                refused = escaped.args[0]
        if refused is not None:
            raise refused
        scaler.scale(loss[0].sum()).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=CLIPPED_NORM)
        scaler.step(optimizer)
        scaler.update()
        # Kept rather than freed: while the trainer accumulates, they are there during the next forward pass.
        optimizer.zero_grad(set_to_none=False)

    caller = Caller(
        alone=f"train with YOLO(...).train(batch={{batch_size}}, imgsz={imgsz})",
        more="A trial makes its own images and objects, and calls none of the trainer's callbacks.",
    )
    cast = "no autocast" if dtype is None else f"autocast to {str(dtype).removeprefix('torch.')}"
    notes = [
        f"Ultralytics' loss for {task} at imgsz {imgsz}, {type(optimizer).__name__}, {cast}, and the second copy of the "
        "model that the trainer averages into"
    ]
    if task in ASSIGNED:
        notes.append(
            f"every image had {objects} objects (max_num_obj; the trainer counts four times the fullest image's), "
            "each a quarter of the image, with as many anchors matched as the assigner may match"
        )
    return trained, Step(run=step, caller=caller), notes


def _optimizer(model: torch.nn.Module, net: Any, dataset_size: int) -> torch.optim.Optimizer:
    """The one that the trainer would build. It learns nothing, so that every size meets the same weights."""
    args = net.args
    trainer = SimpleNamespace(args=copy.copy(args), data={"nc": int(getattr(net.model[-1], "nc", 0)) or 10})
    optimizer: torch.optim.Optimizer = _part("engine.trainer").BaseTrainer.build_optimizer(
        trainer,
        model,
        name=args.optimizer,
        lr=args.lr0,
        momentum=args.momentum,
        decay=args.weight_decay,
        iterations=math.ceil(dataset_size / max(1, int(args.nbs))) * int(args.epochs),
    )
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    return optimizer


# --- worst-case batches ---


def _worst_batch(net: Any, task: str, batch_size: int, *, imgsz: int, objects: int) -> dict[str, torch.Tensor]:
    """A batch as the trainer hands it to the loss, with as many objects in every image as there can be.

    `objects`, the trainer's max_num_obj, is four times those of the fullest image, and no point of a mosaic lies in more
    objects than one image has. So each object covers a quarter of the image, and the assigner meets as many pairs of object
    and anchor as a batch can have.
    """
    head = net.model[-1]
    classes = max(1, int(getattr(head, "nc", 0) or len(getattr(net, "names", None) or ())))
    shape = (batch_size, int(net.yaml.get("channels", 3)), imgsz, imgsz)
    if task == "classify":  # its data set hands out floating point
        return {"img": torch.rand(shape), "cls": torch.arange(batch_size) % classes}
    batch = {"img": torch.randint(256, shape, dtype=torch.uint8).float() / 255}
    if task == "semantic":
        return {**batch, "semantic_mask": torch.zeros(batch_size, imgsz, imgsz, dtype=torch.int32)}
    if task == "depth":
        return {**batch, "depth": torch.ones(batch_size, imgsz, imgsz)}
    rows = math.ceil(math.sqrt(objects))
    place = torch.arange(objects)
    middles = (torch.stack((place % rows, place // rows), 1) + 0.5) * SIDE / rows + SIDE / 2
    angles = torch.zeros(objects, 1 if task == "obb" else 0)
    boxes = torch.cat((middles, torch.full((objects, 2), SIDE), angles), 1)
    batch |= {
        "batch_idx": torch.arange(batch_size).repeat_interleave(objects).float(),
        "cls": (place % classes).float().repeat(batch_size)[:, None],
        "bboxes": boxes.repeat(batch_size, 1),
    }
    if hasattr(net, "txt_feats"):  # it reads texts beside each image
        batch["txt_feats"] = torch.ones(batch_size, *net.txt_feats.shape[1:])
    if task == "segment":
        overlap, side = net.args.overlap_mask, imgsz // int(net.args.mask_ratio)
        dtype = torch.int32 if overlap and objects > MASKS_IN_A_BYTE else torch.uint8
        batch["masks"] = torch.ones(batch_size if overlap else batch_size * objects, side, side, dtype=dtype)
        batch["sem_masks"] = torch.zeros(batch_size, side, side)
    if task == "pose":
        batch["keypoints"] = torch.full((batch_size * objects, int(head.kpt_shape[0]), 3), 0.5)
    return batch


class _EscapedError(Exception):
    """Takes an out-of-memory error, its argument, past a handler that would go on image by image."""


def _match_as_many_as_can_be(assigner: Any) -> None:
    """Have a `TaskAlignedAssigner` match as many anchors as it can, and let its out-of-memory errors out.

    It chooses anchors by what the net predicts, and a trained net chooses more of them than random weights do. Its `forward`
    catches what `_forward` raises and goes on image by image; a size at which that happens in every step does not fit.
    """
    inner = assigner._forward

    def match(*args: Any, **kwargs: Any) -> Any:
        try:
            *targets, found, indices = inner(*args, **kwargs)
        except RuntimeError as error:
            raise _EscapedError(error) from None
        found = torch.zeros_like(found)
        found[:, : assigner.n_max_boxes * int(getattr(assigner, "topk2", None) or assigner.topk)] = True
        return (*targets, found, indices)

    assigner._forward = match


# --- drop-ins ---


def check_train_batch_size(
    model: torch.nn.Module,
    imgsz: int = 640,
    amp: bool | torch.dtype = True,
    batch: float = -1,
    max_num_obj: int = 1,
    dataset_size: int = 0,
    *,
    device: Any = None,
    **options: Any,
) -> int:
    """Find the batch to train with; a drop-in for the function of that name that Ultralytics' trainer calls.

    For a model on the CPU or MPS while `device` is None it returns 16, as the original does, with a warning.

    Args:
        model: As for `find_max_batch`.
        imgsz: As for `find_max_batch`; pixels.
        amp: As for `find_max_batch`.
        batch: Share of the available memory that training may use, in (0, 1); any other number means 0.6.
        max_num_obj: As for `find_max_batch`.
        dataset_size: As for `find_max_batch`.
        device: As for `find_max_batch`, such as ``"cpu:4GiB"``. None: where the model is.
        **options: As for `find_max_batch`.

    Returns:
        A size that ran, or 16.

    Raises:
        OomProbeError: as for `find_max_batch`.
    """
    options = {"memory_fraction": batch if 0.0 < batch < 1.0 else DEFAULT_FRACTION, **options}
    utils = _part("utils")
    prefix, home = utils.colorstr("AutoBatch: "), next(model.parameters()).device.type
    if device is None and home in ("cpu", "mps"):
        utils.LOGGER.warning(
            f"{prefix}the model is on the {home}, where Ultralytics asks for the default: using batch-size {DEFAULT_BATCH}, "
            "WHICH WAS NOT RUN. To probe, say where: device='cpu:8GiB' (so much of host memory), or 'mps', here or in "
            "install(device=...)"
        )
        return DEFAULT_BATCH
    sizes: dict[str, Any] = {"imgsz": imgsz, "max_num_obj": max_num_obj, "dataset_size": dataset_size}
    result = find_max_batch(model, amp=amp, device=device, **sizes, **options)
    utils.LOGGER.info(
        f"{prefix}Using batch-size {result.batch_size}, which ran in {options['memory_fraction']:.0%} of the "
        f"{result.available_bytes / 2**30:.2f} GiB available on {result.device}"
    )
    return result.batch_size


def install(*, device: Any = None, **options: Any) -> ExitStack:
    """Make ``YOLO(...).train(batch=-1)`` find its batch here, until it is undone.

    Args:
        device: None: where the trainer has put the model. A trainer on the CPU probes with ``"cpu:8GiB"``.
        **options: Others of `oomprobe.find_max_batch`. Without ``memory_fraction``, it is the trainer's ``batch``
            (``batch=0.8``; -1 means 0.6).

    Returns:
        What puts the trainer's own function back at the end of a ``with`` statement, or by its ``close()``.

    Raises:
        FrameworkError: Ultralytics is not installed, or older than 8.4.
    """
    undo, trainer = ExitStack(), _part("engine.trainer")
    undo.callback(setattr, trainer, "check_train_batch_size", trainer.check_train_batch_size)
    trainer.check_train_batch_size = partial(check_train_batch_size, device=device, **options)
    return undo
