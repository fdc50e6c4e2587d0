"""Ctrl-C, SIGTERM, SIGHUP and time limits: they interrupt the step, never the code that cleans up after it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

from oomprobe.errors import EXIT_TERMINATED, TimeUp
from oomprobe.ground.frames import interrupts_library

ALARM: int | None = getattr(signal, "SIGALRM", None)  # Windows has none
# Which end a probe: SIGHUP comes when its terminal is closed. Windows has none.
ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
LONGEST_TIMER_S = 10**8  # three years; the kernel rejects timers of about 300


class Interrupts:
    """Delivers signals only while a step runs, here or in another process, and deferred ones afterwards.

    Unless the user handles or ignores SIGTERM or SIGHUP, it becomes ``SystemExit`` so that ``finally`` blocks run. Outside the main thread
    Python allows no handlers, and the user may be using the process's only timer; in both cases time limits are checked
    only after each call of the step.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._pending: list[int] = []
        self._open = self._polled = self._busy = False

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, *ENDING):
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._receive)
            if (
                ALARM is not None
                and signal.getsignal(ALARM) is signal.SIG_DFL
                and signal.getitimer(signal.ITIMER_REAL)[0] == 0
            ):
                self._before[ALARM] = signal.signal(ALARM, self._receive)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._open = False
        if ALARM in self._before:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in reversed(
            self._before.items()
        ):  # SIGINT last: once restored, it may raise anywhere
            signal.signal(number, handler)
        if (
            kind is KeyboardInterrupt
            and self._before.get(signal.SIGINT) is signal.default_int_handler
        ):
            # Drop a second Ctrl-C: the exception of the first carries the trials so far.
            self._pending = [number for number in self._pending if number != signal.SIGINT]
        self._deliver_pending()

    def delivered_until(
        self, deadline_s: float | None, *, polled: bool = False
    ) -> AbstractContextManager[None]:
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
        self._busy = (
            True  # first, because an alarm is dropped if neither `_open` nor `_busy` is set
        )
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
            self._open = (
                False  # if this one raises, a second signal waits until everything is restored
            )
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
        elif number in ENDING:
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
                signal.setitimer(
                    signal.ITIMER_REAL,
                    min(LONGEST_TIMER_S, max(1e-3, self._alarm_s - time.monotonic())),
                )
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
        self._interrupts._pending = [
            number for number in self._interrupts._pending if number != ALARM
        ]
        if self._alarm_s is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
