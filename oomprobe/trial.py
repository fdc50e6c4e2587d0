"""Runs one batch size and returns a `Trial`: a value that keeps no exception, frame or tensor of what ran."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from oomprobe.compiled import Compiled
from oomprobe.devices import Device, Simulated, Usage
from oomprobe.errors import NotRunError, NotTrainedError, SimulationError, step_failed
from oomprobe.failure import Failure, clear_frames, failure_of
from oomprobe.interrupts import Interrupts, TimeUp
from oomprobe.options import Step
from oomprobe.result import Phase, Trial
from oomprobe.verdict import Evidence, Verdict, judge
from oomprobe.watch import OptimizerWatch, held_back

NO_OPTIMIZER = (
    "no optimizer stepped in {calls} calls of {step!r}: the number holds for what the step did, forward or not"
)


STOPPED_STEPPING = (
    "at batch {size} the optimizer that stepped at smaller sizes did not step in {calls} calls, so this size was not "
    "trained: does the step skip it (a scaler that sees infinities), or catch an out-of-memory error itself? Let the "
    "error out of step_fn"
)


OVER_CAP = "it ran, but used more than the cap: memory reserved before the trial is not reclaimed"


def _over_cap(usage: Usage, request: Request) -> bool:
    """The cap is compared when memory is asked of the device; what the allocator holds already is served beyond it."""
    peak = usage.peak_allocated_bytes
    return request.cap_bytes is not None and usage.peak_reserved_bytes is not None and (peak or 0) > request.cap_bytes


LONG_STEPS = 50
NO_TIME_FOR_LENGTH = (
    "time limit: a confirmation of batch {size} ran fewer than {steps} steps, and a later one can need more"
)
# Of what a step allocates: steps that differ by more run `LONG_STEPS` to be confirmed. A GPT whose sequences vary from 32
# to 64 tokens was confirmed in six steps at sizes that, margin and all, ran out of the whole card within fifty.
VARIES = 0.01
VARYING = (
    "the step allocates different amounts from call to call (sequence lengths, routing, a last partial batch), so up to "
    f"{LONG_STEPS} steps confirm the answer; a later step can still need more. To be sure, let step_fn make the largest "
    "batch it can meet"
)


def varies(served_bytes: Sequence[int]) -> bool:
    """Whether some steps allocated more than others, not counting the first, which may create caches and buffers.

    Example:
        >>> varies([120, 100, 100]), varies([120, 100, 150])
        (False, True)
    """
    steady = served_bytes[1:]
    return bool(steady) and max(steady) - min(steady) > VARIES * max(steady)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to run.

    Attributes:
        batch_size: The size.
        phase: Why.
        steps: Full steps after every optimizer has stepped once.
        cap_bytes: What to hold the allocator to; None: all there is.
        accumulation_steps: Micro-batches for one optimizer step.
        deadline_s: On the monotonic clock; None: no limit.
        awaited_until_s: When whoever waits for the trial gives up, on the same clock: what need not run does not run then.
        smaller_passed: Whether a smaller size has passed in this probe (it corroborates an ambiguous text).
        largest_passed: The largest size that has passed so far.
    """

    batch_size: int
    phase: Phase
    steps: int
    cap_bytes: int | None = None
    accumulation_steps: int = 1
    deadline_s: float | None = None
    awaited_until_s: float | None = None
    smaller_passed: bool = False
    largest_passed: int | None = None


@dataclass(slots=True)
class _Run:
    """What one trial gathers while it runs."""

    calls: int = 0
    durations_s: dict[str, list[float]] = field(default_factory=dict)
    step_name: str | None = None
    peaks: dict[str, int] = field(default_factory=dict)
    failure: Failure | None = None
    verdict: Verdict = Verdict.FITS
    usage: Usage = field(default_factory=Usage)


class Trials:
    """Runs trials of one model and its steps on one device.

    Args:
        device: Where they run.
        model: Handed to the steps.
        steps: By name.
        optimizers: Gives those known so far; others show themselves.
        restore_modes: Puts every module's train or eval mode back.
        let_go: Lets go of the gradients and the state that earlier calls made.
        watch: Sees optimizers step.
        interrupts: Lets signals reach the step.
        after_call: Called after each call of a step.
    """

    def __init__(
        self,
        device: Device,
        model: torch.nn.Module,
        steps: Mapping[str, Step],
        *,
        optimizers: Callable[[], Iterable[torch.optim.Optimizer]],
        restore_modes: Callable[[], None],
        let_go: Callable[[], None],
        watch: OptimizerWatch,
        interrupts: Interrupts,
        after_call: Callable[[], None] = lambda: None,
    ) -> None:
        self._device, self.model, self._steps = device, model, steps
        self._optimizers, self._watch, self.interrupts = optimizers, watch, interrupts
        self._restore_modes, self._let_go, self._after_call = restore_modes, let_go, after_call
        self._simulated: Simulated | None = device if isinstance(device, Simulated) else None
        if self._simulated is not None:
            self._simulated.begin_probe(interrupts.poll)
        self._expected: dict[str, set[int]] = {}  # optimizers that step, learned in the first trial
        self._last_stepped: set[int] = set()  # in the last call that was run
        self.compiled = Compiled()
        self.in_steps_s = 0.0
        self.notes: dict[str, None] = {}

    def run(self, request: Request) -> Trial:
        """Run one size, and judge how it ended.

        Raises:
            StepFailedError: the step failed with a bug; chained from the user's own exception.
        """
        run = _Run()
        # A second opinion must not start beside the captured graphs of the first.
        self.compiled.start_size(request.batch_size, anew=request.phase in (Phase.RECHECK, Phase.CONFIRM))
        self.start_cold()
        self._device.start_trial()
        try:
            with self._device.cap(request.cap_bytes):
                self._run_steps(request, run)
            if self._simulated is not None:
                self._simulated.end_trial()
        except TimeUp as up:
            self.interrupts.check_own(up)
            run.verdict = Verdict.TIMED_OUT
        except (SimulationError, NotRunError, NotTrainedError):
            raise
        except Exception as error:
            run.usage = self._usage()
            self._watch.drop_half_made()
            run.failure = failure_of(error)
            run.verdict = self._judge(run, request, healthy=True)
            if run.verdict is Verdict.BUG and self._device.healthy():
                clear_frames(error)
                raise step_failed(
                    error,
                    batch_size=request.batch_size,
                    trials=(),
                    largest_passed=request.largest_passed,
                    caller=self._steps[run.step_name].caller if run.step_name else None,
                ) from error
        except BaseException as interruption:
            clear_frames(interruption)
            raise
        # Here the exception is gone, and with it the frames that held the failed step's tensors.
        if run.failure is None:
            run.usage = self._usage()
            if run.verdict is Verdict.FITS and _over_cap(run.usage, request):
                run.verdict = Verdict.OOM
        elif run.verdict is not Verdict.POISONED:
            run.verdict = self._judge(run, request, healthy=self._device.healthy())
        return _trial(request, run, several=len(self._steps) > 1, timed=self._simulated is None)

    def start_cold(self) -> None:
        """Let go of what earlier calls left: the next finds the memory as training will, with nothing but the model in it."""
        self._let_go()
        gc.collect()
        self._device.release()

    def _judge(self, run: _Run, request: Request, *, healthy: bool) -> Verdict:
        assert run.failure is not None
        evidence = Evidence(
            # A library that finds no memory on the host at the first size says no more than at a later one.
            smaller_size_passed=request.smaller_passed or self._device.on_host,
            memory_pressure=run.usage.under_pressure,
            healthy=healthy,
            on_host=self._device.on_host,
            integrated=bool(getattr(self._device, "integrated", False)),
        )
        return judge(run.failure.facts, evidence)

    def _usage(self) -> Usage:
        try:
            return self._device.usage()
        except Exception:  # a poisoned process answers nothing
            return Usage()

    def _run_steps(self, request: Request, run: _Run) -> None:
        for name, step in self._steps.items():
            run.step_name = name
            if len(self._steps) > 1:
                self._restore_modes()
            if request.accumulation_steps > 1:
                self._accumulate(step, request, run)
            else:
                self._until_steady(name, step, request, run)
                run.durations_s.pop(name, None)
                self._full_steps(name, step, request, run)
            if len(self._steps) > 1:
                run.peaks[name] = self._usage().peak_allocated_bytes or 0

    def _full_steps(self, name: str, step: Step, request: Request, run: _Run) -> None:
        """As many as were asked for, and more where chance has a part in whether the next will run."""
        done, until_s = 0, request.awaited_until_s
        served_bytes: list[int] = []
        while done < request.steps or (done < LONG_STEPS and self._goes_on(name, request, run, until_s, served_bytes)):
            before_bytes = self._served_bytes()
            self._full_step(step, self._expected[name], request, run)
            served_bytes.append(self._served_bytes() - before_bytes)
            done += 1

    def _goes_on(
        self, name: str, request: Request, run: _Run, until_s: float | None, served_bytes: Sequence[int]
    ) -> bool:
        if request.phase is not Phase.CONFIRM or not varies(served_bytes):
            return False
        self.notes[VARYING] = None
        in_time = until_s is None or time.monotonic() + 2 * max(run.durations_s[name]) < until_s
        if not in_time:
            self.notes[NO_TIME_FOR_LENGTH.format(size=request.batch_size, steps=LONG_STEPS)] = None
        return in_time

    def _served_bytes(self) -> int:
        served_bytes: Callable[[], int] | None = getattr(self._device, "served_bytes", None)
        return 0 if served_bytes is None else served_bytes()

    def _until_steady(self, name: str, step: Step, request: Request, run: _Run) -> None:
        """Call until every optimizer of the step has stepped: only then does its state exist."""
        if name in self._expected:
            if self._expected[name]:
                self._full_step(step, self._expected[name], request, run)
            return
        known = {id(optimizer) for optimizer in self._optimizers() if not _wraps_another(optimizer)}
        self._expected[name] = set()  # a failure on the way leaves it to the next trial
        try:
            stepped = self._full_step(step, known or {0}, request, run, learned=False)
        except BaseException:
            del self._expected[name]
            raise
        self._expected[name] = stepped
        if not stepped:
            self.notes[NO_OPTIMIZER.format(calls=step.max_calls, step=name)] = None

    def _full_step(
        self, step: Step, wanted: set[int], request: Request, run: _Run, *, learned: bool = True
    ) -> set[int]:
        """Call the step until all the wanted optimizers have stepped; once when none is wanted.

        Raises:
            NotTrainedError: one that stepped before does not any more, so that the size was not really run.
        """
        self._watch.stepped.clear()
        for _ in range(step.max_calls if wanted else 1):
            self._call_or_repeat(step, request, run)
            if self._watch.stepped and self._all_stepped(wanted):
                return set(self._watch.stepped)
        if wanted and learned:
            raise NotTrainedError(STOPPED_STEPPING.format(calls=step.max_calls, size=request.batch_size))
        return set(self._watch.stepped)

    def _all_stepped(self, wanted: set[int]) -> bool:
        """As many as were wanted, or all of them that still exist: a step may build its optimizer on each call."""
        stepped = self._watch.stepped
        there = wanted & {id(optimizer) for optimizer in self._optimizers()}
        return stepped >= there or (bool(stepped - wanted) and len(stepped) >= len(wanted))

    def _accumulate(self, step: Step, request: Request, run: _Run) -> None:
        with held_back(self._optimizers(), self.model):
            for _ in range(request.accumulation_steps - 1):
                self._call(step, request, run)
        self._call(step, request, run)

    def _call_or_repeat(self, step: Step, request: Request, run: _Run) -> None:
        """A call that is known to do what the last one did may be left to a simulated device."""
        known = run.calls and len(self._steps) == 1
        if known and self._simulated is not None and self._simulated.repeat():
            self._watch.stepped |= self._last_stepped
            run.calls += 1
            return
        self._watch.stepped, before = set(), self._watch.stepped
        self._call(step, request, run)
        self._last_stepped = set(self._watch.stepped)
        self._watch.stepped |= before

    def _call(self, step: Step, request: Request, run: _Run, inside: AbstractContextManager[Any] | None = None) -> None:
        started = time.perf_counter()
        allowed = self.interrupts.allowed(request.deadline_s, polled=self._simulated is not None)
        try:
            with self._device.session(), inside or nullcontext(), allowed:
                step.run(self.model, request.batch_size)
                self._device.synchronize()
        finally:
            duration = time.perf_counter() - started
            self.in_steps_s += duration
        self._after_call()
        run.calls += 1
        run.durations_s.setdefault(run.step_name or "", []).append(duration)

    @property
    def learned(self) -> dict[str, list[int]]:
        """Which optimizers step in each step, by their place among those known; -1 and below: others."""
        places = {id(optimizer): place for place, optimizer in enumerate(self._optimizers())}
        return {
            name: [places.get(one, -1 - nth) for nth, one in enumerate(stepped)]
            for name, stepped in self._expected.items()
        }

    def learn(self, learned: Mapping[str, Iterable[int]]) -> None:
        """Take over what trials of the same target learned in another process."""
        known = [id(optimizer) for optimizer in self._optimizers()]
        self._expected = {
            name: {known[place] if 0 <= place < len(known) else place for place in places}
            for name, places in learned.items()
        }

    @property
    def step_names(self) -> list[str]:
        return list(self._steps)

    @property
    def nothing_stepped(self) -> bool:
        """Whether no optimizer was seen to step in the first trial."""
        return not any(self._expected.values())

    def call_once(
        self, batch_size: int, deadline_s: float | None, inside: AbstractContextManager[Any] | None = None
    ) -> None:
        """Call every step once at one size, outside any trial; `inside` is entered around each call.

        Raises:
            TimeUp: its time passed. Whatever else comes, a `TimeLimitError` too, is the step's own.
        """
        request = Request(batch_size=batch_size, phase=Phase.GROW, steps=1, deadline_s=deadline_s)
        self.compiled.start_size(batch_size)
        self.start_cold()
        try:
            for step in self._steps.values():
                if len(self._steps) > 1:
                    self._restore_modes()
                self._call(step, request, _Run(), inside)
        except BaseException as error:
            self._watch.drop_half_made()
            clear_frames(error)
            raise


def _wraps_another(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is another one's shell, such as accelerate's: it has no step of its own, and is never seen to make one."""
    return any(isinstance(value, torch.optim.Optimizer) for value in vars(optimizer).values())


def _trial(request: Request, run: _Run, *, several: bool, timed: bool) -> Trial:
    medians = [statistics.median(durations_s) for durations_s in run.durations_s.values()]
    step_s = sum(medians) if timed and medians and run.failure is None else None
    failed = run.verdict is not Verdict.FITS
    named = run.step_name if failed else max(run.peaks, key=lambda name: run.peaks[name], default=None)
    return Trial(
        batch_size=request.batch_size,
        verdict=run.verdict,
        phase=request.phase,
        steps=run.calls,
        cap_bytes=request.cap_bytes,
        peak_allocated_bytes=run.usage.peak_allocated_bytes,
        peak_reserved_bytes=run.usage.peak_reserved_bytes,
        peak_upper_bytes=run.usage.peak_upper_bytes,
        step_s=step_s,
        samples_per_s=request.batch_size / step_s if step_s else None,
        alloc_retries=run.usage.alloc_retries,
        error=run.failure.text if run.failure else OVER_CAP if run.verdict is Verdict.OOM else None,
        where=run.failure.where if run.failure else None,
        step_name=named if several else None,
        accumulation_steps=request.accumulation_steps,
    )
