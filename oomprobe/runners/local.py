"""Run one batch size from a cold start and return an `Outcome` that keeps no exception, frame or tensor of the run."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

import torch

from oomprobe.devices import Device, Usage, describe, extras_of
from oomprobe.devices.leaks import Baseline
from oomprobe.devices.recorder import Recorder
from oomprobe.errors import (
    InvalidArgumentError,
    NotRunError,
    NotTrainedError,
    OomProbeError,
    SimulationError,
    StepFailedError,
    TimeUp,
    UnreliableError,
    step_failed,
)
from oomprobe.ground.frames import is_own_fault
from oomprobe.ground.units import format_bytes
from oomprobe.records.axis import NO_AXIS, Axis
from oomprobe.records.options import MAX_CALLS, MAX_WAITING_CALLS, WAITING_S, Step
from oomprobe.records.patience import PATIENCE, Patience
from oomprobe.records.trials import Measured, Outcome, Request, RunnerInfo, Verdict
from oomprobe.rules.look import SMALLEST_GROWTH_BYTES, Rows, growth_bytes
from oomprobe.runners.hooks import (
    COMPILED,
    HOOKS_GONE,
    Compiled,
    OptimizerWatch,
    Stepping,
    accumulating,
    never_stepped,
    outside_modes,
)
from oomprobe.runners.ranks_here import check_process_group
from oomprobe.runners.running import Running
from oomprobe.runners.signals import Interrupts
from oomprobe.state import Snapshot, Tracker, generator_states
from oomprobe.verdicts import Evidence, classify
from oomprobe.verdicts.failure import clear_frames, failure_of

STOPPED_STEPPING = (
    "at batch {size} the optimizer that stepped before did not step in {calls} calls, so this size was not trained: does the "
    "step skip it (a scaler that sees infinities), or catch an out-of-memory error itself? Let step_fn raise that error"
)
REPLAYS_GRAPH = (
    "at batch {size} no optimizer stepped in {calls} calls, and this process has captured a CUDA graph: a step that replays one "
    "cannot be probed, since a graph is made for one batch size and never calls the optimizer's step(). Pass the step that you "
    "capture as step_fn"
)
CYCLES = (
    "at batch {size} each step leaves {kept} in reference cycles until Python collects garbage, so training needs more than a "
    "trial of a few steps: break the cycle (an object that holds its own output), or call gc.collect() every few steps"
)
KEPT = (
    "values that the step counts with were not put back before each trial, only at the end: with them put back, batch {size} "
    "failed with {error}"
)


class LocalRunner:
    """Runs trials of one model and its steps in this process; see `oomprobe.records.trials.Runner`.

    With `ends_with_trial` the process ends after one trial, so the runner neither cleans up nor checks for leaks. Without a
    `snapshot` it cannot restore weights that earlier trials have trained. As one of several `ranks`, it makes exactly the
    calls of the request, since a rank that makes one more waits for the others for ever, and its process ends with a failure.
    """

    def __init__(
        self,
        device: Device,
        model: torch.nn.Module,
        steps: Mapping[str, Step],
        tracker: Tracker,
        watch: OptimizerWatch,
        interrupts: Interrupts,
        *,
        snapshot: Snapshot | None = None,
        ends_with_trial: bool = False,
        ranks: int = 1,
        axis: Axis = NO_AXIS,
        patience: Patience = PATIENCE,
    ) -> None:
        self._ranks, self._patience = ranks, patience
        self._axis, self._row = axis, 0
        self._device, self._extras = device, extras_of(device)
        self._card = self._extras.replay
        self.facts = RunnerInfo(
            device=describe(device),
            step_names=tuple(steps),
            threads=torch.get_num_threads(),
            starts_anew=any(step.starts_anew for step in steps.values()),
            world_size=self._extras.world_size,
            max_batch=min((step.max_batch for step in steps.values() if step.max_batch is not None), default=None),
            builds=snapshot is None and not ends_with_trial,
        )
        self._model, self._steps, self._tracker = model, steps, tracker
        self._watch, self._interrupts, self._snapshot = watch, interrupts, snapshot
        self._stepping = Stepping(watch, tracker)
        self._ends_with_trial = ends_with_trial
        self._is_cold = False  # whether nothing has run since the last clean-up
        self._number = 0  # of the trial that is running, among those of this process
        # What the default random number generators were; a process that ends with its trial needs none.
        self._generators = [] if ends_with_trial else generator_states(device.torch_device.type)
        self.compiled = Compiled()
        self._in_steps_s = 0.0  # of the trial that is running
        self._begin_row(0)

    def _begin_row(self, row: int) -> None:
        """Forget what trials with another value of the axis have shown of memory."""
        self._row = row
        self._card.begin_probe(self._interrupts.poll, replays=len(self._steps) == 1)
        self._baseline = Baseline(self._device, clean=self._start_cold)
        self._notes: dict[str, None] = {}

    # --- a trial ---

    def run(self, request: Request) -> Outcome:
        """Run one trial, or predict it if the request allows that, and return the memory to its baseline."""
        if request.row != self._row:
            self._begin_row(request.row)
        predicted = self._card.predict_trial(request)
        if predicted is not None:
            return Outcome(trial=predicted)
        self._in_steps_s, self._number = 0.0, self._number + 1
        self._stepping.learn(request.learned)
        before_bytes = self._device.outside_bytes()
        try:
            running = self._run_cold(request)
        except NotTrainedError:  # earlier trials trained the weights until the loss scaler saw only infinities
            if self._snapshot is None:
                raise  # the caller tries again in a new process, whose weights are fresh
            self._snapshot.restore_weights()
            running = self._run_cold(request)
        except StepFailedError as error:
            if self._ranks > 1:
                raise
            running = self._run_as_left(request, error)
        trial = running.trial(several=len(self._steps) > 1, timed=not self.facts.device.replays)
        calls = running.calls_made(is_exact=self._tracker.is_exact, waiting=self._stepping.waiting)
        outcome = Outcome(
            trial=trial,
            calls=calls,
            breakdown=running.breakdown,
            in_steps_s=self._in_steps_s,
            notes=self._notes_after(running),
            learned=self._stepping.learned(),
            held=running.held,
            is_spent=self._snapshot is None and self._tracker.has_replaced_parameters,
        )
        self._tracker.end_trial(passed=trial.passed)
        if trial.verdict is Verdict.POISONED or self._ends_with_trial:
            return outcome
        if self._ranks > 1 and not trial.passed:
            return replace(outcome, outside_before_bytes=before_bytes)
        trial = replace(trial, leaked_bytes=self._baseline.settle(keeps=not self._tracker.is_exact))
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
            contradicts_replay=self._card.learn(request, trial),
        )

    def _run_as_left(self, request: Request, error: StepFailedError) -> Running:
        """Run a trial that failed with a bug once more, with the values that the last trial left, or raise the error.

        A counter that is put back beside an iterator that cannot be may make a running loop fail.
        """
        if not self._tracker.leave():
            raise error
        try:
            running = self._run_cold(request)
        except StepFailedError:
            raise error from error.__cause__
        cause = error.__cause__ or error
        self._notes[KEPT.format(size=request.batch_size, error=failure_of(cause).text)] = None
        return running

    def _run_cold(self, request: Request) -> Running:
        """Start cold, make the calls under the cap, and classify the end."""
        running = Running(request=request, step=next(iter(self._steps.values())))
        # A fresh trial drops code compiled for its own size too: its captured graphs hold memory.
        if self.compiled.start_size((request.row, request.batch_size), anew=request.fresh) or not self._is_cold:
            self._start_cold(keeps_cache=request.as_built and self._number == 1)
        self._device.start_trial()
        try:
            with self._device.cap(request.cap_bytes):
                for _ in self._turns(running):
                    if request.calls is not None and request.accumulation_steps == 1:
                        self._make_calls(running, request.calls)
                    else:
                        self._full_steps(running, 1, creates_state=True)
                        self._full_steps(running, request.steps if request.accumulation_steps == 1 else 0)
                        self._more_calls(running)
                    if request.breakdown:
                        self._break_down(running)
            self._card.end_trial()
        except TimeUp:
            running.verdict = Verdict.TIMED_OUT
        except (SimulationError, NotRunError, NotTrainedError, InvalidArgumentError):
            raise
        except Exception as error:
            self._judge(running, error)
        except BaseException as interruption:
            clear_frames(interruption)
            raise
        if not self._watch.is_alive:
            raise UnreliableError(HOOKS_GONE.format(size=request.batch_size))
        # The exception is gone by now, and with it the frames that held the failed step's tensors.
        if running.failure is None:
            running.usage = self._usage()
            if running.verdict is Verdict.FITS and running.is_over_cap:
                running.verdict = Verdict.OOM
            running.step_leaked_bytes = self._step_leak(running)
        elif running.verdict is not Verdict.POISONED and self._device.healthy():
            self._end_backward()
        else:
            running.verdict = Verdict.POISONED
        return running

    def _end_backward(self) -> None:
        """Make the autograd thread let go of a failed backward's tensors, as it does before its next task.

        Otherwise memory may be released while it still holds one, and the next trial starts in a segment that was not given back.
        """
        if self._device.on_host or self.facts.device.replays:
            return
        with suppress(Exception), torch.inference_mode(False), outside_modes():  # there may be no memory for it
            torch.zeros((), device=self._device.torch_device, requires_grad=True).backward()  # type: ignore[no-untyped-call]

    def _turns(self, running: Running) -> Iterator[None]:
        """Give each step its turn; over several of them twice, because training resumes after evaluation.

        Evaluation splits cached blocks, and only in the second turn does the state of every step's optimizers exist.
        """
        for name, step in [*self._steps.items()] * self._turn_count:
            running.name, running.step = name, step
            row = running.rows.setdefault(name, Rows())
            row.turn_calls = len(row.live_bytes)
            self._tracker.restore_modes()
            yield
            if self._turn_count > 1 and (peak_bytes := self._usage().peak_allocated_bytes or 0) > running.peak_bytes:
                running.peak_bytes, running.limiting_step = peak_bytes, name

    @property
    def _turn_count(self) -> int:
        return 2 if len(self._steps) > 1 else 1

    def _start_cold(self, *, keeps_cache: bool = False) -> None:
        """Drop what earlier calls left, so that the next call starts as training does: with only the model in memory.

        Runs after each trial, so that what a trial leaks is seen (`Baseline.settle`), and before the first.
        """
        self._tracker.start_cold(gc.collect if keeps_cache else self._release)
        for put, state in self._generators:
            with suppress(Exception):  # a captured graph may have taken the generator over
                put(state)
        self._is_cold = True

    def _release(self) -> None:
        gc.collect()
        self._device.release()

    # --- its calls ---

    def _make_calls(self, running: Running, calls: int) -> None:
        """Make this turn's share of the calls, each of which may be the one that needs the most memory.

        Raise NotTrainedError if an optimizer that stepped before no longer does: the size was not really trained.
        """
        request, row, stepping = running.request, running.row, self._stepping
        is_known, wanted = stepping.knows(running.name), stepping.wanted(running.name)
        if not is_known and self._ranks == 1:
            wanted = None
        share, first_turn = -(-calls // self._turn_count), row.first_calls is None
        allocations, seen, last = self._extras.allocations(), 0, 0  # `last`: the call after which another had stepped
        stepping.start_step(may_wait=not is_known)
        for number in range(share):
            # A call may be repeated only if it would do all that a full step does.
            is_whole = len(self._steps) == 1 and stepping.did_all(running.name)
            self._call(running, may_repeat=is_whole and request.repeats)
            if stepping.count > seen:
                seen, last = stepping.count, number + 1
            if wanted is not None and stepping.has_stepped(wanted):
                if not is_known:
                    stepping.learn_step(running.name, wanted, number + 1)
                wanted, row.timed_from = None, len(row.durations_s)
                if first_turn:
                    row.first_calls = row.step_calls = number + 1
                    allocations = self._extras.allocations()
            made = len(row.served_bytes)
            running.past_least = request.least_calls is not None and made * self._turn_count >= request.least_calls
        stepping.end_turn(running.name)
        if wanted is not None and is_known:
            raise self._not_trained(request.batch_size, share)
        if wanted is not None and share >= running.step.max_calls and not stepping.waiting:  # no other will step
            stepping.learn_step(running.name, wanted, share)
            row.first_calls = last
        row.first_calls = row.first_calls or 0
        running.allocations += self._extras.allocations() - allocations

    def _full_steps(self, running: Running, steps: int, *, creates_state: bool = False) -> None:
        """Call the step until all its optimizers have stepped, `steps` times; learn which these are on first use.

        A step without any is called once each time; it has no full step that `creates_state`, whose allocations do not count.
        Raise NotTrainedError if an optimizer that stepped before no longer does: the size was not really trained.
        """
        row, stepping, allocations = running.row, self._stepping, self._extras.allocations()
        for _ in range(steps):
            is_known, wanted = stepping.knows(running.name), stepping.wanted(running.name)
            if is_known and running.calls:
                wanted = stepping.again(wanted)
            commanded = running.request.step_calls if self._ranks > 1 else 0
            if creates_state and is_known and wanted is None and not commanded:
                continue
            stepping.start_step()
            seen, calls = 0, 0  # how many optimizers have stepped, and the call after which the last of them had
            most = max(running.step.max_calls, running.request.step_calls, row.step_calls)
            most = commanded or (1 if wanted is None else most)
            number, is_done, began_s = 0, False, time.monotonic()
            while not is_done and (number < most or self._waits(running, number, began_s)):
                self._call(running, may_repeat=len(self._steps) == 1 and number == 0)
                number += 1
                if stepping.count > seen:
                    seen, calls = stepping.count, number
                if number < commanded:
                    continue
                nothing_to_step = wanted == set() and not seen and not self._has_gradients()
                is_done = nothing_to_step or (wanted is not None and stepping.has_stepped(wanted))
            if wanted is not None and is_known and not is_done:
                raise self._not_trained(running.request.batch_size, most)
            if not is_known:
                if self._ranks == 1 and number >= MAX_CALLS and (kind := stepping.waiting):
                    raise NotRunError(never_stepped(kind, number))
                stepping.learn_step(
                    running.name, wanted, number
                )  # only here: if a call raises, the next trial learns it
            row.step_calls = calls or 1
            if row.first_calls is None:
                row.first_calls, row.waited_calls = calls, len(row.served_bytes) - calls
                row.timed_from = len(row.durations_s)
        if not creates_state:
            running.allocations += self._extras.allocations() - allocations

    def _waits(self, running: Running, number: int, began_s: float) -> bool:
        """Return whether to go on calling a step of the user's, because an optimizer within reach has gradients to step."""
        may_wait = self._ranks == 1 and running.step.max_calls == MAX_CALLS and number < MAX_WAITING_CALLS
        return may_wait and time.monotonic() < began_s + WAITING_S and bool(self._stepping.waiting)

    def _not_trained(self, batch_size: int, calls: int) -> NotTrainedError:
        reason = REPLAYS_GRAPH if self._extras.has_graphs() else STOPPED_STEPPING
        return NotTrainedError(reason.format(size=batch_size, calls=calls))

    def _has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self._tracker.parameters())

    def _more_calls(self, running: Running) -> None:
        """Make the micro-batches of an accumulated step; or, to confirm a first size, further calls while there is time."""
        request, row, allocations = running.request, running.row, self._extras.allocations()
        if request.accumulation_steps > 1:
            with accumulating(self._tracker.optimizers, self._model):
                for _ in range(request.accumulation_steps):
                    self._call(running)
            return
        running.past_least = request.more_calls > 0
        until_s = time.monotonic() + (self._patience.host_look_s if self._device.on_host else self._patience.look_s)
        while len(row.served_bytes) < request.more_calls and self._has_time(until_s, running):
            self._call(running, may_repeat=len(self._steps) == 1)
        running.allocations += self._extras.allocations() - allocations

    def _has_time(self, until_s: float, running: Running) -> bool:
        """Return whether another call fits, and ends well before the deadline."""
        longest_s, deadline_s = max(running.row.durations_s, default=0.0), running.request.deadline_s
        is_hurried = deadline_s is not None and time.monotonic() + 2 * longest_s > deadline_s
        return not is_hurried and time.monotonic() + longest_s < until_s

    def _call(self, running: Running, *, may_repeat: bool = False) -> None:
        """Call the step once. If `may_repeat`, a device that replays may repeat the last call instead."""
        request, row, before_bytes = running.request, running.row, self._extras.served_bytes()
        may_repeat = may_repeat and running.calls > 0 and not request.breakdown
        if may_repeat and self._card.repeat(confirms=request.confirms and running.calls <= request.steps):
            self._stepping.repeat_call()
        else:
            self._is_cold = False
            before = self._stepping.start_call()
            started_s = time.perf_counter()
            delivered = self._interrupts.delivered_until(request.deadline_s, polled=self.facts.device.replays)
            try:
                with self._device.session(), delivered:
                    running.step.run(self._model, running.next_size, **self._axis.arguments(running.next_row))
                    self._device.synchronize()
                    check_process_group(max(self._ranks, self._extras.world_size))  # the step may have made one
            finally:
                duration_s = time.perf_counter() - started_s
                self._in_steps_s += duration_s
            row.durations_s.append(duration_s)
            self._stepping.end_call(before)
            self._after_call(running)
        running.calls += 1
        row.served_bytes.append(self._extras.served_bytes() - before_bytes)
        if request.watches_leaks and not self._ends_with_trial:
            row.peak_bytes.append(self._usage().peak_allocated_bytes or 0)
            row.live_bytes.append(self._device.live_bytes())

    def _after_call(self, running: Running) -> None:
        if self._snapshot is not None:
            self._snapshot.release_dead()
        if self.facts.device.replays and not running.counts:
            values = self._tracker.plain_values()
            running.counts = running.values is not None and values != running.values
            running.values = values

    def _break_down(self, running: Running) -> None:
        """Run one more full step and record its allocations; of several steps, keep the one with the highest peak."""
        history = self._extras.history()
        if history is None:
            return
        recorder = Recorder(self._model, self._tracker.optimizers)
        with history as recorded, recorder.recording(recorded):
            self._full_steps(replace(running, rows={running.name: Rows()}), 1)
        usage = self._usage()
        found = recorder.breakdown(
            running.request.batch_size,
            running.name if len(self._steps) > 1 else None,
            peak_allocated_bytes=usage.peak_allocated_bytes or 0,
            peak_reserved_bytes=usage.peak_reserved_bytes or 0,
        )
        if running.breakdown is None or found.live_bytes > running.breakdown.live_bytes:
            running.breakdown = found

    # --- what it showed ---

    def _judge(self, running: Running, error: Exception) -> None:
        """Classify the failure of a call. Raise StepFailedError for a bug, unless the trial has passed by then."""
        request = running.request
        running.usage = self._usage()
        clear_frames(error)  # what the failed step holds, before the error's own code makes a text of it
        running.failure = failure_of(error)
        evidence = Evidence(
            # On the host, an ambiguous text at the first size is as likely to be about memory as at a later one.
            smaller_size_passed=request.smaller_passed or self._device.on_host,
            memory_pressure=running.usage.under_pressure,
            on_host=self._device.on_host,
            integrated=self.facts.device.integrated,
        )
        running.verdict = classify(running.failure.facts, evidence)
        if running.verdict is not Verdict.BUG:
            return  # the health of the device is checked later, when the exception no longer holds the failed step's tensors
        if not self._device.healthy():
            running.verdict = Verdict.POISONED
            return
        if is_own_fault(error) and not isinstance(error, OomProbeError):  # that is of another probe, inside the step
            raise error
        if not running.past_least:
            size, last, caller = running.next_size, request.largest_passed, running.step.caller
            row = self._axis.label(running.next_row)
            raise step_failed(
                error, batch_size=size, largest_passed=last, caller=caller, row=row, trial=self._number,
                simulated=self.facts.device.replays,
            ) from error  # fmt: skip
        running.ended_early, running.failure, running.verdict = running.failure.text, None, Verdict.FITS

    def _usage(self) -> Usage:
        try:
            return self._device.usage()
        except Exception:  # every call fails in a poisoned process
            return Usage()

    def _step_leak(self, running: Running) -> int:
        """Return the bytes that each further call leaves allocated, not counting uncollected garbage."""
        steady = [row.steady_live_bytes for row in running.rows.values() if row.live_bytes]
        leaked_bytes = sum(growth_bytes(live) for live in steady)
        if not leaked_bytes:
            return 0
        before_bytes = self._device.live_bytes()
        gc.collect()
        garbage_bytes = before_bytes - self._device.live_bytes()
        running.held = tuple(self._tracker.largest_added(SMALLEST_GROWTH_BYTES))
        cycle_bytes = min(leaked_bytes, garbage_bytes // max(map(len, steady)))
        if cycle_bytes >= SMALLEST_GROWTH_BYTES and running.request.confirms:
            self._notes[CYCLES.format(kept=format_bytes(cycle_bytes), size=running.request.batch_size)] = None
        return leaked_bytes - cycle_bytes

    def _notes_after(self, running: Running) -> tuple[str, ...]:
        self._notes |= dict.fromkeys(getattr(self._device, "notes", ()))
        if self.compiled.is_used:
            self._notes[COMPILED] = None
        # Not before the confirmation: an optimizer may step only then.
        confirmed = running.verdict is Verdict.FITS and running.request.confirms
        if confirmed and (note := self._stepping.note(self._steps, trains=self._trains())):
            self._notes[note] = None
        return tuple(self._notes)

    def _trains(self) -> bool:
        """Return whether the model may be there to be trained: not in eval mode, not frozen, and with gradients on."""
        parameters = list(self._tracker.parameters())
        is_frozen = bool(parameters) and not any(one.requires_grad for one in parameters)
        return self._model.training and torch.is_grad_enabled() and not is_frozen

    # --- between trials ---

    def measure(self) -> Measured:
        """Sample the memory now. Before the first trial, what building left in the cache stays there."""
        available_bytes = self._device.available_bytes()
        if self._number:
            self._device.release()
        return Measured(available_bytes=available_bytes, outside_bytes=self._device.outside_bytes())
