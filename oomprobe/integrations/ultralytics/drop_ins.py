"""Drop-ins for ``ultralytics.utils.autobatch``."""

from __future__ import annotations

import inspect
import math
import numbers
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch

import oomprobe
from oomprobe.errors import (
    DeviceLostError,
    InvalidArgumentError,
    NoDeviceError,
    NothingFitsError,
    OomProbeError,
    SimulationError,
)
from oomprobe.integrations.framework import FrameworkError, is_simulated
from oomprobe.integrations.ultralytics.probing import LINE, checked, find_max_batch
from oomprobe.integrations.ultralytics.training import part
from oomprobe.options import check_size

DEFAULT_FRACTION = 0.6
DEFAULT_BATCH = 16
FRACTION = "a share of the available memory, above 0 and at most 1"
ASKED = ("imgsz", "amp", "max_num_obj", "dataset_size")
PATCHED = (
    ("utils.autobatch", "autobatch"),
    ("utils.autobatch", "check_train_batch_size"),
    ("engine.trainer", "check_train_batch_size"),  # which it imported by name
)
NOT_PROBED = (
    "the model is on the {kind}, where Ultralytics' contract asks for the default: using batch-size {default}, WHICH WAS "
    "NOT RUN. To probe, say where: device='cpu:8GiB' (so much of host memory), 'mps', or 'sim:RTX-3090' (a card that need "
    "not be there), here or in install(device=...)"
)


class NoBatchSizeError(NothingFitsError, RuntimeError):
    """Not even the smallest batch fits: ours, and the RuntimeError of Ultralytics' contract."""


def autobatch(
    model: torch.nn.Module,
    imgsz: int = 640,
    fraction: float = 0.60,
    batch_size: int = 16,
    max_num_obj: int = 1,
    dataset_size: int = 0,
    *,
    device: Any = None,
) -> int:
    """Find the largest batch that trains within a share of the available memory; a drop-in for Ultralytics' own.

    Args:
        model: Of Ultralytics; it is only read.
        imgsz: As for `find_max_batch`: height and width of an image, pixels.
        fraction: Share of the available memory that training may use, in (0, 1].
        batch_size: What to return when the probe itself failed, with a warning that says why; also, as the contract of
            the original has it, for a model on the CPU or MPS while `device` is None.
        max_num_obj: Objects in an image, as the trainer counts them.
        dataset_size: Images of the training set; 0: not known.
        device: None: where the model is. Otherwise as for `oomprobe.find_max_batch`, such as ``"cpu:4GiB"``.

    Returns:
        A size that ran, or `batch_size`.

    Raises:
        NoBatchSizeError: nothing fits. It is a RuntimeError, as of the original, and a `NothingFitsError`.
        InvalidArgumentError: an argument is wrong.
        NoDeviceError: the device is not here.
        DeviceLostError: a sticky error of the device; no training in this process would run.
        SimulationError: a simulated card cannot run the loss of this model.
    """
    return _auto(model, imgsz, fraction, batch_size, max_num_obj, dataset_size, device=device)


def check_train_batch_size(
    model: torch.nn.Module,
    imgsz: int = 640,
    amp: bool | torch.dtype = True,
    batch: float = -1,
    max_num_obj: int = 1,
    dataset_size: int = 0,
    *,
    device: Any = None,
) -> int:
    """Find the batch to train with, as the trainer asks for it; a drop-in for Ultralytics' own.

    Args:
        model: As for `autobatch`.
        imgsz: As for `autobatch`.
        amp: As for `find_max_batch`: mixed precision, or its dtype.
        batch: Share of the available memory, where it is in (0, 1); any other number means 0.6.
        max_num_obj: As for `autobatch`.
        dataset_size: As for `autobatch`.
        device: As for `autobatch`.

    Returns:
        A size that ran, or 16 as `autobatch` does.

    Raises:
        OomProbeError: as for `autobatch`.
    """
    return _check(model, imgsz, amp, batch, max_num_obj, dataset_size, device=device)


def _auto(
    model: torch.nn.Module,
    imgsz: int = 640,
    fraction: float = DEFAULT_FRACTION,
    batch_size: int = DEFAULT_BATCH,
    max_num_obj: int = 1,
    dataset_size: int = 0,
    *,
    device: Any,
    **options: Any,
) -> int:
    """The precision is that of the autocast in which it is called, as of the original."""
    if not 0.0 < _number("fraction", fraction, FRACTION) <= 1.0:
        raise InvalidArgumentError(f"fraction must be {FRACTION}, not {fraction!r}")
    check_size("batch_size", batch_size)
    kind = "cuda" if is_simulated(device) else _home(model).type
    amp = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else False
    return _answer(
        model, batch_size, device, imgsz=imgsz, amp=amp, memory_fraction=float(fraction), max_num_obj=max_num_obj,
        dataset_size=dataset_size, **options,
    )  # fmt: skip


def _check(
    model: torch.nn.Module,
    imgsz: int = 640,
    amp: bool | torch.dtype = True,
    batch: float = -1,
    max_num_obj: int = 1,
    dataset_size: int = 0,
    *,
    device: Any,
    **options: Any,
) -> int:
    batch = _number("batch", batch, "a share of the available memory, between 0 and 1, or -1 for 0.6")
    fraction = batch if 0.0 < batch < 1.0 else DEFAULT_FRACTION
    return _answer(
        model, DEFAULT_BATCH, device, imgsz=imgsz, amp=amp, memory_fraction=fraction,
        max_num_obj=max_num_obj, dataset_size=dataset_size, **options,
    )  # fmt: skip


def _answer(model: torch.nn.Module, default: int, device: Any, **options: Any) -> int:
    options |= checked(model, **{name: options[name] for name in ASKED})  # wrong is wrong on the CPU, too
    utils = part("utils")
    logger, prefix = utils.LOGGER, utils.colorstr("AutoBatch: ")
    home = _home(model).type
    if device is None and home in ("cpu", "mps"):
        logger.warning(prefix + NOT_PROBED.format(kind=home, default=default))
        return default
    try:
        result = find_max_batch(model, device=device, **options)
    except NothingFitsError as error:
        raise NoBatchSizeError(str(error), trials=error.trials) from error
    except (InvalidArgumentError, NoDeviceError, DeviceLostError, SimulationError, FrameworkError):
        raise
    except OomProbeError as error:
        logger.warning(
            f"{prefix}the probe failed, using default batch-size {default}, WHICH WAS NOT RUN: "
            f"{type(error).__name__}: {error}"
        )
        return default
    line, answer = next((name, value) for name, value in result.estimates.items() if name.startswith(LINE))
    logger.info(
        f"{prefix}Using batch-size {result.batch_size}, which ran in {options['memory_fraction']:.0%} of the "
        f"{result.available_bytes / 2**30:.2f} GiB available on {result.device}. "
        f"{line}: {'nothing' if answer is None else int(answer)} (not used)"
    )
    return result.batch_size


def _number(name: str, value: Any, wanted: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise InvalidArgumentError(f"{name} must be {wanted}, not {value!r}")
    return float(value)


def _home(model: torch.nn.Module) -> torch.device:
    parameter = next(model.parameters(), None)
    if parameter is None:
        raise InvalidArgumentError("the model has no parameters, so nothing says where it is")
    return parameter.device


@dataclass(frozen=True, slots=True)
class Installed:
    """What `install` replaced. As a context manager it is undone at the end of the block."""

    replaced: tuple[tuple[Any, str, Any, Any], ...]  # module, name, what was there, and what is there now

    def undo(self) -> None:
        """Put back what was there, whichever was undone first; what somebody else has replaced since stays."""
        for module, name, before, ours in self.replaced:
            ours.undone_to = before
            while hasattr(current := getattr(module, name), "undone_to"):
                setattr(module, name, current.undone_to)

    def __enter__(self) -> Installed:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.undo()


def install(*, device: Any = None, **options: Any) -> Installed:
    """Make ``YOLO(...).train(batch=-1)`` find its batch here, until it is undone.

    Args:
        device: None: where the trainer has put the model. Otherwise as for `oomprobe.find_max_batch`: a trainer on the
            CPU probes with ``"cpu:8GiB"``.
        **options: Others of `oomprobe.find_max_batch`, but for ``memory_fraction``, which ``batch`` says
            (``batch=0.8``; -1 is 0.6).

    Returns:
        What to call ``undo()`` of, or to use in a ``with`` statement.

    Raises:
        InvalidArgumentError: an option is one that the trainer says itself.
        FrameworkError: Ultralytics is not there, or older than 8.4.

    Example, in a script::

        with install(time_limit_s=600):
            YOLO("yolo11n.yaml").train(data="coco8.yaml", batch=-1)
    """
    for name in options:
        if name in ("memory_fraction", *ASKED):
            raise InvalidArgumentError(
                f"install({name}=...): the trainer says that itself (memory_fraction is its batch, such as batch=0.8)"
            )
        if name not in inspect.signature(oomprobe.find_max_batch).parameters:
            raise TypeError(f"install() got an unexpected keyword argument {name!r}")
    ours = {
        "autobatch": partial(_auto, device=device, **options),
        "check_train_batch_size": partial(_check, device=device, **options),
    }
    found = [(part(module), name) for module, name in PATCHED]
    replaced = tuple((module, name, getattr(module, name), ours[name]) for module, name in found)
    for module, name, _, function in replaced:
        setattr(module, name, function)
    return Installed(replaced)
