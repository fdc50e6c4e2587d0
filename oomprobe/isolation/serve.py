"""Answer for a runner over a wire: what a process of trials does, forked or spawned."""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch

from oomprobe import errors
from oomprobe.devices import Device, is_host, linux, raised_by
from oomprobe.hooks import OptimizerWatch
from oomprobe.isolation import system
from oomprobe.isolation.wire import Message, Wire
from oomprobe.options import Options, Step
from oomprobe.result import Phase
from oomprobe.signals import Interrupts
from oomprobe.state import Tracker
from oomprobe.trial import LocalRunner, Request, Runner
from oomprobe.verdicts.failure import failure_of

LONGEST_TEXT = 16_000
NO_BACKWARD = (
    "host memory is probed in children forked from this process, and they cannot run a backward here, because this process "
    "has run one where an accelerator is visible. Probe in processes that start afresh: "
    "oomprobe run path/to/train.py:build --device cpu"
)


def serve(wire: Wire, make: Callable[[], tuple[Runner, Device | None]], building: str | None = None) -> None:
    """Answer for a runner until the other end is closed.

    Args:
        wire: To the parent.
        make: Makes the runner, and tells the device where its trials run in this process.
        building: The target that `make` builds, if it does.
    """
    own = os.getpid()
    try:
        runner, device = make()
        answer = {"hello": _hello(runner)}
    except BaseException as error:
        answer = told(error, building=building)
    _send(wire, answer, own)
    while "failed" not in answer and not wire.ended:
        for message in wire.read():
            try:
                _send(wire, _answer(runner, message), own)
            except BaseException as error:
                _send(wire, told(_blamed_on_device(error, device), building=None), own)
    system.flush()
    os._exit(0)


def _send(wire: Wire, answer: Message, own: int) -> None:
    if os.getpid() != own:  # a copy, made by a target or step that forked and returned in both
        os._exit(0)
    system.flush()
    wire.send(answer)


def _hello(runner: Runner) -> Message:
    return {
        "device": asdict(runner.device),
        "step_names": runner.step_names,
        "threads": runner.threads,
        "forks": runner.replaceable,
        "resident_bytes": linux.process_bytes("VmRSS") or 0,
    }


def _answer(runner: Runner, message: Message) -> Message:
    answer: Message
    if message["do"] == "run":
        runner.learn(runner.learned or message["learned"])
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
        "graphs": runner.graphs,
    }


def _blamed_on_device(error: BaseException, device: Device | None) -> BaseException:
    """An error outside a step may come from the device: then it becomes DeviceLostError or UnreliableError."""
    if device is None or isinstance(error, errors.OomProbeError) or not isinstance(error, Exception):
        return error
    if not device.healthy():
        return errors.DeviceLostError(f"a sticky error ({type(error).__name__}: {error})")
    return errors.unmeasured(device.name, error) if raised_by(device, error) else error


def told(error: BaseException, *, building: str | None) -> Message:
    """An exception as a message.

    Args:
        error: What was raised.
        building: The target, while that was being built; None in a trial.
    """
    cause = error.__cause__ if isinstance(error, errors.StepFailedError) and error.__cause__ is not None else error
    return {
        "failed": {
            "kind": type(error).__name__ if isinstance(error, errors.OomProbeError) else None,
            "left": isinstance(error, SystemExit),
            "text": errors.text_of(error)[:LONGEST_TEXT],
            "building": building,
            "cause": {
                "module": type(cause).__module__,
                "name": type(cause).__qualname__,
                "text": failure_of(cause).text,
                "arguments": _arguments(cause),
                "traceback": _trace(cause),
            },
        }
    }


def _trace(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))[-LONGEST_TEXT:]
    except Exception:
        return "(no traceback)"


def _arguments(error: BaseException) -> list[Any]:
    """What an exception of its class can be made from again, as far as JSON can say it."""
    if all(isinstance(one, str | int | float | None) for one in error.args):
        return [one[:LONGEST_TEXT] if isinstance(one, str) else one for one in error.args]
    return [failure_of(error).text]


def local_runner(
    model: torch.nn.Module, steps: Mapping[str, Step], tracker: Tracker, device: Device, options: Options
) -> LocalRunner:
    """Make what runs trials here, without a snapshot: the process ends with what they changed.

    Raises:
        InvalidArgumentError: this is a forked child, and no backward can run in it.
    """
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
