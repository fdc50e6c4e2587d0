"""Runs trials in child processes, which may die of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from oomprobe import errors
from oomprobe.anatomy import Anatomy
from oomprobe.clock import Clock
from oomprobe.interrupts import Interrupts
from oomprobe.isolation.deaths import Death, judge_death
from oomprobe.isolation.failures import raise_failure
from oomprobe.isolation.process import ANSWER_S, TemplateProcess, ThisProcess
from oomprobe.isolation.spec import Spec
from oomprobe.isolation.wire import Message
from oomprobe.options import Options
from oomprobe.result import SECOND_OPINIONS, Phase, Trial, trial_from_dict
from oomprobe.runner import Measured, Ran
from oomprobe.trial import Request
from oomprobe.verdict import Evidence, Verdict
from oomprobe.work import Work

FRESH = (
    "children forked from the built target hung or could not run ({why}), as they do when building it started threads: "
    "each trial builds the target anew"
)
STUCK = (
    "a child forked from this process for a trial hangs at {where}: it waits for a thread, or a lock, of this process. Probe in "
    "processes that start afresh: oomprobe run path/to/train.py:build"
)
COMPILED = (
    "the step is compiled by torch.compile: each size was compiled anew, as training at that size alone would, and in "
    "processes that training has nothing to do with"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotePlace:
    """The device, as a child told of it."""

    name: str
    torch_device: torch.device
    total_bytes: int
    on_host: bool


class RemoteRunner:
    """Runs trials in children of a template.

    Args:
        spec: What they build; None: nothing, they are forked from this process, which has the model.
        options: Of the probe.
        interrupts: Lets signals reach a wait for a child.
        clock: Of the probe.
        forked: Forks them, where that is not the work of a template.
    """

    replaceable = True

    def __init__(
        self,
        spec: Spec | None,
        options: Options,
        interrupts: Interrupts,
        clock: Clock,
        forked: ThisProcess | None = None,
    ) -> None:
        self._spec, self._options, self._interrupts, self._clock = spec, options, interrupts, clock
        self.notes: dict[str, None] = {}
        self.in_steps_s = 0.0
        self._in_child_s = 0.0  # of in_steps_s, what the child that is reused has told so far
        self._template: TemplateProcess | ThisProcess | None = forked
        self.isolated = spec is not None
        self._builds_here = spec is None or _is_on_host(spec)  # where children are forked for one trial each
        self._forks = self._builds_here
        self._available_bytes = 0  # on the host
        self._resident_bytes = 0  # with the model, before a step
        self._learned: dict[str, list[int]] = {}
        self._phase: Phase | None = None  # of the last trial
        self._usual: set[str] = set()  # lines on stderr of children who did not die
        self._has_run = False  # a trial, to its end

    def open(self) -> None:
        """Start the first template, and learn what is probed."""
        hello = self._ask({"do": "hello"}, limited=False)
        if hello["forks"] and not self._forks:  # it turned out to be host memory
            self._forks = self._builds_here = True
            self.close()
            hello = self._ask({"do": "hello"}, limited=False)
        self.place = RemotePlace(**{**hello["place"], "torch_device": torch.device(hello["place"]["torch_device"])})
        self.step_names: list[str] = hello["step_names"]
        self.threads: int = hello["threads"]
        self._resident_bytes = hello["resident_bytes"]
        if self._forks:
            self._available_bytes = self._ask({"do": "measure"}, limited=False)["measured"]["available_bytes"]

    # --- what the workbench asks ---

    def measure(self) -> Measured:
        if self._forks:
            return Measured(available_bytes=self._available_bytes, outside_bytes=None)
        return Measured(**self._ask({"do": "measure"}, limited=False)["measured"])

    def outside_bytes(self) -> int | None:
        return None if self._forks else self.measure().outside_bytes

    def run(self, request: Request) -> Ran:
        changed = request.phase is not self._phase or request.phase is Phase.CONFIRM
        if self._phase is not None and request.phase in SECOND_OPINIONS and changed:
            self.renew()
        self._phase = request.phase
        question = {
            "do": "trial",
            "request": {**asdict(request), "deadline_s": None},
            "learned": self._learned,
            "left_s": self._clock.left_s(),
        }
        try:
            answer = self._ask_or_death(question, limited=True, batch_size=request.batch_size)
        except errors.NotTrainedError:  # trials have trained the weights; a new process has those of the beginning
            if self._forks:
                raise
            self.renew()
            answer = self._ask_or_death(question, limited=True, batch_size=request.batch_size)
        if "death" in answer:
            return Ran(trial=self._died(request, Death.from_message(answer["death"])))
        ran = _ran(answer["ran"])
        if self._forks:
            return replace(ran, measured=self.measure())
        if not ran.trial.passed and ran.trial.leaked_bytes:
            self.renew()  # what the failed trial left goes with its process
            return replace(ran, refusal=None)
        # At the driver's edge a failed mapping may have broken torch's allocator, which a health check need not see.
        at_edge = request.phase is Phase.GROW and request.cap_bytes is None and not ran.trial.passed
        if at_edge or ran.trial.verdict is Verdict.POISONED:
            self.renew()
        return ran

    def work_at(self, batch_size: int) -> Work | None:
        answer = self._told({"do": "work", "size": batch_size}, limited=True)
        return Work(**answer["work"]) if answer.get("work") else None  # what fails here will fail in a trial

    def anatomy_at(self, batch_size: int) -> Anatomy | None:
        answer = self._told({"do": "anatomy", "size": batch_size}, limited=True)
        return Anatomy(**answer["anatomy"]) if answer.get("anatomy") else None

    def renew(self) -> None:
        """Let the next trial run in a new child; one that was forked for its trial is new already."""
        if not self._forks and self._template is not None:
            self._template.tell({"do": "renew"})
            self._in_child_s = 0.0

    @property
    def nothing_stepped(self) -> bool:
        return not any(self._learned.values())

    def close(self) -> None:
        """End every process."""
        self._in_child_s = 0.0
        if self._template is not None:
            self._template.close()
        if self._spec is not None:
            self._template = None

    # --- asking ---

    def _ask(self, message: Message, *, limited: bool) -> Message:
        answer = self._ask_or_death(message, limited=limited)
        if "death" in answer and not answer.get("building") and not Death.from_message(answer["death"]).is_hang:
            self.renew()  # as a trial that died is tried again
            answer = self._ask_or_death(message, limited=limited)
        if "death" in answer:
            death = Death.from_message(answer["death"])
            if death.is_hang:
                self._refuse_stuck(death)
                raise self._clock.time_is_up(self._options.min_batch, ())
            target = "a forked child of this process" if self._spec is None else f"the target {self._spec.target}"
            raise errors.StepFailedError(
                f"the process in which {target} was to be built and run died: {death.text()}\n"
                "Nothing was probed. Import the file and call the function by itself to see it"
            )
        return answer

    def _ask_or_death(self, message: Message, *, limited: bool, batch_size: int = 0) -> Message:
        answer = self._told(message, limited=limited)
        if "failed" in answer:
            raise_failure(answer["failed"], batch_size)
        return answer

    def _told(self, message: Message, *, limited: bool) -> Message:
        """An answer, a failure or a death; where that is about forking alone, what comes without forking."""
        try:
            answer = self._answer(message, limited=limited)
            why = self._why_not_forked(answer)
            if why is not None:
                self.notes[FRESH.format(why=why)] = None
                self._builds_here = False
                self.close()
                answer = self._answer(message, limited=limited)
        except BaseException:
            self.close()
            raise
        self._has_run = self._has_run or "ran" in answer
        self._heed(answer)
        return answer

    def _answer(self, message: Message, *, limited: bool) -> Message:
        if self._template is None:
            assert self._spec is not None
            self._template = template = TemplateProcess(self._interrupts)
            refusal = self._build(template, self._spec)
            if refusal is not None:
                return refusal
        left_s = self._clock.left_s() if limited else None
        if (
            "left_s" in message
        ):  # a new template takes seconds to build, and a trial that counts them as its own is ended
            message = {**message, "left_s": left_s}
        asked: Message = {
            "do": "ask",
            "ask": message,
            "once": self._forks,
            "left_s": left_s,
            "may_be_stuck": self._builds_here,
        }
        asked["over_s"], end_s = self._clock.over_s, self._clock.end_s
        answer = self._template.ask(asked, until_s=None if end_s is None else end_s + ANSWER_S)
        if self._template.lost:
            self.close()
        return answer

    def _build(self, template: TemplateProcess, spec: Spec) -> Message | None:
        """Tell a template what to build; None where it has done so, or its children will."""
        order = {"do": "build", "spec": spec.to_message(), "here": self._builds_here}
        if not self._builds_here:
            template.tell(order)
            return None
        answer = template.ask(order, until_s=self._clock.end_s)
        if "built" in answer:
            return None
        self.close()
        return {**answer, "building": True}

    def _why_not_forked(self, answer: Message) -> str | None:
        """Whether children of a template that has built the target cannot run, and others could."""
        if not self._builds_here or self._spec is None or answer.get("building"):
            return None
        why = answer.get("death", {}).get("why")
        if why == "stuck" or (why == "timed out" and not self._has_run):
            return str(why)
        failed = answer.get("failed", {"kind": None})
        if (
            failed["kind"] == "StepFailedError" and not self._has_run
        ):  # it may lack a thread or a worker of the template's
            return f"{(failed['text'].splitlines() or [''])[0][:80]}"
        return None

    def _heed(self, answer: Message) -> None:
        self.notes |= dict.fromkeys(answer.get("notes", ()))
        if answer.get("ran", {}).get("trial", {}).get("verdict") == Verdict.FITS:
            self._usual |= set(answer["stderr"].splitlines())
        if answer.get("graphs"):
            self.notes[COMPILED] = None
        self._learned = answer.get("learned") or self._learned
        told_s = answer.get("in_steps_s", 0.0)
        self.in_steps_s += told_s if self._forks else max(0.0, told_s - self._in_child_s)
        self._in_child_s = 0.0 if self._forks or "death" in answer else told_s

    # --- what came ---

    def _refuse_stuck(self, death: Death) -> None:
        """Raise where a child of this process hangs: it waits for a thread or a lock that was not forked with it."""
        if death.why == "stuck" and self._spec is None:
            raise errors.UnreliableError(STUCK.format(where=death.where() or "an unknown place"))

    def _died(self, request: Request, death: Death) -> Trial:
        if death.why == "stuck":
            self._refuse_stuck(death)
        evidence = Evidence(
            smaller_size_passed=request.smaller_passed, memory_pressure=False, on_host=self.place.on_host
        )
        verdict = judge_death(
            death,
            evidence,
            used_bytes=death.peak_resident_bytes - self._resident_bytes,
            cap_bytes=request.cap_bytes or self._available_bytes or None,
            usual=frozenset(self._usual),
        )
        return Trial(
            batch_size=request.batch_size,
            verdict=verdict,
            phase=request.phase,
            cap_bytes=request.cap_bytes,
            error=death.text(),
            where=death.where(),
            accumulation_steps=request.accumulation_steps,
        )


def _ran(message: dict[str, Any]) -> Ran:
    measured = message["measured"]
    return Ran(
        trial=trial_from_dict(message["trial"]),
        measured=None if measured is None else Measured(**measured),
        outside_before_bytes=message["outside_before_bytes"],
        outside_after_bytes=message["outside_after_bytes"],
        refusal=message["refusal"],
    )


def _is_on_host(spec: Spec) -> bool:
    """Whether it can only be host memory, without asking for an accelerator: that alone would spoil a fork."""
    if spec.device is not None:
        return spec.device.partition(":")[0] == "cpu"
    built_for = (torch.version.cuda, torch.version.hip, torch.xpu._is_compiled() or None)
    return spec.pickled_device is None and not any(built_for) and not torch.backends.mps.is_built()
