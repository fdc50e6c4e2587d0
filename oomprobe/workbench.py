"""One probe while it runs: the trials so far, the budget, the baseline of memory, the clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from oomprobe.aside import Aside
from oomprobe.clock import Clock
from oomprobe.devices import Device, Simulated
from oomprobe.errors import DeviceLostError, StepFailedError, UnreliableError
from oomprobe.idle import refuse_idle
from oomprobe.leaks import Baseline
from oomprobe.options import Options
from oomprobe.progress import Reporter
from oomprobe.rehearsal import ContradictedError, Rehearsals
from oomprobe.result import Phase, Trial
from oomprobe.search import Reply
from oomprobe.state import Keeper
from oomprobe.trial import Request, Trials
from oomprobe.verdict import Verdict
from oomprobe.work import compiled_graphs


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
        self._trials, self._keeper, self._reporter = trials, keeper, reporter
        self._clock = Clock(options)
        self._aside = Aside(device, trials, self.trials, self._clock, keeper.drop_gradients)
        self._baseline = Baseline(device, drop_gradients=keeper.drop_gradients, flush=self._flush, sleep=sleep)
        self._rehearsals = Rehearsals(device, single=len(trials.step_names) == 1)
        self._graphs_before = compiled_graphs()

    # --- what the search asks ---

    def warm(self, batch_size: int) -> None:
        """Bring the process to the state in which its memory is counted."""
        self._aside.warm(batch_size)

    def ask(self, size: int, phase: Phase, *, capped: bool) -> Reply:
        """Run one size for the search."""
        steps = self._steps(phase)
        cap_bytes = self.budget_bytes if capped else None
        if phase is Phase.GROW and self._is_last(size):
            self._run_last_replayed()
        trial = self._rehearsed(size, phase, steps, cap_bytes) or self.run(
            size, phase, steps=steps, cap_bytes=cap_bytes
        )
        if phase is Phase.GROW:
            refuse_idle(
                self.trials,
                self.options.sizes,
                self._aside.work_at,
                nothing_stepped=self._trials.nothing_stepped,
                kind="host" if self.device.on_host else "device",
            )
        peak = trial.peak_reserved_bytes
        return Reply(passed=trial.passed, within_cap=trial.passed and peak is not None and peak <= self.budget_bytes)

    def _rehearsed(self, size: int, phase: Phase, steps: int, cap_bytes: int | None) -> Trial | None:
        """The trial of a size that need not be run; None for others, such as those between which the limit lies."""
        if phase is Phase.GROW and self._is_last(size):
            return None
        trial = self._rehearsals.trial(size, phase, steps=steps, cap_bytes=cap_bytes)
        if trial is None:
            return None
        if phase is Phase.GROW and not trial.passed:
            self._run_last_replayed()
            return None
        self.trials.append(trial)
        self._reporter.finished(trial)
        return trial

    def _steps(self, phase: Phase) -> int:
        """Full steps of a trial; a simulated device repeats them without running them, so none need fewer."""
        if isinstance(self.device, Simulated):
            return max(self.options.steps, self.options.confirm_steps)
        return self.options.confirm_steps if phase is Phase.CONFIRM else self.options.steps

    def _is_last(self, size: int) -> bool:
        return size == self.options.sizes.last

    def _run_last_replayed(self) -> None:
        """The last size that passed is the lower end of the bracket: it is run, where it was only replayed."""
        if not self.trials or not self.trials[-1].replayed:
            return
        last = self.trials.pop()
        if not self.run(last.batch_size, last.phase, steps=self._steps(last.phase), cap_bytes=last.cap_bytes).passed:
            raise ContradictedError

    def stop_rehearsing(self) -> None:
        """Forget what was only replayed, and run every size from here on."""
        self._rehearsals.stop()
        self.trials[:] = [trial for trial in self.trials if not trial.replayed]

    def _contradicted(self, phase: Phase) -> None:
        """While growing, the ends of the bracket are still to be run; later, what was only replayed has decided."""
        if phase is not Phase.GROW and any(trial.replayed for trial in self.trials):
            raise ContradictedError
        self.stop_rehearsing()

    def enough(self, good: int, bad: int) -> bool:
        """Whether the bracket is narrow enough, or only time for the confirmation is left."""
        if bad - good <= self.options.resolution * good:
            return True
        if self._clock.suffices_to_confirm(good, self.trials):
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
        self._aside.prime(size)
        request = Request(
            batch_size=size,
            phase=phase,
            steps=steps,
            cap_bytes=cap_bytes,
            accumulation_steps=accumulation_steps,
            deadline_s=self._clock.deadline_s(),
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
            self.measure_available()
            self._baseline.take(self.available_bytes)
        if not self._rehearsals.borne_out(trial):
            self._contradicted(phase)
        return trial

    def _smaller_passed(self, size: int) -> bool:
        """Whether what fails now has run at a smaller size, or at this one with more memory."""
        warmed = self._aside.warmed_at is not None and self._aside.warmed_at <= size
        return warmed or any(t.passed and t.batch_size < size for t in self.trials)

    @property
    def graphs_compiled(self) -> int:
        return compiled_graphs() - self._graphs_before

    @property
    def step_names(self) -> list[str]:
        return self._trials.step_names

    @property
    def elapsed_s(self) -> float:
        return self._clock.elapsed_s

    @property
    def in_steps_s(self) -> float:
        return self._trials.in_steps_s

    # --- memory between trials ---

    def measure_available(self) -> None:
        """Sample what this process may use, and with it the budget."""
        self.available_bytes = self.device.available_bytes()
        self.budget_bytes = int(self.options.memory_fraction * self.available_bytes)
        self._sample_outside()

    @property
    def cap_bytes(self) -> int | None:
        """What a trial under the margin is held to; None where the card enforces it."""
        return self.budget_bytes if self.options.memory_fraction < 1 else None

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
        self._aside.flush(self.options.sizes.first)

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
        if trial.verdict is Verdict.POISONED:
            raise self.device_lost(f"batch {trial.batch_size}, {trial.error}")
        if trial.verdict is Verdict.TIMED_OUT:
            raise self._clock.time_is_up(trial.batch_size, self.trials)
        self._baseline.refuse(trial, tuple(self.trials))
