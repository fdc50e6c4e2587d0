"""One step as Ultralytics' trainer takes it: its loss, optimizer, scaler, clipping, and the second copy of the model."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from oomprobe.devices import Device, Simulated
from oomprobe.errors import Caller, SimulationError
from oomprobe.integrations.ultralytics.asked import Asked, part
from oomprobe.integrations.ultralytics.batches import Batches, batches_for
from oomprobe.integrations.ultralytics.selections import (
    UNKNOWN_HERE,
    AsManyAsCan,
    Selections,
    call,
    criteria,
    prepare_for_simulation,
)
from oomprobe.scope import scope

CLIPPED_NORM = 10.0  # what the trainer clips gradients to
ASSIGNED = ("detect", "segment", "pose", "obb")  # tasks whose losses match anchors with objects


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What a probe runs.

    Attributes:
        model: A copy of the one that was given, in 32 bits.
        average: The second copy that the trainer keeps in memory, for the average of the weights.
        step: One full step.
        notes: What is particular about it.
    """

    model: torch.nn.Module
    average: torch.nn.Module
    step: Callable[[torch.nn.Module, int], object]
    notes: tuple[str, ...]


def prepare(model: torch.nn.Module, device: Device, asked: Asked) -> Training:
    """Build what a probe runs from a model of Ultralytics.

    Raises:
        InvalidArgumentError: the task is not known.
        SimulationError: a simulated card cannot run this loss.
        FrameworkError: Ultralytics is not there, or too old.
    """
    simulated = isinstance(device, Simulated)
    kind = "cuda" if simulated else device.torch_device.type
    with device.building() if isinstance(device, Simulated) else nullcontext(), _quietly():
        trained = copy.deepcopy(model).train()
        was = _widen(trained)
        average = copy.deepcopy(trained).requires_grad_(False) if was else model
        plain = part("utils.torch_utils").unwrap_model(trained)
        plain.args = _arguments(plain)
        unfrozen = _unfreeze(trained)
        task = str(part("nn.tasks").guess_model_task(plain))
        batches = batches_for(
            plain, plain.args, task, asked.imgsz, asked.max_num_obj, kind if simulated else device.torch_device
        )
        if simulated:
            _put_on_card(trained, plain)
        plain.criterion = plain.init_criterion()
        selections = Selections(batches.objects)
        if simulated:
            _check_simulation(task, plain.criterion)
            prepare_for_simulation(plain.criterion, selections)
        for criterion in criteria(plain.criterion):
            selections.impose_on(criterion.assigner)
        optimizer = _optimizer(trained, plain, asked.dataset_size)
        precision = Precision.of(asked.amp, kind)
        scaler = torch.amp.GradScaler(kind, enabled=precision.scaled)
    step = _step(
        batches,
        optimizer,
        scaler,
        casts=precision.casts,
        selecting=AsManyAsCan(selections) if simulated else nullcontext(),
        compiled=bool(getattr(plain.args, "compile", False)),
        loss_of=plain.loss,
    )
    step.oomprobe_caller = _caller(batches)  # type: ignore[attr-defined]
    notes = (*_notes(batches, optimizer, precision, unfrozen), *was)
    return Training(model=trained, average=average, step=step, notes=notes)


def _step(
    batches: Batches,
    optimizer: torch.optim.Optimizer,
    scaler: Any,
    *,
    casts: Callable[[], AbstractContextManager[Any]],
    selecting: AbstractContextManager[Any],
    compiled: bool,
    loss_of: Callable[..., Any],
) -> Callable[[torch.nn.Module, int], object]:
    def forward(model: torch.nn.Module, batch_size: int) -> torch.Tensor:
        batch = batches.make(batch_size)
        with casts():
            predicted = (model(batch["img"]),) if compiled else ()
            with selecting:
                loss = call(loss_of, batch, *predicted) if compiled else call(model, batch)
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

    return step


@dataclass(frozen=True, slots=True)
class Precision:
    """What the trainer makes of ``amp``."""

    kind: str
    dtype: torch.dtype | None

    @classmethod
    def of(cls, amp: bool | torch.dtype, kind: str) -> Precision:
        if not amp or kind in ("cpu", "mps"):  # there the trainer switches it off
            return cls(kind, None)
        return cls(kind, amp if isinstance(amp, torch.dtype) else torch.float16)

    @property
    def scaled(self) -> bool:
        return self.dtype is torch.float16

    def casts(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.dtype is None else torch.autocast(self.kind, dtype=self.dtype)


def _arguments(model: Any) -> Any:
    """The training arguments: a namespace, which a model that no trainer has had yet does not have."""
    known = getattr(model, "args", {})
    if not isinstance(known, dict):
        return known
    utils = part("utils")
    return utils.IterableSimpleNamespace(**{**utils.DEFAULT_CFG_DICT, **known})


def _widen(model: torch.nn.Module) -> tuple[str, ...]:
    """Bring a model to 32 bits, as the trainer does with the weights that it starts from; a note, where it was not."""
    values = (*model.parameters(), *model.buffers())
    others = {value.dtype for value in values if value.is_floating_point()} - {torch.float32}
    if not others:
        return ()
    model.float()
    names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in others))
    return (f"the model has weights of {names}: it was trained, and averaged, in float32, as the trainer does",)


def _unfreeze(model: torch.nn.Module) -> bool:
    """A checkpoint holds an average, of which nothing requires gradients; the trainer lets all but ``.dfl`` do so."""
    if any(parameter.requires_grad for parameter in model.parameters()):
        return False
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and ".dfl" not in name:
            parameter.requires_grad_(True)
    return True


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


def _put_on_card(model: torch.nn.Module, plain: Any) -> None:
    """The strides stay behind: they are read as numbers, and what is on a simulated card has no value."""
    head = plain.model[-1]
    stride = head.stride.clone() if hasattr(head, "stride") else None
    model.to("cuda")
    if stride is not None:
        head.stride = stride


def _check_simulation(task: str, criterion: Any) -> None:
    if task in ASSIGNED and not list(criteria(criterion)):
        raise SimulationError(UNKNOWN_HERE.format(what=type(criterion).__name__))


def _caller(batches: Batches) -> Caller:
    many = f", with {batches.objects} objects each" if batches.task in ASSIGNED else ""
    return Caller(
        alone=f"train with YOLO(...).train(batch={{batch_size}}, imgsz={batches.imgsz})",
        more=f"A trial makes its own images{many}, and calls none of the trainer's callbacks.",
    )


def _notes(batches: Batches, optimizer: torch.optim.Optimizer, precision: Precision, unfrozen: bool) -> Iterator[str]:
    cast = "no autocast" if precision.dtype is None else f"autocast to {str(precision.dtype).removeprefix('torch.')}"
    yield (
        f"Ultralytics' loss for {batches.task} at imgsz {batches.imgsz}, {type(optimizer).__name__}, {cast}, and the second "
        "copy of the model that the trainer averages into"
    )
    if batches.task in ASSIGNED:
        yield (
            f"every image had {batches.objects} objects (max_num_obj; the trainer counts four times the fullest image's), "
            "each a quarter of the image, with as many anchors matched as the assigner may match"
        )
    if unfrozen:
        yield "no parameter required gradients, as in a checkpoint: all were trained but .dfl, as the trainer does"


@scope
def _quietly() -> Iterator[None]:
    """Ultralytics logs the optimizer that it builds, which is not the one of the user's training."""
    logger = part("utils").LOGGER
    level = logger.level
    logger.setLevel("ERROR")
    try:
        yield
    finally:
        logger.setLevel(level)
