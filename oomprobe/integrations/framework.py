"""What the adapters have in common: a framework that must be new enough, ranks that would hang, loops as steps."""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from oomprobe.errors import InvalidArgumentError, OomProbeError
from oomprobe.options import check_size
from oomprobe.result import ProbeResult

LOOP_STEPS = 2  # optimizer steps of one call of a framework's loop: the second finds what the first left


class FrameworkError(OomProbeError, ImportError):
    """A framework is not installed, is too old, or cannot be imported."""


def framework(name: str, *, minimum: str, extra: str) -> Any:
    """Import a framework.

    Args:
        name: Of the module, such as ``"lightning.pytorch"``.
        minimum: Oldest version that this adapter was made for.
        extra: The optional dependency of oomprobe that installs it.

    Raises:
        FrameworkError: it is not there, older, or fails as it is imported.
    """
    package = name.partition(".")[0]
    install = f"pip install 'oomprobe[{extra}]'"
    try:
        module = importlib.import_module(name)
        version = str(importlib.import_module(package).__version__)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise FrameworkError(f"{name} lacks {error.name}: {install}") from error
        raise FrameworkError(f"this needs {package} {minimum} or newer, and it is not installed: {install}") from None
    except Exception as error:
        raise FrameworkError(
            f"{name} is installed and cannot be imported ({type(error).__name__}: {error}). Often a part of it was built "
            "for another torch: try the import by itself"
        ) from error
    # Of "8.4.190+cpu", 8, 4 and 190 are compared.
    ours, oldest = ([int(part) for part in re.findall(r"\d+", one.partition("+")[0])[:3]] for one in (version, minimum))
    if ours < oldest:
        raise FrameworkError(
            f"this needs {package} {minimum} or newer, and {version} is installed: {install} --upgrade"
        )
    return module


def refuse_several(what: str, ranks: int) -> None:
    """Refuse a set-up of several ranks, which wait for each other: one that ran out of memory would hang the rest."""
    if ranks > 1:
        raise InvalidArgumentError(
            f"{what} trains on {ranks} ranks: an out-of-memory error on one would leave the others waiting in a collective. "
            "Ranks are not supported yet: probe with one device, and keep room for what the strategy adds (DDP: buckets as "
            "large as the gradients), by a smaller memory_fraction"
        )


def check_flag(name: str, value: object) -> None:
    """Refuse what is neither True nor False: the text ``"no"`` would mean yes."""
    if not isinstance(value, bool):
        raise InvalidArgumentError(f"{name} must be True or False, not {value!r}")


def count_calls(options: dict[str, Any], steps_of_a_call: int = LOOP_STEPS) -> None:
    """Turn the optimizer steps that a user asks for in `options` into calls that make so many each, rounded up."""
    for name, default in (("steps", 2), ("confirm_steps", 5)):
        asked = options.get(name, default)
        check_size(name, asked)
        options[name] = -(-asked // steps_of_a_call)


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
