"""One probe while it runs: its trials so far, budget, clock and retries, and the other processes on the device."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import tenacity
import torch

from oomprobe import search
from oomprobe.devices import Device, raised_by, replay_of
from oomprobe.devices.sharing import processes_on
from oomprobe.errors import (
    DeviceLostError,
    OomProbeError,
    StepFailedError,
    TimeLimitError,
    UnreliableError,
    unmeasured,
)
from oomprobe.hooks import OptimizerWatch, outside_modes, preload_dynamo
from oomprobe.look import HOST_LOOK_S, LOOK_CALLS, LOOK_S, tolerance_of
from oomprobe.options import MAX_CALLS, Options, Step
from oomprobe.report.breakdown import Breakdown
from oomprobe.report.plan import plan
from oomprobe.report.progress import Progress, Reporter, reporter
from oomprobe.report.table import trials_table
from oomprobe.report.words import count, shortened
from oomprobe.result import SECOND_OPINIONS, Phase, Trial
from oomprobe.search import STRIDE, Found, Reply
from oomprobe.signals import Clock, Interrupts
from oomprobe.state import Snapshot, state_tensors
from oomprobe.trial import VARIES, VARYING, LocalRunner, Measured, Outcome, Request, Runner
from oomprobe.units import format_bytes
from oomprobe.verdicts import Verdict

LOST = frozenset({Verdict.POISONED, Verdict.CRASHED})  # the process died or can give no further verdict
ENDED = LOST | {Verdict.TIMED_OUT}  # the trial gave no verdict on the size, so the search cannot continue
# While the accumulation plan does not fit, its micro-batch shrinks. The gradient buffer that accumulation adds is small, so
# five times a tenth is more than enough.
PLAN_TRIALS, PLAN_SHRINK = 5, 0.9
# Over this many doublings a step that uses its batch size must raise its peak or allocate more bytes; over more doublings
# if the device does not count those. Allocators round up small requests, and the host's resident memory is noisy.
DOUBLINGS, UNCOUNTED_DOUBLINGS, HOST_NOISE_BYTES = 10, 24, 16 * 2**20
ENDLESS_BATCH = 2**40  # no memory holds this batch: a step that still passes ignores batch_size
# Over this many doublings a step that splits its batch itself multiplies its allocations at each, and its peak stays within
# VARIES. An ordinary step allocates as many blocks for any batch (27 and 27, where such a step allocated 55, 191, 735, 2911).
SPLITTING_DOUBLINGS, SPLITTING_FACTOR = 3, 1.6
# Of the time that is left, the share that the calls of a look and of a confirmation may take.
LOOK_SHARE, CONFIRM_SHARE = 1 / 8, 1 / 2
# Growth outside our allocator that is ignored: this fraction of the device, but at least this many bytes. Kernels that
# libraries load late take over 250 MiB.
MOVED_SHARE, MOVED_BYTES = 0.02, 512 * 2**20
ATTEMPTS = 5  # at one trial, while other processes change their memory
LOOKS = 3  # samples before the next attempt, until memory is steady; all waits together take at most 24 seconds
WAIT = tenacity.wait_exponential(multiplier=2, max=16)
# Refuse the answer if a leak in each step would use up the free memory in fewer steps than this. The second number is for
# the user's own process, where other things may have grown.
STEPS_TO_LAST, STEPS_TO_LAST_HERE = 1000, 100
NO_HISTORY = (
    "no breakdown: {device} does not record its allocations; torch's own CUDA allocator and simulated cards do "
    "(--device sim:24GiB)"
)


ENDED_EARLY = "call {number} of batch {size} failed with {error}, which is not about memory: later calls were not seen"
LONG_CALLS = (
    "the step allocates different amounts from call to call (evaluation, lengths, an average or a buffer that it keeps), and the "
    "most within {calls} calls, so each trial after growing made so many: a later call can still need more. To be sure, let "
    "step_fn make the largest batch it can meet"
)
UNSTEADY = (
    "the step varies: batch {size} ended differently in two trials of {calls} under the same cap ({how}), so something that it "
    "depends on was not put back between trials (an iterator, a file, the time). Keep the margin"
)
NOT_RESTORED = "not restored: {names}"
PRESSED = (
    "marginal: at batch {size} the allocator released its cache {retries} in {calls} calls to serve a request, which is slow; "
    "{instead}"
)
EASIER = (1 - 1 / 32, 1 - 1 / 16, 1 - 1 / 8)  # of the answer: sizes to try if it needs that at most calls
SPLITS = (
    "memory does not limit this step: from batch {smaller} to {size} its peak stays the same while the number of its allocations "
    "grows with the batch, so it splits the batch itself. Larger batches run, in more time; to try them, pass max_batch"
)


class ContradictedError(Exception):
    """A replayed trial was wrong: the search must start again without replays."""


class Session:
    """Runs the trials that the search asks for and appends them to `trials`. `clock` started with the probe."""

    def __init__(
        self,
        runner: Runner,
        options: Options,
        reporter: Reporter,
        clock: Clock,
        trials: list[Trial],
    ) -> None:
        self.runner, self.options, self.trials, self.clock = runner, options, trials, clock
        self.device, self.notes = runner.device, runner.notes
        self.available_bytes = self.budget_bytes = 0  # memory available to this process, and `memory_fraction` of it
        self.state_verified = False  # whether the restored state was equal bit for bit
        self.breakdown: Breakdown | None = None  # what held the memory at the answer, if requested
        self.neighbours = Neighbours(self.device.total_bytes, self.tenants)
        self._reporter = reporter
        self._is_measured = False  # whether the budget was measured after a step loaded its kernels
        self._replays = True  # whether a simulated device may replay trials
        # The bytes and the number of blocks that the calls of a trial allocated, by batch size; 0 if unknown.
        self._allocated: dict[int, tuple[int, int]] = {}
        self._ends: dict[tuple[int, int | None, int | None], Trial] = {}  # by batch size, cap and calls
        self._call_s: dict[int, float] = {}  # the time of one call of each step, by batch size
        self._first_calls = 0  # calls until every optimizer has stepped
        self._step_calls = 0  # calls of a full step after that; 0: no trial has passed yet
        self._needed_calls = 0  # calls that meet the one that needs the most memory, as the look found
        self._most_calls = LOOK_CALLS  # fewer if a late call failed with a bug
        self._looked: Trial | None = None
        self._asked = Request(batch_size=0, phase=Phase.GROW, steps=1)  # the last trial
        self._counts = False  # whether the user's code may know which call it is
        self.seen_calls = 0  # of each step, in the last confirmation
        self.splits = False  # whether the step splits its batch itself, so that memory does not limit it

    # --- the search and what follows it ---

    def find(self) -> Found:
        """Find the largest size that runs."""
        find = partial(
            search.find,
            self.ask,
            self.options.sizes,
            capped=self.options.memory_fraction < 1,
            enough=self.enough,
            look=self.look if self.runner.looks else None,
        )
        try:
            return find()
        except ContradictedError:
            self._stop_replaying()
            return find()

    def ask(self, size: int, phase: Phase, *, capped: bool) -> Reply:
        """Run one size for the search."""
        trial = self.run(size, phase, cap_bytes=self.budget_bytes if capped else self._grow_cap_bytes())
        if phase is Phase.GROW:
            self._refuse_flat()
            self.splits = self.options.max_batch is None and self._is_splitting()
        return Reply(
            passed=trial.passed,
            within_cap=self._is_within_cap(trial),
            grows_no_further=self.splits,
            varies=self._varies(trial),
        )

    def look(self, size: int) -> Reply:
        """Make many calls of a small size, to learn how many calls a trial needs."""
        if self.device.is_simulated and not self._counts:
            return Reply(passed=True)  # each call is like the last, and trials have repeated it
        calls = self._affordable_calls(size, LOOK_SHARE)
        if calls <= self._ordinary_calls(self.options.steps):
            return Reply(passed=True)
        trial = self.run(size, Phase.GROW, cap_bytes=self._grow_cap_bytes(), looks_for=calls)
        self._looked = trial
        if self._needed_calls > self._ordinary_calls(self.options.steps):
            self.notes[LONG_CALLS.format(calls=self._needed_calls)] = None
        varies = trial.passed and self._needed_calls > self._ordinary_calls(self.options.steps)
        if trial.passed and not varies:
            self._counts = False  # what the step counts does not decide about memory
        elif self.device.is_simulated:
            self._stop_replaying()
        return Reply(
            passed=trial.passed,
            within_cap=self._is_within_cap(trial),
            varies=varies,
            tolerance=tolerance_of(self._needed_calls),
            guess=self._guess(trial),
        )

    def _guess(self, looked: Trial) -> int | None:
        """Return the size whose peak would meet the budget, on the line through the smallest trial and the look."""
        smallest = min(
            (trial for trial in self.trials if trial.passed), key=lambda trial: trial.batch_size, default=looked
        )
        base_bytes = smallest.peak_allocated_bytes or 0
        rise_bytes = (looked.peak_allocated_bytes or 0) - base_bytes
        if rise_bytes <= 0 or looked.batch_size <= smallest.batch_size:
            return None
        samples = (self.budget_bytes - base_bytes) * (looked.batch_size - smallest.batch_size) // rise_bytes
        return smallest.batch_size + max(0, samples)

    def _is_within_cap(self, trial: Trial) -> bool:
        peak_bytes = trial.peak_reserved_bytes
        return trial.passed and peak_bytes is not None and peak_bytes <= self.budget_bytes

    # --- how many calls ---

    def _ordinary_calls(self, steps: int) -> int:
        """Return the calls of a trial until every optimizer has stepped, and of so many full steps more."""
        return self._first_calls + steps * self._step_calls

    def _affordable_calls(self, size: int, share: float) -> int:
        """Return how many calls of this size, up to LOOK_CALLS, fit in the time that the search has taken, or in LOOK_S."""
        limits_s = [HOST_LOOK_S if self.device.on_host else max(LOOK_S, self.clock.elapsed_s)]
        limits_s += [] if self.clock.end_s is None else [share * (self.clock.end_s - time.monotonic())]
        if self.options.trial_time_limit_s is not None:
            limits_s.append(CONFIRM_SHARE * self.options.trial_time_limit_s)
        repeats = self.device.is_simulated and not self._counts
        if repeats and len(self.runner.step_names) == 1:  # repeated calls take no time
            return self._most_calls
        nearest = min(self._call_s, key=lambda one: abs(one - size), default=None)
        # A simulated call takes as long at any size.
        scale = 1.0 if nearest is None or self.device.is_simulated else max(1.0, size / nearest)
        call_s = 0.0 if nearest is None else self._call_s[nearest] * scale
        return min(self._most_calls, int(min(limits_s) / call_s) if call_s else LOOK_CALLS)

    def _calls(self, size: int, phase: Phase) -> int | None:
        """Return the calls of a trial, fixed before it; None if no trial has shown how many an optimizer's step takes."""
        if not self._step_calls:
            return None
        least = max(self._ordinary_calls(self._steps(phase)), self._needed_calls)
        several_repeat = self.device.is_simulated and not self._counts and len(self.runner.step_names) > 1
        if phase is not Phase.CONFIRM or self.runner.starts_anew or several_repeat:
            return least
        return max(least, self._affordable_calls(size, CONFIRM_SHARE))

    def confirm_only(self, size: int) -> Found:
        """Run one size under the cap. Rerun it if it failed, or if the cap shrank below its peak once kernels were loaded."""
        self._budget_from(self.runner.measure())
        first_budget_bytes = self.budget_bytes
        trial = first = self.run(size, Phase.CONFIRM, cap_bytes=self.cap_bytes)
        again = not trial.passed
        if trial.passed:
            self._take(self.runner.measure())
            peak_bytes = trial.peak_reserved_bytes
            again = self.budget_bytes < first_budget_bytes and (peak_bytes is None or peak_bytes > self.budget_bytes)
        varies = self._varies(trial)
        if again:
            trial = self.run(size, Phase.CONFIRM, cap_bytes=self.cap_bytes)
            varies = self._varies(trial)
        if not trial.passed:
            return Found(batch_size=None)
        return Found(batch_size=size, limit=size, transient=() if first.passed or varies else (size,))

    def run_plan(self, batch_size: int) -> None:
        """Run the micro-batch planned for `global_batch` with gradient accumulation; shrink it while that fails."""
        if self.options.global_batch is None:
            return
        largest = batch_size
        for _ in range(PLAN_TRIALS):
            entries = plan(
                self.options.global_batch,
                world_size=1,
                max_micro_batch=largest,
                min_micro_batch=self.options.min_batch,
                multiple_of=self.options.multiple_of,
            )
            entry = next(iter(entries), None)
            if entry is None:
                break
            if entry.accumulation_steps == 1 and entry.micro_batch == batch_size:
                return
            calls = min(entry.accumulation_steps, MAX_CALLS)
            try:
                size = entry.micro_batch
                trial = self.run(size, Phase.CONFIRM, cap_bytes=self.cap_bytes, accumulation_steps=calls)
            except (TimeLimitError, StepFailedError) as error:
                reason = str(error).splitlines()[0]
                self.notes[f"the plan for global_batch was not run to completion ({reason})"] = None
                return
            if trial.passed:
                return
            largest = int(PLAN_SHRINK * entry.micro_batch)
        self.notes[
            f"no split of global_batch={self.options.global_batch} into micro-batches of at most {batch_size} ran: accumulate "
            "in the step function, and probe that"
        ] = None

    def break_down(self, batch_size: int) -> None:
        """Run one more step at the answer, which is not recorded as a trial, to find what held the memory."""
        if not self.options.breakdown:
            return
        request = Request(batch_size=batch_size, phase=Phase.BISECT, steps=1, cap_bytes=self.cap_bytes, breakdown=True)
        try:
            outcome = self.runner.run(self._with_evidence(request))
        except OomProbeError as error:  # the answer stands without it
            self.notes[f"no breakdown: {str(error).splitlines()[0]}"] = None
            return
        self.breakdown = outcome.breakdown
        if not outcome.trial.passed:
            self.notes[f"no breakdown: its extra step ended with {outcome.trial.verdict}"] = None
        elif self.breakdown is None:
            self.notes[NO_HISTORY.format(device=self.device.name)] = None

    def ease(self, answer: int) -> None:
        """If the answer releases the allocator's cache at most calls, look for a smaller size that does not, and name it."""
        confirmed = [t for t in self.trials if t.batch_size == answer and t.passed and t.accumulation_steps == 1][-1]
        if confirmed.replayed or not _is_pressed(confirmed):
            return
        instead = "lower memory_fraction, or set PYTORCH_ALLOC_CONF=expandable_segments:True"
        sizes = (self.options.sizes.down(int(share * answer), 1) for share in EASIER)
        with suppress(OomProbeError):  # the answer stands without it
            for size in dict.fromkeys(size for size in sizes if size < answer):
                trial = self.run(size, Phase.BISECT, cap_bytes=self.cap_bytes)
                if trial.passed and not _is_pressed(trial):
                    instead = f"batch {size}, tried for this, does not need that"
                    break
        retries = count(confirmed.alloc_retries, "time", "times")
        self.notes[PRESSED.format(size=answer, calls=confirmed.steps, retries=retries, instead=instead)] = None

    def enough(self, good: int, bad: int) -> bool:
        """Return whether the bracket is narrow enough, or only enough time to confirm is left."""
        closest = STRIDE if self.device.on_host else 0.0  # below this, fragmentation of malloc's heap decides
        if bad - good <= max(self.options.resolution, closest) * good:
            return True
        calls = max(self._ordinary_calls(self.options.confirm_steps), self._needed_calls)
        if self._needed_calls > self._ordinary_calls(self.options.steps):  # another such trial comes before it
            calls += self._needed_calls
        if self.clock.suffices_to_confirm(good, self.trials, calls=calls):
            return False
        self.notes[
            f"time limit: bisecting stopped between {good}, which ran, and {bad}, which failed; "
            "a larger size may fit (allow more with time_limit_s)"
        ] = None
        return True

    def refuse_leaking(self, answer: int) -> None:
        """Raise UnreliableError if each step leaks enough to exhaust the memory soon."""
        kept_bytes, free_bytes = self.leak_of_step(answer)
        least_steps = STEPS_TO_LAST if self.runner.replaceable else STEPS_TO_LAST_HERE
        if kept_bytes and free_bytes // kept_bytes < least_steps:
            raise UnreliableError(
                f"each step at batch {answer} keeps {format_bytes(kept_bytes)}, even after collecting garbage, so training "
                f"would use up the {format_bytes(free_bytes)} left free after about {free_bytes // kept_bytes} more. Something "
                "keeps tensors of each step: a list of losses that still have their graph (append loss.item()), a cache keyed "
                "by shape, or a buffer that takes more than so many calls to fill; if it is a buffer, run the step until it is "
                "full, then probe",
                trials=tuple(self.trials),
            )

    def leak_of_step(self, answer: int) -> tuple[int, int]:
        """Return the bytes that each step of the answer leaks and the bytes that the answer leaves free."""
        confirmed = [t for t in self.trials if t.phase in SECOND_OPINIONS and t.passed and t.accumulation_steps == 1]
        last = next((t for t in reversed(confirmed) if t.batch_size == answer), None)
        if last is None:
            return 0, 0
        looked = self._looked
        if looked is not None and looked.passed and looked.steps > last.steps and not looked.step_leaked_bytes:
            return 0, 0  # over more calls it levelled off
        reserved_bytes = last.peak_reserved_bytes or self.budget_bytes
        return last.step_leaked_bytes, self.available_bytes - min(self.budget_bytes, reserved_bytes)

    # --- one trial, with retries ---

    def run(
        self, size: int, phase: Phase, *, cap_bytes: int | None, accumulation_steps: int = 1, looks_for: int = 0
    ) -> Trial:
        """Run one trial. Rerun it if other processes disturbed it, or once in a new process if it ended its own.

        With `looks_for`, make so many calls, and learn from them how many calls later trials need.
        """
        may_end_early = (looks_for or phase is Phase.CONFIRM) and not self.runner.starts_anew
        request = Request(
            batch_size=size,
            phase=phase,
            steps=self._steps(phase),
            calls=looks_for or self._calls(size, phase),
            step_calls=self._step_calls,
            least_calls=self._ordinary_calls(self.options.steps) if self._step_calls and may_end_early else None,
            more_calls=LOOK_CALLS if phase is Phase.CONFIRM and may_end_early else 0,
            looks=looks_for > 0,
            repeats=not looks_for and not self._counts,
            cap_bytes=cap_bytes,
            accumulation_steps=accumulation_steps,
            exact=bool(looks_for) or phase is Phase.CONFIRM or not self._replays,
        )
        self._asked = request
        last: Trial | None = None
        try:
            for attempt in (request, replace(request, phase=Phase.RECHECK, exact=True)):
                self._reporter.started(size, attempt.phase)
                outcome = self.runner.run(self._with_evidence(attempt))
                while self.neighbours.should_rerun(outcome, self.runner.outside_bytes):
                    outcome = self.runner.run(self._with_evidence(attempt))
                self._record(outcome)
                if last is not None:
                    self._note_death(last, outcome.trial)
                last = outcome.trial
                if last.verdict not in ENDED or not self.runner.replaceable or self._is_size_limit(last):
                    break
                if self.clock.is_over:
                    raise self.clock.time_is_up(size, self.trials)
                self.runner.renew()
            self._stop_if_final(outcome)
        except (StepFailedError, UnreliableError) as error:
            error.trials = tuple(self.trials)
            raise
        if outcome.contradicts_replay:
            if any(trial.replayed for trial in self.trials):
                raise ContradictedError
            self._stop_replaying()
        return outcome.trial

    def _steps(self, phase: Phase) -> int:
        """Return the full steps of a trial; where a simulated device repeats calls, which is free, every trial runs the most."""
        is_single = len(self.runner.step_names) == 1 and self._step_calls <= 1
        if self.device.is_simulated and is_single and not self._counts:
            return max(self.options.steps, self.options.confirm_steps)
        return self.options.confirm_steps if phase is Phase.CONFIRM else self.options.steps

    def _with_evidence(self, request: Request) -> Request:
        """Add the deadline and the evidence from earlier trials."""
        passed = [trial.batch_size for trial in self.trials if trial.passed]
        return replace(
            request,
            deadline_s=self.clock.deadline_s(),
            smaller_passed=any(size < request.batch_size for size in passed),
            largest_passed=max(passed, default=None),
        )

    def _record(self, outcome: Outcome) -> None:
        trial = outcome.trial
        self.trials.append(trial)
        self._allocated[trial.batch_size] = outcome.served_bytes, outcome.allocations
        self._counts |= (outcome.counts or outcome.varying) and self.device.is_simulated and self._looked is None
        if outcome.call_s:
            self._call_s[trial.batch_size] = outcome.call_s
        if trial.passed and not self._step_calls and outcome.calls and trial.accumulation_steps == 1:
            self._first_calls = outcome.first_calls
            self._step_calls = max(1, (outcome.calls - outcome.first_calls) // self._asked.steps)
        self._needed_calls = max(self._needed_calls, outcome.needed_calls)
        if outcome.ended_early is not None:
            self._most_calls = min(self._most_calls, outcome.calls)
            self._needed_calls = min(self._needed_calls, self._most_calls)
            number = outcome.calls + 1
            self.notes[
                ENDED_EARLY.format(number=number, size=trial.batch_size, error=shortened(outcome.ended_early))
            ] = None
        if (
            outcome.varying
            and trial.phase is Phase.CONFIRM
            and self._needed_calls <= self._ordinary_calls(self.options.steps)
        ):
            self.notes[VARYING] = None
        if trial.passed and trial.phase is Phase.CONFIRM and trial.accumulation_steps == 1:
            self.seen_calls = trial.steps // len(self.runner.step_names)
        self._reporter.finished(outcome.trial)
        if outcome.measured is not None and not self._is_measured:
            self._take(outcome.measured)

    def _stop_replaying(self) -> None:
        """Forget replayed trials and run every size from here on."""
        self._replays = False
        self.trials[:] = [trial for trial in self.trials if not trial.replayed]

    # --- the budget ---

    def _take(self, measured: Measured) -> None:
        """Set the budget from a sample taken after a step loaded its kernels, which take memory outside the allocator."""
        self._budget_from(measured)
        self._is_measured = True
        self.neighbours.expect(measured.outside_bytes)

    def _budget_from(self, measured: Measured) -> None:
        self.available_bytes = measured.available_bytes
        self.budget_bytes = int(self.options.memory_fraction * self.available_bytes)

    @property
    def cap_bytes(self) -> int | None:
        """The cap of every trial but those that grow."""
        return self._grow_cap_bytes() if self.options.memory_fraction == 1 else self.budget_bytes

    def _grow_cap_bytes(self) -> int | None:
        """Return the cap of trials that grow; None in a worker, which may die, and on devices without `edge_bytes`."""
        if self.runner.replaceable or not self.device.edge_bytes:
            return None
        if not self.available_bytes:
            self._budget_from(self.runner.measure())  # provisional, until a step has loaded its kernels
        return max(self.budget_bytes, self.available_bytes - self.device.edge_bytes)

    def tenants(self) -> str:
        """Describe the other processes on the device; empty if unknown."""
        is_card = self.device.torch_device.startswith("cuda") and not self.device.is_simulated
        return processes_on(torch.device(self.device.torch_device)) if is_card else ""

    def _refuse_flat(self) -> None:
        """Raise UnreliableError if the step needs the same memory at every size, so that memory would never limit it."""
        grown = [trial for trial in self.trials if trial.phase is Phase.GROW and trial.passed]
        if not grown:
            return
        now, served = grown[-1], {size: served for size, (served, _) in self._allocated.items()}
        doublings = DOUBLINGS if served.get(now.batch_size) else UNCOUNTED_DOUBLINGS
        then = grown[-1 - doublings] if len(grown) > doublings else None
        noise_bytes = HOST_NOISE_BYTES if self.device.on_host else 0
        is_flat = (
            then is not None
            and (now.peak_allocated_bytes or 0) <= (then.peak_allocated_bytes or 0) + noise_bytes
            and served.get(now.batch_size) == served.get(then.batch_size)
        )
        if is_flat or now.batch_size >= ENDLESS_BATCH:
            if now.replayed:
                raise ContradictedError  # the two sizes it was predicted from may have had different lengths
            smaller = grown[0] if then is None else then
            raise UnreliableError(
                f"batch {now.batch_size} needs no more memory than batch {smaller.batch_size}, so memory does not limit the "
                "batch size: the step ignores batch_size, does not run the model on this device, or runs out of data. If it "
                "runs out of data, pass max_batch; if it pads small batches, pass the size it pads to as min_batch",
                trials=tuple(self.trials),
            )

    def _is_splitting(self) -> bool:
        """Return whether the last doublings multiplied the allocations of the step and did not raise its peak."""
        grown = [trial for trial in self.trials if trial.phase is Phase.GROW and trial.passed][
            -1 - SPLITTING_DOUBLINGS :
        ]
        if len(grown) <= SPLITTING_DOUBLINGS or any(trial.replayed for trial in grown):
            return False
        first, last = grown[0], grown[-1]
        counts = [self._allocated[trial.batch_size][1] for trial in grown]
        is_multiplied = all(0 < SPLITTING_FACTOR * fewer <= more for fewer, more in pairwise(counts))
        if not is_multiplied or not _differs_little(first.peak_allocated_bytes or 0, last.peak_allocated_bytes or 0):
            return False
        self.notes[SPLITS.format(smaller=first.batch_size, size=last.batch_size)] = None
        return True

    def _varies(self, trial: Trial) -> bool:
        """Return whether the size ended differently before, after the same calls under the same cap, and note that."""
        before = self._ends.setdefault((trial.batch_size, trial.cap_bytes, self._asked.calls), trial)
        if before is trial or trial.replayed or before.replayed or self.neighbours.contaminated or self.device.on_host:
            return False
        peaks = before.peak_allocated_bytes or 0, trial.peak_allocated_bytes or 0
        if before.verdict is not trial.verdict:
            how = f"{before.verdict}, then {trial.verdict}"
        elif trial.passed and not _differs_little(*peaks):
            how = f"peaks of {format_bytes(peaks[0])} and {format_bytes(peaks[1])}"
        else:
            return False
        self.notes[UNSTEADY.format(size=trial.batch_size, calls=count(trial.steps, "call", "calls"), how=how)] = None
        self._needed_calls = max(self._needed_calls, self._affordable_calls(trial.batch_size, CONFIRM_SHARE))
        return True

    # --- when to stop ---

    def device_lost(self, what: str) -> DeviceLostError:
        """Return the error for a device on which nothing can run any more."""
        lost = (
            "a fresh process hit the same error. Run the step once by itself with CUDA_LAUNCH_BLOCKING=1 to see where"
            if self.runner.replaceable
            else f"this process can no longer use {self.device.name}, and all tensors on it are lost. The state from before "
            "the first step is in this error's .snapshot. Start a new process; to run trials in child processes that may "
            "fail like this, use oomprobe run path/to/train.py:build or oomprobe.probe_target"
        )
        return DeviceLostError(f"a sticky error ({what}): {lost}", trials=tuple(self.trials))

    def _note_death(self, died: Trial, again: Trial) -> None:
        """Note a process death that did not recur, or a sticky error that did."""
        size, how = died.batch_size, f"{died.verdict}: {died.error}"
        if again.verdict not in ENDED:
            self.notes[f"batch {size} ended its process once ({how}); tried again in a new one: {again.verdict}"] = None
        elif again.verdict is Verdict.POISONED:
            self.notes[
                f"batch {size} ended in a sticky error in two processes ({how}): the cause is not memory but a limit of a "
                "kernel, or a bug that appears at that size. The answer is below it"
            ] = None

    def _is_size_limit(self, trial: Trial) -> bool:
        """Return whether this size is the limit: a smaller one passed, and two processes had a sticky error here."""
        lost = [t for t in self.trials if t.verdict is Verdict.POISONED and t.batch_size == trial.batch_size]
        return len(lost) > 1 and any(t.passed and t.batch_size < trial.batch_size for t in self.trials)

    def _stop_if_final(self, outcome: Outcome) -> None:
        trial = outcome.trial
        if trial.verdict is Verdict.TIMED_OUT:
            raise self.clock.time_is_up(trial.batch_size, self.trials)
        if trial.verdict in LOST and not self._is_size_limit(trial):
            if trial.verdict is Verdict.POISONED:
                raise self.device_lost(f"batch {trial.batch_size}, {trial.error}")
            raise StepFailedError(
                f"the process of the trial died twice at batch size {trial.batch_size} with no sign that memory was the "
                f"cause, so there is no answer: {trial.error}\n"
                f"Run step_fn(model, {trial.batch_size}) once by itself to see it",
                batch_size=trial.batch_size,
            )
        if outcome.refusal is not None:
            raise UnreliableError(outcome.refusal, trials=tuple(self.trials))


def _is_pressed(trial: Trial) -> bool:
    """Return whether the allocator released its cache at half of the calls or more: each takes a synchronisation."""
    return 2 * trial.alloc_retries >= trial.steps > 0


def _differs_little(one_bytes: int, other_bytes: int) -> bool:
    return abs(one_bytes - other_bytes) <= VARIES * max(one_bytes, other_bytes)


class Neighbours:
    """Watches the memory of other processes on the device: a trial that failed while it grew runs again.

    A pass always counts. A failure counts if the others left the whole cap free. After `ATTEMPTS` it counts anyway, and
    the answer is marked as contaminated, because the others may have caused it. `names` describes them.
    """

    def __init__(
        self, total_bytes: int, names: Callable[[], str], *, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._total_bytes, self._names, self._sleep = total_bytes, names, sleep
        self._tolerated_bytes = max(MOVED_SHARE * total_bytes, MOVED_BYTES)
        self._expected_bytes: int | None = None
        self._spoiled = 0  # disturbed attempts at the current trial
        self.contaminated = False
        self.notes: dict[str, None] = {}
        self.held_bytes: list[int] = []  # samples, each after a trial

    def expect(self, outside_bytes: int | None) -> None:
        """Take `outside_bytes` as the normal level, once kernels and libraries are loaded."""
        if outside_bytes is not None:
            self._expected_bytes = outside_bytes
            self.held_bytes.append(outside_bytes)

    def should_rerun(self, outcome: Outcome, look: Callable[[], int | None]) -> bool:
        """Return whether to rerun the trial, after waiting for the others; `look` returns the outside bytes now."""
        trial, after_bytes = outcome.trial, outcome.outside_after_bytes
        outside_bytes = max(outcome.outside_before_bytes or 0, after_bytes or 0)
        grown_bytes = self._grown_bytes(outside_bytes)
        has_room = trial.cap_bytes is not None and self._total_bytes - outside_bytes >= trial.cap_bytes
        may_be_theirs = not trial.passed and trial.verdict not in ENDED and not has_room
        disturbed = may_be_theirs and grown_bytes > self._tolerated_bytes
        self._spoiled = self._spoiled + 1 if disturbed else 0
        if disturbed and self._spoiled < ATTEMPTS and not self.contaminated:  # wait in vain only once
            self.notes[
                f"other processes on the device held {format_bytes(grown_bytes)} more around batch {trial.batch_size}, which "
                "failed: that trial was discarded and tried again"
            ] = None
            self._wait_for_quiet(look)
            return True
        if disturbed:
            self._spoiled, self.contaminated, self._expected_bytes = 0, True, after_bytes
            names = self._names()
            self.notes[
                f"CONTAMINATED: other processes on the device{f' ({names})' if names else ''} kept more memory than before "
                f"around batch {trial.batch_size}, so the answer may be too small. Probe again once they have ended"
            ] = None
        if self._expected_bytes is not None and after_bytes is not None:
            self.held_bytes.append(after_bytes)
        return False

    def _wait_for_quiet(self, look: Callable[[], int | None]) -> None:
        """Wait until the others are back at their normal level. Retry on values: a kept exception would hold tensors alive."""
        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(LOOKS),
            wait=WAIT,
            retry=tenacity.retry_if_result(lambda grown_bytes: grown_bytes > self._tolerated_bytes),
            retry_error_callback=lambda state: None,
            sleep=self._sleep,
        )
        retrying(lambda: self._grown_bytes(look() or 0))

    def _grown_bytes(self, outside_bytes: int) -> int:
        return 0 if self._expected_bytes is None else outside_bytes - self._expected_bytes


@contextmanager
def open_here(
    model: torch.nn.Module,
    steps: Mapping[str, Step],
    preserve: list[Any],
    device: Device,
    options: Options,
    progress: Progress,
) -> Iterator[Session]:
    """Open a session whose trials run in this process. On every way out the state is restored and compared."""
    functions = [step.run for step in steps.values()]
    status, replay = reporter(progress), replay_of(device)
    recorded: list[Trial] = []
    preload_dynamo()
    with told_of_trials(recorded), Interrupts() as interrupts, garbage_frozen():
        snapshot = Snapshot(model, functions, preserve, device.torch_device.type, device)
        if replay is not None:
            replay.place(snapshot.tracker.resident_tensors())

        def keep_new_optimizer(optimizer: torch.optim.Optimizer) -> None:
            # An optimizer that the step creates and drops within one call needs no copy.
            if not any(step.has_made is not None and step.has_made(optimizer) for step in steps.values()):
                with interrupts.held_back(), outside_modes():
                    snapshot.add(optimizer)
                    if replay is not None:
                        replay.place(state_tensors(optimizer))

        with OptimizerWatch(keep_new_optimizer, model) as watch:
            runner = LocalRunner(
                device,
                model,
                steps,
                snapshot.tracker,
                watch,
                interrupts,
                restore_weights=snapshot.restore_weights,
                after_call=snapshot.release_dead,
            )
            session = Session(runner, options, status, Clock(options), recorded)
            status.opened(device.name, options)
            with _state_restored(session, snapshot, device), _device_errors_converted(session, device):
                try:
                    yield session
                finally:
                    status.close()
                    runner.compiled.drop()  # training compiles as if there had been no probe
                    session.notes |= dict.fromkeys(snapshot.notes)


@contextmanager
def garbage_frozen() -> Iterator[None]:
    """Freeze existing objects so that garbage collection scans only new ones: 0.01 ms, not 98, with frameworks imported.

    Forked children inherit this and copy fewer pages. Freeze nothing if the caller has frozen objects, because unfreezing
    would unfreeze theirs too.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _state_restored(session: Session, snapshot: Snapshot, device: Device) -> Iterator[None]:
    """Restore and compare the state on every way out, and release the memory that the probe reserved."""
    try:
        try:
            yield
        except DeviceLostError:
            raise
        except BaseException:
            _restore(session, snapshot, device)
            raise
        _restore(session, snapshot, device)
    except DeviceLostError as error:
        error.snapshot = snapshot.host_copy()
        snapshot.restore(device_lost=True)
        raise


def _restore(session: Session, snapshot: Snapshot, device: Device) -> None:
    try:
        snapshot.restore()
        differences = snapshot.differences()
        if differences:
            raise UnreliableError(
                f"not everything came back as it was before the probe: {', '.join(differences[:5])}. Do not train with "
                "this model: load it again. The step may be changing it from another thread",
                trials=tuple(session.trials),
            )
        if changes := snapshot.tracker.kept.changes():
            session.notes[NOT_RESTORED.format(names=", ".join(changes))] = None
        session.state_verified = not changes
        gc.collect()
        device.release()
    except Exception as error:
        if device.healthy():
            raise
        raise session.device_lost(f"{type(error).__name__}: {error}") from error


@contextmanager
def told_of_trials(trials: list[Trial]) -> Iterator[None]:
    """Add the trials so far to a Ctrl-C or exit. Must be outermost: `Interrupts` raises deferred signals when it closes."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as interruption:
        interruption.add_note("oomprobe was interrupted; the trials so far:\n" + trials_table(trials))
        raise


@contextmanager
def _device_errors_converted(session: Session, device: Device) -> Iterator[None]:
    """Convert errors of the device outside a step, while memory is measured or released."""
    try:
        yield
    except OomProbeError:
        raise
    except Exception as error:
        if not device.healthy():
            raise session.device_lost(f"{type(error).__name__}: {error}") from error
        if raised_by(device, error):  # errors of the step itself are a StepFailedError by now
            raise unmeasured(device.name, error, trials=tuple(session.trials)) from error
        raise
