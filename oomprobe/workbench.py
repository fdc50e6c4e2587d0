"""One probe while it runs: the trials so far, the budget, the baseline of memory, the clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from oomprobe.devices import Device
from oomprobe.errors import DeviceLostError, StepFailedError, TimeLimitError, UnreliableError
from oomprobe.idle import refuse_idle
from oomprobe.interrupts import TimeUp
from oomprobe.leaks import Baseline
from oomprobe.options import Options
from oomprobe.plan import plan
from oomprobe.progress import Reporter
from oomprobe.result import Phase, Trial
from oomprobe.scope import scope
from oomprobe.search import Found, Reply
from oomprobe.state import Keeper
from oomprobe.trial import MAX_CALLS, Request, Trials
from oomprobe.units import format_bytes, format_seconds
from oomprobe.verdict import Verdict
from oomprobe.work import Work, compiled_graphs, count_work

PLAN_TRIALS = 5  # a gradient buffer beside the activations costs little; five times a tenth is far more
PLAN_SHRINK = 0.9
CONFIRM_SLACK = 1.5  # a confirmation step may take this much longer than a step of the search


class Workbench:
    """Runs what the search asks for and keeps the memory between trials at its baseline."""

    def __init__(
        self,
        device: Device,
        trials: Trials,
        keeper: Keeper,
        options: Options,
        reporter: Reporter,
        *,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.device, self.options = device, options
        self.trials: list[Trial] = []
        self.notes: dict[str, None] = trials.notes  # ordered and without doubles
        self.available_bytes = self.budget_bytes = 0
        self.outside_bytes: list[int] = []
        self.state_verified = False
        self._trials, self._keeper, self._reporter, self._sleep = trials, keeper, reporter, sleep
        self._baseline = Baseline(device, drop_gradients=keeper.drop_gradients, flush=self._flush, sleep=sleep)
        self._warmed_at: int | None = None  # the size that ran, without a limit, to warm the process
        self._primed: set[int] = set()
        self._started_s = time.monotonic()
        self._graphs_before = compiled_graphs()

    # --- what the search asks ---

    @property
    def step_names(self) -> list[str]:
        return self._trials.step_names

    def warm(self, batch_size: int) -> None:
        """Bring the process to the state in which its memory is counted."""

        def step() -> None:
            self._call_once(batch_size)
            self._warmed_at = batch_size

        with self._in_time(batch_size):
            self.device.warm(step)

    def confirm_only(self, size: int) -> Found:
        """Ask for one size under the cap, and again where that fails or the cap turns out too high.

        The available memory is sampled before the trial and, once its kernels are loaded, after it.
        """
        self._measure_available()
        cap_bytes = self.budget_bytes
        trial = self.run(size, Phase.CONFIRM, steps=self.options.confirm_steps, cap_bytes=self._cap(cap_bytes))
        if trial.passed:
            self._measure_available()
            peak = trial.peak_reserved_bytes
            if self.budget_bytes < cap_bytes and (peak is None or peak > self.budget_bytes):
                trial = self._once_more(size)
        else:
            trial = self._once_more(size)
        passed = trial.passed
        return Found(batch_size=size if passed else None, limit=size if passed else None)

    def _once_more(self, size: int) -> Trial:
        return self.run(size, Phase.RECHECK, steps=self.options.confirm_steps, cap_bytes=self._cap(self.budget_bytes))

    def _cap(self, budget_bytes: int) -> int | None:
        return budget_bytes if self.options.memory_fraction < 1 else None

    def run_plan(self, batch_size: int) -> None:
        """Run the micro-batch planned for `global_batch` with its accumulation; move down while that fails."""
        if self.options.global_batch is None:
            return
        largest = batch_size
        for _ in range(PLAN_TRIALS):
            entries = plan(
                self.options.global_batch,
                world_size=1,
                max_micro_batch=largest,
                multiple_of=self.options.multiple_of,
            )
            entry = next((e for e in entries if e.micro_batch >= self.options.min_batch), None)
            if entry is None or entry.accumulation_steps == 1:
                return
            try:
                trial = self.run(
                    entry.micro_batch,
                    Phase.CONFIRM,
                    steps=1,
                    cap_bytes=self._cap(self.budget_bytes),
                    accumulation_steps=min(entry.accumulation_steps, MAX_CALLS),
                )
            except (TimeLimitError, StepFailedError) as error:
                reason = str(error).splitlines()[0]
                self.notes[f"the plan for global_batch was not run to its end ({reason})"] = None
                return
            if trial.passed:
                return
            largest = int(PLAN_SHRINK * entry.micro_batch)

    def ask(self, size: int, phase: Phase, *, capped: bool) -> Reply:
        """Run one size for the search."""
        steps = self.options.confirm_steps if phase is Phase.CONFIRM else self.options.steps
        trial = self.run(size, phase, steps=steps, cap_bytes=self.budget_bytes if capped else None)
        if phase is Phase.GROW:
            refuse_idle(
                self.trials,
                self.options.sizes,
                self._work_at,
                nothing_stepped=self._trials.nothing_stepped,
                kind="host" if self.device.on_host else "device",
            )
        peak = trial.peak_reserved_bytes
        return Reply(passed=trial.passed, within_cap=trial.passed and peak is not None and peak <= self.budget_bytes)

    def enough(self, good: int, bad: int) -> bool:
        """Whether the bracket is narrow enough, or only time for the confirmation is left."""
        if bad - good <= self.options.resolution * good:
            return True
        if self._time_left_s() >= self._confirmation_s(good):
            return False
        self.notes[
            f"time limit: bisecting stopped between {good}, which ran, and {bad}, which failed; "
            "a larger size may fit (allow more with time_limit_s)"
        ] = None
        return True

    def run(self, size: int, phase: Phase, *, steps: int, cap_bytes: int | None, accumulation_steps: int = 1) -> Trial:
        """Run one trial, put the memory back to its baseline, and record it.

        Raises:
            TimeLimitError: its time passed.
            DeviceLostError: the process can give no further verdict.
            StepFailedError: a bug in the step.
            UnreliableError: memory did not come back.
        """
        self._reporter.started(size, phase)
        self._keeper.start_over()
        self._prime(size)
        request = Request(
            batch_size=size,
            phase=phase,
            steps=steps,
            cap_bytes=cap_bytes,
            accumulation_steps=accumulation_steps,
            deadline_s=self._deadline_s(),
            smaller_passed=self._smaller_passed(size),
            largest_passed=max((t.batch_size for t in self.trials if t.passed), default=None),
        )
        try:
            trial = self._trials.run(request)
        except (StepFailedError, UnreliableError) as error:
            error.trials = tuple(self.trials)
            raise
        trial = self._settle(trial)
        self.trials.append(trial)
        self._reporter.finished(trial)
        self._stop_if_final(trial)
        if trial.passed and not self._baseline.known:
            self._measure_available()
            self._baseline.take(self.available_bytes)
        return trial

    def _prime(self, size: int) -> None:
        if size not in self._primed:
            self._primed.add(size)
            with self._in_time(size):
                self.device.prime(lambda: self._call_once(size))

    def _smaller_passed(self, size: int) -> bool:
        """Whether what fails now has run at a smaller size, or at this one with more memory."""
        warmed = self._warmed_at is not None and self._warmed_at <= size
        return warmed or any(t.passed and t.batch_size < size for t in self.trials)

    @property
    def graphs_compiled(self) -> int:
        return compiled_graphs() - self._graphs_before

    # --- time ---

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    @property
    def in_steps_s(self) -> float:
        return self._trials.in_steps_s

    def _time_left_s(self) -> float:
        limit = self.options.time_limit_s
        return float("inf") if limit is None else limit - self.elapsed_s

    def _deadline_s(self) -> float | None:
        left = [self._time_left_s(), self.options.trial_time_limit_s or float("inf")]
        return None if min(left) == float("inf") else time.monotonic() + min(left)

    def _confirmation_s(self, size: int) -> float:
        rates = [t.step_s / t.batch_size for t in self.trials if t.step_s]
        calls = 1 + self.options.confirm_steps
        return CONFIRM_SLACK * calls * size * (rates[-1] if rates else 0.0)

    def _time_is_up(self, batch_size: int) -> TimeLimitError:
        return TimeLimitError(
            f"time passed during batch {batch_size} after {format_seconds(self.elapsed_s)} and {len(self.trials)} trials "
            f"(time_limit_s={self.options.time_limit_s}, trial_time_limit_s={self.options.trial_time_limit_s}), before a "
            "size was confirmed. Allow more time, start nearer with min_batch, or stop earlier with resolution=0.05",
            trials=tuple(self.trials),
        )

    # --- memory between trials ---

    def _measure_available(self) -> None:
        self.available_bytes = self.device.available_bytes()
        self.budget_bytes = int(self.options.memory_fraction * self.available_bytes)
        self._sample_outside()

    def _sample_outside(self) -> None:
        outside = self.device.outside_bytes()
        if outside is not None:
            self.outside_bytes.append(outside)

    def _settle(self, trial: Trial) -> Trial:
        """Clean up after a trial; what survives is its leak."""
        if trial.verdict is Verdict.POISONED:
            return trial
        leaked_bytes = self._baseline.settle(passed=trial.passed)
        if self._baseline.known:
            self._sample_outside()
        return replace(trial, leaked_bytes=leaked_bytes)

    def _flush(self) -> None:
        size = self.options.sizes.first
        with self._in_time(size):
            try:
                self._call_once(size)
            except Exception:  # the leak itself may fill the memory; it is measured next
                self._keeper.drop_gradients()

    def _call_once(self, batch_size: int) -> None:
        self._trials.call_once(batch_size, self._deadline_s())

    @scope
    def _in_time(self, batch_size: int) -> Iterator[None]:
        """Around calls outside any trial. Until here our time limit is a `TimeUp`: an error would pass for the step's."""
        try:
            yield
        except TimeUp as up:
            self._trials.interrupts.check_own(up)
            raise self._time_is_up(batch_size) from None

    # --- when to stop ---

    def device_lost(self, what: str) -> DeviceLostError:
        """The error for a device that can give no further verdict."""
        return DeviceLostError(
            f"a sticky error ({what}): this process can give no further verdict on {self.device.name}, and what was on "
            "it is lost. The state from before the first step is in this error's .snapshot. Start a new process, with a "
            "max_batch below this size if it happens again",
            trials=tuple(self.trials),
        )

    def _stop_if_final(self, trial: Trial) -> None:
        trials = tuple(self.trials)
        if trial.verdict is Verdict.POISONED:
            raise self.device_lost(f"batch {trial.batch_size}, {trial.error}")
        if trial.verdict is Verdict.TIMED_OUT:
            raise self._time_is_up(trial.batch_size)
        if trial.leaked_bytes > self._baseline.refused_bytes:
            raise UnreliableError(
                f"{format_bytes(trial.leaked_bytes)} did not come back after batch {trial.batch_size}, even after "
                "collecting garbage and a step at the smallest size, so every later trial would have less memory and "
                "the answer would be too small. Something keeps tensors of each step: a list of losses that still have "
                "their graph (append loss.item()), a cache keyed by shape, an output kept in an attribute",
                trials=trials,
            )

    def _work_at(self, batch_size: int) -> Work | None:
        """None where that size does not run."""
        with self._in_time(batch_size):
            try:
                with self.device.cap(None):
                    return count_work(lambda: self._call_once(batch_size))
            except Exception:
                return None
