"""What the adapters share: framework version checks, a training loop as a step, and restoring the user's objects."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.torch_version import TorchVersion

from oomprobe.errors import OomProbeError, check_size
from oomprobe.probe import find_max_batch
from oomprobe.records.options import Step
from oomprobe.records.result import ProbeResult
from oomprobe.state import Tracker, generator_states, preserved
from oomprobe.worst_case import LargestFirst

WATCHDOG_S = 0.2  # enough for NCCL's watchdog thread to look
LOOP_STEPS = 2  # optimizer steps in one call of a framework's loop: the second runs with the state the first created


class FrameworkError(OomProbeError, ImportError):
    """A framework is missing or too old."""


def framework(name: str, *, minimum: str, extra: str) -> Any:
    """Import the module `name`; raise FrameworkError, naming the pip extra, unless its package is `minimum` or newer."""
    package = name.partition(".")[0]
    install = f"pip install 'oomprobe[{extra}]'"
    try:
        version = TorchVersion(importlib.import_module(package).__version__)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise FrameworkError(f"this needs {package} {minimum} or newer, and it is not installed: {install}") from None
    if version < minimum:
        raise FrameworkError(
            f"this needs {package} {minimum} or newer, and {version} is installed: {install} --upgrade"
        )
    return importlib.import_module(name)


def drop_last_collectives(device: torch.device) -> None:
    """Let NCCL drop the tensors of collectives that have ended; all ranks must call this.

    Its watchdog thread looks every 100 ms, and the next collective then drops the tensors of those that it has seen
    (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp).
    """
    time.sleep(WATCHDOG_S)
    torch.distributed.all_reduce(torch.zeros(1, device=device))


def skipped_callbacks(callbacks: Iterable[object], harmless: tuple[type, ...]) -> str:
    """Return the names of callbacks that are not harmless: trials call none of them."""
    return ", ".join(sorted({type(one).__name__ for one in callbacks if not isinstance(one, harmless)}))


def last_batch(count: int, batch_size: int) -> int:
    """Return the size of the smaller last batch of an epoch over `count` examples; 0: it is full.

    One example counts as two: batch norm cannot train on one, which has nothing to do with memory.
    """
    rest = count % batch_size
    return 2 if rest == 1 else rest


def steps_to_calls(options: dict[str, Any], steps_per_call: int = LOOP_STEPS) -> None:
    """Convert the optimizer steps in `options` to calls of `steps_per_call` steps each, rounded up."""
    for name, default in (("steps", 2), ("confirm_steps", 5)):
        asked = options.get(name, default)
        check_size(name, asked)
        options[name] = -(-asked // steps_per_call)


def probe_loop(
    model: torch.nn.Module,
    steps: Step | Mapping[str, Step],
    options: dict[str, Any],
    *,
    scanned: Sequence[tuple[LargestFirst, str]] = (),
    scan_s: float = 0.0,
    evaluates: bool = False,
    last_batch: bool = False,
) -> ProbeResult:
    """Search, and say what the trials covered of the data.

    Args:
        model: As for `oomprobe.find_max_batch`, like `steps`.
        steps: Each call is a framework's loop over a few batches.
        options: Those of `oomprobe.find_max_batch`.
        scanned: Each data set that trials read, and what it is called.
        scan_s: Seconds in which each was scanned.
        evaluates: Whether trials evaluate too.
        last_batch: Whether trials run the smaller last batch of an epoch, if training has one and goes on after it.
    """
    result = find_max_batch(model, steps, **options)
    notes = [note for largest, what in scanned for note in largest.notes(scan_s, what)]
    has_largest = bool(scanned) and all(largest.has_largest(result.batch_size) for largest, _ in scanned)
    covered = ("longest sequence",) * has_largest + ("evaluation between epochs",) * evaluates
    covered += ("smaller last batch",) * last_batch
    return replace(
        result,
        notes=(*result.notes, *notes),
        not_covered=tuple(item for item in result.not_covered if not item.startswith(covered)),
    )


def with_notes(result: ProbeResult, notes: Iterable[str], not_covered: Iterable[str] = ()) -> ProbeResult:
    """Add what an adapter has to say."""
    return replace(result, notes=(*result.notes, *notes), not_covered=(*result.not_covered, *not_covered))


@contextmanager
def quiet_loggers(*names: str) -> Iterator[None]:
    """Set loggers to pass errors only."""
    with ExitStack() as stack:
        for name in names:
            logger = logging.getLogger(name)
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        yield


@contextmanager
def state_kept(owners: Iterable[object], model: torch.nn.Module | None = None, preserve: object = ()) -> Iterator[None]:
    """Put back on exit what `owners` and `model` hold, and the host's random number generators, but no weights."""
    generators = generator_states("cpu")
    tracker = Tracker(torch.nn.Module() if model is None else model, [], preserved(preserve), owners=owners)
    held = [copy.find() for copy in tracker.tensors]  # what is replaced while this is open must not be freed
    try:
        yield
    finally:
        tracker.put_back()
        for put, state in generators:
            put(state)
        del held
