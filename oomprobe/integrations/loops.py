"""What the adapters have in common that run a framework's own loop as a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from oomprobe.errors import InvalidArgumentError
from oomprobe.options import check_size
from oomprobe.result import ProbeResult

LOOP_STEPS = 2  # optimizer steps of one call of a loop: the second finds what the first left


def loops_of(name: str, steps: int) -> int:
    """Calls of the loop that make so many optimizer steps, or one more.

    Args:
        name: Of the argument.
        steps: Its value, at least 1.

    Raises:
        InvalidArgumentError: it is no such number.

    Example:
        >>> loops_of("steps", 5)
        3
    """
    check_size(name, steps)
    return -(-steps // LOOP_STEPS)


def refuse_once(dataset: Any, what: str = "data set") -> None:
    """Refuse a stream that is used up by being read.

    Raises:
        InvalidArgumentError: so it is.
    """
    if iter(dataset) is iter(dataset):
        raise InvalidArgumentError(
            f"the {what} can be read only once, and a probe would use it up: pass a data set whose __iter__ begins anew each "
            "time"
        )


def untimed(result: ProbeResult) -> ProbeResult:
    """Without samples a second: a call takes several steps, and makes a loop, so the core's number is a fraction of the truth."""
    return replace(result, trials=tuple(replace(trial, samples_per_s=None) for trial in result.trials))
