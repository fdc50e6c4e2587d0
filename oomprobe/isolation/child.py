"""What a child does: build the target where the template has not, and run what it is asked to."""

from __future__ import annotations

import gc
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import torch

from oomprobe import errors
from oomprobe.clock import Clock
from oomprobe.devices import Device, choose_device, linux, raised_by
from oomprobe.devices.forked import ForkedHostDevice, Growth
from oomprobe.devices.host import HostDevice
from oomprobe.devices.limits import address_space
from oomprobe.failure import failure_of
from oomprobe.interrupts import Interrupts
from oomprobe.isolation.spec import Spec
from oomprobe.isolation.wire import Message, Wire
from oomprobe.local import LocalRunner
from oomprobe.options import StepFn, check_model, named_steps, refuse_ranks
from oomprobe.result import Phase
from oomprobe.scope import scope
from oomprobe.state.seen import Seen
from oomprobe.target import build as build_target
from oomprobe.trial import Request, Trials
from oomprobe.watch import OptimizerWatch

LONGEST_TEXT = 16_000


@dataclass(frozen=True, slots=True)
class Built:
    """A target, built."""

    model: torch.nn.Module
    steps: dict[str, StepFn]


def build(spec: Spec) -> Built:
    """Build the target of a probe."""
    model, step_fn = build_target(spec.target)
    built = Built(check_model(model), named_steps(step_fn))
    refuse_ranks()
    return built


@scope
def one_thread() -> Iterator[dict[str, int]]:
    """Build with one thread, whatever the target wishes; what it wished is given to the children."""
    wished: dict[str, int] = {}
    before, own, torch_module = torch.get_num_threads(), torch.set_num_threads, cast(Any, torch)

    def wish(threads: int) -> None:
        wished["threads"] = threads

    torch_module.set_num_threads = wish
    own(1)
    try:
        yield wished
    finally:
        torch_module.set_num_threads = own
        if torch.get_num_threads() != 1:
            wished.setdefault("threads", torch.get_num_threads())
        wished.setdefault("threads", before)


def serve(wire: Wire, spec: Spec, built: Built | None, threads: int) -> None:
    """Answer until the other end is closed."""
    torch.set_num_threads(threads)
    torch.ones(2**20).add_(1)  # starts the threads; it hangs here where the template had more than one
    own = os.getpid()
    answers, failure = _built(spec, built)
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


def _built(spec: Spec, built: Built | None) -> tuple[_Answers | None, Message]:
    try:
        return _Answers(spec, built), {}
    except BaseException as error:
        return None, told(error, building=spec.target)


def _answer(answers: _Answers, message: Message) -> Message:
    try:
        answer = answers.to(message)
    except BaseException as error:
        answer = told(answers.judged(error), building=None)
    sys.stdout.flush()
    sys.stderr.flush()
    return answer


class _Answers:
    def __init__(self, spec: Spec, built: Built | None) -> None:
        self._built = built or build(spec)
        # Without time limits: the template ends what hangs.
        self._options = replace(spec.options, time_limit_s=None, trial_time_limit_s=None)
        self._device = choose_device(spec.open_device(), self._built.model)
        self._spec = spec
        self._seen = Seen(self._built.model, self._built.steps.values())
        self._runner: LocalRunner | None = None
        gc.collect()
        gc.freeze()  # for as long as this process lives: trials collect what they made

    def to(self, message: Message) -> Message:
        does: dict[str, Callable[..., Message]] = {
            "hello": self._hello,
            "grow": self._grow,
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
            "step_names": list(self._built.steps),
            "threads": torch.get_num_threads(),
            "notes": list(getattr(device, "notes", ())),
        }

    def _grow(self, size: int | None) -> Message:
        """What the first step adds to this process, and what is free then."""
        host = self._device
        assert isinstance(host, HostDevice)
        device = ForkedHostDevice(host, state_bytes=lambda: self._seen.state_bytes("cpu"))
        trials = self._trials(device)
        failed = False
        try:
            with address_space((linux.process_bytes("VmSize") or 0) + host.warming_bytes()):
                growth = device.grown_by(lambda: None if size is None else trials.call_once(size, None))
        except Exception:  # left to the first trial
            failed = True
        host.sample()
        return {
            "growth": asdict(Growth() if failed else growth),
            "resident_bytes": linux.process_bytes("VmRSS") or 0,
            "available_bytes": host.available_bytes(),
        }

    def _measure(self, warm_size: int | None) -> Message:
        runner = self._reused(warm_size)
        measured = runner.measure()
        return {"measured": asdict(measured), **self._said(runner)}

    def _trial(
        self,
        request: dict[str, Any],
        warm_size: int | None,
        learned: dict[str, list[int]],
        forked: dict[str, Any] | None,
        left_s: float | None,
    ) -> Message:
        until_s = None if left_s is None else time.monotonic() + left_s
        asked = Request(**{**request, "phase": Phase(request["phase"])})
        is_new = self._runner is None
        runner = self._reused(warm_size) if forked is None else self._forked(**forked)
        if is_new:
            runner.trials.learn(learned)
        ran = runner.run(asked, awaited_until_s=until_s)
        return {"ran": asdict(ran), **self._said(runner)}

    def _work(self, size: int) -> Message:
        runner = self._reused(None)
        work = runner.work_at(size)
        return {"work": None if work is None else asdict(work), **self._said(runner)}

    def _anatomy(self, size: int) -> Message:
        runner = self._reused(None)
        anatomy = runner.anatomy_at(size)
        return {"anatomy": None if anatomy is None else asdict(anatomy), **self._said(runner)}

    def _said(self, runner: LocalRunner) -> Message:
        return {
            "notes": list(runner.notes),
            "in_steps_s": runner.in_steps_s,
            "learned": runner.trials.learned,
            "kept_bytes": runner.kept_bytes,
            "graphs": runner.trials.compiled.graphs,
        }

    def _reused(self, warm_size: int | None) -> LocalRunner:
        """The runner of a child that goes from trial to trial."""
        if self._runner is None:
            self._runner = self._runner_on(self._device)
            if warm_size is not None:
                self._runner.warm(warm_size)
        return self._runner

    def _forked(self, growth: dict[str, int], available_bytes: int) -> LocalRunner:
        """The runner of a child that was forked for one trial."""
        assert isinstance(self._device, HostDevice)
        grown = Growth(**growth)
        device = ForkedHostDevice(
            self._device,
            growth=grown,
            available_bytes=available_bytes,
            state_bytes=lambda: self._seen.state_bytes("cpu"),
        )
        runner = self._runner_on(device)
        gc.collect()
        runner.expect(device.live_bytes() + grown.live_bytes, available_bytes)
        return runner

    def _runner_on(self, device: Device) -> LocalRunner:
        trials = self._trials(device)
        smallest = self._options.sizes.first
        return LocalRunner(device, trials, self._seen, Clock(self._options), [], smallest=smallest)

    def _trials(self, device: Device) -> Trials:
        watch = OptimizerWatch(self._seen.add, self._built.model)
        watch.__enter__()  # for as long as this process lives
        return Trials(
            device,
            self._built.model,
            self._built.steps,
            optimizers=lambda: self._seen.optimizers,
            restore_modes=self._seen.restore_modes,
            let_go=self._seen.restart_counts if device.on_host else self._seen.start_cold,
            watch=watch,
            interrupts=Interrupts(),
        )


def told(error: BaseException, *, building: str | None) -> Message:
    """An exception as a message.

    Args:
        error: What was raised.
        building: The target, while that was being built; None in a trial.
    """
    of_step = isinstance(error, errors.StepFailedError)
    cause = error.__cause__ if of_step and error.__cause__ is not None else error
    ours = isinstance(error, errors.OomProbeError) and not of_step
    return {
        "failed": {
            "kind": type(error).__name__ if ours else None,
            "left": isinstance(error, SystemExit),
            "own": isinstance(error, Exception) and not of_step,
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
