"""Run one batch size from a cold start and return a `Trial` that keeps no exception, frame or tensor of the run."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from oomprobe.devices import Device, DeviceInfo, Usage, describe, replay_of
from oomprobe.devices.leaks import Baseline
from oomprobe.devices.recorder import Recorder
from oomprobe.errors import NotRunError, NotTrainedError, SimulationError, StepFailedError, TimeUp, step_failed
from oomprobe.hooks import COMPILED, Compiled, OptimizerWatch, accumulating, wraps_another
from oomprobe.look import HOST_LOOK_S, LOOK_S, SMALLEST_GROWTH_BYTES, calls_needed, growth_bytes
from oomprobe.options import Step
from oomprobe.report.breakdown import Breakdown
from oomprobe.result import SECOND_OPINIONS, Phase, Trial
from oomprobe.signals import Interrupts
from oomprobe.state import Tracker, generator_states
from oomprobe.units import format_bytes
from oomprobe.verdicts import Evidence, Verdict, classify
from oomprobe.verdicts.failure import Failure, clear_frames, failure_of

NO_OPTIMIZER = (
    "no optimizer stepped in {calls} calls of {steps}: the result covers only what the step did, "
    "perhaps just a forward pass"
)
IDLE = (
    "some optimizers ({count}) did not step in {calls} calls of {steps}, so the result does not cover their state: let the step "
    "function step every optimizer that training has"
)
STOPPED_STEPPING = (
    "at batch {size} the optimizer that stepped at smaller sizes did not step in {calls} calls, so this size was not "
    "trained: does the step skip it (a scaler that sees infinities), or catch an out-of-memory error itself? Let "
    "step_fn raise that error"
)
CYCLES = (
    "at batch {size} each step leaves {kept} in reference cycles until Python collects garbage, so training needs more than a "
    "trial of a few steps: break the cycle (an object that holds its own output), or call gc.collect() every few steps"
)
OVER_CAP = "it ran, but its peak was over the cap: it reused memory that the allocator had reserved earlier"
# If the bytes that full steps allocate differ by more than this fraction, their sizes vary.
VARIES = 0.01
VARYING = (
    "the step allocates different amounts from call to call (sequence lengths, routing, a last partial batch): a later call "
    "can need more than those that ran. To be sure, let step_fn make the largest batch it can meet"
)
KEPT = (
    "values that the step counts with were not put back before each trial, only at the end: with them put back, batch {size} "
    "failed with {error}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A trial to run."""

    batch_size: int
    phase: Phase
    steps: int  # full steps after every optimizer has stepped once
    calls: int | None = None  # of each step; None: as many as `steps` takes, while no trial has passed
    step_calls: int = 0  # calls of a full step; 0: unknown
    least_calls: int | None = None  # a bug after so many calls ends the trial, which has passed; None: it is an error
    more_calls: int = 0  # without `calls`: make up to so many in all, while they fit in LOOK_S
    looks: bool = False  # whether to find out how many calls a trial needs
    repeats: bool = True  # whether a simulated device may repeat calls that would be the same
    cap_bytes: int | None = None  # limit of the allocator; None: no limit
    accumulation_steps: int = 1  # micro-batches per optimizer step
    exact: bool = True  # whether a simulated device must run the step instead of replaying it
    breakdown: bool = False  # whether to record the allocations of one more full step
    deadline_s: float | None = None  # on this machine's monotonic clock; None: no limit
    smaller_passed: bool = False  # whether a smaller size has passed: evidence for an ambiguous error text
    largest_passed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A sample of the device's memory between trials."""

    available_bytes: int  # available to this process
    outside_bytes: int | None  # in use, but not by this process's allocator; None if unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A finished trial and the measurements around it."""

    trial: Trial
    measured: Measured | None = None  # after every trial on host memory, otherwise after the first pass in a process
    outside_before_bytes: int | None = None  # `Measured.outside_bytes` before the trial
    outside_after_bytes: int | None = None
    served_bytes: int = 0  # that the allocator handed out in the calls after the first full step; 0 if unknown
    allocations: int = 0  # the number of blocks that these calls allocated; 0 if unknown
    calls: int = 0  # of each step
    first_calls: int = 0  # until every optimizer had stepped
    call_s: float | None = None  # time of one call of each step; None if all were repeated
    needed_calls: int = 0  # after a look: how many calls meet the one that needs the most memory
    ended_early: str | None = None  # the bug of a late call that ended the trial
    counts: bool = False  # whether the user's own code may know which call it is
    varying: bool = False  # whether full steps allocated different amounts
    refusal: str | None = None  # why the probe must stop, such as a large leak
    contradicts_replay: bool = False  # whether it proves earlier replayed trials wrong
    breakdown: Breakdown | None = None


class Runner(Protocol):
    """Runs the trials of a session, in this process or in processes that may die (`oomprobe.isolation`)."""

    replaceable: bool  # whether a process that dies or is poisoned can be replaced, and its trial tried again
    device: DeviceInfo
    step_names: list[str]
    threads: int
    looks: bool  # whether it can tell how many calls a trial needs
    starts_anew: bool  # whether each call starts the loop anew, so that many calls show no more than few
    in_steps_s: float
    notes: dict[str, None]  # notes about the trials, in order and without duplicates

    @property
    def device_notes(self) -> tuple[str, ...]: ...

    @property
    def learned(self) -> dict[str, list[int]]:
        """For each step, the indices of the optimizers that step; negative for those created during the probe."""
        ...

    def learn(self, learned: Mapping[str, Iterable[int]]) -> None:
        """Take over what trials of the same target learned in another process."""
        ...

    def measure(self) -> Measured:
        """Sample the memory now."""
        ...

    def outside_bytes(self) -> int | None:
        """Sample `Measured.outside_bytes` now."""
        ...

    def run(self, request: Request) -> Outcome:
        """Run one trial and return the memory to its baseline. Raise StepFailedError for a bug in the step."""
        ...

    def renew(self) -> None:
        """Run the next trial in a new process if processes can be replaced."""
        ...


@dataclass(slots=True)
class _Record:
    """Measurements of one trial while it runs; dictionaries are by step name."""

    calls: int = 0
    step_name: str = ""
    durations_s: dict[str, list[float]] = field(default_factory=dict)  # after the first full step
    all_durations_s: dict[str, list[float]] = field(default_factory=dict)
    # For each call: the bytes that the allocator handed out and, when looking, rechecking or confirming, the highest
    # allocation so far, and the bytes in live tensors afterwards.
    served_bytes: dict[str, list[int]] = field(default_factory=dict)
    peaks_bytes: dict[str, list[int]] = field(default_factory=dict)
    live_bytes: dict[str, list[int]] = field(default_factory=dict)
    turns: dict[str, int] = field(default_factory=dict)  # calls before the last turn
    first_calls: dict[str, int] = field(default_factory=dict)  # until every optimizer had stepped
    waited_calls: dict[str, int] = field(default_factory=dict)  # in vain for an optimizer, in the first full step
    per_step: dict[str, int] = field(default_factory=dict)  # calls of the last full step
    allocations: int = 0
    past_least: bool = False  # whether a bug now ends the trial
    ended_early: str | None = None
    counts: bool = False
    values: object = None  # what the user's code counted after the last call
    step_leaked_bytes: int = 0
    peak_bytes: int = 0  # the highest of several steps
    limiting_step: str = ""  # the step that reached it
    failure: Failure | None = None
    verdict: Verdict = Verdict.FITS
    usage: Usage = field(default_factory=Usage)
    breakdown: Breakdown | None = None


class LocalRunner:
    """Runs trials of one model and its steps in this process.

    With `ends_with_trial` the process ends after one trial, so the runner neither cleans up nor checks for leaks.
    """

    replaceable = False

    def __init__(
        self,
        device: Device,
        model: torch.nn.Module,
        steps: Mapping[str, Step],
        tracker: Tracker,
        watch: OptimizerWatch,
        interrupts: Interrupts,
        *,
        restore_weights: Callable[[], None] | None = None,
        after_call: Callable[[], None] = lambda: None,
        ends_with_trial: bool = False,
    ) -> None:
        self.device, self._device, self._replay = describe(device), device, replay_of(device)
        if self._replay is not None:
            self._replay.begin_probe(interrupts.poll, replays=len(steps) == 1)
        self._model, self._steps, self._tracker = model, steps, tracker
        self._watch, self._interrupts = watch, interrupts
        self._restore_weights, self._after_call = restore_weights, after_call
        self._ends_with_trial = ends_with_trial
        self.step_names, self.threads = list(steps), torch.get_num_threads()
        self.starts_anew = any(step.starts_anew for step in steps.values())
        self.looks = hasattr(device, "served_bytes") and not self.starts_anew
        self._expected: dict[str, set[int]] = {}  # ids of the optimizers that step, learned in the first trial
        self._last_stepped: set[int] = set()  # ids of those that stepped in the last call that was not replayed
        self._idle: set[int] = set()  # ids of the optimizers that were found and did not step
        self._is_cold = False  # whether nothing has run since the last clean-up
        self._baseline = Baseline(device, clean=self._start_cold)
        # What the default random number generators were; a process that ends with its trial needs none.
        self._generators = [] if ends_with_trial else generator_states(device.torch_device.type)
        self.compiled = Compiled()
        self.in_steps_s = 0.0
        self.notes: dict[str, None] = {}

    # --- a trial ---

    def run(self, request: Request) -> Outcome:
        """Run or replay one trial and return the memory to its baseline."""
        replayed = None if self._replay is None else self._replay.replay(request)
        if replayed is not None:
            return Outcome(trial=replayed)
        before_bytes = self._device.outside_bytes()
        try:
            record = self._run_cold(request)
        except NotTrainedError:  # earlier trials trained the weights until the loss scaler saw only infinities
            if self._restore_weights is None:
                raise  # the caller tries again in a new process, whose weights are fresh
            self._restore_weights()
            record = self._run_cold(request)
        except StepFailedError as error:
            record = self._run_as_left(request, error)
        if self.compiled.is_used:
            self.notes[COMPILED] = None
        if record.verdict is Verdict.FITS:
            self._note_optimizers()
        trial = _make_trial(request, record, several=len(self._steps) > 1, timed=self._replay is None)
        outcome = self._outcome(request, record, trial)
        self._tracker.end_trial(passed=trial.passed)
        if trial.verdict is Verdict.POISONED or self._ends_with_trial:
            return outcome
        trial = replace(trial, leaked_bytes=self._baseline.settle(keeps=not self._tracker.kept.is_exact))
        measured = None
        if trial.passed and not self._baseline.known:
            measured = self.measure()
            self._baseline.take(measured.available_bytes)
        return replace(
            outcome,
            trial=trial,
            measured=measured,
            outside_before_bytes=before_bytes,
            outside_after_bytes=self._device.outside_bytes() if measured is None else measured.outside_bytes,
            refusal=self._baseline.refusal(trial),
            contradicts_replay=self._replay is not None and self._replay.learn(trial),
        )

    def _run_as_left(self, request: Request, error: StepFailedError) -> _Record:
        """Run a trial that failed with a bug once more, with the values that the last trial left, or raise the error.

        A counter that is put back beside an iterator that cannot be may make a running loop fail.
        """
        if not self._tracker.kept.leave():
            raise error
        try:
            record = self._run_cold(request)
        except StepFailedError:
            raise error from error.__cause__
        cause = error.__cause__
        self.notes[KEPT.format(size=request.batch_size, error=f"{type(cause).__name__}: {cause}")] = None
        return record

    def _outcome(self, request: Request, record: _Record, trial: Trial) -> Outcome:
        first_calls = record.first_calls
        calls = {name: len(served) - record.waited_calls.get(name, 0) for name, served in record.served_bytes.items()}
        medians = [statistics.median(durations_s) for durations_s in record.all_durations_s.values()]
        after_first = {
            name: served[record.waited_calls.get(name, 0) + first_calls.get(name, 0) :]
            for name, served in record.served_bytes.items()
        }
        needed_calls = 0
        if request.looks and trial.passed:
            needed_calls = max(
                calls_needed(
                    record.served_bytes[name],
                    record.peaks_bytes[name],
                    record.live_bytes[name],
                    first_calls=first_calls[name],
                    ordinary_calls=request.least_calls or 0,
                    is_exact=self._tracker.kept.is_exact,
                )
                for name in self._steps
            )
        return Outcome(
            trial=trial,
            served_bytes=sum(map(sum, after_first.values())),
            allocations=record.allocations,
            calls=max(calls.values(), default=0),
            first_calls=max(first_calls.values(), default=0),
            call_s=sum(medians) if medians else None,
            needed_calls=needed_calls,
            ended_early=record.ended_early,
            counts=record.counts,
            varying=any(
                varies(_by_step(served, request.step_calls or record.per_step.get(name, 1)))
                for name, served in after_first.items()
            ),
            breakdown=record.breakdown,
        )

    def _run_cold(self, request: Request) -> _Record:
        """Start cold, make the calls under the cap, and classify the end."""
        record = _Record()
        # Rechecks and confirmations drop compiled code even for the same size: its captured graphs hold memory.
        if self.compiled.start_size(request.batch_size, anew=request.phase in SECOND_OPINIONS) or not self._is_cold:
            self._start_cold()
        self._device.start_trial()
        try:
            with self._device.cap(request.cap_bytes):
                for name, step in self._turns(record):
                    if request.calls is not None and request.accumulation_steps == 1:
                        self._make_calls(name, step, request, record)
                        continue
                    if self._expected.get(name) != set():
                        self._full_step(name, step, request, record)
                    if request.accumulation_steps > 1:
                        with accumulating(self._tracker.optimizers, self._model):
                            for _ in range(request.accumulation_steps):
                                self._call(step, request, record)
                    else:
                        self._full_steps(name, step, request, record)
                        if request.breakdown:
                            self._break_down(name, step, request, record)
            if self._replay is not None:
                self._replay.end_trial()
        except TimeUp:
            record.verdict = Verdict.TIMED_OUT
        except (SimulationError, NotRunError, NotTrainedError):
            raise
        except Exception as error:
            record.usage = self._usage()
            self._watch.drop_partial_state()
            record.failure = failure_of(error)
            record.verdict = self._classify(record, request)
            if record.verdict is Verdict.BUG and self._device.healthy():
                clear_frames(error)
                if not record.past_least:
                    caller, size, last = (
                        self._steps[record.step_name].caller,
                        request.batch_size,
                        request.largest_passed,
                    )
                    raise step_failed(error, batch_size=size, largest_passed=last, caller=caller) from error
                record.ended_early, record.failure, record.verdict = record.failure.text, None, Verdict.FITS
        except BaseException as interruption:
            clear_frames(interruption)
            raise
        # The exception is gone by now, and with it the frames that held the failed step's tensors.
        if record.failure is None:
            record.usage = self._usage()
            if record.verdict is Verdict.FITS and _is_over_cap(record.usage, request):
                record.verdict = Verdict.OOM
            record.step_leaked_bytes = self._step_leak(record, request)
        elif not self._device.healthy():
            record.verdict = Verdict.POISONED
        return record

    def _turns(self, record: _Record) -> Iterator[tuple[str, Step]]:
        """Iterate over the steps; over several of them twice, because training resumes after evaluation.

        Evaluation splits cached blocks, and only in the second turn does the state of every step's optimizers exist.
        """
        turns = 2 if len(self._steps) > 1 else 1
        for name, step in [*self._steps.items()] * turns:
            record.step_name = name
            record.turns[name] = len(record.live_bytes.get(name, []))
            self._tracker.restore_modes()
            yield name, step
            if turns == 2 and (peak_bytes := self._usage().peak_allocated_bytes or 0) > record.peak_bytes:
                record.peak_bytes, record.limiting_step = peak_bytes, name

    def _start_cold(self) -> None:
        """Drop everything earlier calls left, so that the next call starts as training does: with only the model in memory."""
        self._tracker.start_cold()
        for put, state in self._generators:
            with suppress(Exception):  # a captured graph may have taken the generator over
                put(state)
        gc.collect()
        self._device.release()
        self._is_cold = True

    def _make_calls(self, name: str, step: Step, request: Request, record: _Record) -> None:
        """Make this turn's share of the requested calls, each of which may be the one that needs the most memory.

        Raise NotTrainedError if an optimizer that stepped before no longer does: the size was not really trained.
        """
        assert request.calls is not None
        turns = 2 if len(self._steps) > 1 else 1
        wanted, first_turn = self._expected.get(name, set()), name not in record.first_calls
        self._watch.stepped.clear()
        waits, calls, allocations = bool(wanted), -(-request.calls // turns), self._allocations()
        for number in range(calls):
            # A call may be repeated only if it would do all that a full step does.
            whole = len(self._steps) == 1 and self._last_stepped >= wanted
            self._call(step, request, record, may_repeat=whole and request.repeats)
            if waits and self._has_stepped(wanted):
                waits = False
                record.durations_s.pop(name, None)  # the first full step creates optimizer state, so it is slower
                if first_turn:
                    record.first_calls[name] = record.per_step[name] = number + 1
                    allocations = self._allocations()
            made = len(record.served_bytes[name])
            record.past_least = request.least_calls is not None and made * turns >= request.least_calls
        if waits:
            raise NotTrainedError(STOPPED_STEPPING.format(calls=calls, size=request.batch_size))
        record.first_calls.setdefault(name, 0)
        record.allocations += self._allocations() - allocations

    def _full_step(self, name: str, step: Step, request: Request, record: _Record) -> None:
        """Call the step until all its optimizers have stepped, or once if it has none. Learn which step on first use.

        Raise NotTrainedError if an optimizer that stepped before no longer does: the size was not really trained.
        """
        is_known, stepped = name in self._expected, self._watch.stepped
        if is_known:
            wanted = self._expected[name]
        else:
            found = {id(one) for one in self._tracker.optimizers if not wraps_another(one)}
            elsewhere = set[int]().union(*self._expected.values())  # optimizers of other steps
            # 0 is no optimizer's id: if none exists yet, the first that steps ends the loop.
            wanted = found - elsewhere if elsewhere else found or {0}
        stepped.clear()
        seen, calls = 0, 0  # how many optimizers have stepped, and the call after which the last of them had
        for number in range(step.max_calls if wanted else 1):
            self._call(step, request, record, may_repeat=len(self._steps) == 1 and number == 0)
            if len(stepped) > seen:
                seen, calls = len(stepped), number + 1
            if self._has_stepped(wanted):
                break
        else:
            if wanted and is_known:
                raise NotTrainedError(STOPPED_STEPPING.format(calls=step.max_calls, size=request.batch_size))
        if not is_known:
            self._expected[name] = set(stepped)  # only here: if a call raises, the next trial learns it
            self._idle = (self._idle | wanted) - stepped - {0}
        record.per_step[name] = calls or 1
        if name not in record.first_calls:
            record.waited_calls[name] = len(record.served_bytes[name]) - calls
            record.first_calls[name] = calls
            record.durations_s.pop(name, None)  # it creates optimizer state, so it is slower

    def _has_stepped(self, wanted: set[int]) -> bool:
        """Return whether all the wanted optimizers that are alive have stepped, or as many new ones."""
        stepped = self._watch.stepped
        alive = wanted & {id(optimizer) for optimizer in self._tracker.optimizers}
        # A step may build its optimizers on each call: then new ones must step, as many as were wanted.
        return bool(stepped) and (stepped >= alive or (bool(stepped - wanted) and len(stepped) >= len(wanted)))

    def _full_steps(self, name: str, step: Step, request: Request, record: _Record) -> None:
        """Run `request.steps` full steps, and more calls up to `request.more_calls` if there is time."""
        allocations, started_s = self._allocations(), time.monotonic()
        for _ in range(request.steps):
            self._full_step(name, step, request, record)
        record.past_least = request.more_calls > 0
        while len(record.served_bytes[name]) < request.more_calls and self._has_time(started_s, request, record):
            self._call(step, request, record, may_repeat=len(self._steps) == 1)
        record.allocations += self._allocations() - allocations

    def _has_time(self, started_s: float, request: Request, record: _Record) -> bool:
        """Return whether another call fits in LOOK_S and well before the deadline."""
        longest_s, now_s = max(record.all_durations_s.get(record.step_name, [0.0])), time.monotonic()
        if request.deadline_s is not None and now_s + 2 * longest_s > request.deadline_s:
            return False
        return now_s + longest_s < started_s + (HOST_LOOK_S if self.device.on_host else LOOK_S)

    def _note_optimizers(self) -> None:
        """Note that no optimizer stepped, or that one did not: its state is not in the measured memory."""
        steps = " and ".join(map(repr, self._steps))
        calls = max(step.max_calls for step in self._steps.values())
        if not any(self._expected.values()):
            self.notes[NO_OPTIMIZER.format(calls=calls, steps=steps)] = None
        elif self._idle:
            self.notes[IDLE.format(count=len(self._idle), calls=calls, steps=steps)] = None

    def _break_down(self, name: str, step: Step, request: Request, record: _Record) -> None:
        """Run one more full step and record its allocations; of several steps, keep the one with the highest peak."""
        history = getattr(self._device, "history", lambda: None)()
        if history is None:
            return
        recorder = Recorder(self._model, self._tracker.optimizers)
        with history as recorded, recorder.recording(recorded):
            self._full_step(name, step, request, _Record(step_name=name))
        usage = self._usage()
        found = recorder.breakdown(
            request.batch_size,
            name if len(self._steps) > 1 else None,
            peak_allocated_bytes=usage.peak_allocated_bytes or 0,
            peak_reserved_bytes=usage.peak_reserved_bytes or 0,
        )
        if record.breakdown is None or found.live_bytes > record.breakdown.live_bytes:
            record.breakdown = found

    def _call(self, step: Step, request: Request, record: _Record, *, may_repeat: bool = False) -> None:
        """Call the step once. If `may_repeat`, a simulated device may repeat the last call from its recording instead."""
        name, before_bytes = record.step_name, self._served_bytes()
        may_repeat = may_repeat and record.calls > 0 and not request.breakdown
        confirms = request.phase is Phase.CONFIRM and record.calls <= request.steps
        if may_repeat and self._replay is not None and self._replay.repeat(confirms=confirms):
            self._watch.stepped |= self._last_stepped
        else:
            self._call_really(step, request, record)
        record.calls += 1
        record.served_bytes.setdefault(name, []).append(self._served_bytes() - before_bytes)
        if (request.looks or request.phase in SECOND_OPINIONS) and not self._ends_with_trial:
            record.peaks_bytes.setdefault(name, []).append(self._usage().peak_allocated_bytes or 0)
            record.live_bytes.setdefault(name, []).append(self._device.live_bytes())

    def _call_really(self, step: Step, request: Request, record: _Record) -> None:
        self._is_cold = False
        before = set(self._watch.stepped)
        self._watch.stepped.clear()
        started_s = time.perf_counter()
        allowed = self._interrupts.allowed(request.deadline_s, polled=self._replay is not None)
        try:
            with self._device.session(), allowed:
                step.run(self._model, request.batch_size)
                self._device.synchronize()
        finally:
            duration_s = time.perf_counter() - started_s
            self.in_steps_s += duration_s
        self._after_call()
        self._last_stepped = set(self._watch.stepped)
        self._watch.stepped |= before
        for durations_s in (record.durations_s, record.all_durations_s):
            durations_s.setdefault(record.step_name, []).append(duration_s)
        if self._replay is not None and not record.counts:
            values = self._tracker.kept.plain_values()
            record.counts = record.values is not None and values != record.values
            record.values = values

    def _served_bytes(self) -> int:
        return int(getattr(self._device, "served_bytes", lambda: 0)())

    def _allocations(self) -> int:
        return int(getattr(self._device, "allocations", lambda: 0)())

    def _classify(self, record: _Record, request: Request) -> Verdict:
        assert record.failure is not None
        evidence = Evidence(
            # On the host, an ambiguous text at the first size is as likely to be about memory as at a later one.
            smaller_size_passed=request.smaller_passed or self.device.on_host,
            memory_pressure=record.usage.under_pressure,
            healthy=True,
            on_host=self.device.on_host,
            integrated=self.device.integrated,
        )
        return classify(record.failure.facts, evidence)

    def _usage(self) -> Usage:
        try:
            return self._device.usage()
        except Exception:  # every call fails in a poisoned process
            return Usage()

    # --- leaks ---

    def _step_leak(self, record: _Record, request: Request) -> int:
        """Return the bytes that each further call leaves allocated, not counting uncollected garbage."""
        steady = [
            live[max(record.turns[name], record.first_calls.get(name, 1) - 1) :]
            for name, live in record.live_bytes.items()
        ]
        leaked_bytes = sum(growth_bytes(live) for live in steady)
        if not leaked_bytes:
            return 0
        before_bytes = self._device.live_bytes()
        gc.collect()
        garbage_bytes = before_bytes - self._device.live_bytes()
        cycle_bytes = min(leaked_bytes, garbage_bytes // max(map(len, steady)))
        if cycle_bytes >= SMALLEST_GROWTH_BYTES and request.phase is Phase.CONFIRM:
            self.notes[CYCLES.format(kept=format_bytes(cycle_bytes), size=request.batch_size)] = None
        return leaked_bytes - cycle_bytes

    # --- for the session ---

    def measure(self) -> Measured:
        available_bytes = self._device.available_bytes()
        return Measured(available_bytes=available_bytes, outside_bytes=self._device.outside_bytes())

    def outside_bytes(self) -> int | None:
        return self._device.outside_bytes()

    def renew(self) -> None:
        """Do nothing: trials run in the user's own process."""

    @property
    def device_notes(self) -> tuple[str, ...]:
        return tuple(getattr(self._device, "notes", ()))

    @property
    def learned(self) -> dict[str, list[int]]:
        places = {id(optimizer): place for place, optimizer in enumerate(self._tracker.optimizers)}
        return {
            name: [places.get(one, -1 - nth) for nth, one in enumerate(stepped)]
            for name, stepped in self._expected.items()
        }

    def learn(self, learned: Mapping[str, Iterable[int]]) -> None:
        known = [id(optimizer) for optimizer in self._tracker.optimizers]
        self._expected = {
            name: {known[place] if 0 <= place < len(known) else place for place in places}
            for name, places in learned.items()
        }


def _by_step(served: Sequence[int], calls: int) -> list[int]:
    """Return the bytes that full steps of so many calls allocated; drop an incomplete one."""
    return [sum(served[start : start + calls]) for start in range(0, len(served) - calls + 1, calls)]


def varies(served: Sequence[int]) -> bool:
    """Return whether some steps allocated more bytes than others, ignoring the first, which may fill caches.

    Example:
        >>> varies([120, 100, 100]), varies([120, 100, 150])
        (False, True)
    """
    steady = served[1:]
    return bool(steady) and max(steady) - min(steady) > VARIES * max(steady)


def _is_over_cap(usage: Usage, request: Request) -> bool:
    """Return whether cached blocks pushed the peak over the cap, which torch checks only when it asks the driver for memory."""
    if request.cap_bytes is None or usage.peak_reserved_bytes is None:  # without reserved memory there is no such cache
        return False
    return (usage.peak_allocated_bytes or 0) > request.cap_bytes


def _make_trial(request: Request, record: _Record, *, several: bool, timed: bool) -> Trial:
    medians = [statistics.median(durations_s) for durations_s in record.durations_s.values()]
    step_s = sum(medians) if timed and medians and record.failure is None else None
    failed = record.verdict is not Verdict.FITS
    named = record.step_name if failed else record.limiting_step
    return Trial(
        batch_size=request.batch_size,
        verdict=record.verdict,
        phase=request.phase,
        steps=record.calls,
        cap_bytes=request.cap_bytes,
        peak_allocated_bytes=record.usage.peak_allocated_bytes,
        peak_reserved_bytes=record.usage.peak_reserved_bytes,
        peak_upper_bytes=record.usage.peak_upper_bytes,
        step_s=step_s,
        samples_per_s=request.batch_size / step_s if step_s else None,
        alloc_retries=record.usage.alloc_retries,
        step_leaked_bytes=record.step_leaked_bytes,
        error=record.failure.text if record.failure else OVER_CAP if record.verdict is Verdict.OOM else None,
        where=record.failure.where if record.failure else None,
        step_name=named if several else None,
        accumulation_steps=request.accumulation_steps,
    )
