"""Threads of code on a simulated card: they are on it, too, and operators run one at a time."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from oomprobe.errors import SimulationError
from oomprobe.ground.frames import user_line
from oomprobe.ground.replaced import Patch

GOES_ON = (
    "{line} uses the card in a thread that goes on when the call that started it has ended, and "
    "then nothing is simulated: let it end within the call, move tensors to the card in the step "
    "itself, or probe on a real device"
)
JOIN_S = 1.0  # for which a thread may go on, to end


class Threads:
    """The threads of a card.

    Attributes:
        lock: Is held while an operator runs, and while a block is freed.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._handles = dict[int, int]()  # of cuBLAS, by the thread's identifier
        self._users = dict[threading.Thread, str]()  # of the card, with the line that first used it
        self._error: BaseException | None = None

    def are_simulated_here(self) -> bool:
        """Return whether this thread is on the card."""
        return threading.get_ident() in self._handles

    def handle(self) -> int:
        """Return the number of this thread's handle of cuBLAS: a new thread gets a free one."""
        return self._handles.get(threading.get_ident(), 0)

    def enter(self) -> None:
        """Put this thread on the card."""
        taken = {*self._handles.values()}
        free = min({*range(len(taken) + 1)} - taken)
        self._handles[threading.get_ident()] = free

    def leave(self) -> None:
        """Take this thread off the card."""
        self._handles.pop(threading.get_ident(), None)

    def starting(
        self, modes: Callable[[], AbstractContextManager[object]], *, in_step: bool
    ) -> Iterator[Patch]:
        """Yield what lets threads begin inside the modes, and ends a step with what they raise."""
        thread_type: Any = threading.Thread
        begin, report = thread_type._bootstrap_inner, threading.excepthook

        def begin_inside(thread: threading.Thread) -> None:
            self.enter()
            try:
                with modes():
                    begin(thread)
            finally:
                self.leave()

        def end_step(raised: threading.ExceptHookArgs) -> None:
            report(raised)
            if raised.exc_type is SystemExit:
                return  # it ends the thread alone
            self._error = raised.exc_value
            # The step may wait for ever for what this thread would have made: its time is up.
            if callable(signal.getsignal(signal.SIGALRM)):
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)

        yield thread_type, "_bootstrap_inner", begin_inside
        if in_step:
            yield threading, "excepthook", end_step

    def in_main(self, act: Callable[[], object]) -> None:
        """Call a function, unless this is another thread than the main one."""
        if threading.current_thread() is threading.main_thread():
            act()

    def use_card(self) -> None:
        """Note that this thread uses the card, or end it, if the call that started it has ended."""
        thread = threading.current_thread()
        if thread is threading.main_thread():
            return
        if thread not in self._users:
            self._users[thread] = user_line()
        if not self._users[thread]:
            raise SystemExit

    def end_call(self, *, passed: bool) -> None:
        """Raise what a thread of the call has raised, or refuse one that goes on."""
        error, self._error = self._error, None
        refusals = []
        for thread, line in self._users.items():
            thread.join(JOIN_S)
            if thread.is_alive() and line:
                self._users[thread] = ""
                refusals.append(GOES_ON.format(line=line))
        self._users = {thread: line for thread, line in self._users.items() if thread.is_alive()}
        if error is not None:
            raise error
        if refusals and passed:
            raise SimulationError(refusals[0])
