"""What the adapters share: checks of versions, the probe of a training loop, and restoring the user's objects."""

from __future__ import annotations

import importlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch.torch_version import TorchVersion

from oomprobe.devices.choose import model_device
from oomprobe.errors import DeviceLostError, OomProbeError, check_size
from oomprobe.explaining import PeakMonitor
from oomprobe.probe import find_max_batch
from oomprobe.probing.order import SearchOptions
from oomprobe.probing.summary import LONGEST
from oomprobe.records.notes import remark
from oomprobe.records.options import Options, Step
from oomprobe.records.patience import UNSEEN_STEPS
from oomprobe.results.log import log_notes
from oomprobe.results.result import ProbeResult
from oomprobe.state import Tracker, generator_states, preserved
from oomprobe.worst_case import LargestFirst

WATCHDOG_S = 0.2  # enough for NCCL's watchdog thread to look
LOOP_STEPS = 2  # optimizer steps in one call of a framework's loop: the second runs with the state the first created


class FrameworkError(OomProbeError, ImportError):
    """A framework is missing or too old."""


def load(name: str, *, minimum: str, extra: str) -> Any:
    """Import the module `name`; raise FrameworkError, naming the pip extra, unless its package is `minimum` or newer."""
    package = name.partition(".")[0]
    install = f"pip install 'oomprobe[{extra}]'"
    try:
        version = TorchVersion(importlib.import_module(package).__version__)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise FrameworkError(
            f"this needs {package} {minimum} or newer, and it is not installed: {install}"
        ) from None
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


def skipped_callbacks(callbacks: Iterable[object], harmless: tuple[type, ...]) -> list[str]:
    """Say that trials call none of the callbacks, unless all of them are harmless."""
    names = ", ".join(
        sorted(
            {
                type(callback).__name__
                for callback in callbacks
                if not isinstance(callback, harmless)
            }
        )
    )
    if not names:
        return []
    if "WeightAveraging" in names:
        names += " (weight averaging keeps a copy of the weights)"
    return [f"callbacks, which trials do not call: {names}"]


def last_batch(count: int, batch_size: int, epochs: float = math.inf) -> int:
    """Return the size of the smaller last batch of an epoch over `count` examples; 0: it is full, or nothing follows it.

    One example counts as two: batch norm cannot train on one, which has nothing to do with memory.
    """
    if epochs <= 1:
        return 0
    rest = count % batch_size
    return 2 if rest == 1 else rest


def steps_to_calls(options: SearchOptions, steps_per_call: int = LOOP_STEPS) -> None:
    """Convert the optimizer steps in `options` to calls of `steps_per_call` steps each, rounded up."""
    steps, confirm_steps = options.get("steps", Options().steps), options.get("confirm_steps")
    if confirm_steps is None:
        confirm_steps = UNSEEN_STEPS
    check_size("steps", steps)
    check_size("confirm_steps", confirm_steps)
    options["steps"], options["confirm_steps"] = (
        -(-steps // steps_per_call),
        -(-confirm_steps // steps_per_call),
    )


class Loop(Protocol):
    """A framework's training loop. `probe` probes it live; a target's ``build()`` returns its model and its steps."""

    model: torch.nn.Module
    covered: tuple[str, ...]  # items of `ProbeResult.not_covered` that its trials do

    @property
    def scanned(self) -> Sequence[tuple[str, LargestFirst]]:
        """Return each data set that trials read, with what it is called."""

    def steps(self) -> Mapping[str, Step]:
        """Return the steps by name; each call of one runs the framework's loop over a few batches."""

    def notes(self, result: ProbeResult) -> Iterable[str]:
        """Return what there is to say about the trials."""

    def not_covered(self) -> Iterable[str]:
        """Return what training does but no trial did."""


def probe(loop: Loop, options: SearchOptions) -> ProbeResult:
    """Search, and say what the trials covered."""
    result = find_max_batch(loop.model, loop.steps(), **options)
    scanned, covered = loop.scanned, loop.covered
    if scanned and all(examples.has_largest(result.batch_size) for _, examples in scanned):
        covered = (*covered, LONGEST)
    not_covered = [item for item in result.not_covered if item not in covered]
    notes: list[str] = []
    for what, examples in scanned:
        notes += examples.notes(what)
    notes += loop.notes(result)
    log_notes(map(remark, notes))
    return replace(
        result._with_notes(after=map(remark, notes)),
        not_covered=(*not_covered, *loop.not_covered()),
    )


class PeakCallback:
    """What the callbacks that watch a run have in common: a `PeakMonitor`, at the batch size that the framework trains with.

    Each is also of the class that the framework wants, which is imported only when a callback is made.
    """

    kind: Callable[[], type]  # imports the framework, and returns its own class

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        kind = cls.kind()
        if not issubclass(cls, kind):
            cls = type(cls.__name__, (cls, kind), {"__module__": cls.__module__})
        return super().__new__(cls)

    def __init__(
        self,
        result_or_path: ProbeResult | str | Path,
        batch_size: int | None = None,
        warn: bool = True,
    ) -> None:
        self._arguments = result_or_path, batch_size, warn
        self.monitor = PeakMonitor(result_or_path, batch_size, warn)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the class that was written: Lightning starts some ranks with what it pickles."""
        return type(self).__bases__[0], self._arguments

    def _trains(self, batch_size: object) -> None:
        """Compare at the size that the framework trains with, unless another was asked for."""
        _, asked, _ = self._arguments
        if asked is None and isinstance(batch_size, int) and batch_size != self.monitor.batch_size:
            self.monitor.compare_at(batch_size)


@contextmanager
def placed(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Put the model on a device, and back on exit, unless the error is that the device is lost with what is on it."""
    home = model_device(model)
    model.to(device)
    try:
        yield
    except DeviceLostError:
        home = None
        raise
    finally:
        if home is not None:
            model.to(home)


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
def state_kept(
    owners: Iterable[object], model: torch.nn.Module | None = None, preserve: object = ()
) -> Iterator[None]:
    """Put back on exit what `owners` and `model` hold, and the host's random number generators, but no weights."""
    generators = generator_states("cpu")
    tracker = Tracker(
        torch.nn.Module() if model is None else model, [], preserved(preserve), owners=owners
    )
    kept_alive = [
        copy.find() for copy in tracker.tensors
    ]  # what is replaced while this is open must not be freed
    try:
        yield
    finally:
        tracker.put_back()
        for put, state in generators:
            put(state)
        del kept_alive
