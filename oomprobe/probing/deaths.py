"""Trials that end their process, or their time, and so say nothing about the size."""

from __future__ import annotations

from collections.abc import Iterator

from oomprobe.errors import StepFailedError, TimeLimitError, device_lost
from oomprobe.records.trials import LOST, NO_VERDICT, Runner, Trial, Verdict
from oomprobe.rules import diagnosis
from oomprobe.runners.signals import Clock

ENDED_ONCE = "batch {size} ended its process once ({how}); tried again in a new one: {again}"
STICKY_TWICE = (
    "batch {size} ended in a sticky error in two processes ({how}): the cause is not memory but a limit of a kernel, or a bug that "
    "appears at that size. The answer is below it"
)
DIED_TWICE = (
    "the process of the trial died twice at batch size {size} with no sign that memory was the cause, so there is no answer: {error}\n"
    "{alone}"
)


class Deaths:
    """Tries such a size once more in a new process, and ends the probe if that says nothing either."""

    def __init__(self, runner: Runner, clock: Clock, trials: list[Trial]) -> None:
        self._runner, self._clock, self._trials = runner, clock, trials

    def should_rerun(self, trial: Trial) -> bool:
        """Return whether to try again in a new process; raise TimeLimitError if no time is left for that."""
        says_nothing = trial.verdict in NO_VERDICT and not diagnosis.is_size_limit(self._trials, trial)
        if not says_nothing or not self._runner.facts.replaceable:
            return False
        if self._clock.is_over:
            raise self.time_is_up(trial)
        return True

    def compare(self, died: Trial, again: Trial) -> Iterator[str]:
        """Yield a note on a death that did not recur, or on a sticky error that did."""
        size, how = died.batch_size, f"{died.verdict}: {died.error}"
        if again.verdict not in NO_VERDICT:
            yield ENDED_ONCE.format(size=size, how=how, again=again.verdict)
        elif again.verdict is Verdict.POISONED:
            yield STICKY_TWICE.format(size=size, how=how)

    def stop_if_final(self, trial: Trial) -> None:
        """Raise if no further trial makes sense."""
        size = trial.batch_size
        if trial.verdict is Verdict.TIMED_OUT:
            raise self.time_is_up(trial)
        if trial.verdict not in LOST or diagnosis.is_size_limit(self._trials, trial):
            return
        if trial.verdict is Verdict.POISONED:
            what = f"batch {size}, {trial.error}"
            raise device_lost(self._runner.facts.device.name, what, replaceable=self._runner.facts.replaceable)
        alone = self._runner.facts.alone.format(batch_size=size)
        raise StepFailedError(DIED_TWICE.format(size=size, error=trial.error, alone=alone), batch_size=size)

    def time_is_up(self, trial: Trial) -> TimeLimitError:
        """Return the error for a trial that was running when the time passed."""
        places = f" ({trial.error})" if trial.ranks else ""
        return self._clock.time_is_up(f"during batch {trial.batch_size}, in trial {len(self._trials)}{places}")
