"""Runs trials in processes that may die: workers that build the target, or children forked from this process."""

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
from oomprobe.verdicts import Evidence, Verdict

STUCK_S = 10.0  # a child that is not ready yet and uses no processor waits for threads that are not there
STUCK_IN_STEP_S = 60.0  # the same in a step, which may wait for data
# Beyond the limit of a trial: a worker has ended its child by then, or hangs itself.
WORKER_GRACE_S = GRACE_S + 30.0
STUCK = (
    "a child forked for a trial hangs at {where}: it waits for a thread, or a lock, of the process that has the model (call "
    "torch.set_num_threads(1) before the first operation there, and start other threads in the step). A script that has "
    "computed already is probed in processes that start afresh: oomprobe run path/to/train.py:build"
)
LIVE_CHILDREN = (
    "host memory is probed in children forked from the process that has the model, and that has live child processes "
    "({names}), such as the workers of a data loader: a forked step would read batches meant for it. End them (del the "
    "iterator of the loader), start them in the step, or, from a script, probe in processes that start afresh: "
    "oomprobe run path/to/train.py:build"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where processes of trials come from."""

    start: Callable[[], Process]
    target: str | None = None  # what workers build; None: children forked from this process, which has the model
    task: Message | None = None  # told to a worker when it is to build


def forks(
    model: torch.nn.Module, steps: Mapping[str, Step], tracker: Tracker, device: Device, options: Options
) -> Source:
    """Children of this process, which has the model: each runs one trial on host memory."""
    if living := multiprocessing.active_children():
        raise errors.InvalidArgumentError(LIVE_CHILDREN.format(names=", ".join(one.name for one in living)))
    preload_dynamo()

    def answer(wire: Connection) -> None:
        serve(wire, lambda: (local_runner(model, steps, tracker, device, options), device))

    return Source(start=lambda: Process.forked(answer))


def workers(target: str, device: Any, options: Options) -> Source:
    """Programs that build a target."""
    try:
        pickled_device = pickle.dumps(device).hex()
    except Exception as error:
        raise errors.InvalidArgumentError(
            f"the {type(device).__name__} given as device cannot be sent to the processes that run trials ({error}): "
            "name it by a string such as 'cuda:1', or pass isolate=False"
        ) from None
    task = {"target": target, "device": pickled_device, "options": asdict(options)}
    return Source(start=Process.spawned, target=target, task=task)


class ProcessRunner:
    """Runs trials in other processes. The next worker is started ahead, so that its imports cost nothing."""

    replaceable = True

    def __init__(self, source: Source, clock: Clock, interrupts: Interrupts) -> None:
        self._source, self._clock, self._interrupts = source, clock, interrupts
        self._ends_with_trial = source.target is None
        self._process: Process | None = None
        self._spare: Process | None = None  # has been told nothing yet
        self._before_s = 0.0  # in steps, in the processes before this one
        self._has_run = False  # whether the process has run a trial
        self.in_steps_s = 0.0
        self.notes: dict[str, None] = {}
        self.device_notes: tuple[str, ...] = ()
        self.learned: dict[str, list[int]] = {}

    def open(self) -> None:
        """Start the first process, and learn what is probed."""
        ended = self._ready()
        if ended is not None:
            raise self._refusal(ended)

    def _ready(self) -> ExitStatus | None:
        """Start a process where there is none; how it died, or None."""
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
        self._resident_bytes: int = hello["resident_bytes"]
        self._has_children: bool = hello["has_children"]  # whether each trial runs in a child of the process
        self._available_bytes: int | None = hello["available_bytes"]  # where it does not change between trials
        return None

    def _ask(self, message: Message, deadline_s: float | None) -> Message | ExitStatus:
        """Ask a process, after starting one where there is none; what it raised is raised here."""
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
            self._heed(answer)
        if self._ends_with_trial:
            self._end_process()
        if "failed" in answer:
            raise_failure(answer["failed"], message.get("request", {}).get("batch_size", 0))
        return answer

    def _wait(self, deadline_s: float | None, stuck_s: float) -> Message | ExitStatus:
        """Listen to the process; a forked child hangs if it waits for a thread or lock that was not forked with it."""
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

    def _heed(self, answer: Message) -> None:
        self.notes |= dict.fromkeys(answer["notes"])
        self.device_notes = tuple(answer["device_notes"])
        self.in_steps_s = self._before_s + answer["in_steps_s"]
        self.learned = answer["learned"] or self.learned

    def end(self) -> None:
        """End every process, and all that they started."""
        self._end_process()
        self._process, self._spare = self._spare, None
        self._end_process()

    def _end_process(self) -> None:
        last, self._process = self._process, None
        if last is not None:
            last.end()

    # --- what a session asks ---

    def run(self, request: Request) -> Outcome:
        if self._has_run and request.phase in SECOND_OPINIONS:
            self.renew()  # asked of a process that has run nothing else
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
            self.renew()  # what the trial left goes with its process
        return replace(outcome, refusal=None)

    def _answer(self, request: Request) -> Message | ExitStatus:
        """Ask the process that is ready: building the target takes seconds, which are not the trial's."""
        self._has_run = True
        request = replace(request, deadline_s=self._clock.deadline_s())
        question = {"do": "run", "request": asdict(request), "learned": self.learned}
        try:
            return self._ask(question, request.deadline_s)
        except errors.NotTrainedError:  # trials have trained the weights; a new process has those of the beginning
            if self._ends_with_trial or self._has_children:
                raise
            self.renew()
            return self._ready() or self._ask(question, self._clock.deadline_s())

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
        """Let the next trial run in a new process; where each is a child of its own, it does already."""
        if not self._has_children:
            self._end_process()

    # --- deaths ---

    def _refusal(self, ended: ExitStatus) -> errors.OomProbeError:
        """The error for a process that died before there was a trial."""
        if ended.is_hang:
            return self._clock.time_is_up(self._clock.options.min_batch, ())
        target = self._source.target
        what = "a forked child of this process" if target is None else f"the target {target}"
        return errors.StepFailedError(
            f"the process in which {what} was to be built and run died: {ended.text()}\n"
            "Nothing was probed. Import the file and call the function by itself to see it"
        )

    def _died(self, request: Request, ended: ExitStatus) -> Trial:
        evidence = Evidence(
            smaller_size_passed=request.smaller_passed, memory_pressure=False, on_host=self.device.on_host
        )
        verdict = classify_exit(
            ended,
            evidence,
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
