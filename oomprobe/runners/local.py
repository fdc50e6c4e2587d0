"""Run one batch size from a cold start and return an `Outcome` that keeps no exception, frame or tensor of the run."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace

import torch

from oomprobe.devices import Device, Usage, describe, extras_of, replays
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
from oomprobe.ground.frames import hide_frames, is_own_fault
from oomprobe.ground.units import format_bytes
from oomprobe.records.axis import NO_AXIS, Axis
from oomprobe.records.options import MAX_CALLS, MAX_WAITING_CALLS, WAITING_S, Step
from oomprobe.records.patience import PATIENCE, Patience
from oomprobe.records.trials import Measured, Outcome, Request, RunnerInfo, Verdict
from oomprobe.rules.look import SMALLEST_GROWTH_BYTES, Series, growth_bytes
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
from oomprobe.runners.repeats import Repeats
from oomprobe.runners.running import Running
from oomprobe.runners.signals import Interrupts
from oomprobe.state import Snapshot, Tracker, addresses_of, can_copy, generator_states, largest_added
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
WENT_ON = (
    "not cold: the step replaces parameters by others of another shape, beside an iterator whose position cannot be put back, so each "
    "trial went on from the last one, and the calls that replace them were not run at this size. Probe it as a target (oomprobe run "
    "train.py:build), whose trials run in fresh processes"
)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is run in this process: a model, its steps, and what watches them.

    Attributes:
        device: Where it runs.
        model: The model that the steps get.
        steps: The steps by name; each trial runs all of them.
        tracker: Finds what the steps can reach, and puts it back before each trial.
        watch: Sees which optimizers step.
        interrupts: Delivers signals and time limits into the step.
        snapshot: The state from before the probe. Without one, weights that earlier trials have trained cannot be restored.
        axis: Of a table.
        ends_with_trial: Whether the process ends after one trial, so that nothing is cleaned up, nor checked for leaks.
        ranks: How many processes run each trial. All make the same calls, since a rank that makes one more waits for the others for
            ever; and a process ends with a failure.
        agree: Where the number of calls is not fixed before, takes whether this rank has made enough; returns whether all have.
        patience: How many calls confirm a first size, and how long they may take.
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
    agree: Callable[[bool], bool] = bool
    patience: Patience = PATIENCE


class StepCalls:
    """Makes the calls of a trial: in each turn as many as requested, or until every optimizer has stepped.

    Attributes:
        in_steps_s: Time inside the step since the trial began.
        is_cold: Whether nothing has run since the last clean-up.
        stepping: Knows which optimizers step.
    """

    def __init__(self, work: Workload) -> None:
        self._work, self._device, self._tracker = work, work.device, work.tracker
        self._extras = extras_of(work.device)
        self._card, self._replays = self._extras.replay, replays(work.device)
        self._look_s = work.patience.host_look_s if work.device.on_host else work.patience.look_s
        self._turn_count = 2 if len(work.steps) > 1 else 1
        self.stepping = Stepping(work.watch, work.tracker)
        self.in_steps_s, self.is_cold = 0.0, False

    def turns(self, running: Running) -> Iterator[int | None]:
        """Give each step its turn, and yield how many calls to make; over several of them twice, because training resumes after evaluation.

        Evaluation splits cached blocks, and only in the second turn does the state of every step's optimizers exist.
        """
        request = running.request
        for name, step in [*self._work.steps.items()] * self._turn_count:
            running.name, running.step = name, step
            series = running.every.setdefault(name, Series())
            series.turn_calls = len(series.live_bytes)
            self._tracker.restore_modes()
            yield None if request.calls is None else -(-request.calls // self._turn_count)
            if request.accumulation_steps > 1:
                with accumulating(self._tracker.optimizers, self._work.model):
                    for _ in range(request.accumulation_steps):
                        self._call(running)
            if request.breakdown:
                self._break_down(running)
            if self._turn_count > 1 and (peak_bytes := self.usage().peak_allocated_bytes or 0) > running.peak_bytes:
                running.peak_bytes, running.limiting_step = peak_bytes, name

    def make_calls(self, running: Running, calls: int | None) -> None:
        """Make this many calls; None: make a full step that creates optimizer state, then `request.steps` more, on every rank.

        A full step ends when every optimizer of the step has stepped. The first one of a trial creates optimizer state. Raise NotTrainedError if
        an optimizer that stepped before no longer does: the size was not really trained.
        """
        request, series, stepping = running.request, running.series, self.stepping
        wanted = stepping.start_step(running.name, is_further=running.calls > 0, may_wait=calls is None)
        due = request.steps + (series.first_calls is None or wanted is not None)
        goes_on = request.confirms and request.accumulation_steps == 1 and not running.step.starts_anew
        allocations, made, full, until_s = self._extras.allocations(), 0, 0, 0.0
        enough = calls is None and not due
        while not enough:
            self._call(
                running, may_repeat=request.repeats and len(self._work.steps) == 1 and stepping.did_all(running.name)
            )
            made += 1
            if (calls is not None or full < due) and self._ends_step(running, wanted, is_fixed=calls is not None):
                full += 1
                if series.first_calls is None:
                    series.end_first_step(stepping.last)
                    allocations = self._extras.allocations()
                series.step_calls = stepping.last or 1
                wanted = stepping.start_step(running.name, is_further=True, may_wait=calls is None)
                until_s = time.monotonic() + self._look_s
            if calls is not None:
                enough, least = made == calls, request.least_calls
                running.past_least = least is not None and len(series.served_bytes) * self._turn_count >= least
                if not enough and request.settled_calls is not None:
                    enough = self._has_settled(running)
            else:
                running.past_least = goes_on and full >= due
                mine = full >= due and not (goes_on and self._has_time(until_s, running))
                enough = self._work.agree(mine)
        if calls is not None and wanted is not None and not full and stepping.knows(running.name):
            raise self._not_trained(request.batch_size, made)
        series.first_calls = series.first_calls or 0
        running.allocations += self._extras.allocations() - allocations

    def _has_settled(self, running: Running) -> bool:
        """Take note of a call, and return whether further ones would repeat the last ones, on every rank."""
        if running.series.first_calls is not None:
            running.repeats.end_call()
        request = running.request
        is_due = running.calls >= (request.settled_calls or 0)
        if not is_due or not self._work.agree(running.repeats.have_settled):
            return False
        running.settled_after = running.calls
        return True

    def _ends_step(self, running: Running, wanted: set[int] | None, *, is_fixed: bool) -> bool:
        """Return whether the last call ended a full step, and learn on first use which optimizers that takes.

        If the number of calls `is_fixed`, more of them follow in any case. Otherwise a step without an optimizer ends with each call, and
        one that is waited for in vain ends the step too, or raises.
        """
        stepping, name = self.stepping, running.name
        is_known, calls = stepping.knows(name), stepping.calls
        if wanted is not None and stepping.has_stepped(wanted):
            is_done = True
        elif is_fixed:
            return False
        else:
            most = 1 if wanted is None else max(running.step.max_calls, running.series.step_calls)
            nothing_to_step = wanted == set() and not stepping.last and not self._has_gradients()
            is_done = nothing_to_step or not (calls < most or self._waits(running))
            if is_done and is_known and wanted is not None:
                raise self._not_trained(running.request.batch_size, calls)
            if is_done and not is_known and calls >= MAX_CALLS and (kind := stepping.waiting):
                raise NotRunError(never_stepped(kind, calls))
        if is_done and not is_known:
            stepping.learn_step(name, wanted)  # only here: if a call raises, the next trial learns it
        return is_done

    def _waits(self, running: Running) -> bool:
        """Return whether to go on calling a step of the user's, because an optimizer within reach has gradients to step."""
        may_wait = running.step.max_calls == MAX_CALLS and self.stepping.calls < MAX_WAITING_CALLS
        return may_wait and self.stepping.waited_s < WAITING_S and bool(self.stepping.waiting)

    def _not_trained(self, batch_size: int, calls: int) -> NotTrainedError:
        reason = REPLAYS_GRAPH if self._extras.has_graphs() else STOPPED_STEPPING
        return NotTrainedError(reason.format(size=batch_size, calls=calls))

    def _has_gradients(self) -> bool:
        return any(one.is_leaf and one.grad is not None for one in self._tracker.parameters())

    def _has_time(self, until_s: float, running: Running) -> bool:
        """Return whether another call of a confirmation fits, and ends well before the deadline."""
        series, deadline_s = running.series, running.request.deadline_s
        longest_s = max(series.durations_s, default=0.0)
        is_hurried = deadline_s is not None and time.monotonic() + 2 * longest_s > deadline_s
        return (
            len(series.served_bytes) < self._work.patience.look_calls
            and not is_hurried
            and time.monotonic() + longest_s < until_s
        )

    def _call(self, running: Running, *, may_repeat: bool = False) -> None:
        """Call the step once. If `may_repeat`, a device that replays may repeat the last call instead."""
        request, series, before_bytes = running.request, running.series, self._extras.served_bytes()
        before_blocks = self._extras.allocations() if request.watches_leaks else 0
        may_repeat = may_repeat and running.calls > 0 and not request.breakdown
        if may_repeat and self._card.repeat(confirms=request.confirms and running.calls <= request.steps):
            self.stepping.repeat_call()
        else:
            self.is_cold = False
            before = self.stepping.start_call()
            started_s = time.perf_counter()
            delivered = self._work.interrupts.delivered_until(request.deadline_s, polled=self._replays)
            try:
                with self._device.session(), delivered:
                    running.step.run(self._work.model, running.next_size, **self._work.axis.arguments(running.next_row))
                    self._device.synchronize()
                    check_process_group(max(self._work.ranks, self._extras.world_size))  # the step may have made one
            finally:
                duration_s = time.perf_counter() - started_s
                self.in_steps_s += duration_s
            series.durations_s.append(duration_s)
            self.stepping.end_call(before)
            self._after_call(running)
        running.calls += 1
        series.served_bytes.append(self._extras.served_bytes() - before_bytes)
        if request.watches_leaks and not self._work.ends_with_trial:
            series.blocks.append(self._extras.allocations() - before_blocks)
            series.peak_bytes.append(self.usage().peak_allocated_bytes or 0)
            series.live_bytes.append(self._device.live_bytes())

    def _after_call(self, running: Running) -> None:
        if self._work.snapshot is not None:
            self._work.snapshot.release_dead()
        if self._replays and not running.counts:
            values = self._tracker.plain_values()
            running.counts = running.values is not None and values != running.values
            running.values = values

    def _break_down(self, running: Running) -> None:
        """Run one more full step and record its allocations; of several steps, keep the one with the highest peak."""
        history = self._extras.history()
        if history is None:
            return
        recorder = Recorder(self._work.model, self._tracker.optimizers)
        one_step = replace(running, request=replace(running.request, steps=0), every={running.name: Series()})
        with history as recorded, recorder.recording(recorded):
            self.make_calls(one_step, None)
        usage = self.usage()
        found = recorder.breakdown(
            running.request.batch_size,
            running.name if len(self._work.steps) > 1 else None,
            peak_allocated_bytes=usage.peak_allocated_bytes or 0,
            peak_reserved_bytes=usage.peak_reserved_bytes or 0,
        )
        if running.breakdown is None or found.live_bytes > running.breakdown.live_bytes:
            running.breakdown = found

    def usage(self) -> Usage:
        """Return the memory in use; nothing in a poisoned process, where every call fails."""
        try:
            return self._device.usage()
        except Exception:
            return Usage()


class LocalRunner:
    """Runs trials of one model and its steps in this process; see `oomprobe.records.trials.Runner`."""

    def __init__(self, work: Workload) -> None:
        self._work, self._device, self._tracker, self._snapshot = work, work.device, work.tracker, work.snapshot
        self._extras, self._row = extras_of(work.device), 0
        self._card = self._extras.replay
        self.facts = RunnerInfo(
            device=describe(work.device),
            step_names=tuple(work.steps),
            threads=torch.get_num_threads(),
            starts_anew=any(step.starts_anew for step in work.steps.values()),
            world_size=self._extras.world_size,
            model=type(work.model).__name__,
            max_batch=min((step.max_batch for step in work.steps.values() if step.max_batch is not None), default=None),
            builds=work.snapshot is None and not work.ends_with_trial,
        )
        self._caller = StepCalls(work)
        self._number = 0  # of the trial that is running, among those of this process
        # What the default random number generators were; a process that ends with its trial needs none.
        self._generators = [] if work.ends_with_trial else generator_states(work.device.torch_device.type)
        self.compiled = Compiled()
        self._shapes = self._shapes_now()
        self._begin_row(0)

    def _begin_row(self, row: int) -> None:
        """Forget what trials with another value of the axis have shown of memory."""
        self._row = row
        self._card.begin_probe(self._work.interrupts.poll, replays=len(self._work.steps) == 1)
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
        self._caller.in_steps_s, self._number = 0.0, self._number + 1
        self._caller.stepping.learn(request.learned)
        before_bytes = self._device.outside_bytes()
        try:
            running = self._run_cold(request)
        except NotTrainedError:  # earlier trials trained the weights until the loss scaler saw only infinities
            if self._snapshot is None:
                raise  # the caller tries again in a new process, whose weights are fresh
            self._snapshot.restore_weights()
            running = self._run_cold(request)
        except StepFailedError as error:
            if self._work.ranks > 1:
                raise
            running = self._run_as_left(request, error)
        trial = running.trial(several=len(self._work.steps) > 1, timed=not self.facts.device.replays)
        calls = running.calls_made(is_exact=self._tracker.is_exact)
        outcome = Outcome(
            trial=trial,
            calls=calls,
            breakdown=running.breakdown,
            in_steps_s=self._caller.in_steps_s,
            notes=self._notes_after(running),
            learned=self._caller.stepping.learned(),
            held=running.held,
            gradients_hold_graphs=running.gradients_hold_graphs,
            is_spent=self._snapshot is None and self._tracker.has_replaced_parameters,
        )
        self._tracker.end_trial(passed=trial.passed)
        if trial.verdict is Verdict.POISONED or self._work.ends_with_trial:
            return outcome
        if self._work.ranks > 1 and not trial.passed:
            return replace(outcome, outside_before_bytes=before_bytes)
        trial = replace(trial, leaked_bytes=self._baseline.settle(keeps=not self._tracker.is_exact))
        emptying = [one.emptied_by for one in self._tracker.opaque if one.emptied_by and one.has_changed]
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
            refusal=self._baseline.refusal(trial, emptying),
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
        repeats = Repeats(self._mark, self._counted, self._device.live_bytes, period=request.period)
        running = Running(request=request, step=next(iter(self._work.steps.values())), repeats=repeats)
        # A fresh trial drops code compiled for its own size too: its captured graphs hold memory.
        if self.compiled.start_size((request.row, request.batch_size), anew=request.fresh) or not self._caller.is_cold:
            self._start_cold(keeps_cache=request.as_built and self._number == 1)
        self._device.start_trial()
        try:
            watched = nullcontext() if request.settled_calls is None else repeats
            with self._device.cap(request.cap_bytes), watched:
                for calls in self._caller.turns(running):
                    self._caller.make_calls(running, calls)
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
        if not self._work.watch.is_alive:
            raise UnreliableError(HOOKS_GONE.format(size=request.batch_size))
        # The exception is gone by now, and with it the frames that held the failed step's tensors.
        if running.failure is None:
            running.usage = self._caller.usage()
            if running.verdict is Verdict.FITS and running.is_over_cap:
                running.verdict = Verdict.OOM
            running.step_leaked_bytes = self._step_leak(running)
        elif running.verdict is not Verdict.POISONED and self._device.healthy():
            self._end_backward()
        else:
            running.verdict = Verdict.POISONED
        return running

    def _mark(self) -> int | None:
        """Return a number for what the last call did to the device and where it left what stays there; None if that cannot be seen."""
        fingerprint = self._extras.fingerprint()
        if fingerprint is None:
            return None
        return hash(
            (fingerprint, *(place for tensor in self._tracker.resident_tensors() for place in addresses_of(tensor)))
        )

    def _counted(self) -> list[object] | None:
        """Return what the user's code counts with; None if it is compiled, since a late call may compile it again."""
        return None if self.compiled.is_used else self._tracker.counted()

    def _end_backward(self) -> None:
        """Make the autograd thread let go of a failed backward's tensors, as it does before its next task.

        Otherwise memory may be released while it still holds one, and the next trial starts in a segment that was not given back.
        """
        if self._device.on_host:
            return
        with suppress(Exception), torch.inference_mode(False), outside_modes():  # there may be no memory for it
            torch.zeros((), device=self._device.torch_device, requires_grad=True).backward()  # type: ignore[no-untyped-call]

    def _start_cold(self, *, keeps_cache: bool = False) -> None:
        """Drop what earlier calls left, so that the next call starts as training does: with only the model in memory.

        Runs after each trial, so that what a trial leaks is seen (`Baseline.settle`), and before the first.
        """
        torch.clear_autocast_cache()  # of casts of the weights, where autocast is entered once around everything
        self._tracker.start_cold(gc.collect if keeps_cache else self._release)
        for put, state in self._generators:
            with suppress(Exception):  # a captured graph may have taken the generator over
                put(state)
        self._caller.is_cold = True

    def _release(self) -> None:
        gc.collect()
        self._device.release()

    # --- what it showed ---

    def _judge(self, running: Running, error: Exception) -> None:
        """Classify the failure of a call. Raise StepFailedError for a bug, unless the trial has passed by then."""
        request = running.request
        running.usage = self._caller.usage()
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
            row = self._work.axis.label(running.next_row)
            hide_frames(error)
            raise step_failed(
                error, batch_size=size, largest_passed=last, caller=caller, row=row, trial=self._number,
                simulated=self.facts.device.replays,
            ) from error  # fmt: skip
        running.ended_early, running.failure, running.verdict = running.failure.text, None, Verdict.FITS

    def _step_leak(self, running: Running) -> int:
        """Return the bytes that each further call leaves allocated, not counting uncollected garbage."""
        steady = [series.steady_live_bytes for series in running.every.values() if series.live_bytes]
        leaked_bytes = sum(growth_bytes(live) for live in steady)
        if not leaked_bytes:
            return 0
        before_bytes = self._device.live_bytes()
        gc.collect()
        garbage_bytes = before_bytes - self._device.live_bytes()
        running.held = tuple(largest_added(self._tracker, SMALLEST_GROWTH_BYTES))
        running.gradients_hold_graphs = any(map(_sums_graphs, self._tracker.parameters()))
        cycle_bytes = min(leaked_bytes, garbage_bytes // max(map(len, steady)))
        if cycle_bytes >= SMALLEST_GROWTH_BYTES and running.request.confirms:
            self._notes[CYCLES.format(kept=format_bytes(cycle_bytes), size=running.request.batch_size)] = None
        return leaked_bytes - cycle_bytes

    def _notes_after(self, running: Running) -> tuple[str, ...]:
        self._notes |= dict.fromkeys(getattr(self._device, "notes", ()))
        if self.compiled.is_used:
            self._notes[COMPILED] = None
        if self._snapshot is not None and not self._tracker.is_exact and self._shapes_now() != self._shapes:
            self._notes[WENT_ON] = None
        # Not before the confirmation: an optimizer may step only then.
        confirmed = running.verdict is Verdict.FITS and running.request.confirms
        if confirmed and (note := self._caller.stepping.note(self._work.steps, trains=self._trains())):
            self._notes[note] = None
        return tuple(self._notes)

    def _shapes_now(self) -> list[torch.Size]:
        return [tensor.shape for tensor in self._tracker.parameters() if can_copy(tensor)]

    def _trains(self) -> bool:
        """Return whether the model may be there to be trained: not in eval mode, not frozen, and with gradients on."""
        parameters = list(self._tracker.parameters())
        is_frozen = bool(parameters) and not any(one.requires_grad for one in parameters)
        return self._work.model.training and torch.is_grad_enabled() and not is_frozen

    # --- between trials ---

    def measure(self) -> Measured:
        """Sample the memory now. Before the first trial, what building left in the cache stays there."""
        available_bytes = self._device.available_bytes()
        if self._number:
            self._device.release()
        return Measured(available_bytes=available_bytes, outside_bytes=self._device.outside_bytes())


def _sums_graphs(parameter: torch.Tensor) -> bool:
    """Return whether a parameter's gradient is a sum that keeps the graphs of its parts, as ``backward(create_graph=True)`` makes."""
    gradient = parameter.grad if parameter.is_leaf else None
    return gradient is not None and type(gradient.grad_fn).__name__ == "AddBackward0"
