"""Run one batch size from a cold start and return an `Outcome` that keeps no exception, frame or tensor of the run."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from oomprobe.devices import Device, Usage, describe
from oomprobe.devices.leaks import TOLERATED_BYTES, Baseline
from oomprobe.devices.recorder import Recorder
from oomprobe.errors import (
    InvalidArgumentError,
    NotRunError,
    NotTrainedError,
    OomProbeError,
    SimulationError,
    StepFailedError,
    TimeUp,
    step_failed,
)
from oomprobe.ground.frames import hide_frames, is_own_fault
from oomprobe.ground.units import format_bytes, known
from oomprobe.records.axis import NO_AXIS, Axis
from oomprobe.records.breakdown import Breakdown
from oomprobe.records.notes import Note, NoteKind, Notes, remark, take_told
from oomprobe.records.options import Step
from oomprobe.records.trials import (
    Call,
    CallRecord,
    Measured,
    Outcome,
    Phase,
    Request,
    RunnerInfo,
    Trial,
    Verdict,
)
from oomprobe.rules import look, program
from oomprobe.runners.frees import watch_frees
from oomprobe.runners.hooks import (
    COMPILED,
    Compiled,
    InputWatch,
    OptimizerWatch,
    OutOfMemoryWatch,
    Stepping,
    accumulating,
    outside_modes,
)
from oomprobe.runners.loop_variables import LoopVariables
from oomprobe.runners.ranks_here import check_process_group
from oomprobe.runners.savings import Savings
from oomprobe.runners.signals import Interrupts
from oomprobe.state import (
    Snapshot,
    Tracker,
    addresses_of,
    can_copy,
    generator_states,
    largest_added,
)
from oomprobe.state.tracker import gradients_among
from oomprobe.verdicts import Evidence, classify
from oomprobe.verdicts.failure import Failure, clear_frames, failure_of

OVER_CAP = "it ran, but its peak was over the cap: it reused memory that the allocator had reserved earlier"
COUNTERS_LEFT = "the step's counters were restored only at the end: when they were restored before each trial, batch {size} failed with {error}"
WENT_ON = (
    "not cold: the step replaces parameters by others of another shape, beside an iterator whose position cannot be put back, so each "
    "trial went on from the last one, and the calls that replace them were not run at this size. Probe it as a target (oomprobe run "
    "train.py:build), whose trials run in fresh processes"
)
LIVES_ON = (
    "between two calls, as between two iterations of a loop, these live on until the next one binds "
    "them again: {shares}. If training calls the step as a function, whose variables die when it "
    "returns, pass oomprobe.Step(step, is_loop=False)"
)
HELD_FRACTION = 0.01  # of the peak, which is worth a word
# What computed a gradient that keeps the graphs of its parts: ``backward(create_graph=True)``.
SUM_OF_GRAPHS = "AddBackward0"


FurtherCalls = Callable[[Request, Sequence[CallRecord]], Sequence[Call]]


def further_here(request: Request, records: Sequence[CallRecord]) -> Sequence[Call]:
    """Return the calls with which a trial in one process goes on."""
    return program.further(request, records, time.monotonic())


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is run in this process: a model, its steps, and what watches them.

    Attributes:
        device: Where it runs.
        model: The model that the steps get.
        steps: The steps by name.
        tracker: Finds what the steps can reach, and puts it back before each trial.
        watch: Sees which optimizers step.
        interrupts: Delivers signals and time limits into the step.
        snapshot: The state from before the probe. Without one, weights that earlier trials have trained cannot be restored.
        axis: What the steps get beside the batch size, and which savings are on around them.
        ends_with_trial: Whether the process ends after one trial, so that nothing is cleaned up, nor checked for leaks.
        ranks: How many processes run each trial. All make the same calls, since a rank that makes one more waits for the others for
            ever; and a process ends with a failure.
        further: Returns the calls with which a trial goes on; of several ranks, all get the same.
    """

    device: Device
    model: torch.nn.Module
    steps: Mapping[str, Step]
    tracker: Tracker
    watch: OptimizerWatch
    interrupts: Interrupts
    snapshot: Snapshot | None = None
    axis: Axis = NO_AXIS
    ends_with_trial: bool = False
    ranks: int = 1
    further: FurtherCalls = further_here

    @cached_property
    def savings(self) -> Savings:
        """Those that are on during each call."""
        return Savings(self.axis.savings, self.device)


class TrialCalls:
    """Makes the calls of one trial, and keeps a record of each.

    As a context manager, it notices where Python's collector frees device memory, or autograd's
    thread does: such a call is not like others, because the next may do so later.

    Attributes:
        records: Of the calls that were completed.
        call: The call that is running, or ran last.
        ended_early: The bug of an extra call that ended the trial.
        in_steps_s: Time inside the step.
        breakdown: What held the memory in the recorded calls; of several steps, of the one with the highest peak.
        watch: Knows whether the last call ran out of memory, though the step may have caught that.
        held_bytes: How much each variable of a loop held when the trial had passed.
        unseen: Why variables of the steps could not be kept.
    """

    def __init__(
        self,
        work: Workload,
        request: Request,
        stepping: Stepping,
        counted: Callable[[], list[object] | None],
    ) -> None:
        self._work, self._device, self._tracker = work, work.device, work.tracker
        self._request, self._stepping, self._counted = request, stepping, counted
        self._settles = request.settles is not None
        self._before = self._device.counters()
        self._values: object = None  # what the user's code counted after the last call
        self._is_hidden = False  # whether it may count with what cannot be seen
        self._last_counted: list[object] | None = None  # what it counted with at the last check
        self._changes = 0  # how often that had changed
        self.records: list[CallRecord] = []
        self.call = request.calls[0]
        self.ended_early: str | None = None
        self.in_steps_s = 0.0
        self.breakdown: Breakdown | None = None
        self.watch, self._inputs = OutOfMemoryWatch(), InputWatch()
        self._loops = {name: LoopVariables(step) for name, step in work.steps.items()}
        self._stack, self._frees = ExitStack(), list[str]()  # who freed memory in the last call
        self.held_bytes, self.unseen = dict[str, int](), set[str]()

    def __enter__(self) -> TrialCalls:
        if self._settles:
            self._frees = self._stack.enter_context(watch_frees(self._device.live_bytes))
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None and self._request.phase is Phase.CONFIRM:
            self._measure_held()
        self.unseen = {loop.unseen for loop in self._loops.values()} - {""}
        self._loops.clear()
        self._stack.close()

    def _measure_held(self) -> None:
        """Drop what the loops of the steps keep, one by one, and measure each."""
        for step, loop in self._loops.items():
            for name in loop.names():
                before_bytes = self._device.live_bytes()
                loop.drop(name)
                label = name if len(self._loops) == 1 else f"{step}: {name}"
                self.held_bytes[label] = before_bytes - self._device.live_bytes()

    def make(self) -> None:
        """Make the requested calls, and then the calls that `further` adds from what these have shown."""
        calls: Sequence[Call] = self._request.calls
        while calls:
            for call in calls:
                if not self.records or call.step != self.call.step:
                    self._start_turn(call)
                self.call = call
                seconds = self._run(call)
                self._keep(call, seconds, self._stepping.end_call())
            self._check_counters()
            calls = self._work.further(self._request, self.records)
        self._stepping.end_turn()

    def _keep(self, call: Call, seconds: float, stepped: int | None) -> None:
        """Keep the record of a call."""
        before, now = self._before, self._device.counters()
        self._before = now
        record = CallRecord(
            step=call.step,
            served_bytes=now.served_bytes - before.served_bytes,
            blocks=now.blocks - before.blocks,
            live_bytes=now.live_bytes,
            peak_bytes=now.peak_bytes,
            examples=self._inputs.examples,
            values=self._inputs.values,
            seconds=seconds,
            stepped=stepped,
            mark=self._mark() if self._settles else None,
            counts=self._counts(),
        )
        self.records.append(record)

    def _counts(self) -> bool:
        """Return whether what the user's code holds has changed, on a simulated device."""
        if not self._device.is_simulated:
            return False
        before, self._values = self._values, self._tracker.plain_values()
        return before is not None and self._values != before

    def _start_turn(self, call: Call) -> None:
        if self.records:
            self._stepping.end_turn()
        self._tracker.restore_modes()
        learns = self._request.learns is not None
        self._stepping.start_turn(
            call.step, self._work.steps[call.step], self._request.batch_size, learns=learns
        )

    def _run(self, call: Call) -> float:
        """Run the step once, and return how long it took."""
        work, step, loop = self._work, self._work.steps[call.step], self._loops[call.step]
        around: AbstractContextManager[None] = nullcontext()
        inputs: AbstractContextManager[None] = nullcontext()
        if self._request.watches_inputs:
            inputs = self._inputs.watching(work.model)
        if call.accumulates:
            around = accumulating(self._tracker.optimizers, work.model)
        elif call.is_recorded:
            around = self._recording(call.step)
        delivered = work.interrupts.delivered_until(
            self._request.deadline_s, polled=self._device.is_simulated
        )
        self._stepping.start_call()
        started_s = time.perf_counter()
        try:
            with (
                around,
                self.watch.watching(),
                self._device.session(),
                delivered,
                work.savings.on(work.model),
                inputs,
            ):
                size, arguments = work.axis.arguments_of(call)
                with loop.keeping():
                    loop.returned = step.function(work.model, size, **arguments)
                self._device.synchronize()
                # The step may have made one.
                check_process_group(max(work.ranks, self._device.world_size))
        finally:
            seconds = time.perf_counter() - started_s
            self.in_steps_s += seconds
        if work.snapshot is not None:
            work.snapshot.release_dead()
        return seconds

    # --- whether calls repeat ---

    def _mark(self) -> int | None:
        """Return a number for what the last call did to the device and where it left what stays there; None if that cannot be seen."""
        varies = [*self._frees]
        self._frees.clear()
        if self._is_hidden:
            return None
        fingerprint = self._device.fingerprint()
        if fingerprint is None or varies:
            return None
        places = [
            place for tensor in self._tracker.resident_tensors() for place in addresses_of(tensor)
        ]
        return hash((fingerprint, *places))

    def _check_counters(self) -> None:
        """Note what the user's code counts with, if the device's calls seem to repeat: that takes up to 0.2 s."""
        settles = self._request.settles
        if settles is None or not look.calls_since(look.marks_of(self.records), settles.period):
            return
        counted = self._counted()
        if counted is None:
            self._is_hidden = True
            return
        if counted != self._last_counted:
            self._changes += 1
        self._last_counted = counted
        self.records[-1] = replace(self.records[-1], counted=self._changes)

    # --- the breakdown ---

    @contextmanager
    def _recording(self, name: str) -> Iterator[None]:
        """Record the allocations of a call, if the device can."""
        history = self._device.history()
        if history is None:
            yield
            return
        recorder = Recorder(self._work.model, self._tracker.optimizers)
        with history as recorded, recorder.recording(recorded):
            yield
        usage = self._device.usage()
        breakdown = recorder.breakdown(
            self._request.batch_size,
            name if len(self._work.steps) > 1 else None,
            peak_allocated_bytes=usage.peak_allocated_bytes or 0,
            peak_reserved_bytes=usage.peak_reserved_bytes or 0,
        )
        if self.breakdown is None or breakdown.live_bytes > self.breakdown.live_bytes:
            self.breakdown = breakdown

    # --- the record of the trial ---

    def trial(self, verdict: Verdict, failure: Failure | None, usage: Usage) -> Trial:
        """Return the record of the trial; of several steps it names the one that failed, or had the highest peak."""
        request, records, settles = self._request, self.records, self._request.settles
        error, where, step_s, step_name, settled_after = None, None, None, None, None
        if failure is not None:
            error, where = failure.text, failure.where
        elif verdict is Verdict.OOM:
            error = OVER_CAP
        if failure is None and not self._device.is_simulated:
            step_s = look.later_step_s(records)
        if len(self._work.steps) > 1:
            step_name = look.limiting_step(records) if verdict is Verdict.FITS else self.call.step
        has_ended = verdict is Verdict.FITS and self.ended_early is None
        if has_ended and settles is not None and len(records) < settles.most_calls:
            settled_after = len(records)
        is_timed = self._work.steps[self.call.step].is_timed
        return Trial.of(
            request,
            verdict,
            steps=len(records),
            peak_allocated_bytes=usage.peak_allocated_bytes,
            peak_reserved_bytes=usage.peak_reserved_bytes,
            peak_upper_bytes=usage.peak_upper_bytes,
            step_s=step_s,
            samples_per_s=request.batch_size / step_s if step_s and is_timed else None,
            alloc_retries=usage.alloc_retries,
            pinned_bytes=usage.pinned_bytes,
            host_bytes=usage.host_bytes,
            settled_after=settled_after,
            error=error,
            where=where,
            step_name=step_name,
        )


class LocalRunner:
    """Runs trials of one model and its steps in this process; see `oomprobe.records.trials.Runner`."""

    def __init__(self, work: Workload) -> None:
        self._work, self._device = work, work.device
        self._tracker, self._snapshot = work.tracker, work.snapshot
        self.facts = RunnerInfo(
            device=describe(work.device),
            step_names=tuple(work.steps),
            threads=torch.get_num_threads(),
            starts_anew=any(step.starts_anew for step in work.steps.values()),
            world_size=work.device.world_size,
            model=type(work.model).__name__,
            max_batch=min(known(step.max_batch for step in work.steps.values()), default=None),
            builds=work.snapshot is None and not work.ends_with_trial,
        )
        self._stepping = Stepping(work.watch, work.tracker, work.device)
        self._number = 0  # of the trial that is running, among those of this process
        self._is_cold = False  # whether nothing has run since the last clean-up
        self._in_steps_s = 0.0
        # What the default random number generators were; a process that ends with its trial needs none.
        self._generators = (
            [] if work.ends_with_trial else generator_states(work.device.torch_device.type)
        )
        self.compiled = Compiled()
        self._shapes = self._shapes_now()
        self._begin_row(0)

    def _begin_row(self, row: int) -> None:
        """Forget what trials with another value of the axis have shown of memory."""
        self._row = row
        self._device.begin_probe(self._work.interrupts.poll)
        self._baseline = Baseline(self._device, clean=self._start_cold)
        self._notes = Notes()

    # --- a trial ---

    def run(self, request: Request) -> Outcome:
        """Run one trial, and return the memory to its baseline."""
        if request.row != self._row:
            self._begin_row(request.row)
        take_told()  # what was told outside of a step
        self._number, self._in_steps_s = self._number + 1, 0.0
        self._stepping.learn(request.learned)
        before_bytes = self._device.outside_bytes()
        try:
            outcome = self._run_cold(request)
        except NotTrainedError:
            if self._snapshot is None:
                raise  # the caller tries again in a new process, whose weights are fresh
            # Earlier trials had trained the weights until the loss scaler saw only infinities.
            self._snapshot.restore_weights()
            outcome = self._run_cold(request)
        except StepFailedError as error:
            outcome = self._with_values_left(request, error)
        outcome = replace(
            outcome,
            in_steps_s=self._in_steps_s,
            recomputed=self._work.savings.recomputed,
            typed=self._work.savings.typed,
            blocks=self._work.savings.blocks,
            notes=self._notes_after(outcome.trial),
            learned=self._stepping.learned(),
            is_spent=self._snapshot is None and self._tracker.has_replaced_parameters,
        )
        trial = outcome.trial
        # What the device leaves out may show only then.
        self.facts = replace(self.facts, device=describe(self._device))
        self._tracker.end_trial(passed=trial.passed)
        if trial.verdict is Verdict.POISONED or self._work.ends_with_trial:
            return outcome
        outcome = replace(outcome, outside_before_bytes=before_bytes)
        if self._work.ranks > 1 and not trial.passed:
            return outcome
        return self._settled(request, outcome)

    def _with_values_left(self, request: Request, error: StepFailedError) -> Outcome:
        """Run a trial that failed with a bug once more, with the values that the last trial left; raise the error if that fails too.

        A counter that is put back beside an iterator that cannot be may make a running loop fail.
        """
        if self._work.ranks > 1 or not self._tracker.leave():
            raise error
        try:
            outcome = self._run_cold(request)
        except StepFailedError:
            raise error from error.__cause__
        cause = error.__cause__ or error
        text = COUNTERS_LEFT.format(size=request.batch_size, error=failure_of(cause).text)
        self._notes.add(remark(text, request.batch_size))
        return outcome

    def _run_cold(self, request: Request) -> Outcome:
        """Start cold, set the cap, make the calls, and judge how they ended."""
        # A fresh trial drops code compiled for its own size too: its captured graphs hold memory.
        if (
            self.compiled.start_size((request.row, request.batch_size), anew=request.fresh)
            or not self._is_cold
        ):
            self._start_cold(keeps_cache=request.as_built and self._number == 1)
        self._is_cold = False
        self._device.start_trial()
        calls = TrialCalls(self._work, request, self._stepping, self._counted)
        verdict, failure, usage = Verdict.FITS, None, Usage()
        try:
            with self._device.cap(request.cap_bytes), calls:
                calls.make()
        except TimeUp:
            verdict = Verdict.TIMED_OUT
        except (SimulationError, NotRunError, NotTrainedError, InvalidArgumentError):
            raise
        except Exception as error:
            verdict, failure, usage = self._judge(request, calls, error)
        except BaseException as interruption:
            clear_frames(interruption)
            raise
        finally:
            self._in_steps_s += calls.in_steps_s
        # The exception is gone by now, and with it the frames that held the failed step's tensors.
        if failure is None:
            usage = self._usage()
            if verdict is Verdict.FITS and _is_over_cap(usage, request.cap_bytes):
                verdict = Verdict.OOM
        else:
            verdict = self._verdict_after(verdict)
        self._note_held(calls, usage)
        outcome = Outcome(
            trial=calls.trial(verdict, failure, usage),
            records=tuple(calls.records),
            starts_alike=self._tracker.is_exact,
            ended_early=calls.ended_early,
            breakdown=calls.breakdown,
        )
        if failure is None and request.watches_growth and not self._work.ends_with_trial:
            return self._with_growth(outcome)
        return outcome

    def _note_held(self, calls: TrialCalls, usage: Usage) -> None:
        """Tell what the loops of the steps kept between two calls."""
        least_bytes = HELD_FRACTION * (usage.peak_allocated_bytes or math.inf)
        shares = []
        for name, held_bytes in calls.held_bytes.items():
            if held_bytes >= least_bytes:
                shares.append(f"{name} ({format_bytes(held_bytes)})")
        if shares:
            text = LIVES_ON.format(shares=", ".join(shares))
            self._notes.add(Note(text=text, kind=NoteKind.HELD))
        self._notes.extend(map(remark, calls.unseen))

    # --- cold ---

    def _start_cold(self, *, keeps_cache: bool = False) -> None:
        """Drop what earlier calls left, so that the next call starts as training does: with only the model in memory.

        What the user's code keeps and counts with is put back too, so that each trial starts at the same call.

        Runs after each trial, so that what a trial leaks is seen (`Baseline.settle`), and before the first.
        """
        torch.clear_autocast_cache()  # of casts of the weights, where autocast is entered once around everything
        self._work.savings.start_trial()

        def let_go() -> None:
            gc.collect()
            if not keeps_cache:
                self._device.release()

        self._tracker.start_cold(let_go)
        for put, state in self._generators:
            with suppress(Exception):  # a captured graph may have taken the generator over
                put(state)
        self._is_cold = True

    def _settled(self, request: Request, outcome: Outcome) -> Outcome:
        """Clean up after a trial, and add what it has left and what memory is available."""
        leaked_bytes = self._baseline.settle(keeps=not self._tracker.is_exact)
        trial = replace(outcome.trial, leaked_bytes=leaked_bytes)
        emptying = [
            cache.emptied_by
            for cache in self._tracker.opaque
            if cache.emptied_by and cache.has_changed
        ]
        measured, outside_bytes = None, self._device.outside_bytes()
        if trial.passed and not self._baseline.known:
            measured = self.measure()
            outside_bytes = measured.outside_bytes
            self._baseline.take(measured.available_bytes)
        is_spent, lives_on = outcome.is_spent, not self.compiled.is_used  # whose graphs are dropped
        if lives_on and self._snapshot is None:
            # Where a pool keeps memory, the next trial gets a new process, and a new pool.
            is_spent |= self._baseline.pooled_bytes() > TOLERATED_BYTES
            lives_on = False
        return replace(
            outcome,
            trial=trial,
            is_spent=is_spent,
            measured=measured,
            outside_after_bytes=outside_bytes,
            refusal=self._baseline.refusal(trial, emptying, lives_on=lives_on),
        )

    # --- what it showed ---

    def _usage(self) -> Usage:
        """Return the memory in use; nothing in a poisoned process, where every call fails."""
        with suppress(Exception):
            return self._device.usage()
        return Usage()

    def _counted(self) -> list[object] | None:
        """Return what the user's code counts with: numbers, texts, lengths, small tensors, random states.

        None if it may hide a count, as iterators do. Steps of optimizers do not count.

        Compiled code does: a late call may compile it again.
        """
        return None if self.compiled.is_used else self._tracker.counted()

    def _judge(
        self, request: Request, calls: TrialCalls, error: Exception
    ) -> tuple[Verdict, Failure | None, Usage]:
        """Return the verdict on a call that raised, its failure, and the memory in use then.

        Raise StepFailedError for a bug of the step, unless it came in an extra call: then the trial has passed.
        """
        usage = self._usage()
        # What the failed step holds, before the error's own code makes a text of it.
        clear_frames(error)
        failure = failure_of(error)
        evidence = Evidence(
            # On the host, an ambiguous text at the first size is as likely to be about memory as at a later one.
            smaller_size_passed=request.smaller_passed or self._device.on_host,
            memory_pressure=usage.under_pressure,
            on_host=self._device.on_host,
            integrated=self.facts.device.integrated,
        )
        verdict = classify(failure.facts, evidence)
        if verdict is Verdict.BUG and calls.watch.error:
            verdict, failure = Verdict.OOM, replace(failure, text=calls.watch.error)
        if verdict is not Verdict.BUG:
            # The health is checked when the exception no longer holds the failed step's tensors.
            return verdict, failure, usage
        if not self._device.healthy():
            return Verdict.POISONED, failure, usage
        # oomprobe's own errors are those of another probe, inside the step.
        if is_own_fault(error) and not isinstance(error, OomProbeError):
            raise error
        if calls.call.is_extra:
            calls.ended_early = failure.text
            return Verdict.FITS, None, usage
        hide_frames(error)
        raise step_failed(
            error,
            batch_size=calls.call.batch_size,
            largest_passed=request.largest_passed,
            caller=self._work.steps[calls.call.step].caller,
            row=self._work.axis.label(calls.call.row),
            trial=self._number,
            simulated=self._device.is_simulated,
        ) from error

    def _verdict_after(self, verdict: Verdict) -> Verdict:
        """Return the verdict on a failure, once its tensors are gone: poisoned if the device no longer works."""
        if verdict is Verdict.POISONED or not self._device.healthy():
            return Verdict.POISONED
        if not self._device.on_host:
            # The autograd thread lets go of a failed backward's tensors before its next task.
            # Otherwise memory may be released while it still holds one, and the next trial starts
            # in a segment that was not given back.
            place = self._device.torch_device
            with suppress(Exception), torch.inference_mode(False), outside_modes():
                # There may be no memory for it.
                torch.zeros((), device=place, requires_grad=True).backward()  # type: ignore[no-untyped-call]
        return verdict

    def _with_growth(self, outcome: Outcome) -> Outcome:
        """Add the bytes that each further call leaves allocated, not counting uncollected garbage."""
        grown_bytes = look.growth_of(outcome.records)
        if not grown_bytes:
            return outcome
        before_bytes = self._device.live_bytes()
        gc.collect()
        garbage_bytes = before_bytes - self._device.live_bytes()
        kept_bytes = max(0, grown_bytes - garbage_bytes // len(outcome.records))
        return replace(
            outcome,
            trial=replace(outcome.trial, step_leaked_bytes=kept_bytes),
            holders=tuple(largest_added(self._tracker, look.SMALLEST_GROWTH_BYTES)),
            gradients_hold_graphs=any(
                type(gradient.grad_fn).__name__ == SUM_OF_GRAPHS
                for _, gradient in gradients_among(self._tracker.parameters())
            ),
        )

    def _notes_after(self, trial: Trial) -> tuple[Note, ...]:
        self._notes.extend([*map(remark, self._device.notes), *take_told()])
        if self._device.not_compared:
            self._notes.add(Note(text=self._device.not_compared, kind=NoteKind.NOT_COMPARED))
        if self.compiled.is_used:
            self._notes.add(Note(text=COMPILED, kind=NoteKind.COMPILES))
        may_go_on = self._snapshot is not None and not self._tracker.is_exact
        if may_go_on and self._shapes_now() != self._shapes:
            self._notes.add(remark(WENT_ON))
        # Not before the confirmation: an optimizer may step only then.
        if trial.passed and trial.phase is Phase.CONFIRM:
            note = self._stepping.note(self._work.steps, trains=self._trains())
            if note is not None:
                self._notes.add(note)
        return tuple(self._notes)

    def _shapes_now(self) -> list[torch.Size]:
        return [tensor.shape for tensor in self._tracker.parameters() if can_copy(tensor)]

    def _trains(self) -> bool:
        """Return whether the model may be there to be trained: not in eval mode, not frozen, and with gradients on."""
        parameters = list(self._tracker.parameters())
        is_frozen = bool(parameters) and not any(
            parameter.requires_grad for parameter in parameters
        )
        return self._work.model.training and torch.is_grad_enabled() and not is_frozen

    # --- between trials ---

    def measure(self) -> Measured:
        """Sample the memory now. Before the first trial, what building left in the cache stays there."""
        available_bytes = self._device.available_bytes()
        if self._number:
            self._device.release()
        return Measured(available_bytes=available_bytes, outside_bytes=self._device.outside_bytes())


def _is_over_cap(usage: Usage, cap_bytes: int | None) -> bool:
    """Return whether cached blocks pushed the peak over the cap, which torch checks only when it asks the driver for memory."""
    # Without reserved memory there is no such cache.
    if cap_bytes is None or usage.peak_reserved_bytes is None:
        return False
    return (usage.peak_allocated_bytes or 0) > cap_bytes
