"""Answer for a runner over a wire: what a process of trials does, forked or spawned."""

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
from oomprobe.isolation.messages import Message, receive, send, told
from oomprobe.options import Options, Step
from oomprobe.result import Phase
from oomprobe.signals import Interrupts
from oomprobe.state import Tracker
from oomprobe.trial import LocalRunner, Request, Runner

NO_BACKWARD = (
    "host memory is probed in children forked from this process, and they cannot run a backward here, because this process "
    "has run one where an accelerator is visible. Probe in processes that start afresh: "
    "oomprobe run path/to/train.py:build --device cpu"
)


def serve(wire: Connection, make: Callable[[], tuple[Runner, Device | None]], building: str | None = None) -> None:
    """Answer for a runner until the other end is closed.

    `make` returns the runner, and the device if trials run in this process, otherwise None. `building` is the target that it
    builds.
    """
    try:
        runner, device = make()
    except BaseException as error:
        _answer(wire, told(error, building=building))
        return
    hello = {
        "device": asdict(runner.device),
        "step_names": runner.step_names,
        "threads": runner.threads,
        "resident_bytes": linux.process_bytes("VmRSS"),
        "has_children": runner.replaceable,
        "available_bytes": runner.measure().available_bytes if device is None or is_host(device) else None,
    }
    _answer(wire, {"hello": hello})
    while (message := receive(wire)) is not None:
        try:
            answer = _done(runner, message)
        except BaseException as error:
            answer = told(_blamed_on_device(error, device), building=None)
        _answer(wire, answer)


def _answer(wire: Connection, answer: Message) -> None:
    system.flush()
    send(wire, answer)


def _done(runner: Runner, message: Message) -> Message:
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


def _blamed_on_device(error: BaseException, device: Device | None) -> BaseException:
    """An error outside a step may come from the device: then it becomes DeviceLostError or UnreliableError."""
    if device is None or isinstance(error, errors.OomProbeError) or not isinstance(error, Exception):
        return error
    if not device.healthy():
        return errors.DeviceLostError(f"a sticky error ({type(error).__name__}: {error})")
    return errors.unmeasured(device.name, error) if raised_by(device, error) else error


def local_runner(
    model: torch.nn.Module, steps: Mapping[str, Step], tracker: Tracker, device: Device, options: Options
) -> LocalRunner:
    """Make what runs trials here, without a snapshot: the process ends with what they changed."""
    if is_host(device):
        torch.set_num_threads(1)  # the threads of the process it was forked from are not there any more
        _compile_here()
        _try_backward()
    gc.collect()
    gc.freeze()  # trials collect what they made
    watch = OptimizerWatch(tracker.add, model)
    watch.__enter__()  # for as long as this process lives
    return LocalRunner(
        device,
        model,
        steps,
        tracker,
        watch,
        Interrupts(),  # whoever waits for an answer ends what hangs
        smallest=options.sizes.first,
        ends_with_trial=is_host(device),
    )


def _compile_here() -> None:
    """Let torch.compile compile in this process: the threads that talk to its pool of workers are not there any more."""
    config = sys.modules.get("torch._inductor.config")
    if config is None:
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    else:
        config.compile_threads = 1  # type: ignore[attr-defined]


def _try_backward() -> None:
    """Raise where no backward can run: autograd cannot start its threads anew after a fork (torch/csrc/autograd/engine.cpp)."""
    try:
        torch.ones(1, device="cpu", requires_grad=True).backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if "fork" in str(error):
            raise errors.InvalidArgumentError(NO_BACKWARD) from error
