"""One probe while it runs: the trials so far, the budget, the clock, and what becomes of a trial that ended badly."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import NoReturn

from oomprobe.anatomy import Anatomy
from oomprobe.clock import Clock
from oomprobe.devices import Simulated
from oomprobe.errors import DeviceLostError, OomProbeError, StepFailedError, UnreliableError
from oomprobe.idle import Idle
from oomprobe.leaks import refuse_growing
from oomprobe.neighbours import Neighbours, processes_on
from oomprobe.options import Options
from oomprobe.progress import Reporter
from oomprobe.rehearsal import ContradictedError, Rehearsals
from oomprobe.result import Phase, Trial
from oomprobe.runner import Measured, Ran, Runner
from oomprobe.search import STRIDE, Reply
from oomprobe.trial import Request
from oomprobe.verdict import Verdict

LOST = frozenset({Verdict.POISONED, Verdict.CRASHED})  # the process of the trial was, and with it any word on the size
ENDED = LOST | {Verdict.TIMED_OUT}  # no word about the size, and no way on


class Workbench:
    """Runs what the search asks for.

    Args:
        runner: Runs the trials.
        options: Of the probe.
        reporter: Told of each trial.
        clock: Started with the probe.
        trials: Filled with those that ran.
        sleep: Waits for neighbours.
    """

    def __init__(
        self,
        runner: Runner,
        options: Options,
        reporter: Reporter,
        clock: Clock,
        trials: list[Trial],
        *,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.runner, self.options, self.trials = runner, options, trials
        self.device, self.notes = runner.place, runner.notes
        self.available_bytes = self.budget_bytes = 0
        self._is_measured = False  # with the kernels of a step loaded
        self.state_verified = False
        self.anatomy: Anatomy | None = None
        self.neighbours = Neighbours(self.device.total_bytes, self.tenants, sleep=sleep)
        self._reporter, self._clock = reporter, clock
        self._simulated = isinstance(self.device, Simulated)
        kind = "host" if self.device.on_host else "device"
        self._idle = Idle(trials, options.sizes, runner.work_at, kind=kind)
        self._rehearsals = Rehearsals(self.device, single=len(runner.step_names) == 1)

    # --- what the search asks ---

    def ask(self, size: int, phase: Phase, *, capped: bool) -> Reply:
        """Run one size for the search."""
        steps = self._steps(phase)
        cap_bytes = self.budget_bytes if capped else self._ceiling_bytes()
        if phase is Phase.GROW and self._is_last(size):
            self._run_last_replayed()
        trial = self._rehearsed(size, phase, steps, cap_bytes) or self.run(
            size, phase, steps=steps, cap_bytes=cap_bytes
        )
        if phase is Phase.GROW:
            self._idle.refuse(nothing_stepped=self.runner.nothing_stepped)
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
        if self._simulated:
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

    def count_anatomy(self) -> None:
        """What rules of thumb need to know, where there is an answer: nothing that goes wrong here takes it away."""
        sizes = [trial.batch_size for trial in self.trials if trial.passed]
        with suppress(OomProbeError):
            self.anatomy = self.runner.anatomy_at(min(sizes))

    def refuse_leaking(self, answer: int) -> None:
        """Raise where the answer would not last."""
        refuse_growing(
            self.trials,
            answer,
            available_bytes=self.available_bytes,
            budget_bytes=self.budget_bytes,
            isolated=self.runner.replaceable,
        )

    def enough(self, good: int, bad: int) -> bool:
        """Whether the bracket is narrow enough, or only time for the confirmation is left."""
        luck = STRIDE if self.device.on_host else 0.0  # fragmentation of malloc's heap decides at less
        if bad - good <= max(self.options.resolution, luck) * good:
            return True
        if self._clock.suffices_to_confirm(good, self.trials):
            return False
        self.notes[
            f"time limit: bisecting stopped between {good}, which ran, and {bad}, which failed; "
            "a larger size may fit (allow more with time_limit_s)"
        ] = None
        return True

    def run(
        self,
        size: int,
        phase: Phase,
        *,
        steps: int,
        cap_bytes: int | None,
        accumulation_steps: int = 1,
    ) -> Trial:
        """Run one trial, and tell of it.

        Raises:
            TimeLimitError: its time passed.
            DeviceLostError: the process can give no further verdict.
            StepFailedError: a bug in the step, or its process died and not of memory.
            UnreliableError: memory did not come back.
        """
        request = Request(
            batch_size=size,
            phase=phase,
            steps=steps,
            cap_bytes=cap_bytes,
            accumulation_steps=accumulation_steps,
        )
        try:
            trial = self._lived_through(request)
        except (StepFailedError, UnreliableError) as error:
            error.trials = tuple(self.trials)
            raise
        if not self._rehearsals.borne_out(trial):
            self._contradicted(phase)
        return trial

    def _lived_through(self, request: Request) -> Trial:
        """Run a trial; where its process ended badly and another can be had, again in that, until it ends the same way."""
        ran, seen = self._run(request), set[Verdict]()
        while self._may_run_again(died := ran.trial, seen):
            if self._clock.is_over:
                raise self._clock.time_is_up(died.batch_size, self.trials)
            seen.add(died.verdict)
            self.runner.renew()
            ran = self._run(replace(request, phase=Phase.RECHECK))
            self._note_death(died, ran.trial)
        self._stop_if_final(ran)
        return ran.trial

    def _may_run_again(self, died: Trial, seen: set[Verdict]) -> bool:
        new = died.verdict in ENDED - seen
        return new and self.runner.replaceable and not self._is_ceiling(died)

    def _run(self, request: Request) -> Ran:
        self._reporter.started(request.batch_size, request.phase)
        ran = self.neighbours.undisturbed(lambda: self.runner.run(self._completed(request)), self.runner.outside_bytes)
        self.trials.append(ran.trial)
        self._reporter.finished(ran.trial)
        if ran.measured is not None and not self._is_measured:
            self._take(ran.measured)
        return ran

    def _completed(self, request: Request) -> Request:
        """With what is known only now."""
        return replace(
            request,
            deadline_s=self._clock.deadline_s(),
            smaller_passed=any(t.passed and t.batch_size < request.batch_size for t in self.trials),
            largest_passed=max((t.batch_size for t in self.trials if t.passed), default=None),
        )

    @property
    def step_names(self) -> list[str]:
        return self.runner.step_names

    @property
    def elapsed_s(self) -> float:
        return self._clock.elapsed_s

    @property
    def in_steps_s(self) -> float:
        return self.runner.in_steps_s

    # --- the budget ---

    def measure_available(self, *, loaded: bool) -> None:
        """Sample what this process may use, and with it the budget.

        Args:
            loaded: Whether a step has loaded its kernels: what is held outside the allocator is known only then.
        """
        measured = self.runner.measure()
        if loaded:
            self._take(measured)
        else:
            self._budget_from(measured)

    def _take(self, measured: Measured) -> None:
        self._budget_from(measured)
        self._is_measured = True
        self.neighbours.expect(measured.outside_bytes)

    def _budget_from(self, measured: Measured) -> None:
        self.available_bytes = measured.available_bytes
        self.budget_bytes = int(self.options.memory_fraction * self.available_bytes)

    @property
    def cap_bytes(self) -> int | None:
        """What a trial under the margin is held to; None where the card enforces it."""
        return self._ceiling_bytes() if self.options.memory_fraction == 1 else self.budget_bytes

    def _ceiling_bytes(self) -> int | None:
        """What a trial that grows is held to; None in a process that may die, and where there is no driver to upset."""
        edge_bytes = getattr(self.device, "edge_bytes", 0)
        if self.runner.replaceable or not edge_bytes:
            return None
        if not self.available_bytes:
            self._budget_from(self.runner.measure())  # until a step has loaded its kernels
        return max(self.budget_bytes, self.available_bytes - edge_bytes)

    def tenants(self) -> str:
        """Who else is on the device; empty where nobody knows."""
        if self.device.torch_device.type != "cuda" or self._simulated:
            return ""
        return processes_on(self.device.torch_device)

    # --- when to stop ---

    def device_lost(self, what: str) -> DeviceLostError:
        """The error for a device that can give no further verdict."""
        lost = (
            "new processes end in it too. Run the step once by itself with CUDA_LAUNCH_BLOCKING=1 to see where"
            if self.runner.replaceable
            else f"this process can give no further verdict on {self.device.name}, and what was on it is lost. The state "
            "from before the first step is in this error's .snapshot. Start a new process; trials that may lose theirs "
            "run in children of their own: oomprobe run path/to/train.py:build, or oomprobe.probe_target"
        )
        return DeviceLostError(f"a sticky error ({what}): {lost}", trials=tuple(self.trials))

    def _note_death(self, died: Trial, again: Trial) -> None:
        """One process ended badly for no reason that holds, or two did at one size."""
        size, how = died.batch_size, f"{died.verdict}: {died.error}"
        if again.verdict not in ENDED:
            self.notes[f"batch {size} ended its process once ({how}); tried again in a new one: {again.verdict}"] = None
        elif again.verdict is Verdict.POISONED:
            self.notes[
                f"batch {size} ended in a sticky error in two processes ({how}): that is not memory, but a limit of a "
                "kernel, or a bug that shows itself at that size. The answer is below it"
            ] = None

    def _smaller_passed(self, size: int) -> bool:
        return any(trial.passed and trial.batch_size < size for trial in self.trials)

    def _stop_if_final(self, ran: Ran) -> None:
        trial = ran.trial
        if trial.verdict is Verdict.TIMED_OUT:
            raise self._clock.time_is_up(trial.batch_size, self.trials)
        if trial.verdict in LOST and not self._is_ceiling(trial):
            if trial.verdict is Verdict.POISONED:
                raise self.device_lost(f"batch {trial.batch_size}, {trial.error}")
            self._stop_at_crash(trial)
        if ran.refusal is not None:
            raise UnreliableError(ran.refusal, trials=tuple(self.trials))

    def _is_ceiling(self, trial: Trial) -> bool:
        """A sticky error in two processes is the size's own, where a smaller one ran."""
        lost = [t for t in self.trials if t.verdict is Verdict.POISONED and t.batch_size == trial.batch_size]
        return len(lost) > 1 and self._smaller_passed(trial.batch_size)

    def _stop_at_crash(self, trial: Trial) -> NoReturn:
        raise StepFailedError(
            f"the process of the trial died twice at batch size {trial.batch_size}, and nothing says that it was for want "
            f"of memory, so there is no answer: {trial.error}\n"
            f"Run step_fn(model, {trial.batch_size}) once by itself to see it",
            batch_size=trial.batch_size,
        )
