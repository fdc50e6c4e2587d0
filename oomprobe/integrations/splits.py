"""The gradient accumulation that keeps a global batch, run before it is written anywhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from oomprobe import probe
from oomprobe.errors import NothingFitsError, TimeLimitError
from oomprobe.options import StepFn
from oomprobe.plan import PlanEntry, plan

PLAN_TRIALS = 4
MOMENT_S = 1e-3  # a limit has to be positive
CHECKED = ("device", "memory_fraction", "confirm_steps", "preserve", "time_limit_s", "progress")


def running_split(
    model: torch.nn.Module,
    steps: Callable[[int], Mapping[str, StepFn]],
    global_batch: int,
    largest: int,
    options: Mapping[str, Any],
    *,
    clock: Callable[[], float] = time.monotonic,
) -> PlanEntry | None:
    """The split with the fewest accumulation steps that runs.

    Args:
        model: The module that is probed.
        steps: Makes the steps for a number of micro-batches to an optimizer step.
        global_batch: Samples for one optimizer step.
        largest: Micro-batch that may be.
        options: Of the probe that found `largest`; its `time_limit_s` is what is left of it.
        clock: Gives seconds.

    Returns:
        None where no split of exactly `global_batch` was found that runs, or time was up before one had.
    """
    smallest, multiple = options.get("min_batch", 1), options.get("multiple_of", 1)
    checked = {name: options[name] for name in CHECKED if name in options}
    limit_s = checked.get("time_limit_s")
    until_s = None if limit_s is None else clock() + limit_s
    for _ in range(PLAN_TRIALS):
        if largest < smallest:
            return None
        entries = plan(
            global_batch, world_size=1, max_micro_batch=largest, min_micro_batch=smallest, multiple_of=multiple
        )
        entry = next((one for one in entries if one.exact), None)
        if entry is None:
            return None
        try:
            if until_s is not None:
                checked["time_limit_s"] = max(MOMENT_S, until_s - clock())
            probe.check(model, steps(entry.accumulation_steps), entry.micro_batch, **checked)
        except NothingFitsError:
            largest = entry.micro_batch - 1
        except TimeLimitError:
            return None
        else:
            return replace(entry, ran=True)
    return None
