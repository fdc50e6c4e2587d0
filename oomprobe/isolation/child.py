"""What a child does: build the target where its parent has not, and run what it is asked to."""

from __future__ import annotations

import gc
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from oomprobe import errors
from oomprobe.clock import Clock
from oomprobe.devices import Device, choose_device, linux, raised_by
from oomprobe.devices.host import HostDevice
from oomprobe.failure import failure_of
from oomprobe.interrupts import Interrupts
from oomprobe.isolation.spec import Spec
from oomprobe.isolation.system import flush
from oomprobe.isolation.wire import Message, Wire
from oomprobe.local import LocalRunner
from oomprobe.options import Options, Step, check_model, named_steps, refuse_ranks
from oomprobe.result import Phase
from oomprobe.runner import Ran
from oomprobe.state import Tracker
from oomprobe.target import build as build_target
from oomprobe.trial import Request, Trials
from oomprobe.watch import OptimizerWatch

LONGEST_TEXT = 16_000
NO_BACKWARD = (
    "host memory is probed in children forked from this process, and they cannot run a backward here, because this process "
    "has run one where an accelerator is visible. Probe in processes that start afresh: "
    "oomprobe run path/to/train.py:build --device cpu"
)


@dataclass(frozen=True, slots=True)
class Built:
    """A model and its steps, with what is known of them, and the device that they were built for."""

    model: torch.nn.Module
    steps: Mapping[str, Step]
    tracker: Tracker
    device: Device


def build(spec: Spec) -> Built:
    """Build the target of a probe."""
    model, step_fn = build_target(spec.target)
    check_model(model)
    steps = named_steps(step_fn)
    refuse_ranks()
    return Built(
        model, steps, Tracker(model, [step.run for step in steps.values()]), choose_device(spec.open_device(), model)
    )


def serve(wire: Wire, make: Callable[[], Answers], building: str | None = None) -> None:
    """Answer until the other end is closed.

    Args:
        wire: To the parent.
        make: Makes what answers; what it raises is the answer to every question.
        building: The target that it builds, if it does.
    """
    own = os.getpid()
    answers, failure = _made(make, building)
    end_copy(own)
    wire.send({"ready": True})
    while not wire.ended:
        for message in wire.read():
            answer = failure if answers is None else _answer(answers, message)
            end_copy(own)
            wire.send(answer)


def end_copy(own: int) -> None:
    """End here where this is not the process `own` but a copy, made by a target that forked and returned in both."""
    if os.getpid() != own:
        os._exit(0)


def _made(make: Callable[[], Answers], building: str | None) -> tuple[Answers | None, Message]:
    try:
        return make(), {}
    except BaseException as error:
        return None, told(error, building=building)


def _answer(answers: Answers, message: Message) -> Message:
    try:
        answer = answers.to(message)
    except BaseException as error:
        answer = told(answers.judged(error), building=None)
    flush()
    return answer


class Answers:
    """Runs trials of a model in this process, and answers in plain data.

    Args:
        built: What is probed, and where.
        options: Of the probe.
    """

    def __init__(self, built: Built, options: Options) -> None:
        device, tracker = built.device, built.tracker
        if isinstance(device, HostDevice):
            torch.set_num_threads(1)  # the threads of the process it was forked from are not there any more
            _compile_here()
            _try_backward()
        gc.freeze()  # for as long as this process lives: trials collect what they made
        self._device, self._steps = device, list(built.steps)
        # Without time limits: whoever waits for an answer ends what hangs.
        self._options = replace(options, time_limit_s=None, trial_time_limit_s=None)
        watch = OptimizerWatch(tracker.add, built.model)
        watch.__enter__()  # for as long as this process lives
        self._trials = Trials(
            device,
            built.model,
            built.steps,
            optimizers=lambda: tracker.optimizers,
            restore_modes=tracker.restore_modes,
            let_go=tracker.start_cold,
            watch=watch,
            interrupts=Interrupts(),
        )
        self._runner = LocalRunner(
            device, self._trials, tracker, Clock(self._options), [], smallest=self._options.sizes.first
        )
        self._has_run = False

    @classmethod
    def of_target(cls, spec: Spec) -> Answers:
        """Build the target of a probe, and answer for it."""
        built = build(spec)
        gc.collect()
        return cls(built, spec.options)

    def to(self, message: Message) -> Message:
        does: dict[str, Callable[..., Message]] = {
            "hello": self._hello,
            "measure": self._measure,
            "trial": self._trial,
            "work": self._work,
            "anatomy": self._anatomy,
        }
        return does[message.pop("do")](**message)

    def judged(self, error: BaseException) -> BaseException:
        """What failed beside the steps, whose own errors have another class by now, may be the device's doing."""
        if isinstance(error, errors.OomProbeError) or not isinstance(error, Exception):
            return error
        if not self._device.healthy():
            return errors.DeviceLostError(f"a sticky error ({type(error).__name__}: {error})")
        return errors.unmeasured(self._device.name, error) if raised_by(self._device, error) else error

    def _hello(self) -> Message:
        device = self._device
        return {
            "place": {
                "name": device.name,
                "torch_device": str(device.torch_device),
                "total_bytes": device.total_bytes,
                "on_host": device.on_host,
            },
            "forks": isinstance(device, HostDevice),
            "step_names": self._steps,
            "threads": torch.get_num_threads(),
            "resident_bytes": linux.process_bytes("VmRSS") or 0,
            "notes": list(getattr(device, "notes", ())),
        }

    def _measure(self) -> Message:
        return {"measured": asdict(self._runner.measure()), **self._said()}

    def _trial(self, request: dict[str, Any], learned: dict[str, list[int]], left_s: float | None) -> Message:
        until_s = None if left_s is None else time.monotonic() + left_s
        asked = Request(**{**request, "phase": Phase(request["phase"])})
        if not self._has_run:
            self._trials.learn(learned)
        self._has_run = True
        if isinstance(self._device, HostDevice):  # the process ends with the trial: nothing needs to come back
            ran = Ran(trial=self._trials.run(asked))
        else:
            ran = self._runner.run(asked, awaited_until_s=until_s)
        return {"ran": asdict(ran), **self._said()}

    def _work(self, size: int) -> Message:
        work = self._runner.work_at(size)
        return {"work": None if work is None else asdict(work), **self._said()}

    def _anatomy(self, size: int) -> Message:
        anatomy = self._runner.anatomy_at(size)
        return {"anatomy": None if anatomy is None else asdict(anatomy), **self._said()}

    def _said(self) -> Message:
        return {
            "notes": list(self._trials.notes),
            "in_steps_s": self._trials.in_steps_s,
            "learned": self._trials.learned,
            "graphs": self._trials.compiled.graphs,
        }


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
            "text": _text(error),
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


def _text(error: BaseException) -> str:
    try:
        return str(error)[:LONGEST_TEXT]
    except Exception:
        return "(no text)"


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
