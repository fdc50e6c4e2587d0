"""What a trial's process does, forked or spawned: run trials on request and send the results."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from oomprobe import errors
from oomprobe.devices import Device, device_error, is_host
from oomprobe.ground import linux, processes
from oomprobe.records.axis import NO_AXIS, Axis
from oomprobe.records.options import Step
from oomprobe.records.trials import Call, CallRecord, Outcome, Request, Runner
from oomprobe.runners.hooks import OptimizerWatch
from oomprobe.runners.local import FurtherCalls, Workload, further_here
from oomprobe.runners.predicting import open_local
from oomprobe.runners.signals import Interrupts
from oomprobe.runners.workers.messages import (
    Failed,
    Further,
    Lost,
    Message,
    Ready,
    Shown,
    failed,
    receive,
    send,
)
from oomprobe.state import Tracker
from oomprobe.verdicts.failure import failure_of

CANNOT_TRAIN = (
    "host memory is probed in children forked from this process, but they cannot train: while an accelerator was visible, this process "
    "has run a backward pass, or used CUDA, for which torch.cuda.is_available() is enough ({error}). Hide the accelerator, "
    "CUDA_VISIBLE_DEVICES= python train.py, or probe in fresh processes: oomprobe run path/to/train.py:build --device cpu"
)


def serve(
    wire: Connection, make: Callable[[], tuple[Runner, Device | None]], building: str | None = None
) -> None:
    """Answer requests with a runner until the other end is closed.

    `make` returns the runner, and the device if trials run in this process, otherwise None. `building` is the target it builds.
    """
    try:
        runner, device = make()
    except BaseException as error:
        _send_answer(wire, failed(error, building=building))
        return
    ready = Ready(
        facts=runner.facts,
        resident_bytes=linux.process_bytes("VmRSS"),
        trials_in_children=runner.facts.replaceable,
        available_bytes=runner.measure().available_bytes
        if device is None or is_host(device)
        else None,
        outside_bytes=None if device is None else device.outside_bytes(),
    )
    _send_answer(wire, ready)
    answer: Message
    while (message := receive(wire)) is not None:
        try:
            answer = runner.run(message) if isinstance(message, Request) else runner.measure()
        except BaseException as error:
            answer = _failure(error, device)
        if isinstance(answer, Outcome):
            answer = replace(answer, taped=tuple(taped.plain() for taped in answer.taped))
        _send_answer(wire, answer)


def _failure(error: BaseException, device: Device | None) -> Failed | Lost:
    """Say what an error means: that the device is lost or cannot be measured, or what it says itself."""
    of_device = None if device is None else device_error(device, error)
    if isinstance(of_device, errors.DeviceLostError):
        return Lost(text=failure_of(error).text)
    cause = error.__cause__
    # Optimizers ask for CUDA's current stream, also those of a model on the CPU.
    if isinstance(cause, RuntimeError) and "forked subprocess" in str(cause) and is_host(device):
        return failed(cannot_train(cause))
    return failed(of_device or error)


def _send_answer(wire: Connection, answer: Message) -> None:
    processes.flush()
    send(wire, answer)


class FurtherOfAll:
    """Asks the parent for the calls with which a trial goes on, which are the same on all ranks."""

    def __init__(self, wire: Connection) -> None:
        self._wire = wire
        self._records: Sequence[CallRecord] = ()  # of the trial that runs
        self._sent = 0  # how many of them

    def __call__(self, request: Request, records: Sequence[CallRecord]) -> Sequence[Call]:
        """Send the records that are new, and return the calls that the parent answers."""
        if request.settles is None and request.learns is None:
            return ()
        if records is not self._records:
            self._records, self._sent = records, 0
        send(self._wire, Shown(records=tuple(records[self._sent :])))
        self._sent = len(records)
        answer = receive(self._wire)
        if not isinstance(answer, Further):
            os._exit(0)  # the parent is gone
        return answer.calls


def local_runner(
    model: torch.nn.Module,
    steps: Mapping[str, Step],
    tracker: Tracker,
    device: Device,
    ranks: int = 1,
    axis: Axis = NO_AXIS,
    further: FurtherCalls = further_here,
) -> Runner:
    """Make a runner of trials in this process, without a snapshot: the changed state ends with the process."""
    if is_host(device):
        torch.set_num_threads(1)  # the threads of the parent were not forked
        # The threads that serve torch.compile's worker pool were not forked either: compile in this process.
        config: Any = sys.modules.get("torch._inductor.config")
        if config is None:
            os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        else:
            config.compile_threads = 1
        try:  # autograd cannot restart its threads after a fork (torch/csrc/autograd/engine.cpp)
            torch.ones(1, device="cpu", requires_grad=True).backward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if "fork" in str(error):
                raise cannot_train(error) from error
    gc.collect()
    gc.freeze()  # so that trials collect only what they created
    watch = OptimizerWatch(tracker.add, model)
    watch.__enter__()  # until this process ends
    work = Workload(
        device=device, model=model, steps=steps, tracker=tracker, watch=watch, axis=axis, ranks=ranks, further=further,
        interrupts=Interrupts(),  # the parent ends a process that hangs
        ends_with_trial=is_host(device),
    )  # fmt: skip
    _, runner = open_local(work)
    return runner


def cannot_train(error: BaseException) -> errors.InvalidArgumentError:
    """Return the error for a step that a fork has spoilt."""
    return errors.InvalidArgumentError(
        CANNOT_TRAIN.format(error=errors.text_of(error).partition(". ")[0])
    )
