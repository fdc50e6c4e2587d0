"""Trials in this process, one after another, with the memory brought back to its baseline in between."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from oomprobe.anatomy import Anatomy
from oomprobe.aside import Aside
from oomprobe.clock import CONFIRM_SLACK, Clock
from oomprobe.devices import Device, asked_bytes
from oomprobe.errors import NotTrainedError
from oomprobe.leaks import FURTHER_CALLS, Baseline
from oomprobe.result import SECOND_OPINIONS, Trial
from oomprobe.runner import Measured, Ran
from oomprobe.state import Keeper, Tracker
from oomprobe.state.surroundings import with_same_numbers
from oomprobe.trial import Request, Trials
from oomprobe.verdict import Verdict
from oomprobe.work import Work

NO_TIME_FOR_LEAKS = "time limit: none was left to see whether each step at batch {size} keeps memory"


class LocalRunner:
    """Runs trials of one model here.

    Args:
        device: Where they run.
        trials: Runs one of them.
        state: Puts weights back that trials have worn out.
        clock: Knows until when.
        recorded: The trials so far.
        smallest: The smallest size that may be tried.
        sleep: Waits for memory to come back.
    """

    isolated = replaceable = False

    def __init__(
        self,
        device: Device,
        trials: Trials,
        state: Keeper | Tracker,
        clock: Clock,
        recorded: Sequence[Trial],
        *,
        smallest: int,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.place, self.notes = device, trials.notes
        self.trials, self._state = trials, state
        self._aside = Aside(device, trials, recorded, clock)
        self._baseline = Baseline(
            device,
            clean=trials.start_cold,
            flush=self._flush,
            sleep=sleep,
        )
        self._smallest = smallest

    def measure(self) -> Measured:
        return Measured(
            available_bytes=asked_bytes(self.place, "available_bytes"), outside_bytes=self.place.outside_bytes()
        )

    def outside_bytes(self) -> int | None:
        return self.place.outside_bytes()

    def run(self, request: Request, *, awaited_until_s: float | None = None) -> Ran:
        """Run one trial, and put the memory back to its baseline.

        Args:
            request: What to run.
            awaited_until_s: On the monotonic clock, when whoever waits for the trial gives up; None: at its deadline.
        """
        before = self.place.outside_bytes()
        until_s = request.deadline_s if awaited_until_s is None else awaited_until_s
        request = replace(request, awaited_until_s=until_s)
        try:
            trial = self.trials.run(request)
        except NotTrainedError:  # the trials before have trained the weights, until a loss scaler sees infinities only
            if not self._state.put_weights_back():
                raise
            trial = self.trials.run(request)
        if trial.verdict is Verdict.POISONED:  # nothing more can be asked of it
            return Ran(trial=trial)
        trial = self._with_leak(trial, until_s)
        after = None
        if trial.passed and not self._baseline.known:
            after = self.measure()
            self._baseline.take(after.available_bytes)
        return Ran(
            trial=trial,
            measured=after,
            outside_before_bytes=before,
            outside_after_bytes=after.outside_bytes if after else self.place.outside_bytes(),
            refusal=self._baseline.refusal(trial),
        )

    def _with_leak(self, trial: Trial, until_s: float | None) -> Trial:
        """With what did not come back, and what each further step keeps."""
        left_bytes = self._baseline.settle(passed=trial.passed)
        if not trial.passed or trial.phase not in SECOND_OPINIONS:
            return replace(trial, leaked_bytes=left_bytes)
        rounds = trial.steps // len(self.step_names)  # each further call is one of every step
        kept_bytes = self._kept_by_each(trial, rounds, until_s) if self._baseline.may_be_growing(rounds) else 0
        return replace(trial, step_leaked_bytes=kept_bytes, leaked_bytes=max(left_bytes, kept_bytes * rounds))

    def _kept_by_each(self, trial: Trial, rounds: int, until_s: float | None) -> int:
        """What each further call keeps. Of the same shapes, also where those are random: a new one is kept by libraries."""
        if not _suffices_for_more(until_s, trial):
            self.notes[NO_TIME_FOR_LEAKS.format(size=trial.batch_size)] = None
            return 0
        enough: list[bool] = []
        again = with_same_numbers(lambda: enough.append(self._aside.flush(trial.batch_size)))
        kept_bytes = self._baseline.added_by(again)
        return kept_bytes if all(enough) else max(kept_bytes, self._baseline.grown_by_each(rounds))

    def work_at(self, batch_size: int) -> Work | None:
        return self._aside.work_at(batch_size)

    def anatomy_at(self, batch_size: int) -> Anatomy | None:
        return self._aside.anatomy_at(batch_size)

    def renew(self) -> None:
        """This process is the only one."""

    @property
    def threads(self) -> int:
        return torch.get_num_threads()

    @property
    def step_names(self) -> list[str]:
        return self.trials.step_names

    @property
    def nothing_stepped(self) -> bool:
        return self.trials.nothing_stepped

    @property
    def in_steps_s(self) -> float:
        return self.trials.in_steps_s

    def _flush(self) -> None:
        self._aside.flush(self._smallest)


def _suffices_for_more(until_s: float | None, trial: Trial) -> bool:
    """Whether there is time for further calls, so that what has passed is not ended in the midst of them."""
    return until_s is None or time.monotonic() + CONFIRM_SLACK * FURTHER_CALLS * (trial.step_s or 0.0) < until_s
