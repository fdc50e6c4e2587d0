"""`probe_target`: the same probe for a function that builds model and step, whose trials can run in processes that die."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from oomprobe import summary
from oomprobe.devices import Simulated
from oomprobe.errors import InvalidArgumentError, OomProbeError, target_failed
from oomprobe.here import bench_here
from oomprobe.options import Options, StepFn
from oomprobe.probe import check_on, options_of_one, search_on
from oomprobe.progress import Progress
from oomprobe.result import ProbeResult
from oomprobe.target import build, name_of, simulated_or
from oomprobe.workbench import Workbench

_OPTION_NAMES = frozenset(field.name for field in fields(Options))


def probe_target(
    target: str | Callable[[], Any],
    *,
    isolate: bool = True,
    device: Any = None,
    preserve: Any = (),
    progress: Progress = "auto",
    **options: Any,
) -> ProbeResult:
    """Probe what a target builds.

    A target can be built anew, so its trials run in child processes that may die: of a sticky CUDA error, of the system's
    OOM killer, of a library that leaves the process. On host memory each trial is a process of its own, forked from one
    that has built the target; on an accelerator a child goes from trial to trial for as long as it is healthy, and this
    process opens no CUDA context. A simulated card takes no memory, and is probed in this process.

    Args:
        target: ``module:function`` or ``path/to/file.py:function``, or such a function itself; it takes no arguments and
            returns ``(model, step_fn)``.
        isolate: Run trials in child processes (Linux only); False: build the target here, and run them here.
        device: As for `find_max_batch`. A `Device` of your own has to be one that can be pickled.
        preserve: As for `find_max_batch`, and only without isolation: children have nothing to give back.
        progress: As for `find_max_batch`.
        **options: As for `find_max_batch`.

    Returns:
        The result.

    Raises:
        InvalidArgumentError: the target cannot be found, or imported in another process, or does not return a model and
            a step; or trials cannot be isolated here.
        StepFailedError: a bug in the step or in the target; or its process died twice at one size, and not for want of
            memory.
        OomProbeError: whatever else `find_max_batch` raises.

    Example:
        >>> probe_target("oomprobe.demo:small_gpt", device="sim:16GiB", resolution=0.5, progress="off").limited_by
        'memory'
    """
    unknown = sorted(options.keys() - _OPTION_NAMES)
    if unknown:
        raise TypeError(f"probe_target() got an unexpected keyword argument {unknown[0]!r}")
    asked = Options(**options)
    with _bench(target, isolate, device, preserve, asked, progress) as bench:
        found = search_on(bench)
    return summary.result(bench, found)


def check_target(
    target: str | Callable[[], Any],
    batch_size: int,
    *,
    isolate: bool = True,
    device: Any = None,
    memory_fraction: float = 0.9,
    confirm_steps: int = 5,
    time_limit_s: float | None = None,
    progress: Progress = "auto",
) -> ProbeResult:
    """Answer whether one size of what a target builds will survive, as `check` does.

    Args:
        target: As for `probe_target`.
        batch_size: As for `check`.
        isolate: As for `probe_target`.
        device: As for `probe_target`.
        memory_fraction: As for `check`.
        confirm_steps: As for `check`.
        time_limit_s: As for `check`.
        progress: As for `check`.

    Returns:
        A result whose `batch_size` is the one asked for.

    Raises:
        NothingFitsError: it does not fit.
        OomProbeError: as for `probe_target`.
    """
    asked = options_of_one(batch_size, memory_fraction, confirm_steps, time_limit_s)
    with _bench(target, isolate, device, (), asked, progress) as bench:
        found = check_on(bench)
    return summary.result(bench, found)


@contextmanager
def _bench(
    target: str | Callable[[], Any],
    isolate: bool,
    device: Any,
    preserve: Any,
    options: Options,
    progress: Progress,
) -> Iterator[Workbench]:
    name, device = name_of(target), simulated_or(device)
    bench: AbstractContextManager[Workbench]
    if isolate and not isinstance(device, Simulated):
        _refuse_isolation(preserve)
        from oomprobe.isolation.bench import isolated_bench

        bench = isolated_bench(name, device, options, progress)
    else:
        model, step_fn = _built(name, device)
        bench = bench_here(model, step_fn, device, preserve, options, progress)
    with bench as opened:
        yield opened


def _built(target: str, device: object) -> tuple[torch.nn.Module, StepFn]:
    try:
        return build(target, device)
    except (OomProbeError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        error.with_traceback(_users_part(error.__traceback__))
        raise target_failed(error, target) from error


def _users_part(frames: TracebackType | None) -> TracebackType | None:
    """Without the frames of this package and of the import machinery that come before the user's own."""
    here = f"{Path(__file__).parent}{os.sep}"
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(
        (here, "<frozen importlib", importlib.__file__)
    ):
        frames = frames.tb_next
    return frames


def _refuse_isolation(preserve: Any) -> None:
    if getattr(sys.modules.get("oomprobe.isolation.template"), "is_serving", False):
        raise InvalidArgumentError(
            "a target's file calls probe_target while it is imported, and each process that builds the target would start "
            'another probe: put the call under if __name__ == "__main__":'
        )
    if sys.platform != "linux":
        raise InvalidArgumentError(
            f"trials can be isolated on Linux only, and this is {sys.platform}: pass isolate=False (--in-process) to run "
            "them in this process"
        )
    if preserve is not None and preserve != () and preserve != []:
        raise InvalidArgumentError(
            "preserve names live objects, and isolated trials run in other processes, where there is nothing to give back: "
            "leave it out, or pass isolate=False"
        )
