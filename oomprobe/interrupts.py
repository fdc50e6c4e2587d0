"""Ctrl-C, SIGTERM and time limits: they reach the step, never the code that cleans up after it."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

ALARM: int | None = getattr(signal, "SIGALRM", None)  # Windows has none
LONGEST_TIMER_S = 10**8  # three years; the kernel's timer refuses about 300
EXIT_TERMINATED = 128 + signal.SIGTERM  # what a shell reports for a process that SIGTERM ended


class TimeUp(BaseException):
    """Raised inside a step when its time has passed. Not an Exception, so that no step swallows it.

    ``of`` is whose time: a step may run a probe of its own, through which this passes.
    """

    def __init__(self, of: Interrupts | None = None) -> None:
        super().__init__()
        self.of = of


class Interrupts:
    """Holds signals back except while a step runs; what came in between is delivered afterwards.

    SIGTERM, where nobody handles it, becomes ``SystemExit`` so that ``finally`` blocks run. Outside the main thread
    Python allows no handlers, and a process has one timer, which may be the user's own: in both cases time limits
    are only seen between calls of the step.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._pending: list[int] = []
        self._open = False

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._receive)
            if ALARM is not None and _timer_is_free(ALARM):
                self._before[ALARM] = signal.signal(ALARM, self._receive)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._open = False
        if ALARM in self._before:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in reversed(self._before.items()):  # SIGINT last: from then on it may raise anywhere
            signal.signal(number, handler)
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            self._drop_repeated_ctrl_c()
        self._deliver_pending()

    def _drop_repeated_ctrl_c(self) -> None:
        """A second Ctrl-C is answered by the first, whose exception carries the trials so far."""
        if self._before.get(signal.SIGINT) is signal.default_int_handler:
            self._pending = [number for number in self._pending if number != signal.SIGINT]

    def allowed(self, deadline_s: float | None) -> AbstractContextManager[None]:
        """Let signals through, and raise `TimeUp` at `deadline_s` on the monotonic clock."""
        return _Allowed(self, deadline_s)

    def check_own(self, up: TimeUp) -> None:
        """Raise what is about the time of another probe, around this one."""
        if up.of is not self:
            raise up

    def _let_through(self, deadline_s: float | None) -> None:
        self._deliver_pending()
        try:
            self._open = True
            if deadline_s is not None and ALARM in self._before:
                signal.setitimer(signal.ITIMER_REAL, _timer_s(deadline_s))
        except BaseException:
            self._hold_back(deadline_s)
            raise

    def _hold_back(self, deadline_s: float | None) -> None:
        self._open = False
        if deadline_s is not None and ALARM in self._before:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._open:
            self._open = False  # a second signal waits until everything is restored
            self._deliver(number, frame)
            self._deliver_pending()  # what came while the handler ran
            self._open = True  # a handler that returns lets the step go on
        elif number != ALARM:
            self._pending.append(number)

    def _deliver_pending(self) -> None:
        while self._pending:
            self._deliver(self._pending.pop(0), None)

    def _deliver(self, number: int, frame: FrameType | None) -> None:
        if number == ALARM:
            raise TimeUp(self)
        before = self._before[number]
        if callable(before):
            before(number, frame)
        elif number == signal.SIGTERM:
            raise SystemExit(EXIT_TERMINATED)
        else:
            raise KeyboardInterrupt


class _Allowed:
    """Not a `contextlib.contextmanager`: that one sets ``__traceback__``, which a user's exception may refuse."""

    def __init__(self, interrupts: Interrupts, deadline_s: float | None) -> None:
        self._interrupts, self._deadline_s = interrupts, deadline_s

    def __enter__(self) -> None:
        self._interrupts._let_through(self._deadline_s)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._interrupts._hold_back(self._deadline_s)
        if kind is None and self._deadline_s is not None and time.monotonic() > self._deadline_s:
            raise TimeUp(self._interrupts)


def _timer_is_free(alarm: int) -> bool:
    return signal.getsignal(alarm) is signal.SIG_DFL and signal.getitimer(signal.ITIMER_REAL)[0] == 0


def _timer_s(deadline_s: float) -> float:
    return min(LONGEST_TIMER_S, max(1e-3, deadline_s - time.monotonic()))
