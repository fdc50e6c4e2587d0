"""Sessions whose trials run in processes that may die."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from oomprobe.devices import Device
from oomprobe.isolation.runner import ProcessRunner, Source, forks, workers
from oomprobe.options import Options, Step
from oomprobe.report.progress import Progress, reporter
from oomprobe.result import Trial
from oomprobe.session import Session, garbage_frozen, told_of_trials
from oomprobe.signals import Clock, Interrupts
from oomprobe.state import Tracker

ON_THE_CPU = (
    "THE MODEL IS ON THE CPU, but an accelerator is available: this number is about host memory. Call model.to('cuda') "
    "before probing"
)
ON_HOST_MEMORY = (
    ", which is slow: the model is on the CPU. Build it on the GPU, or simulate one with --device sim:24GiB (in Python "
    'device="sim:24GiB")'
)


@contextmanager
def open_isolated(target: str, device: Any, options: Options, progress: Progress) -> Iterator[Session]:
    """Open a session whose trials run in workers; none of its processes is left afterwards."""
    with _opened(workers(target, device, options), options, progress, "" if device else ON_HOST_MEMORY) as session:
        session.state_verified = True  # the caller's process has no state that a trial could change
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
    """Open a session on host memory: each trial runs in a child forked from this process, which holds the model.

    A child changes only its own copy of the state, except for tensors in shared memory, which are restored at the end.
    """
    tracker = Tracker(model, [step.run for step in steps.values()], preserve, device)
    source = forks(model, steps, tracker, device, options)
    resident = tracker.resident_tensors()
    shared = [(tensor, tensor.detach().clone()) for tensor in resident if tensor.is_shared()]  # type: ignore[no-untyped-call]
    try:
        with garbage_frozen(), _opened(source, options, progress, "" if was_chosen else ON_HOST_MEMORY) as session:
            if not was_chosen and torch.accelerator.is_available():
                session.notes[ON_THE_CPU] = None
            yield session
    finally:
        for tensor, before in shared:
            tensor.detach().copy_(before)
    session.state_verified = True


@contextmanager
def _opened(source: Source, options: Options, progress: Progress, hint: str) -> Iterator[Session]:
    status = reporter(progress)
    recorded: list[Trial] = []
    with told_of_trials(recorded), Interrupts() as interrupts:
        clock = Clock(options)
        runner = ProcessRunner(source, clock, interrupts)
        try:
            runner.open()
            status.opened(runner.device.name + hint * runner.device.on_host, options)
            yield Session(runner, options, status, clock, recorded)
        finally:
            status.close()
            runner.end()
