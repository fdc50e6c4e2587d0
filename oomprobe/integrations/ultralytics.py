"""Ultralytics' AutoBatch, replaced by running batches: the real loss and optimizer on worst-case targets.

`find_max_batch` returns everything that was measured. `install` makes the trainer call `check_train_batch_size`, and so use
the largest batch that runs in 60 % of the free memory::

    with install():
        YOLO("yolo11n.yaml").train(data="coco8.yaml", batch=-1)
"""

from __future__ import annotations

import copy
import math
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any, Unpack

import torch

from oomprobe.devices import Device, choose_device
from oomprobe.errors import Caller, InvalidArgumentError, check_size
from oomprobe.integrations import framework
from oomprobe.probing.order import SearchOptions
from oomprobe.probing.summary import LAST_BATCH
from oomprobe.records.options import Step
from oomprobe.results.result import ProbeResult

GRID = 32  # pixels: the trainer rounds image sides up to a multiple of the stride, which is at least this
OBJECT_SIDE = 0.5  # as a share of the image's side; see `_worst_batch`
MAX_UINT8_MASKS = 255  # objects that an overlapping mask of 8 bits can number
CLIPPED_NORM = 10.0  # to which the trainer clips gradients
DEFAULT_FRACTION, DEFAULT_BATCH = 0.6, 16  # of Ultralytics' own `check_train_batch_size`
ASSIGNED = ("detect", "segment", "pose", "obb")  # tasks whose losses assign anchors to objects
TASKS = (*ASSIGNED, "classify", "semantic", "depth")
AUTOCAST: dict[object, torch.dtype | None] = {  # by the values that `amp` takes
    True: torch.float16, "fp16": torch.float16, torch.float16: torch.float16,
    "bf16": torch.bfloat16, torch.bfloat16: torch.bfloat16,
    False: None, "fp32": None,
}  # fmt: skip
NOT_COVERED = (
    "validation during training: batches twice as large (except for obb, semantic and depth), without gradients",
    "augmentations that add objects beyond max_num_obj (mixup, cutmix, copy_paste), and multi_scale beyond imgsz",
)


def _import(name: str) -> Any:
    """Import a module of Ultralytics."""
    return framework.load(f"ultralytics.{name}", minimum="8.4", extra="ultralytics")


# --- the probe ---


def find_max_batch(
    model: torch.nn.Module,
    *,
    imgsz: int = 640,
    amp: bool | str | torch.dtype = True,
    max_num_obj: int = 1,
    dataset_size: int = 0,
    **options: Unpack[SearchOptions],
) -> ProbeResult:
    """Find the largest batch size with which an Ultralytics model trains, by training it.

    Runs the model's own loss on images with `max_num_obj` objects each, backward, gradient clipping and the optimizer
    that the trainer would build. A copy of the model is trained; the model that you pass is only read, and takes the place
    of the averaged weights that the trainer keeps in memory.

    Args:
        model: Such as ``YOLO("yolo11n.yaml").model``; it is trained in float32.
        imgsz: Height and width of an image, pixels, rounded up to the model's stride.
        amp: Mixed precision, or its dtype (torch.float16, torch.bfloat16, "fp16", "bf16", "fp32"). As in training, it has
            no effect on the CPU and MPS.
        max_num_obj: Objects in an image, as the trainer counts them: four times those of the fullest image in the data
            set, since a mosaic combines four images.
        dataset_size: Images in the training set, the largest batch to try; ``optimizer=auto`` depends on it. 0: unknown.
        **options: Those of `oomprobe.find_max_batch`, such as ``memory_fraction``; `device` cannot be a simulated card.

    Returns:
        The result, with the answer and the trials.

    Raises:
        InvalidArgumentError: an argument is wrong, or oomprobe has no batches for the model's task.
        FrameworkError: Ultralytics is not installed, or older than 8.4.
        OomProbeError: as for `oomprobe.find_max_batch`.

    Examples:
        >>> def largest(yolo):
        ...     return find_max_batch(yolo.model.to("cuda"), imgsz=1280, max_num_obj=80).batch_size
    """
    if isinstance(model, _import("engine.model").Model) or not hasattr(
        _unwrapped(model), "init_criterion"
    ):
        raise InvalidArgumentError(
            f"model must be an Ultralytics model, such as YOLO('yolo11n.yaml').model, not {type(model).__name__}: pass "
            "the .model of a YOLO object"
        )
    check_size("imgsz", imgsz)
    check_size("max_num_obj", max_num_obj or 1)
    if amp not in AUTOCAST:
        raise InvalidArgumentError(
            f"amp must be True, False, torch.float16, torch.bfloat16, 'fp16', 'bf16' or 'fp32', not {amp!r}"
        )
    device = choose_device(options.get("device"), model)
    if device.is_simulated:
        raise InvalidArgumentError(
            "a simulated card cannot run Ultralytics' losses, which select by values, and a simulated card has none: probe on "
            "the card itself, or in host memory with device='cpu:8GiB'"
        )
    stride = getattr(_unwrapped(model), "stride", None)
    grid = (
        GRID if stride is None else max(GRID, int(stride.max()))
    )  # pixels per point of the coarsest feature map
    pixels = math.ceil(imgsz / grid) * grid
    if dataset_size:
        check_size("dataset_size", dataset_size)
    training = Training(model, device, pixels, AUTOCAST[amp], max(1, max_num_obj), dataset_size)
    if pixels == grid and dataset_size != 1:
        options.setdefault(
            "min_batch", 2
        )  # batch norm cannot train on one image with a last feature map of one point
    if options.get("device") is not None:
        options["device"] = device
    return framework.probe(training, options)


def _unwrapped(model: Any) -> Any:
    """Return the model without the wrapper of torch.compile or data parallelism."""
    return _import("utils.torch_utils").unwrap_model(model)


class Training:
    """The training of a copy of the model, as the trainer would train it: a `Loop` of `framework`."""

    scanned: tuple[()] = ()

    def __init__(
        self,
        model: torch.nn.Module,
        device: Device,
        imgsz: int,
        dtype: torch.dtype | None,
        objects: int,
        dataset_size: int,
    ) -> None:
        """Copy the model, and make its loss and optimizer."""
        self.device, self.imgsz, self.objects, self.dataset_size = (
            device.torch_device,
            imgsz,
            objects,
            dataset_size,
        )
        self.covered: tuple[str, ...] = (LAST_BATCH,) if dataset_size else ()
        self.dtype = (
            None if self.device.type in ("cpu", "mps") else dtype
        )  # the trainer disables autocast there
        with framework.quiet_loggers(
            "ultralytics"
        ):  # else it would log an optimizer that only the trials use
            self.model = copy.deepcopy(model).float().train()
            if not any(
                parameter.requires_grad for parameter in self.model.parameters()
            ):  # loaded from a checkpoint
                for name, parameter in self.model.named_parameters():
                    parameter.requires_grad_(parameter.is_floating_point() and ".dfl" not in name)
            self.net = net = _unwrapped(self.model)
            if isinstance(getattr(net, "args", {}), dict):  # no trainer has set the model up yet
                utils = _import("utils")
                net.args = utils.IterableSimpleNamespace(
                    **{**utils.DEFAULT_CFG_DICT, **getattr(net, "args", {})}
                )
            self.task = str(_import("nn.tasks").guess_model_task(net))
            if self.task not in TASKS:
                raise InvalidArgumentError(
                    f"the model's task is {self.task!r}, and oomprobe has batches only for {', '.join(TASKS)}: write your own "
                    "step, and call oomprobe.find_max_batch(model, step_fn)"
                )
            net.criterion = net.init_criterion()
            for criterion in (
                net.criterion,
                *vars(net.criterion).values(),
            ):  # an end-to-end loss contains two
                if hasattr(criterion, "assigner"):
                    _match_all_anchors(criterion.assigner)
            self.optimizer = _optimizer(self.model, net, dataset_size)
        self.scaler: Any = torch.amp.GradScaler(
            self.device.type, enabled=self.dtype is torch.float16
        )

    def steps(self) -> dict[str, Step]:
        """Return the training step."""
        caller = Caller(
            alone=f"train with YOLO(...).train(batch={{batch_size}}, imgsz={self.imgsz})",
            more="A trial creates its own images and objects, and calls none of the trainer's callbacks.",
        )
        count = self.dataset_size or None
        return {
            "step": Step(
                self.run,
                is_loop=False,
                caller=caller,
                starts_anew=True,
                is_timed=count is None,
                max_batch=count,
            ),
        }

    def notes(self, result: ProbeResult) -> list[str]:
        """Return what a trial runs."""
        cast = (
            "no autocast"
            if self.dtype is None
            else f"autocast to {str(self.dtype).removeprefix('torch.')}"
        )
        notes = [
            f"Ultralytics' loss for {self.task} at imgsz {self.imgsz}, {type(self.optimizer).__name__}, {cast}, and a second "
            "copy of the model, as the trainer keeps for averaged weights"
        ]
        if self.task in ASSIGNED:
            notes.append(
                f"every image had {self.objects} objects (max_num_obj; the trainer counts four times the fullest image's), "
                "each a quarter of the image, with as many anchors matched as the assigner may match"
            )
        return notes

    def not_covered(self) -> tuple[str, ...]:
        """Return what the trainer does besides."""
        return NOT_COVERED

    def run(self, model: torch.nn.Module, batch_size: int) -> None:
        """Train on a batch, and on the smaller last one of an epoch, which the trainer does not drop."""
        self._train(model, batch_size)
        if last := framework.last_batch(self.dataset_size, batch_size):
            self._train(model, last)

    def _train(self, model: torch.nn.Module, batch_size: int) -> None:
        with self.device:
            batch = _worst_batch(
                self.net, self.task, batch_size, imgsz=self.imgsz, objects=self.objects
            )
        refused: BaseException | None = None
        with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype is not None):
            try:
                loss = model(batch)
            except _EscapedError as escaped:
                refused = escaped.args[0]
        if refused is not None:
            raise refused
        self.scaler.scale(loss[0].sum()).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=CLIPPED_NORM)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        # Keep the gradients: they exist during the next forward pass while the trainer accumulates.
        self.optimizer.zero_grad(set_to_none=False)


def _optimizer(model: torch.nn.Module, net: Any, dataset_size: int) -> torch.optim.Optimizer:
    """Return the trainer's optimizer, with learning rates of 0 so that every size runs with the same weights."""
    args = net.args
    trainer = SimpleNamespace(
        args=copy.copy(args), data={"nc": int(getattr(net.model[-1], "nc", 0)) or 10}
    )
    optimizer: torch.optim.Optimizer = _import("engine.trainer").BaseTrainer.build_optimizer(
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


def _worst_batch(
    net: Any, task: str, batch_size: int, *, imgsz: int, objects: int
) -> dict[str, torch.Tensor]:
    """Return a batch as the trainer passes it to the loss, with the largest number of objects in every image.

    `objects`, the trainer's max_num_obj, is four times the number in the fullest image, and no point of a mosaic lies in
    more objects than one image has. So each object covers a quarter of the image, and the assigner gets as many pairs of
    object and anchor as a batch can have.
    """
    head = net.model[-1]
    classes = max(1, int(getattr(head, "nc", 0) or len(getattr(net, "names", None) or ())))
    shape = (batch_size, int(net.yaml.get("channels", 3)), imgsz, imgsz)
    if task == "classify":  # its data set yields floats
        return {"img": torch.rand(shape), "cls": torch.arange(batch_size) % classes}
    batch = {"img": torch.randint(256, shape, dtype=torch.uint8).float() / 255}
    if task == "semantic":
        return {**batch, "semantic_mask": torch.zeros(batch_size, imgsz, imgsz, dtype=torch.int32)}
    if task == "depth":
        return {**batch, "depth": torch.ones(batch_size, imgsz, imgsz)}
    rows = math.ceil(math.sqrt(objects))
    place = torch.arange(objects)
    middles = (
        torch.stack((place % rows, place // rows), 1) + 0.5
    ) * OBJECT_SIDE / rows + OBJECT_SIDE / 2
    angles = torch.zeros(objects, 1 if task == "obb" else 0)
    boxes = torch.cat((middles, torch.full((objects, 2), OBJECT_SIDE), angles), 1)
    batch |= {
        "batch_idx": torch.arange(batch_size).repeat_interleave(objects).float(),
        "cls": (place % classes).float().repeat(batch_size)[:, None],
        "bboxes": boxes.repeat(batch_size, 1),
    }
    if hasattr(net, "txt_feats"):  # the model reads texts with each image
        batch["txt_feats"] = torch.ones(batch_size, *net.txt_feats.shape[1:])
    if task == "segment":
        overlap, side = net.args.overlap_mask, imgsz // int(net.args.mask_ratio)
        count, dtype = batch_size * objects, torch.uint8
        if overlap:  # one mask for each image, which numbers its objects
            count, dtype = batch_size, torch.int32 if objects > MAX_UINT8_MASKS else torch.uint8
        batch["masks"] = torch.ones(count, side, side, dtype=dtype)
        batch["sem_masks"] = torch.zeros(batch_size, side, side)
    if task == "pose":
        batch["keypoints"] = torch.full((batch_size * objects, int(head.kpt_shape[0]), 3), 0.5)
    return batch


class _EscapedError(Exception):
    """Carries an out-of-memory error, its argument, past a handler that would continue image by image."""


def _match_all_anchors(assigner: Any) -> None:
    """Make a `TaskAlignedAssigner` match as many anchors as it may, and raise its out-of-memory errors.

    It selects anchors by the model's predictions, and selects more for a trained model than for random weights. Its
    `forward` catches out-of-memory errors of `_forward` and continues image by image; such a size does not fit.
    """
    inner = assigner._forward

    def match(*args: Any, **kwargs: Any) -> Any:
        try:
            *targets, matched, indices = inner(*args, **kwargs)
        except RuntimeError as error:
            raise _EscapedError(error) from None
        matched = torch.zeros_like(matched)
        matched[
            :, : assigner.n_max_boxes * int(getattr(assigner, "topk2", None) or assigner.topk)
        ] = True
        return (*targets, matched, indices)

    assigner._forward = match


# --- drop-ins ---


def check_train_batch_size(
    model: torch.nn.Module,
    imgsz: int = 640,
    amp: bool | torch.dtype = True,
    batch: float = -1,
    max_num_obj: int = 1,
    dataset_size: int = 0,
    **options: Unpack[SearchOptions],
) -> int:
    """Find the batch size for training; a drop-in for the function that Ultralytics' trainer calls.

    Its arguments are those of `find_max_batch`, and `batch`: the share of the available memory that training may use, in (0, 1);
    any other number means 0.6. If the model is on the CPU or MPS and no `device` is given, return 16 as the original does,
    with a warning.

    Returns:
        A size that ran, or 16.

    Raises:
        OomProbeError: as for `find_max_batch`.
    """
    options.setdefault("memory_fraction", batch if 0.0 < batch < 1.0 else DEFAULT_FRACTION)
    utils = _import("utils")
    prefix, home = utils.colorstr("AutoBatch: "), next(model.parameters()).device.type
    if options.get("device") is None and home in ("cpu", "mps"):
        utils.LOGGER.warning(
            f"{prefix}the model is on the {home}, where Ultralytics uses its default: using batch-size {DEFAULT_BATCH}, "
            "WHICH WAS NOT RUN. To probe, pass device='cpu:8GiB' (that much host memory) or device='mps', here or in "
            "install(device=...)"
        )
        return DEFAULT_BATCH
    result = find_max_batch(
        model, imgsz=imgsz, amp=amp, max_num_obj=max_num_obj, dataset_size=dataset_size, **options
    )
    utils.LOGGER.info(
        f"{prefix}Using batch-size {result.batch_size}, which ran in {options['memory_fraction']:.0%} of the "
        f"{result.available_bytes / 2**30:.2f} GiB available on {result.device}"
    )
    return result.batch_size


def install(**options: Unpack[SearchOptions]) -> ExitStack:
    """Make ``YOLO(...).train(batch=-1)`` use `check_train_batch_size` of this module, until undone.

    Args:
        **options: Those of `oomprobe.find_max_batch`. `device` defaults to the trainer's: to probe with one on the CPU, pass
            ``"cpu:8GiB"``. `memory_fraction` defaults to the trainer's ``batch`` (such as ``batch=0.8``; -1 means 0.6).

    Returns:
        An ExitStack that restores the trainer's function at the end of a ``with`` statement, or by ``close()``.

    Raises:
        FrameworkError: Ultralytics is not installed, or older than 8.4.

    Examples:
        >>> def train(yolo, data):
        ...     with install(memory_fraction=0.9):
        ...         return yolo.train(data=data, batch=-1)
    """
    undo, trainer = ExitStack(), _import("engine.trainer")
    undo.callback(setattr, trainer, "check_train_batch_size", trainer.check_train_batch_size)
    trainer.check_train_batch_size = partial(check_train_batch_size, **options)
    return undo
