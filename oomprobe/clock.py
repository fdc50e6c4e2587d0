"""The time limits of a probe: what is left, until when a trial may run, and the error when it has passed."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from oomprobe.errors import TimeLimitError
from oomprobe.options import Options
from oomprobe.result import Trial
from oomprobe.units import format_seconds

CONFIRM_SLACK = 1.5  # a confirmation step may take this much longer than a step of the search


class Clock:
    """Starts when it is made."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._started_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started_s

    def deadline_s(self) -> float | None:
        """Until when a trial that begins now may run, on the monotonic clock; None: no limit."""
        left_s = self.left_s()
        return None if left_s is None else time.monotonic() + left_s

    def left_s(self) -> float | None:
        """How long a trial that begins now may run; None: no limit."""
        left_s = min(self._left_s(), self._options.trial_time_limit_s or float("inf"))
        return None if left_s == float("inf") else max(0.0, left_s)

    def _left_s(self) -> float:
        limit = self._options.time_limit_s
        return float("inf") if limit is None else limit - self.elapsed_s

    @property
    def end_s(self) -> float | None:
        """When the time of the whole probe has passed, on the monotonic clock; None: no limit."""
        limit = self._options.time_limit_s
        return None if limit is None else self._started_s + limit

    @property
    def over_s(self) -> float | None:
        """In how many seconds that is; None: no limit."""
        return None if self._options.time_limit_s is None else max(0.0, self._left_s())

    @property
    def is_over(self) -> bool:
        """Whether the time of the whole probe has passed."""
        return self._left_s() <= 0

    def suffices_to_confirm(self, size: int, trials: Iterable[Trial]) -> bool:
        """Whether what is left is more than the confirmation of a size takes."""
        rates = [t.step_s / t.batch_size for t in trials if t.step_s]
        calls = 1 + self._options.confirm_steps
        return self._left_s() >= CONFIRM_SLACK * calls * size * (rates[-1] if rates else 0.0)

    def time_is_up(self, batch_size: int, trials: Sequence[Trial]) -> TimeLimitError:
        """The error for a size during which the time passed."""
        return TimeLimitError(
            f"time passed during batch {batch_size} after {format_seconds(self.elapsed_s)} and {len(trials)} trials "
            f"(time_limit_s={self._options.time_limit_s}, trial_time_limit_s={self._options.trial_time_limit_s}), "
            "before a size was confirmed. Allow more time, start nearer with min_batch, or stop earlier with "
            "resolution=0.05",
            trials=tuple(trials),
        )
