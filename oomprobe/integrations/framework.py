"""What the adapters share: a framework that must be new enough, loops as steps, objects that come back as they were."""

from __future__ import annotations

import importlib
import logging
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch.torch_version import TorchVersion
from torch.utils.data import DataLoader, Dataset, Sampler

from oomprobe.errors import InvalidArgumentError, OomProbeError
from oomprobe.options import check_size
from oomprobe.result import ProbeResult
from oomprobe.state.surroundings import generators

LOOP_STEPS = 2  # optimizer steps of one call of a framework's loop: the second finds what the first left
GENERATORS: Any = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
PARTS = (Dataset, DataLoader, Sampler, *GENERATORS)  # followed under any name; anything else under these names
NAMES = ("dataset", "datasets", "transform", "transforms", "sampler", "batch_sampler", "collate_fn")


class FrameworkError(OomProbeError, ImportError):
    """A framework is not installed, or is too old."""


def framework(name: str, *, minimum: str, extra: str) -> Any:
    """Import a module of a framework, at least of the version `minimum`, which the optional dependency `extra` installs."""
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


def refuse_several(what: str, ranks: int) -> None:
    """Refuse a set-up of several ranks, which wait for each other: one that ran out of memory would hang the rest."""
    if ranks > 1:
        raise InvalidArgumentError(
            f"{what} trains on {ranks} ranks: an out-of-memory error on one would leave the others waiting in a collective. "
            "Ranks are not supported yet: probe with one device, and keep room for what the strategy adds (DDP: buckets as "
            "large as the gradients), by a smaller memory_fraction"
        )


def uncalled(callbacks: Iterable[object], harmless: tuple[type, ...]) -> str:
    """Names of callbacks that do more than show and save: trials call none."""
    return ", ".join(sorted({type(one).__name__ for one in callbacks if not isinstance(one, harmless)}))


def count_calls(options: dict[str, Any], steps_of_a_call: int = LOOP_STEPS) -> None:
    """Turn the optimizer steps that a user asks for in `options` into calls that make so many each, rounded up."""
    for name, default in (("steps", 2), ("confirm_steps", 5)):
        asked = options.get(name, default)
        check_size(name, asked)
        options[name] = -(-asked // steps_of_a_call)


def limit_to_data(options: dict[str, Any], count: int) -> None:
    """Have a search end at a data set's `count` examples."""
    asked = options.get("max_batch")
    if asked is not None:
        check_size("max_batch", asked)
    options["max_batch"] = count if asked is None else min(count, asked)
    sizes = {name: options[name] for name in ("min_batch", "multiple_of") if options.get(name) is not None}
    if any(isinstance(size, int) and size > count for size in sizes.values()):
        listed = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise InvalidArgumentError(f"the data set has {count} examples, and no batch that {listed} asks for")


def notes_of_data(result: ProbeResult, count: int | None) -> list[str]:
    """Say so where a data set of `count` examples ended the search."""
    if result.limited_by != "max_batch" or result.options["max_batch"] != count:
        return []
    return [f"the data set ends the search: it has {count} examples, and no larger batch is possible"]


def untimed(result: ProbeResult) -> ProbeResult:
    """Leave out samples a second: a call takes several steps and sets up a loop, so the core's number is too low."""
    return replace(result, trials=tuple(replace(trial, samples_per_s=None) for trial in result.trials))


@contextmanager
def quiet_loggers(*names: str) -> Iterator[None]:
    """Have loggers pass on errors only."""
    with ExitStack() as stack:
        for name in names:
            logger = logging.getLogger(name)
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        yield


@contextmanager
def attributes_kept(owners: Iterable[object]) -> Iterator[None]:
    """Restore the attributes of objects, the random number generators in them, and the host's default ones.

    Data sets, loaders, samplers, transforms and collate functions in the owners are followed. What an attribute holds is
    not looked into: a list that changed in place stays changed.
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
                if name in NAMES:
                    waiting += value if isinstance(value, list | tuple) else [value]
                elif isinstance(value, PARTS):
                    waiting.append(value)
    try:
        yield
    finally:
        for now, before in attributes:
            now.clear()
            now.update(before)
        for restore in restores:
            restore()
