"""Second tries: of a trial that says nothing about its size, and of one that failed as building left its process."""

from __future__ import annotations

from dataclasses import replace

from oomprobe.errors import StepFailedError, TimeLimitError, device_lost
from oomprobe.records.notes import Note, remark
from oomprobe.records.patience import Clock
from oomprobe.records.trials import LOST, NO_VERDICT, Phase, Request, Runner, Trial, Verdict
from oomprobe.rules import diagnosis

ENDED_ONCE = "batch {size} ended its process once ({how}); tried again in a new one: {again}"
STICKY_TWICE = (
    "batch {size} ended in a sticky error in two processes ({how}): the cause is not memory but a limit of a kernel, or a bug that "
    "appears at that size. The answer is below it"
)
DIED_TWICE = (
    "the process of the trial died twice at batch size {size} with no sign that memory was the cause, so there is no answer: {error}\n"
    "{alone}"
)

NEEDS_EMPTYING = (
    "batch {size} at memory_fraction={fraction:g} ran out of memory in call {call} of a fresh process as building left it, and ran with an "
    "empty cache: what building frees, such as weights in another dtype, stays reserved, and what training carves out of it pins the "
    "rest. Call {emptying} after building, before the first step"
)


class Deaths:
    """A policy of second tries: runs such a size once more in a new process, and ends the probe if that says nothing either."""

    def __init__(self, runner: Runner, clock: Clock, trials: list[Trial]) -> None:
        self._runner, self._clock, self._trials = runner, clock, trials
        self._died: Trial | None = None  # the last try, if it ended its process
        self.notes: list[Note] = []

    def second_try(self, request: Request, trial: Trial) -> Request | None:
        """Return the trial to run in a new process if this one says nothing; None for a second one, and for one that does.

        Raises:
            TimeLimitError: no time is left for it.
        """
        died, self._died = self._died, None
        if died is not None:
            self._compare(died, trial)
            return None
        says_nothing = trial.verdict in NO_VERDICT and not diagnosis.is_size_limit(
            self._trials, trial
        )
        if not says_nothing or not self._runner.facts.replaceable:
            return None
        if self._clock.is_over:
            raise self.time_is_up(trial)
        self._died = trial
        return replace(request, phase=Phase.RECHECK, fresh=True, must_run=True)

    def _compare(self, died: Trial, again: Trial) -> None:
        """Note a death that did not recur, or a sticky error that did."""
        size, how = died.batch_size, f"{died.verdict}: {died.error}"
        if again.verdict not in NO_VERDICT:
            self.notes.append(
                remark(ENDED_ONCE.format(size=size, how=how, again=again.verdict), size)
            )
        elif again.verdict is Verdict.POISONED:
            self.notes.append(remark(STICKY_TWICE.format(size=size, how=how), size))

    def stop_if_final(self, trial: Trial) -> None:
        """Raise if no further trial makes sense."""
        size = trial.batch_size
        if trial.verdict is Verdict.TIMED_OUT:
            raise self.time_is_up(trial)
        if trial.verdict not in LOST or diagnosis.is_size_limit(self._trials, trial):
            return
        if trial.verdict is Verdict.POISONED:
            what = f"batch {size}, {trial.error}"
            raise device_lost(
                self._runner.facts.device.name, what, replaceable=self._runner.facts.replaceable
            )
        alone = self._runner.facts.alone.format(batch_size=size)
        raise StepFailedError(
            DIED_TWICE.format(size=size, error=trial.error, alone=alone), batch_size=size
        )

    def time_is_up(self, trial: Trial) -> TimeLimitError:
        """Return the error for a trial that was running when the time passed."""
        places = f" ({trial.error})" if trial.ranks else ""
        return self._clock.time_is_up(
            f"during batch {trial.batch_size}, in trial {len(self._trials)}{places}"
        )


class AsBuilt:
    """A policy of second tries: a confirmation that failed in a process as building left it is made once more with an empty cache.

    Attributes:
        needs_emptying: Whether the answer ran only after the cache that building left was emptied.
    """

    def __init__(self, runner: Runner, fraction: float) -> None:
        self._runner, self._fraction = runner, fraction
        self._failed: Trial | None = None  # the last try, if it failed so
        self.needs_emptying = False
        self.notes: list[Note] = []

    @property
    def is_due(self) -> bool:
        """Whether a confirmation starts as building has left its process, as training does."""
        return self._runner.facts.builds and not self.needs_emptying

    def second_try(self, request: Request, trial: Trial) -> Request | None:
        """Return the trial to run with an empty cache; None if this one counts."""
        failed, self._failed = self._failed, None
        if failed is not None:
            self.needs_emptying = trial.passed
            if trial.passed:
                call, emptying = failed.steps + 1, self._runner.facts.device.emptying
                size = trial.batch_size
                text = NEEDS_EMPTYING.format(
                    size=size, fraction=self._fraction, call=call, emptying=emptying
                )
                self.notes.append(remark(text, size))
            return None
        if not request.as_built or trial.verdict is not Verdict.OOM:
            return None
        self._failed, self.needs_emptying = trial, True
        return replace(request, phase=Phase.CONFIRM, as_built=False)
