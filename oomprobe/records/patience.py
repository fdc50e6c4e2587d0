"""How long each part of a probe waits, and the time limits of a probe."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from oomprobe.errors import TimeLimitError
from oomprobe.ground.units import format_seconds, known
from oomprobe.records.options import Options
from oomprobe.records.trials import Trial

SEEN_STEPS = 3  # full steps that confirm an answer, if a look has shown what later calls need
UNSEEN_STEPS = 5  # otherwise
CONFIRM_SLACK = 1.5  # a confirmation step may take this many times as long as a step of the search


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long each part of a probe waits. The values are for real machines; tests hand in shorter ones."""

    # Many calls of a step. Of 162 answers confirmed over 8 calls, 6 failed within 200 calls under the cap; over 15, 2; over 25,
    # 1; over 50, none.
    look_calls: int = 50  # of a look and of a confirmation, if time allows
    # Time for the calls of each, or as long as the search has taken if that is more.
    look_s: float = 10.0
    # The same on host memory, where calls are slow and answers approximate.
    host_look_s: float = 1.0
    unasked_host_s: float = 120.0  # for a whole probe of host memory that no option asked for
    # Where a failure is expensive, a deciding trial keeps calling for this share of its cost: more calls see more, and a failed
    # confirmation costs two failures.
    cost_share: float = 1 / 4

    slow_start_s: float = (
        1.0  # of the first call of a size, beyond a later one: as torch.compile takes
    )
    # Other processes on the device: the first wait for their memory; the next one takes twice as long.
    neighbour_s: float = 2.0

    # Processes that run trials.
    ending_s: float = 2.0  # between SIGTERM and SIGKILL
    cpu_reading_s: float = 1.0  # between readings of a session's processor time
    stuck_s: float = (
        10.0  # a starting child that uses no processor time waits for threads that were not forked
    )
    stuck_in_step_s: float = 60.0  # the same inside a step, which may wait for data

    # Several ranks.
    building_s: float = 600.0  # for the other ranks to build the target, once one has
    late_s: float = 300.0  # for the other ranks to end a trial that one has passed; rank 0 alone may save a checkpoint
    failing_s: float = 5.0  # for the other ranks to say that they have failed too, once one has
    returning_s: float = 30.0  # for the memory of a group that was ended to come back

    # Commands.
    failed_s: float = 5.0  # for a command to end by itself after a process of it has failed
    handling_s: float = 60.0  # the same after an out-of-memory error that torch may have handled itself, if no step follows
    missing_s: float = 60.0  # for the ranks of other machines to report, after those of this one have made their steps

    sleep: Callable[[float], None] = time.sleep  # for memory that others are to give back


PATIENCE = Patience()


class Clock:
    """The time limits of a probe, which starts with its clock, and how long its parts wait; times are on the monotonic clock."""

    def __init__(
        self, options: Options, end_s: float | None = None, *, patience: Patience = PATIENCE
    ) -> None:
        self.options, self.patience = options, patience
        self._started_s = time.monotonic()
        self.end_s = end_s
        if options.time_limit_s is not None:
            self.limit(options.time_limit_s)

    def limit(self, seconds: float) -> None:
        """Let the probe end after so many seconds, unless an option has set another limit."""
        if self.end_s is None:
            self.end_s = self._started_s + seconds

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started_s

    @property
    def left_s(self) -> float:
        """Seconds until the end; infinite without a limit."""
        return math.inf if self.end_s is None else self.end_s - time.monotonic()

    def left_of(self, options: Options) -> Options:
        """Return options of one row of a table, which may take what is left of the table's time."""
        left_s = self.left_s
        if left_s == math.inf:
            return options
        return replace(options, time_limit_s=max(1e-3, left_s))

    def deadline_s(self) -> float | None:
        """Return the deadline of a trial that starts now; None for no limit."""
        limit_s = self.options.trial_time_limit_s
        ends_s = [self.end_s, None if limit_s is None else time.monotonic() + limit_s]
        return min(known(ends_s), default=None)

    @property
    def is_over(self) -> bool:
        """Whether the time of the whole probe has passed."""
        return self.left_s <= 0

    def suffices_to_confirm(
        self, size: int, trials: Iterable[Trial], *, calls: int = 0, starting_s: float = 0.0
    ) -> bool:
        """Return whether there is time left to confirm `size`, with at least this many calls, after processes have started."""
        rates = [t.step_s / t.batch_size for t in trials if t.step_s]
        calls = max(calls, 1 + (self.options.confirm_steps or UNSEEN_STEPS))
        needed_s = starting_s + CONFIRM_SLACK * calls * size * (rates[-1] if rates else 0.0)
        return self.left_s >= needed_s

    def time_is_up(self, when: str) -> TimeLimitError:
        """Return the error for a time limit that passed, such as ``"while the target was built"``."""
        return TimeLimitError(
            f"time passed {when}, after {format_seconds(self.elapsed_s)} (time_limit_s={self.options.time_limit_s}, "
            f"trial_time_limit_s={self.options.trial_time_limit_s}), before a size was confirmed. Allow more time, start closer "
            "to the limit with start_batch, or stop earlier with resolution=0.05"
        )
