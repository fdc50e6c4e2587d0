"""Workbenches whose trials run in child processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from oomprobe.clock import Clock
from oomprobe.devices.host import HostDevice
from oomprobe.errors import InvalidArgumentError
from oomprobe.here import garbage_frozen, given_back, told_of_trials
from oomprobe.interrupts import Interrupts
from oomprobe.isolation.child import Answers, Built, serve
from oomprobe.isolation.process import ThisProcess
from oomprobe.isolation.remote import RemoteRunner
from oomprobe.isolation.spec import Spec
from oomprobe.options import Options, Step
from oomprobe.progress import Progress, reporter
from oomprobe.result import Trial
from oomprobe.state import Keeper
from oomprobe.work import load_counter
from oomprobe.workbench import Workbench

LIVE_CHILDREN = (
    "host memory is probed in children forked from this process, and it has live child processes ({names}), such as the "
    "workers of a data loader: a forked step that uses them would take their answers from this process. End them (del the "
    "iterator of the loader), or probe in processes that start afresh: oomprobe run path/to/train.py:build"
)


@contextmanager
def isolated_bench(target: str, device: Any, options: Options, progress: Progress) -> Iterator[Workbench]:
    """Everything a probe of a target needs; on every way out no process of it is left."""
    spec = Spec.of(target, device, options)
    status = reporter(progress)
    recorded: list[Trial] = []
    with told_of_trials(recorded), Interrupts() as interrupts:
        clock = Clock(options)
        runner = RemoteRunner(spec, options, interrupts, clock)
        try:
            runner.open()
            bench = Workbench(runner, options, status, clock, recorded)
            bench.state_verified = True  # nothing of the caller's was there to be changed
            yield bench
        finally:
            status.close()
            runner.close()


@contextmanager
def forked_bench(
    model: torch.nn.Module,
    steps: Mapping[str, Step],
    preserve: Iterable[object],
    device: HostDevice,
    options: Options,
    progress: Progress,
    *,
    notes: Iterable[str] = (),
) -> Iterator[Workbench]:
    """Everything a probe of host memory needs: each trial is a child forked from this process, which has the model.

    Raises:
        InvalidArgumentError: this process has children of its own.
    """
    if living := multiprocessing.active_children():
        raise InvalidArgumentError(LIVE_CHILDREN.format(names=", ".join(one.name for one in living)))
    status = reporter(progress)
    recorded: list[Trial] = []
    load_counter()
    with told_of_trials(recorded), Interrupts() as interrupts, garbage_frozen():
        clock = Clock(options)
        keeper = Keeper(
            model, [step.run for step in steps.values()], preserve, "cpu"
        )  # children write to memory that is shared, too
        built = Built(model, steps, keeper.tracker, device)
        forks = ThisProcess(lambda wire: serve(wire, lambda: Answers(built, options)), interrupts)
        runner = RemoteRunner(None, options, interrupts, clock, forks)
        runner.notes |= dict.fromkeys(notes)
        try:
            runner.open()
            bench = Workbench(runner, options, status, clock, recorded)
            with given_back(bench, keeper, device):
                yield bench
        finally:
            status.close()
