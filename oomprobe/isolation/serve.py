"""What a trial's process does, forked or spawned: run trials on request and send the results."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from multiprocessing.connection import Connection

import torch

from oomprobe import errors
from oomprobe.devices import Device, is_host, linux, raised_by
from oomprobe.hooks import OptimizerWatch
from oomprobe.isolation import system
from oomprobe.isolation.messages import Message, failure_message, receive, send
from oomprobe.options import Options, Step
from oomprobe.result import Phase
from oomprobe.signals import Interrupts
from oomprobe.state import Tracker
from oomprobe.trial import LocalRunner, Request, Runner

NO_BACKWARD = (
    "host memory is probed in children forked from this process, but they cannot run a backward pass: this process has "
    "already run one while an accelerator was visible. Probe in fresh processes: "
    "oomprobe run path/to/train.py:build --device cpu"
)


def serve(wire: Connection, make: Callable[[], tuple[Runner, Device | None]], building: str | None = None) -> None:
    """Answer requests with a runner until the other end is closed.

    `make` returns the runner, and the device if trials run in this process, otherwise None. `building` is the target it builds.
    """
    try:
        runner, device = make()
    except BaseException as error:
        _answer(wire, failure_message(error, building=building))
        return
    hello = {
        "device": asdict(runner.device),
        "step_names": runner.step_names,
        "threads": runner.threads,
        "looks": runner.looks,
        "starts_anew": runner.starts_anew,
        "resident_bytes": linux.process_bytes("VmRSS"),
        "has_children": runner.replaceable,
        "available_bytes": runner.measure().available_bytes if device is None or is_host(device) else None,
    }
    _answer(wire, {"hello": hello})
    while (message := receive(wire)) is not None:
        try:
            answer = _carry_out(runner, message)
        except BaseException as error:
            answer = failure_message(_blame_device(error, device), building=None)
        _answer(wire, answer)


def _answer(wire: Connection, answer: Message) -> None:
    system.flush()
    send(wire, answer)


def _carry_out(runner: Runner, message: Message) -> Message:
    answer: Message
    if message["do"] == "run":
        if not runner.learned:
            runner.learn(message["learned"])
        request = message["request"]
        answer = {"outcome": asdict(runner.run(Request(**{**request, "phase": Phase(request["phase"])})))}
    else:
        answer = {"measured": asdict(runner.measure())}
    return {
        **answer,
        "notes": list(runner.notes),
        "device_notes": runner.device_notes,
        "in_steps_s": runner.in_steps_s,
        "learned": runner.learned,
    }


def _blame_device(error: BaseException, device: Device | None) -> BaseException:
    """Return a DeviceLostError or UnreliableError instead of an error that the device raised outside a step."""
    if device is None or isinstance(error, errors.OomProbeError) or not isinstance(error, Exception):
        return error
    if not device.healthy():
        return errors.DeviceLostError(f"a sticky error ({type(error).__name__}: {error})")
    return errors.unmeasured(device.name, error) if raised_by(device, error) else error


def local_runner(
    model: torch.nn.Module, steps: Mapping[str, Step], tracker: Tracker, device: Device, options: Options
) -> LocalRunner:
    """Make a runner of trials in this process, without a snapshot: the changed state ends with the process."""
    if is_host(device):
        torch.set_num_threads(1)  # the threads of the parent were not forked
        _compile_here()
        _try_backward()
    gc.collect()
    gc.freeze()  # so that trials collect only what they created
    watch = OptimizerWatch(tracker.add, model)
    watch.__enter__()  # until this process ends
    return LocalRunner(
        device,
        model,
        steps,
        tracker,
        watch,
        Interrupts(),  # the parent ends a process that hangs
        ends_with_trial=is_host(device),
    )


def _compile_here() -> None:
    """Make torch.compile compile in this process: the threads that serve its worker pool were not forked."""
    config = sys.modules.get("torch._inductor.config")
    if config is None:
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    else:
        config.compile_threads = 1  # type: ignore[attr-defined]


def _try_backward() -> None:
    """Raise if no backward pass can run: autograd cannot restart its threads after a fork (torch/csrc/autograd/engine.cpp)."""
    try:
        torch.ones(1, device="cpu", requires_grad=True).backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if "fork" in str(error):
            raise errors.InvalidArgumentError(NO_BACKWARD) from error
