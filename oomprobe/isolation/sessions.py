"""Sessions whose trials run in processes that may die."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from oomprobe.devices import Device
from oomprobe.errors import InvalidArgumentError
from oomprobe.hooks import load_counter
from oomprobe.isolation.runner import Forks, ProcessRunner, Spec, Workers
from oomprobe.options import Options, Step
from oomprobe.report.progress import Progress, reporter
from oomprobe.result import Trial
from oomprobe.session import Session, told_of_trials
from oomprobe.signals import Clock, Interrupts
from oomprobe.state import Tracker, resident_tensors

LIVE_CHILDREN = (
    "host memory is probed in children forked from this process, and it has live child processes ({names}), such as the "
    "workers of a data loader: a forked step that uses them would take their answers from this process. End them (del the "
    "iterator of the loader), or probe in processes that start afresh: oomprobe run path/to/train.py:build"
)
ON_THE_CPU = (
    "THE MODEL IS ON THE CPU and an accelerator is here: this number is about host memory. Call model.to('cuda') before "
    "probing"
)


@contextmanager
def open_isolated(target: str, device: Any, options: Options, progress: Progress) -> Iterator[Session]:
    """A session whose trials run in workers; on every way out no process of it is left."""
    source = Workers(Spec.of(target, device, options))
    with _opened(source, options, progress) as session:
        session.state_verified = True  # nothing of the caller's was there to be changed
        yield session


@contextmanager
def open_forked(
    model: torch.nn.Module,
    steps: Mapping[str, Step],
    preserve: list[Any],
    device: Device,
    options: Options,
    progress: Progress,
    *,
    was_chosen: bool,
) -> Iterator[Session]:
    """A session on host memory: each trial is a child forked from this process, which has the model.

    What a child changes is its own, but for tensors in shared memory: those are put back.

    Raises:
        InvalidArgumentError: this process has children of its own.
    """
    if living := multiprocessing.active_children():
        raise InvalidArgumentError(LIVE_CHILDREN.format(names=", ".join(one.name for one in living)))
    load_counter()
    functions = [step.run for step in steps.values()]
    resident = resident_tensors([model, *functions, *preserve])
    shared = [(tensor, tensor.detach().clone()) for tensor in resident if tensor.is_shared()]  # type: ignore[no-untyped-call]
    source = Forks(model, steps, Tracker(model, functions, preserve), device, options)
    try:
        with _opened(source, options, progress) as session:
            if not was_chosen and torch.accelerator.is_available():
                session.notes[ON_THE_CPU] = None
            yield session
    finally:
        for tensor, before in shared:
            tensor.detach().copy_(before)
    session.state_verified = True


@contextmanager
def _opened(source: Forks | Workers, options: Options, progress: Progress) -> Iterator[Session]:
    status = reporter(progress)
    recorded: list[Trial] = []
    with told_of_trials(recorded), Interrupts() as interrupts:
        clock = Clock(options)
        runner = ProcessRunner(source, clock, interrupts)
        try:
            runner.open()
            yield Session(runner, options, status, clock, recorded)
        finally:
            status.close()
            runner.end()
