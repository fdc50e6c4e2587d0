"""What the adapters share: framework version checks, a training loop as a step, and restoring the user's objects."""

from __future__ import annotations

import importlib
import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch.torch_version import TorchVersion
from torch.utils.data import DataLoader, Dataset, Sampler

from oomprobe.errors import InvalidArgumentError, OomProbeError, check_size
from oomprobe.options import SEVERAL_RANKS, Step
from oomprobe.probe import find_max_batch
from oomprobe.result import ProbeResult
from oomprobe.state.surroundings import generators
from oomprobe.worst_case import LargestFirst

WATCHDOG_S = 0.2  # enough for NCCL's watchdog thread to look
LOOP_STEPS = 2  # optimizer steps in one call of a framework's loop: the second runs with the state the first created
GENERATORS: Any = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
FOLLOWED_TYPES = (Dataset, DataLoader, Sampler, *GENERATORS)  # under any attribute name
FOLLOWED_NAMES = ("dataset", "datasets", "transform", "transforms", "sampler", "batch_sampler", "collate_fn")


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


def refuse_ranks(what: str, ranks: int, pair: str = "") -> None:
    """Raise InvalidArgumentError for more than one rank: if one ran out of memory, the others would hang.

    `pair` is the call, in `oomprobe.integrations`, that makes what ``build()`` returns; empty if there is none.
    """
    if ranks > 1:
        returned = f". build() returns oomprobe.integrations.{pair}" if pair else ""
        raise InvalidArgumentError(SEVERAL_RANKS.format(what=f"{what} trains on {ranks} ranks", ranks=ranks) + returned)


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
    count: int | None,
    scanned: Sequence[tuple[LargestFirst, str]] = (),
    scan_s: float = 0.0,
    evaluates: bool = False,
    last_batch: bool = False,
) -> ProbeResult:
    """Search among batches of at most `count` examples, and say what the trials covered of the data.

    Args:
        model: As for `oomprobe.find_max_batch`, like `steps` and `options`.
        steps: Each call is a framework's loop over a few batches.
        options: Those of `oomprobe.find_max_batch`; `max_batch` is set to at most `count`.
        count: Examples in the training data; None: unknown.
        scanned: Each data set that trials read, and what it is called.
        scan_s: Seconds in which each was scanned.
        evaluates: Whether trials evaluate too.
        last_batch: Whether trials run the smaller last batch of an epoch, if training has one and goes on after it.
    """
    if count is not None:
        _limit_to_data(options, count)
    result = find_max_batch(model, steps, **options)
    notes = [note for largest, what in scanned for note in largest.notes(scan_s, what)]
    if result.limited_by == "max_batch" and result.options["max_batch"] == count:
        notes.append(f"the data set limits the batch size: it has {count} examples")
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


def _limit_to_data(options: dict[str, Any], count: int) -> None:
    asked = options.get("max_batch")
    if asked is not None:
        check_size("max_batch", asked)
    options["max_batch"] = count if asked is None else min(count, asked)
    sizes = {name: options[name] for name in ("min_batch", "multiple_of") if options.get(name) is not None}
    if any(isinstance(size, int) and size > count for size in sizes.values()):
        listed = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise InvalidArgumentError(f"the data set has {count} examples, too few for {listed}")


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
def attributes_kept(owners: Iterable[object]) -> Iterator[None]:
    """Restore the attributes of `owners` on exit, the random number generators they hold, and the host's default ones.

    Follows data sets, loaders, samplers, transforms and collate functions. A list or dict that was changed in place stays
    changed.
    """
    restores: list[Callable[[], object]] = [partial(put, get()) for get, put in generators("cpu").values()]
    seen: dict[int, Any] = {}
    attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
    waiting: list[Any] = list(owners)
    while waiting:
        one = waiting.pop()
        one = one.__self__ if isinstance(one, MethodType) else one
        if id(one) in seen or isinstance(one, type):
            continue
        seen[id(one)] = one
        if isinstance(one, random.Random):
            restores.append(partial(one.setstate, one.getstate()))
        elif isinstance(one, np.random.Generator):
            restores.append(partial(setattr, one.bit_generator, "state", one.bit_generator.state))
        elif isinstance(one, GENERATORS):
            restores.append(partial(one.set_state, one.get_state()))
        elif hasattr(one, "__dict__"):
            attributes.append((vars(one), dict(vars(one))))
            waiting += [one.func, *one.args, *one.keywords.values()] if isinstance(one, partial) else []
            for name, value in vars(one).items():
                if name in FOLLOWED_NAMES:
                    waiting += value if isinstance(value, list | tuple) else [value]
                elif isinstance(value, FOLLOWED_TYPES):
                    waiting.append(value)
    try:
        yield
    finally:
        for now, before in attributes:
            now.clear()
            now.update(before)
        for restore in restores:
            restore()
