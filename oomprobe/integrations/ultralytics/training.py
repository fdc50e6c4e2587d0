"""One step as Ultralytics' trainer takes it: its loss, optimizer, scaler, clipping, and the second copy of the model."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from oomprobe.devices import Device, replay_of
from oomprobe.errors import Caller, SimulationError
from oomprobe.integrations.framework import framework
from oomprobe.integrations.ultralytics.batches import Batches, batches_for
from oomprobe.integrations.ultralytics.selections import AsManyAsCan, Selections, call, criteria, padded_targets
from oomprobe.options import Step

CLIPPED_NORM = 10.0  # what the trainer clips gradients to
ASSIGNED = ("detect", "segment", "pose", "obb")  # tasks whose losses match anchors with objects


def part(name: str) -> Any:
    """A module of Ultralytics."""
    return framework(f"ultralytics.{name}", minimum="8.4", extra="ultralytics")


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What a probe runs."""

    model: torch.nn.Module  # a copy of the one that was given, in 32 bits
    average: torch.nn.Module  # the second copy that the trainer keeps in memory, for the average of the weights
    step: Step
    notes: tuple[str, ...]


def prepare(
    model: torch.nn.Module,
    device: Device,
    *,
    imgsz: int,
    amp: bool | torch.dtype,
    max_num_obj: int = 1,
    dataset_size: int = 0,
) -> Training:
    """Build what a probe runs from a model of Ultralytics; the arguments are those of `find_max_batch`, checked.

    Raises:
        InvalidArgumentError: the task is not known.
        SimulationError: a simulated card cannot run this loss.
    """
    replay = replay_of(device)
    simulated = replay is not None
    kind = "cuda" if simulated else device.torch_device.type
    with nullcontext() if replay is None else replay.building(), _quietly():
        trained = copy.deepcopy(model).train()
        notes = list(_widened(trained))
        average = copy.deepcopy(trained).requires_grad_(False) if notes else model
        plain = part("utils.torch_utils").unwrap_model(trained)
        plain.args = _arguments(plain)
        notes += _unfrozen(trained)
        task = str(part("nn.tasks").guess_model_task(plain))
        if simulated and task == "segment":
            raise SimulationError(
                "a simulated card cannot run this loss: how much it selects depends on masks. Probe on the card itself, or "
                "on host memory with device='cpu:8GiB'"
            )
        batches = batches_for(plain, plain.args, task, imgsz, max_num_obj, kind if simulated else device.torch_device)
        if simulated:
            head = plain.model[-1]
            # The strides stay behind: they are read as numbers, and what is on a simulated card has no value.
            stride = {"stride": head.stride.clone()} if hasattr(head, "stride") else {}
            trained.to("cuda")
            vars(head).update(stride)
        plain.criterion = plain.init_criterion()
        selections = Selections(batches.objects)
        for criterion in criteria(plain.criterion):
            selections.impose_on(criterion.assigner)
            if simulated:
                criterion.preprocess = padded_targets(batches.objects)
        optimizer = _optimizer(trained, plain, dataset_size)
        dtype = precision_of(amp, kind)
        scaler: Any = torch.amp.GradScaler(kind, enabled=dtype is torch.float16)
    compiled = bool(getattr(plain.args, "compile", False))

    def forward(model: torch.nn.Module, batch_size: int) -> torch.Tensor:
        batch = batches.make(batch_size)
        with nullcontext() if dtype is None else torch.autocast(kind, dtype=dtype):
            predicted = (model(batch["img"]),) if compiled else ()
            with AsManyAsCan(selections) if simulated else nullcontext():
                loss = call(plain.loss, batch, *predicted) if compiled else call(model, batch)
        total: torch.Tensor = loss[0].sum()
        return total

    def step(model: torch.nn.Module, batch_size: int) -> None:
        scaler.scale(forward(model, batch_size)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=CLIPPED_NORM)
        scaler.step(optimizer)
        scaler.update()
        # Kept rather than freed: while the trainer accumulates, they are there during the next forward pass.
        optimizer.zero_grad(set_to_none=False)

    return Training(
        model=trained,
        average=average,
        step=Step(run=step, caller=_caller(batches)),
        notes=(*_notes(batches, type(optimizer).__name__, dtype), *notes),
    )


def precision_of(amp: bool | torch.dtype, kind: str) -> torch.dtype | None:
    """The dtype of autocast; None: there is none. On the CPU and MPS the trainer switches it off."""
    if not amp or kind in ("cpu", "mps"):
        return None
    return amp if isinstance(amp, torch.dtype) else torch.float16


def _arguments(model: Any) -> Any:
    """The training arguments: a namespace, which a model that no trainer has had yet does not have."""
    known = getattr(model, "args", {})
    if not isinstance(known, dict):
        return known
    utils = part("utils")
    return utils.IterableSimpleNamespace(**{**utils.DEFAULT_CFG_DICT, **known})


def _widened(model: torch.nn.Module) -> Iterator[str]:
    """Bring a model to 32 bits, as the trainer does with the weights that it starts from; a note, where it was not."""
    values = (*model.parameters(), *model.buffers())
    others = {value.dtype for value in values if value.is_floating_point()} - {torch.float32}
    if others:
        model.float()
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in others))
        yield f"the model has weights of {names}: it was trained, and averaged, in float32, as the trainer does"


def _unfrozen(model: torch.nn.Module) -> Iterator[str]:
    """A checkpoint holds an average, of which nothing requires gradients; the trainer lets all but ``.dfl`` do so."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.is_floating_point() and ".dfl" not in name)
        yield "no parameter required gradients, as in a checkpoint: all were trained but .dfl, as the trainer does"


def _optimizer(model: torch.nn.Module, plain: Any, dataset_size: int) -> torch.optim.Optimizer:
    """The one that the trainer would build. It learns nothing, so that every size meets the same weights."""
    args = plain.args
    rounds = math.ceil(dataset_size / max(1, int(args.nbs))) * int(args.epochs)
    head = plain.model[-1]
    trainer = SimpleNamespace(args=copy.copy(args), data={"nc": int(getattr(head, "nc", 0)) or 10})
    optimizer: torch.optim.Optimizer = part("engine.trainer").BaseTrainer.build_optimizer(
        trainer,
        model,
        name=args.optimizer,
        lr=args.lr0,
        momentum=args.momentum,
        decay=args.weight_decay,
        iterations=rounds,
    )
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    return optimizer


def _caller(batches: Batches) -> Caller:
    many = f", with {batches.objects} objects each" if batches.task in ASSIGNED else ""
    return Caller(
        alone=f"train with YOLO(...).train(batch={{batch_size}}, imgsz={batches.imgsz})",
        more=f"A trial makes its own images{many}, and calls none of the trainer's callbacks.",
    )


def _notes(batches: Batches, optimizer: str, dtype: torch.dtype | None) -> Iterator[str]:
    cast = "no autocast" if dtype is None else f"autocast to {str(dtype).removeprefix('torch.')}"
    yield (
        f"Ultralytics' loss for {batches.task} at imgsz {batches.imgsz}, {optimizer}, {cast}, and the second copy of the "
        "model that the trainer averages into"
    )
    if batches.task in ASSIGNED:
        yield (
            f"every image had {batches.objects} objects (max_num_obj; the trainer counts four times the fullest image's), "
            "each a quarter of the image, with as many anchors matched as the assigner may match"
        )


@contextmanager
def _quietly() -> Iterator[None]:
    """Ultralytics logs the optimizer that it builds, which is not the one of the user's training."""
    logger = part("utils").LOGGER
    level = logger.level
    logger.setLevel("ERROR")
    try:
        yield
    finally:
        logger.setLevel(level)
