"""The memory that trials may use: a fraction of what is available to this process."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from oomprobe.ground.units import format_bytes
from oomprobe.records.trials import Measured, Outcome, Runner, Trial, Verdict

OVER_HOST = (
    "{taken} of host memory were taken, {pinned} of them pinned, and host_memory allows {limit}"
)


class HostBudget:
    """The host memory that a size may take.

    Attributes:
        is_taken: Whether it is limited and a trial took some: then sizes must run, as a replay does
            not tell what it takes.
    """

    def __init__(self, limit_bytes: float) -> None:
        self._limit_bytes, self.is_taken = limit_bytes, False

    def judge(self, outcome: Outcome) -> Outcome:
        """Let a trial that passed fail if it took more."""
        trial = outcome.trial
        pinned_bytes = trial.pinned_bytes or 0
        taken_bytes = max(trial.host_bytes or 0, pinned_bytes)
        self.is_taken |= taken_bytes > 0 and self._limit_bytes < math.inf
        if not trial.passed or taken_bytes <= self._limit_bytes:
            return outcome
        error = OVER_HOST.format(
            taken=format_bytes(taken_bytes),
            pinned=format_bytes(pinned_bytes),
            limit=format_bytes(self._limit_bytes),
        )
        return replace(outcome, trial=replace(trial, verdict=Verdict.HOST_OOM, error=error))


class Budget:
    """The caps of trials, from a sample of the memory once a step has loaded its kernels.

    Attributes:
        available_bytes: Memory available to this process; 0 until it was sampled.
        total_bytes: `fraction` of that.
        is_final: Whether it was sampled after a step had loaded its kernels, which take memory outside the allocator.
    """

    def __init__(self, runner: Runner, fraction: float) -> None:
        self._runner, self._fraction = runner, fraction
        self.available_bytes = self.total_bytes = 0
        self.is_final = False

    def take(self, measured: Measured, *, is_final: bool = True) -> None:
        """Set the budget from a sample."""
        self.available_bytes = measured.available_bytes
        self.total_bytes = int(self._fraction * self.available_bytes)
        self.is_final |= is_final

    def expect(self, budget: Budget) -> None:
        """Begin with the budget of another row of the table, until the memory is sampled again."""
        self.available_bytes, self.total_bytes = budget.available_bytes, budget.total_bytes

    def search_cap(self) -> int | None:
        """Return the cap of every trial that does not grow; without a margin it is `grow_cap`. May sample the memory.

        None until the first pass of a runner that `grows_capped`, such as that of commands: until then it computes its own.
        """
        if self._fraction < 1:
            return self.total_bytes or None
        return self.grow_cap()

    def grow_cap(self) -> int | None:
        """Return the cap of trials that grow, and sample the memory on first use.

        None in a process that may die, and on devices without `edge_bytes`. Several ranks have one all the same: at the driver's
        limit NCCL may wait for ever.
        """
        facts = self._runner.facts
        if facts.grows_capped and self._fraction < 1:
            return self.search_cap()
        may_die = facts.replaceable and facts.world_size == 1
        if may_die or not facts.device.edge_bytes:
            return None
        if not self.available_bytes:
            self.take(self._runner.measure(), is_final=False)
        return max(self.total_bytes, self.available_bytes - facts.device.edge_bytes)

    def holds(self, trial: Trial) -> bool:
        """Return whether the trial's peak proves that it passes under the budget too."""
        if not trial.passed or trial.peak_reserved_bytes is None:
            return False
        return trial.peak_reserved_bytes <= self.total_bytes

    def decided(self, trial: Trial, trials: Iterable[Trial], *, is_steady: bool) -> bool:
        """Return whether the trial failed for lack of memory and would fail again: in a fresh process, or by the cap alone.

        That alone decides below what others leave free, for a step that `is_steady`, where no trial has left anything behind.
        """
        if trial.verdict is not Verdict.OOM:
            return False
        if trial.replayed and not self._runner.facts.device.is_simulated:
            return False  # a size that a real card has not run
        if self._runner.facts.grows_capped:
            return True
        if not is_steady or trial.cap_bytes is None:
            return False
        if trial.cap_bytes >= self.available_bytes:
            return False
        return not any(ran.leaked_bytes for ran in trials)

    def decided_all(self, trials: Sequence[Trial], *, is_steady: bool) -> bool:
        """Return whether that holds for all that failed."""
        return all(
            self.decided(failed, trials, is_steady=is_steady)
            for failed in trials
            if not failed.passed
        )
