"""Runs trials in child processes, which may die of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from oomprobe import errors
from oomprobe.anatomy import Anatomy
from oomprobe.clock import Clock
from oomprobe.devices.forked import Growth
from oomprobe.interrupts import Interrupts
from oomprobe.isolation.deaths import Death, judge_death
from oomprobe.isolation.failures import raise_failure
from oomprobe.isolation.process import ANSWER_S, TemplateProcess
from oomprobe.isolation.spec import Spec
from oomprobe.isolation.wire import Message
from oomprobe.result import SECOND_OPINIONS, Phase, Trial, trial_from_dict
from oomprobe.runner import Measured, Ran
from oomprobe.trial import Request
from oomprobe.verdict import Evidence, Verdict
from oomprobe.work import Work

FRESH = (
    "children forked from the built target hung or could not run ({why}), as they do when building it started threads: "
    "each trial builds the target anew"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Warm:
    """What a warm process has, measured in a child."""

    growth: Growth
    resident_bytes: int
    available_bytes: int


class RemoteRunner:
    """Runs trials in children of a template.

    Args:
        spec: What they build.
        interrupts: Lets signals reach a wait for a child.
        clock: Of the probe.
    """

    replaceable = True

    def __init__(self, spec: Spec, interrupts: Interrupts, clock: Clock) -> None:
        self._spec, self._interrupts, self._clock = spec, interrupts, clock
        self.notes: dict[str, None] = {}
        self.in_steps_s = 0.0
        self._in_child_s = 0.0  # of in_steps_s, what the child that is reused has told so far
        self._template: TemplateProcess | None = None
        self._builds_here = _is_on_host(spec)  # in the template, whose children are forked for one trial each
        self._forks = self._builds_here
        self._warm: _Warm | None = None
        self._warm_size: int | None = None
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
        self.notes |= dict.fromkeys(hello["notes"])

    # --- what the workbench asks ---

    def warm(self, batch_size: int) -> None:
        self._warm_size = batch_size

    def measure(self) -> Measured:
        if self._forks:
            return Measured(available_bytes=self._warmed().available_bytes, outside_bytes=None)
        answer = self._ask({"do": "measure", "warm_size": self._warm_size}, limited=False)
        return Measured(**answer["measured"])

    def outside_bytes(self) -> int | None:
        return None if self._forks else self.measure().outside_bytes

    def run(self, request: Request) -> Ran:
        changed = request.phase is not self._phase or request.phase is Phase.CONFIRM
        if self._phase is not None and request.phase in SECOND_OPINIONS and changed:
            self.renew()
        self._phase = request.phase
        warm = self._warmed() if self._forks else None
        question = self._question(request, warm)
        try:
            answer = self._ask_or_death(question, limited=True, request=request)
        except errors.NotTrainedError:  # trials have trained the weights; a new process has those of the beginning
            self.renew()
            answer = self._ask_or_death(question, limited=True, request=request)
        if "death" in answer:
            return Ran(trial=self._died(request, Death.from_message(answer["death"])))
        ran = _ran(answer["ran"])
        if warm is not None:
            return replace(ran, measured=Measured(available_bytes=warm.available_bytes, outside_bytes=None))
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
        """For a second opinion: on host memory a child forked from another template, with another layout of its memory."""
        if self._forks:
            self.close()
        elif self._template is not None:
            self._template.tell({"do": "renew"})
            self._in_child_s = 0.0

    @property
    def fragments(self) -> bool:
        return self._forks

    @property
    def nothing_stepped(self) -> bool:
        return not any(self._learned.values())

    def close(self) -> None:
        """End every process."""
        template, self._template = self._template, None
        self._in_child_s = 0.0
        if template is not None:
            template.close()

    # --- asking ---

    def _question(self, request: Request, warm: _Warm | None) -> Message:
        forked = None
        if warm is not None:
            forked = {"growth": asdict(warm.growth), "available_bytes": warm.available_bytes}
        asked = {**asdict(request), "deadline_s": None}
        return {
            "do": "trial",
            "request": asked,
            "warm_size": self._warm_size,
            "learned": self._learned,
            "forked": forked,
            "left_s": self._clock.left_s(),
        }

    def _warmed(self) -> _Warm:
        """What a warm process has; a child tells that once."""
        if self._warm is None:
            answer = self._told({"do": "grow", "size": self._warm_size}, limited=True)
            if "growth" not in answer:  # it died of its first step, which is left to the first trial
                answer = self._ask({"do": "grow", "size": None}, limited=True)
            self._warm = _Warm(
                growth=Growth(**answer["growth"]),
                resident_bytes=answer["resident_bytes"],
                available_bytes=answer["available_bytes"],
            )
        return self._warm

    def _ask(self, message: Message, *, limited: bool) -> Message:
        answer = self._ask_or_death(message, limited=limited)
        if "death" in answer and not answer.get("building") and not Death.from_message(answer["death"]).is_hang:
            self.renew()  # as a trial that died is tried again
            answer = self._ask_or_death(message, limited=limited)
        if "death" in answer:
            death = Death.from_message(answer["death"])
            if death.is_hang:
                raise self._clock.time_is_up(self._warm_size or self._spec.options.min_batch, ())
            raise errors.StepFailedError(
                f"the process in which the target {self._spec.target} was to be built and run died: {death.text()}\n"
                "Nothing was probed. Import the file and call the function by itself to see it"
            )
        return answer

    def _ask_or_death(self, message: Message, *, limited: bool, request: Request | None = None) -> Message:
        answer = self._told(message, limited=limited)
        if "failed" in answer:
            size = request.batch_size if request else self._warm_size or 0
            raise_failure(answer["failed"], size, request.largest_passed if request else None)
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
            self._template = TemplateProcess(self._interrupts)
            refusal = self._build(self._template)
            if refusal is not None:
                return refusal
        left_s = self._clock.left_s() if limited else None
        if (
            "left_s" in message
        ):  # a new template takes seconds to build, and a trial that counts them as its own is ended
            message = {**message, "left_s": left_s}
        asked = {"do": "ask", "ask": message, "once": self._forks, "left_s": left_s, "may_be_stuck": self._builds_here}
        asked["over_s"], end_s = self._clock.over_s, self._clock.end_s
        answer = self._template.ask(asked, until_s=None if end_s is None else end_s + ANSWER_S)
        if self._template.lost:
            self.close()
        return answer

    def _build(self, template: TemplateProcess) -> Message | None:
        """Tell a template what to build; None where it has done so, or its children will."""
        order = {"do": "build", "spec": self._spec.to_message(), "here": self._builds_here}
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
        if not self._builds_here or answer.get("building"):
            return None
        why = answer.get("death", {}).get("why")
        if why == "stuck" or (why == "timed out" and not self._has_run):
            return str(why)
        failed = answer.get("failed", {"kind": "none", "own": True})
        if (
            failed["kind"] is None and not failed["own"] and not self._has_run
        ):  # what it lacks may be a thread or a worker of the template's
            return f"the step failed: {(failed['text'].splitlines() or [''])[0][:80]}"
        return None

    def _heed(self, answer: Message) -> None:
        self.notes |= dict.fromkeys(answer.get("notes", ()))
        if answer.get("ran", {}).get("trial", {}).get("verdict") == Verdict.FITS:
            self._usual |= set(answer["stderr"].splitlines())
        if self._warm is not None:  # what libraries keep for a size, they keep for those above it
            grown = self._warm.growth
            grown = replace(grown, live_bytes=grown.live_bytes + answer.get("kept_bytes", 0))
            self._warm = replace(self._warm, growth=grown)
        if answer.get("graphs"):
            self.notes[COMPILED] = None
        self._learned = answer.get("learned") or self._learned
        told_s = answer.get("in_steps_s", 0.0)
        self.in_steps_s += told_s if self._forks else max(0.0, told_s - self._in_child_s)
        self._in_child_s = 0.0 if self._forks or "death" in answer else told_s

    # --- what came ---

    def _died(self, request: Request, death: Death) -> Trial:
        cap_bytes = request.cap_bytes or (self._warm.available_bytes if self._warm else None)
        base_bytes = self._warm.resident_bytes if self._warm else 0
        evidence = Evidence(
            smaller_size_passed=request.smaller_passed, memory_pressure=False, on_host=self.place.on_host
        )
        verdict = judge_death(
            death,
            evidence,
            used_bytes=death.peak_resident_bytes - base_bytes,
            cap_bytes=cap_bytes,
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
