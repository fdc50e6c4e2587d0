"""Ctrl-C, SIGTERM and time limits: they interrupt the step, never the code that cleans up after it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

from oomprobe.errors import EXIT_TERMINATED, TimeLimitError, TimeUp
from oomprobe.ground.frames import interrupts_library
from oomprobe.ground.units import format_seconds
from oomprobe.records.options import Options
from oomprobe.records.patience import PATIENCE, Patience
from oomprobe.records.trials import Trial

ALARM: int | None = getattr(signal, "SIGALRM", None)  # Windows has none
LONGEST_TIMER_S = 10**8  # three years; the kernel rejects timers of about 300
CONFIRM_SLACK = 1.5  # a confirmation step may take this many times as long as a step of the search


class Interrupts:
    """Delivers signals only while a step runs, here or in another process, and deferred ones afterwards.

    Unless the user handles SIGTERM, it becomes ``SystemExit`` so that ``finally`` blocks run. Outside the main thread
    Python allows no handlers, and the user may be using the process's only timer; in both cases time limits are checked
    only after each call of the step.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._pending: list[int] = []
        self._open = self._polled = self._busy = False

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._receive)
            if ALARM is not None and _is_free(ALARM):
                self._before[ALARM] = signal.signal(ALARM, self._receive)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._open = False
        if ALARM in self._before:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in reversed(self._before.items()):  # SIGINT last: once restored, it may raise anywhere
            signal.signal(number, handler)
        if kind is KeyboardInterrupt and self._before.get(signal.SIGINT) is signal.default_int_handler:
            # Drop a second Ctrl-C: the exception of the first carries the trials so far.
            self._pending = [number for number in self._pending if number != signal.SIGINT]
        self._deliver_pending()

    def delivered_until(self, deadline_s: float | None, *, polled: bool = False) -> AbstractContextManager[None]:
        """Let signals through, and raise `TimeUp` at `deadline_s` on the monotonic clock.

        With `polled`, a signal that arrives inside library code waits for the next call of `poll`.
        """
        return _Delivered(self, deadline_s, polled)

    def poll(self) -> None:
        """Deliver signals that arrived inside library code; called where that code can safely raise."""
        if self._open and self._pending:
            self._open = False
            self._deliver_pending()
            self._open = True

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Defer signals during oomprobe's own work inside a step, which must not stop half-way."""
        self._busy = True  # first, because an alarm is dropped if neither `_open` nor `_busy` is set
        was_open, self._open = self._open, False
        try:
            yield
        finally:
            self._open, self._busy = was_open, False
        self.poll()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._open and self._polled and interrupts_library(frame):
            self._pending.append(number)
        elif self._open:
            self._open = False  # if this one raises, a second signal waits until everything is restored
            self._deliver(number, frame)
            self._deliver_pending()  # signals that arrived while the handler ran
            self._open = True  # the handler returned, so the step continues
        elif number != ALARM or self._busy:
            self._pending.append(number)

    def _deliver_pending(self) -> None:
        while self._pending:
            self._deliver(self._pending.pop(0), None)

    def _deliver(self, number: int, frame: FrameType | None) -> None:
        if number == ALARM:
            raise TimeUp
        before = self._before[number]
        if callable(before):
            before(number, frame)
        elif number == signal.SIGTERM:
            raise SystemExit(EXIT_TERMINATED)
        else:
            raise KeyboardInterrupt


class _Delivered:
    """A class rather than a generator, because a signal could be raised inside the generator's own frame."""

    def __init__(self, interrupts: Interrupts, deadline_s: float | None, polled: bool) -> None:
        self._interrupts, self._deadline_s, self._polled = interrupts, deadline_s, polled
        self._alarm_s = deadline_s if ALARM in interrupts._before else None

    def __enter__(self) -> None:
        self._interrupts._deliver_pending()
        try:
            self._interrupts._open, self._interrupts._polled = True, self._polled
            if self._alarm_s is not None:
                signal.setitimer(signal.ITIMER_REAL, min(LONGEST_TIMER_S, max(1e-3, self._alarm_s - time.monotonic())))
        except BaseException:
            self._hold_back()
            raise

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._hold_back()
        if kind is None and self._deadline_s is not None and time.monotonic() > self._deadline_s:
            raise TimeUp

    def _hold_back(self) -> None:
        self._interrupts._open = False
        # A late alarm is redundant: `__exit__` checks the deadline.
        self._interrupts._pending = [number for number in self._interrupts._pending if number != ALARM]
        if self._alarm_s is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)


def _is_free(alarm: int) -> bool:
    return signal.getsignal(alarm) is signal.SIG_DFL and signal.getitimer(signal.ITIMER_REAL)[0] == 0


class Clock:
    """The time limits of a probe, which starts with its clock, and how long its parts wait; times are on the monotonic clock."""

    def __init__(self, options: Options, end_s: float | None = None, *, patience: Patience = PATIENCE) -> None:
        self.options, self.patience = options, patience
        self._started_s = time.monotonic()
        limit_s = options.time_limit_s
        self.end_s = self._started_s + limit_s if end_s is None and limit_s is not None else end_s

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started_s

    def deadline_s(self) -> float | None:
        """Return the deadline of a trial that starts now; None for no limit."""
        limit_s = self.options.trial_time_limit_s
        ends_s = [self.end_s, None if limit_s is None else time.monotonic() + limit_s]
        return min((end_s for end_s in ends_s if end_s is not None), default=None)

    @property
    def is_over(self) -> bool:
        """Whether the time of the whole probe has passed."""
        return self.end_s is not None and time.monotonic() >= self.end_s

    def suffices_to_confirm(
        self, size: int, trials: Iterable[Trial], *, calls: int = 0, starting_s: float = 0.0
    ) -> bool:
        """Return whether there is time left to confirm `size`, with at least this many calls, after processes have started."""
        rates = [t.step_s / t.batch_size for t in trials if t.step_s]
        calls = max(calls, 1 + self.options.confirm_steps)
        needed_s = starting_s + CONFIRM_SLACK * calls * size * (rates[-1] if rates else 0.0)
        return self.end_s is None or self.end_s - time.monotonic() >= needed_s

    def time_is_up(self, when: str) -> TimeLimitError:
        """Return the error for a time limit that passed, such as ``"while the target was built"``."""
        return TimeLimitError(
            f"time passed {when}, after {format_seconds(self.elapsed_s)} (time_limit_s={self.options.time_limit_s}, "
            f"trial_time_limit_s={self.options.trial_time_limit_s}), before a size was confirmed. Allow more time, start closer "
            "to the limit with start_batch, or stop earlier with resolution=0.05"
        )
