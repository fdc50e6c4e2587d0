"""Run trials in processes that may die: workers that build the target, or children forked from this process."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from oomprobe import errors
from oomprobe.devices import Device
from oomprobe.records.axis import Axis
from oomprobe.records.options import Options, Step
from oomprobe.records.plain import from_plain
from oomprobe.records.trials import Measured, Outcome, Request, RunnerInfo, Trial, Verdict
from oomprobe.runners.hooks import preload_dynamo
from oomprobe.runners.signals import Clock, Interrupts
from oomprobe.runners.workers.exit_status import ExitStatus, classify_exit
from oomprobe.runners.workers.messages import Hello, Message, raise_failure
from oomprobe.runners.workers.process import Process
from oomprobe.runners.workers.serve import local_runner, serve
from oomprobe.state import Tracker

ANSWERING_S = 30.0  # beyond a trial's limit and the end of its child: time for a worker to answer
STUCK = (
    "a child forked for a trial hangs at {where}: it waits for a thread or a lock of the process that holds the model. Call "
    "torch.set_num_threads(1) before the first operation in that process, and start other threads in the step. If a script "
    "has already computed something, probe in fresh processes: oomprobe run path/to/train.py:build"
)
LIVE_CHILDREN = (
    "host memory is probed in children forked from the process that holds the model, but that process has live child "
    "processes ({names}), such as data loader workers: a forked step would read batches meant for its parent. End them "
    "(del the loader's iterator), start them in the step, or, from a script, probe in fresh processes: "
    "oomprobe run path/to/train.py:build"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """How to start the processes that run trials."""

    start: Callable[[], Process]
    # What a worker is to build; None: children are forked from this process, which holds the model.
    task: Message | None = None


def forks(model: torch.nn.Module, steps: Mapping[str, Step], tracker: Tracker, device: Device, axis: Axis) -> Source:
    """Return a source of children forked from this process; each runs one trial on host memory."""
    if living := multiprocessing.active_children():
        raise errors.InvalidArgumentError(LIVE_CHILDREN.format(names=", ".join(one.name for one in living)))
    preload_dynamo()

    def answer(wire: Connection) -> None:
        serve(wire, lambda: (local_runner(model, steps, tracker, device, axis=axis), device))

    return Source(start=lambda: Process.forked(answer))


def workers(target: str, device: Any, options: Options, axis: Axis) -> Source:
    """Return a source of workers that build a target."""
    return Source(start=Process.spawned, task=task_of(target, device, options, axis))


def task_of(target: str, device: Any, options: Options, axis: Axis) -> Message:
    """Return the message that tells a worker what to build, and for which device."""
    return {
        "target": target,
        "device": _pickled(
            device, f"the {type(device).__name__} given as device", "name it by a string such as 'cuda:1'"
        ),
        "axis": _pickled(axis, f"a value of {axis.name}", "let its name stand for it, and the step look it up"),
        "options": asdict(options),
    }


def _pickled(value: object, what: str, instead: str) -> str:
    try:
        return pickle.dumps(value).hex()
    except Exception as error:
        raise errors.InvalidArgumentError(
            f"{what} cannot be sent to the processes that run trials ({error}): {instead}, or pass isolate=False"
        ) from None


class ProcessRunner:
    """Runs trials in other processes; see `oomprobe.records.trials.Runner`. As a context manager it ends them on exit.

    It starts the next worker early, so that its imports cost no time.
    """

    def __init__(self, source: Source, clock: Clock, interrupts: Interrupts) -> None:
        self._source, self._clock, self._interrupts = source, clock, interrupts
        self._forks_here = source.task is None
        self._process: Process | None = None
        self._spare: Process | None = None  # started, but with no task yet
        self._has_run = False  # whether the current process has run a trial
        self._hello: Hello | None = None  # of the current process

    def __enter__(self) -> ProcessRunner:
        """Start the first process and take over what it reports of the device and the steps."""
        try:
            if (ended := self._ready()) is not None:
                raise self._refusal(ended)
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def _greeting(self) -> Hello:
        assert self._hello is not None
        return self._hello

    @property
    def facts(self) -> RunnerInfo:
        """What the processes report; unlike this one, they can be replaced."""
        return replace(self._greeting.facts, replaceable=True)

    def _ready(self) -> ExitStatus | None:
        """Start a process if there is none; return its exit status if it died, otherwise None."""
        if self._process is not None:
            return None
        self._process, self._spare = self._spare or self._source.start(), None
        self._has_run = False
        if self._source.task is not None:
            self._process.tell(self._source.task)
        answer = self._wait(self._clock.end_s, self._clock.patience.stuck_s)
        if isinstance(answer, ExitStatus):
            return answer
        if "failed" in answer:
            self._end_process()
            raise_failure(answer["failed"], 0)
        self._hello = from_plain(Hello, answer["hello"])
        return None

    def _ask(self, message: Message, deadline_s: float | None) -> Message | ExitStatus:
        """Send a message, to a new process if there is none, and return its answer; raise the error that it reports."""
        ended = self._ready()
        if ended is not None:
            return ended
        assert self._process is not None
        self._process.tell(message)
        if deadline_s is not None and self._greeting.trials_in_children:
            deadline_s += self._clock.patience.ending_s + ANSWERING_S
        answer = self._wait(deadline_s, self._clock.patience.stuck_in_step_s)
        if isinstance(answer, ExitStatus):
            return answer
        if self._forks_here or "lost" in answer:
            self._end_process()
        if "failed" in answer:
            raise_failure(answer["failed"], message.get("request", {}).get("batch_size", 0))
        return answer

    def _wait(self, deadline_s: float | None, stuck_s: float) -> Message | ExitStatus:
        """Listen to the process, and raise UnreliableError if it is a forked child that hangs."""
        assert self._process is not None
        try:
            with self._interrupts.delivered_until(None):
                answer = self._process.listen(deadline_s=deadline_s, stuck_s=stuck_s if self._forks_here else None)
        except BaseException:
            self.end()
            raise
        if isinstance(answer, ExitStatus):
            self._process = None
            if answer.why == "stuck":
                raise errors.UnreliableError(STUCK.format(where=answer.where() or "an unknown place"))
        return answer

    def end(self) -> None:
        """End all processes."""
        self._end_process()
        self._process, self._spare = self._spare, None
        self._end_process()

    def _end_process(self) -> None:
        last, self._process = self._process, None
        if last is not None:
            last.end()

    # --- the Runner protocol ---

    def run(self, request: Request) -> Outcome:
        """Run one trial; a `fresh` one in a process that has run nothing else."""
        trials_in_children = self._greeting.trials_in_children
        if self._has_run and request.fresh and not trials_in_children:
            self._end_process()
        ended = self._ready()
        answer = self._answer(request) if ended is None else ended
        if isinstance(answer, ExitStatus) or "lost" in answer:
            return Outcome(trial=self._died(request, answer))
        outcome = from_plain(Outcome, answer["outcome"])
        if self._forks_here:
            return replace(outcome, measured=self.measure())
        if trials_in_children:
            return outcome
        trial = outcome.trial
        if outcome.is_spent:
            self._end_process()
        if trial.passed:
            self._spare = self._spare or self._source.start()
            return outcome
        # At the driver's edge a failed mapping may have broken torch's allocator, which a health check may miss.
        if request.cap_bytes is None or trial.leaked_bytes or trial.verdict is Verdict.POISONED:
            self._end_process()
        return replace(outcome, refusal=None)  # a leak stays in the process that ends here

    def _answer(self, request: Request) -> Message | ExitStatus:
        """Run a trial in the process that is ready; its time limit starts now, after the target was built."""
        is_first, self._has_run = not self._has_run, True
        request = replace(request, deadline_s=self._clock.deadline_s())
        try:
            return self._ask({"do": "run", "request": asdict(request)}, request.deadline_s)
        except errors.NotTrainedError:  # earlier trials trained the weights; a new process has the original ones
            if is_first or self._greeting.trials_in_children:
                raise
            self._end_process()
            ended = self._ready()
            return self._answer(request) if ended is None else ended

    def measure(self) -> Measured:
        """Sample the memory now, or if that ends the process, in a new one."""
        if self._greeting.available_bytes is not None:
            return Measured(available_bytes=self._greeting.available_bytes, outside_bytes=None)
        for _ in range(2):
            answer = self._ask({"do": "measure"}, self._clock.end_s)
            if not isinstance(answer, ExitStatus) and "measured" in answer:
                return from_plain(Measured, answer["measured"])
            if isinstance(answer, ExitStatus) and answer.why is not None:
                raise self._clock.time_is_up("while the memory was measured")
        raise errors.UnreliableError(
            f"two processes died while they measured the memory of {self.facts.device.name}, between trials, so there is no "
            f"answer: {_how_it_ended(answer)}\nThe step is not the cause: probe again, or check the driver and the system's log"
        )

    # --- deaths ---

    def _refusal(self, ended: ExitStatus) -> errors.OomProbeError:
        """Return the error for the first process, which died before it was ready."""
        if ended.why is not None:
            return self._clock.time_is_up("while the target was built")
        if self._source.task is None:
            return errors.StepFailedError(f"a child forked from this process died before its trial: {ended.text()}")
        return errors.StepFailedError(
            f"the process that was to build and run the target {self._source.task['target']} died: {ended.text()}\n"
            "Nothing was probed. To see the error without oomprobe, import the file and call the function"
        )

    def _died(self, request: Request, ended: Message | ExitStatus) -> Trial:
        """Return the trial of a process that died, or whose device was lost between steps."""
        hello, verdict, where = self._greeting, Verdict.POISONED, None
        if isinstance(ended, ExitStatus):
            where = ended.where()
            verdict = classify_exit(
                ended,
                smaller_passed=request.smaller_passed,
                on_host=hello.facts.device.on_host,
                used_bytes=ended.peak_resident_bytes - hello.resident_bytes,
                cap_bytes=request.cap_bytes or hello.available_bytes,
            )
        return Trial.of(request, verdict, error=_how_it_ended(ended), where=where)


def _how_it_ended(ended: Message | ExitStatus) -> str:
    return ended.text() if isinstance(ended, ExitStatus) else str(ended["lost"])
