"""Run trials in processes that may die: workers that build the target, or children forked from this process."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from oomprobe import errors
from oomprobe.devices import Device, DeviceInfo
from oomprobe.hooks import preload_dynamo
from oomprobe.isolation.exit_status import ExitStatus, classify_exit
from oomprobe.isolation.messages import Message, raise_failure
from oomprobe.isolation.process import GRACE_S, Process
from oomprobe.isolation.serve import local_runner, serve
from oomprobe.options import Options, Step
from oomprobe.report.breakdown import Breakdown
from oomprobe.result import SECOND_OPINIONS, Phase, Trial, trial_from_dict
from oomprobe.signals import Clock, Interrupts
from oomprobe.state import Tracker
from oomprobe.trial import Measured, Outcome, Request
from oomprobe.verdicts import Verdict

STUCK_S = 10.0  # a starting child that uses no processor time for so long waits for threads that were not forked
STUCK_IN_STEP_S = 60.0  # the same inside a step, which may wait for data
WORKER_GRACE_S = GRACE_S + 30.0  # beyond a trial's limit: time for a worker to end its child and answer
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
    task: Message | None = (
        None  # what a worker is to build; None: children are forked from this process, which holds the model
    )


def forks(
    model: torch.nn.Module, steps: Mapping[str, Step], tracker: Tracker, device: Device, options: Options
) -> Source:
    """Return a source of children forked from this process; each runs one trial on host memory."""
    if living := multiprocessing.active_children():
        raise errors.InvalidArgumentError(LIVE_CHILDREN.format(names=", ".join(one.name for one in living)))
    preload_dynamo()

    def answer(wire: Connection) -> None:
        serve(wire, lambda: (local_runner(model, steps, tracker, device, options), device))

    return Source(start=lambda: Process.forked(answer))


def workers(target: str, device: Any, options: Options) -> Source:
    """Return a source of workers that build a target."""
    try:
        pickled_device = pickle.dumps(device).hex()
    except Exception as error:
        raise errors.InvalidArgumentError(
            f"the {type(device).__name__} given as device cannot be sent to the processes that run trials ({error}): "
            "name it by a string such as 'cuda:1', or pass isolate=False"
        ) from None
    task = {"target": target, "device": pickled_device, "options": asdict(options)}
    return Source(start=Process.spawned, task=task)


class ProcessRunner:
    """Runs trials in other processes, and starts the next worker early so that its imports cost no time."""

    replaceable = True

    def __init__(self, source: Source, clock: Clock, interrupts: Interrupts) -> None:
        self._source, self._clock, self._interrupts = source, clock, interrupts
        self._ends_with_trial = source.task is None
        self._process: Process | None = None
        self._spare: Process | None = None  # started, but with no task yet
        self._before_s = 0.0  # time in steps of earlier processes
        self._has_run = False  # whether the current process has run a trial
        self.in_steps_s = 0.0
        self.notes: dict[str, None] = {}
        self.device_notes: tuple[str, ...] = ()
        self.learned: dict[str, list[int]] = {}

    def open(self) -> None:
        """Start the first process and take over what it reports of the device and the steps."""
        ended = self._ready()
        if ended is not None:
            raise self._refusal(ended)

    def _ready(self) -> ExitStatus | None:
        """Start a process if there is none; return its exit status if it died, otherwise None."""
        if self._process is not None:
            return None
        self._process, self._spare = self._spare or self._source.start(), None
        self._before_s, self._has_run = self.in_steps_s, False
        if self._source.task is not None:
            self._process.tell(self._source.task)
        answer = self._wait(self._clock.end_s, STUCK_S)
        if isinstance(answer, ExitStatus):
            return answer
        if "failed" in answer:
            self._end_process()
            raise_failure(answer["failed"], 0)
        hello = answer["hello"]
        self.device = DeviceInfo(**{**hello["device"], "not_covered": tuple(hello["device"]["not_covered"])})
        self.step_names: list[str] = hello["step_names"]
        self.threads: int = hello["threads"]
        self.looks: bool = hello["looks"]
        self.starts_anew: bool = hello["starts_anew"]
        self._resident_bytes: int = hello["resident_bytes"]
        self._has_children: bool = hello["has_children"]  # whether the process forks a child for each trial
        self._available_bytes: int | None = hello["available_bytes"]  # None: it changes between trials
        return None

    def _ask(self, message: Message, deadline_s: float | None) -> Message | ExitStatus:
        """Send a message, to a new process if there is none, and return its answer; raise the error that it reports."""
        ended = self._ready()
        if ended is not None:
            return ended
        assert self._process is not None
        self._process.tell(message)
        if deadline_s is not None and self._has_children:
            deadline_s += WORKER_GRACE_S
        answer = self._wait(deadline_s, STUCK_IN_STEP_S)
        if isinstance(answer, ExitStatus):
            return answer
        if "failed" not in answer:
            self.notes |= dict.fromkeys(answer["notes"])
            self.device_notes = tuple(answer["device_notes"])
            self.in_steps_s = self._before_s + answer["in_steps_s"]
            self.learned = answer["learned"] or self.learned
        if self._ends_with_trial:
            self._end_process()
        if "failed" in answer:
            raise_failure(answer["failed"], message.get("request", {}).get("batch_size", 0))
        return answer

    def _wait(self, deadline_s: float | None, stuck_s: float) -> Message | ExitStatus:
        """Listen to the process, and raise UnreliableError if it is a forked child that hangs."""
        assert self._process is not None
        try:
            with self._interrupts.allowed(None):
                answer = self._process.listen(deadline_s=deadline_s, stuck_s=stuck_s if self._ends_with_trial else None)
        except BaseException:
            self.end()
            raise
        if isinstance(answer, ExitStatus):
            self._process = None
            if answer.why == "stuck":
                raise errors.UnreliableError(STUCK.format(where=answer.where() or "an unknown place"))
        return answer

    def end(self) -> None:
        self._end_process()
        self._process, self._spare = self._spare, None
        self._end_process()

    def _end_process(self) -> None:
        last, self._process = self._process, None
        if last is not None:
            last.end()

    # --- the Runner protocol ---

    def run(self, request: Request) -> Outcome:
        if self._has_run and request.phase in SECOND_OPINIONS:
            self.renew()  # a second opinion comes from a process that has run nothing else
        answer = self._ready() or self._answer(request)
        if isinstance(answer, ExitStatus):
            return Outcome(trial=self._died(request, answer))
        outcome = _outcome(answer["outcome"])
        if self._ends_with_trial:
            return replace(outcome, measured=self.measure())
        if self._has_children:
            return outcome
        trial = outcome.trial
        if trial.passed:
            self._spare = self._spare or self._source.start()
            return outcome
        # At the driver's edge a failed mapping may have broken torch's allocator, which a health check may miss.
        at_edge = request.phase is Phase.GROW and request.cap_bytes is None
        if at_edge or trial.leaked_bytes or trial.verdict is Verdict.POISONED:
            self.renew()
        return replace(outcome, refusal=None)

    def _answer(self, request: Request) -> Message | ExitStatus:
        """Run a trial in the process that is ready; its time limit starts now, after the target was built."""
        is_first, self._has_run = not self._has_run, True
        request = replace(request, deadline_s=self._clock.deadline_s())
        try:
            return self._ask({"do": "run", "request": asdict(request), "learned": self.learned}, request.deadline_s)
        except errors.NotTrainedError:  # earlier trials trained the weights; a new process has the original ones
            if is_first or self._has_children:
                raise
            self.renew()
            return self._ready() or self._answer(request)

    def measure(self) -> Measured:
        if self._available_bytes is not None:
            return Measured(available_bytes=self._available_bytes, outside_bytes=None)
        answer = self._ask({"do": "measure"}, self._clock.end_s)
        if isinstance(answer, ExitStatus):
            raise self._refusal(answer)
        return Measured(**answer["measured"])

    def outside_bytes(self) -> int | None:
        return self.measure().outside_bytes

    def learn(self, learned: Mapping[str, Iterable[int]]) -> None:
        self.learned = {name: list(places) for name, places in learned.items()}

    def renew(self) -> None:
        """Run the next trial in a new process; if each trial has its own child, it does so anyway."""
        if not self._has_children:
            self._end_process()

    # --- deaths ---

    def _refusal(self, ended: ExitStatus) -> errors.OomProbeError:
        """Return the error for a process that died outside a trial."""
        if ended.why is not None:
            return self._clock.time_is_up(self._clock.options.min_batch, ())
        if self._source.task is None:
            return errors.StepFailedError(f"a child forked from this process died before its trial: {ended.text()}")
        return errors.StepFailedError(
            f"the process that was to build and run the target {self._source.task['target']} died: {ended.text()}\n"
            "Nothing was probed. To see the error without oomprobe, import the file and call the function"
        )

    def _died(self, request: Request, ended: ExitStatus) -> Trial:
        verdict = classify_exit(
            ended,
            smaller_passed=request.smaller_passed,
            on_host=self.device.on_host,
            used_bytes=ended.peak_resident_bytes - self._resident_bytes,
            cap_bytes=request.cap_bytes or self._available_bytes,
        )
        return Trial(
            batch_size=request.batch_size,
            verdict=verdict,
            phase=request.phase,
            cap_bytes=request.cap_bytes,
            error=ended.text(),
            where=ended.where(),
            accumulation_steps=request.accumulation_steps,
        )


def _outcome(message: dict[str, Any]) -> Outcome:
    measured, breakdown = message["measured"], message["breakdown"]
    return Outcome(
        **{
            **message,
            "trial": trial_from_dict(message["trial"]),
            "measured": None if measured is None else Measured(**measured),
            "breakdown": None if breakdown is None else Breakdown.from_dict(breakdown),
        }
    )
