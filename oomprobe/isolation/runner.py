"""Runs trials in processes that may die: workers that build the target, or children forked from this process."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import torch

from oomprobe import errors
from oomprobe.devices import Device, DeviceInfo
from oomprobe.isolation import system
from oomprobe.isolation.exit_status import ExitStatus, classify_exit
from oomprobe.isolation.failures import raise_failure
from oomprobe.isolation.process import GRACE_S, Process
from oomprobe.isolation.serve import local_runner, serve
from oomprobe.isolation.wire import Message
from oomprobe.options import Options, Step
from oomprobe.report.breakdown import Breakdown
from oomprobe.result import SECOND_OPINIONS, Phase, Trial, trial_from_dict
from oomprobe.signals import Clock, Interrupts
from oomprobe.state import Tracker
from oomprobe.trial import Measured, Outcome, Request
from oomprobe.verdicts import Evidence, Verdict

_Answer = TypeVar("_Answer")
STUCK_S = 10.0  # a child that is not ready yet and uses no processor waits for threads that are not there
STUCK_IN_STEP_S = 60.0  # the same in a step, which may wait for data
# Beyond the limit of a trial: a worker has ended its child by then, or hangs itself.
WORKER_GRACE_S = GRACE_S + 30.0
FRESH = (
    "children forked after building the target hung or failed ({why}), probably because building started threads; each "
    "trial now rebuilds the target"
)
STUCK = (
    "a child forked from this process for a trial hangs at {where}: it waits for a thread, or a lock, of this process (call "
    "torch.set_num_threads(1) before the first operation of the process, or end what else has threads). Or probe in "
    "processes that start afresh: oomprobe run path/to/train.py:build"
)
COMPILED = (
    "the step is compiled by torch.compile: each size was compiled anew, as training at that size alone would, and in "
    "processes that training has nothing to do with"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What a worker builds.

    Attributes:
        target: ``module:function`` or ``path/to/file.py:function``.
        device: A string for `choose_device`, or None.
        pickled_device: A `Device` of the caller's own, as hexadecimal digits of a pickle.
        options: Those of the probe.
        forks: Whether trials on host memory are children of the worker; otherwise each is a worker of its own.
    """

    target: str
    device: str | None
    pickled_device: str | None
    options: Options
    forks: bool = True

    @classmethod
    def of(cls, target: str, device: Any, options: Options) -> Spec:
        """Make one.

        Raises:
            InvalidArgumentError: the device cannot be sent to another process.
        """
        if device is None or isinstance(device, str | torch.device):
            name = None if device is None else str(device)
            return cls(target=target, device=name, pickled_device=None, options=options)
        return cls(target=target, device=None, pickled_device=_pickled(device), options=options)

    @classmethod
    def from_message(cls, message: Message) -> Spec:
        """Read what `asdict` wrote."""
        return cls(**{**message, "options": Options(**message["options"])})

    def open_device(self) -> Any:
        """What the caller gave as `device`."""
        return self.device if self.pickled_device is None else pickle.loads(bytes.fromhex(self.pickled_device))


def _pickled(device: object) -> str:
    if not isinstance(device, Device):
        raise errors.InvalidArgumentError(
            f"device must be None, a string, a torch.device or a Device, not {type(device).__name__}"
        )
    try:
        return pickle.dumps(device).hex()
    except Exception as error:
        raise errors.InvalidArgumentError(
            f"the {type(device).__name__} given as device cannot be sent to the processes that run trials ({error}): "
            "name it by a string such as 'cuda:1', or pass isolate=False"
        ) from None


class Forks:
    """Children of this process, which has the model: each runs one trial on host memory."""

    target = None

    def __init__(
        self, model: torch.nn.Module, steps: Mapping[str, Step], tracker: Tracker, device: Device, options: Options
    ) -> None:
        self._make = lambda: (local_runner(model, steps, tracker, device, options), device)

    def start(self) -> Process:
        """Fork one."""
        return Process.forked(lambda wire: serve(wire, self._make))

    def prepare(self) -> None:
        """A fork takes milliseconds."""

    def end(self) -> None:
        """None is ahead."""


class Workers:
    """Programs that build a target. The next one is started ahead, so that its imports cost nothing.

    Args:
        spec: What they build.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec, self.target = spec, spec.target
        self._spare: Process | None = None

    def start(self) -> Process:
        """Let one build the target."""
        process, self._spare = self._spare, None
        if process is not None and system.has_ended(process.pid):
            process.end()
            process = None
        process = process or Process.spawned()
        process.tell(asdict(self.spec))
        return process

    def prepare(self) -> None:
        """Start the next one; it builds nothing yet."""
        if self._spare is None:
            self._spare = Process.spawned()

    def end(self) -> None:
        """End the one that was started ahead."""
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.end()


class ProcessRunner:
    """Runs trials in other processes.

    Args:
        source: Starts them.
        clock: Of the probe.
        interrupts: Lets signals reach a wait for a process.
    """

    replaceable = True

    def __init__(self, source: Forks | Workers, clock: Clock, interrupts: Interrupts) -> None:
        self._source, self._clock, self._interrupts = source, clock, interrupts
        self._once = isinstance(source, Forks)  # each process runs one trial
        self._is_forking = False  # whether trials in a worker are processes of their own
        self._process: Process | None = None
        self._before_s = 0.0  # in steps, in the processes before this one
        self._available_bytes: int | None = None  # asked once, where each trial is a process of its own
        self._phase: Phase | None = None  # of the last trial
        self._usual: set[str] = set()  # lines on stderr of processes that did not die
        self.has_run = False  # a trial, to its end
        self.in_steps_s, self.graphs = 0.0, 0
        self.notes: dict[str, None] = {}
        self.device_notes: tuple[str, ...] = ()
        self.learned: dict[str, list[int]] = {}

    def open(self) -> None:
        """Start the first process, and learn what is probed.

        Raises:
            StepFailedError: the target has a bug, or its process died.
            OomProbeError: what else is wrong with it.
        """
        self._with_forks_or_without(lambda: self._refused(self._ready() and self._ready()))  # as a trial that died
        if self._once:
            self._available_bytes = self._measure().available_bytes

    def _with_forks_or_without(self, ask: Callable[[], _Answer]) -> _Answer:
        """Ask; where children forked by a worker cannot run, ask workers that run one trial each."""
        try:
            answer = ask()
            hung = isinstance(answer, Outcome) and answer.trial.verdict is Verdict.TIMED_OUT
            if not (hung and self._is_forking and not self.has_run):
                return answer
            why = "timed out"
        except errors.ForkError:
            if isinstance(self._source, Forks):
                raise
            why = "stuck"
        except errors.StepFailedError as error:  # it may lack a thread or a worker that building the target started
            if not self._is_forking or self.has_run:
                raise
            why = str(error).splitlines()[0][:80]
        assert isinstance(self._source, Workers)
        self.notes[FRESH.format(why=why)] = None
        self.end()
        self._source = Workers(replace(self._source.spec, forks=False))
        self._once, self._is_forking = True, False
        self._available_bytes = self._measure().available_bytes
        return ask()

    def _ready(self) -> ExitStatus | None:
        """Start a process where there is none; how it died, or None."""
        if self._process is not None:
            return None
        self._process, self._before_s = self._source.start(), self.in_steps_s
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
        self._is_forking = hello["forks"]
        return None

    def _ask(self, message: Message, deadline_s: float | None) -> Message | ExitStatus:
        """Ask the process that is ready.

        Raises:
            OomProbeError: what it raised.
        """
        assert self._process is not None
        self._process.tell(message)
        if deadline_s is not None and self._is_forking:
            deadline_s += WORKER_GRACE_S
        answer = self._wait(deadline_s, STUCK_IN_STEP_S)
        if isinstance(answer, ExitStatus):
            return answer
        if "failed" not in answer:
            self._heed(answer)
        if self._once:
            self._end_process()
        if "failed" in answer:
            raise_failure(answer["failed"], message.get("request", {}).get("batch_size", 0))
        return answer

    def _wait(self, deadline_s: float | None, stuck_s: float | None) -> Message | ExitStatus:
        assert self._process is not None
        try:
            with self._interrupts.allowed(None):
                hangs_s = stuck_s if isinstance(self._source, Forks) else None
                answer = self._process.listen(deadline_s=deadline_s, stuck_s=hangs_s)
        except BaseException:
            self.end()
            raise
        if isinstance(answer, ExitStatus):
            self._process = None
        return answer

    def _heed(self, answer: Message) -> None:
        self.notes |= dict.fromkeys(answer["notes"])
        self.device_notes = tuple(answer["device_notes"])
        self.in_steps_s = self._before_s + answer["in_steps_s"]
        self.learned = answer["learned"] or self.learned
        if answer["graphs"]:
            self.graphs = answer["graphs"]
            self.notes[COMPILED] = None

    def end(self) -> None:
        """End every process, and all that they started."""
        self._end_process()
        self._source.end()

    def _end_process(self) -> None:
        last, self._process = self._process, None
        if last is not None:
            last.end()

    # --- what a session asks ---

    def run(self, request: Request) -> Outcome:
        return self._with_forks_or_without(lambda: self._run(request))

    def _run(self, request: Request) -> Outcome:
        changed = request.phase is not self._phase or request.phase is Phase.CONFIRM
        if self._phase is not None and request.phase in SECOND_OPINIONS and changed:
            self.renew()  # asked of a process that has run nothing else
        self._phase = request.phase
        answer = self._answer(request)
        if isinstance(answer, ExitStatus):
            return Outcome(trial=self._died(request, answer))
        outcome = _outcome(answer["outcome"])
        if outcome.trial.verdict is not Verdict.TIMED_OUT:
            self.has_run = True
        if self._once:
            return replace(outcome, measured=self.measure())
        if self._is_forking:
            return outcome
        if outcome.trial.passed:
            self._source.prepare()
        if not outcome.trial.passed and outcome.trial.leaked_bytes:
            self.renew()  # what the failed trial left goes with its process
            return replace(outcome, refusal=None)
        # At the driver's edge a failed mapping may have broken torch's allocator, which a health check need not see.
        at_edge = request.phase is Phase.GROW and request.cap_bytes is None and not outcome.trial.passed
        if at_edge or outcome.trial.verdict is Verdict.POISONED:
            self.renew()
        return outcome

    def _answer(self, request: Request) -> Message | ExitStatus:
        ended = self._ready()
        if ended is not None:
            return ended
        assert self._process is not None
        process = self._process
        # A new process takes seconds to build the target, which are not the trial's.
        request = replace(request, deadline_s=self._clock.deadline_s())
        question = {"do": "run", "request": asdict(request), "learned": self.learned}
        try:
            answer = self._ask(question, request.deadline_s)
        except errors.NotTrainedError:  # trials have trained the weights; a new process has those of the beginning
            if self._once or self._is_forking:
                raise
            self.renew()
            ended = self._ready()
            answer = ended if ended is not None else self._ask(question, self._clock.deadline_s())
        if not isinstance(answer, ExitStatus) and answer["outcome"]["trial"]["verdict"] == Verdict.FITS:
            self._usual |= set(process.said.splitlines())
        return answer

    def measure(self) -> Measured:
        if self._available_bytes is not None:
            return Measured(available_bytes=self._available_bytes, outside_bytes=None)
        return self._measure()

    def _measure(self) -> Measured:
        ended = self._ready()
        answer = ended if ended is not None else self._ask({"do": "measure"}, self._clock.end_s)
        if isinstance(answer, ExitStatus) and not answer.is_hang:
            ended = self._ready()
            answer = ended if ended is not None else self._ask({"do": "measure"}, self._clock.end_s)
        if isinstance(answer, ExitStatus):
            raise self._refusal(answer)
        return Measured(**answer["measured"])

    def outside_bytes(self) -> int | None:
        return None if self._available_bytes is not None else self.measure().outside_bytes

    def learn(self, learned: Mapping[str, Iterable[int]]) -> None:
        self.learned = {name: list(places) for name, places in learned.items()}

    def renew(self) -> None:
        """Let the next trial run in a new process; where each is a child of its own, it does already."""
        if self._process is not None and not self._is_forking:
            self._end_process()

    # --- deaths ---

    def _refused(self, ended: ExitStatus | None) -> None:
        if ended is not None:
            raise self._refusal(ended)

    def _refusal(self, ended: ExitStatus) -> errors.OomProbeError:
        """The error for a process that died before there was a trial."""
        self._refuse_stuck(ended)
        if ended.is_hang:
            return self._clock.time_is_up(self._clock.options.min_batch, ())
        target = self._source.target
        what = "a forked child of this process" if target is None else f"the target {target}"
        return errors.StepFailedError(
            f"the process in which {what} was to be built and run died: {ended.text()}\n"
            "Nothing was probed. Import the file and call the function by itself to see it"
        )

    def _refuse_stuck(self, ended: ExitStatus) -> None:
        """Raise where a child of this process hangs: it waits for a thread or a lock that was not forked with it."""
        if ended.why == "stuck":
            raise errors.ForkError(STUCK.format(where=ended.where() or "an unknown place"))

    def _died(self, request: Request, ended: ExitStatus) -> Trial:
        self._refuse_stuck(ended)
        evidence = Evidence(
            smaller_size_passed=request.smaller_passed, memory_pressure=False, on_host=self.device.on_host
        )
        verdict = classify_exit(
            ended,
            evidence,
            used_bytes=ended.peak_resident_bytes - self._resident_bytes,
            cap_bytes=request.cap_bytes or self._available_bytes,
            usual=frozenset(self._usual),
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
