"""What forks trials, as a probe sees it: a template, gone in the end with everything it started, or this very process."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from oomprobe.interrupts import Interrupts
from oomprobe.isolation import system
from oomprobe.isolation.offspring import GRACE_S, Child
from oomprobe.isolation.wire import Message, Wire, above_standard

ENDED, TIMED_OUT = "the process that supervises trials ended", "timed out"
ANSWER_S = GRACE_S + 30.0  # beyond the limit of a trial: the template has ended it by then, or hangs itself
CLOSE_S = 5.0
LOOK_S = 1.0  # between looks whether the template is alive
# Before torch, which takes seconds to import: to die with whoever started it (linux/prctl.h, PR_SET_PDEATHSIG).
_COMMAND = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.getppid() == {parent} or os._exit(0); "
    "sys.path[:] = {path!r}; from oomprobe.isolation import template; template.main({end})"
)


def silent(why: str) -> Message:
    """The death of a template, told like that of a child."""
    seen = {"signal": None, "code": None, "peak_resident_bytes": 0, "stderr": "", "oom_kills": 0}
    return {"death": {**seen, "why": why}}


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


class TemplateProcess:
    """A template, and whatever runs in it.

    Args:
        interrupts: Lets signals reach a wait for an answer.
    """

    def __init__(self, interrupts: Interrupts) -> None:
        self._interrupts = interrupts
        here, there = (socket.socket(fileno=above_standard(end.detach())) for end in socket.socketpair())
        path = [entry for entry in sys.path if isinstance(entry, str)]  # Python's import ignores others
        command = _COMMAND.format(parent=os.getpid(), path=path, end=there.fileno())
        warnings = [part for option in sys.warnoptions for part in ("-W", option)]
        self._process = subprocess.Popen(
            [sys.executable, *warnings, "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=None if _is_open(1) else subprocess.DEVNULL,
            stderr=None if _is_open(2) else subprocess.DEVNULL,
            pass_fds=[there.fileno()],
            start_new_session=True,
        )
        there.close()
        self._wire = Wire(here)
        self._forked: int | None = None
        self.lost = False

    def tell(self, message: Message) -> None:
        """Send a message that has no answer."""
        with suppress(OSError):  # the next question shows that nobody is there
            self._wire.send(message)

    def ask(self, message: Message, *, until_s: float | None) -> Message:
        """Send a message, and wait for its answer.

        Args:
            message: For the template.
            until_s: On the monotonic clock; None: for as long as it takes.

        Returns:
            The answer, or a death.
        """
        self.tell(message)
        with self._interrupts.allowed(None):
            answer = self._answer(until_s)
        self.lost = answer.get("death", {}).get("why") in (ENDED, TIMED_OUT)
        return answer

    def _answer(self, until_s: float | None) -> Message:
        while not self._wire.ended:
            left_s = LOOK_S if until_s is None else until_s - time.monotonic()
            if not select.select([self._wire], [], [], min(LOOK_S, max(0.0, left_s)))[0]:
                if left_s <= 0:
                    return silent(TIMED_OUT)
                if self._process.poll() is not None:  # and what it forked holds its end of the socket open
                    return silent(ENDED)
                continue
            for message in self._wire.read():
                if "forked" not in message:
                    return message
                self._forked = message["forked"]
        return silent(ENDED)

    def close(self) -> None:
        """End it: it ends its children when its socket is closed; one that does not answer is killed with them."""
        self._wire.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            left = system.descendants_of(self._process.pid)
            system.end_group(self._process.pid)
            for pid in left:
                system.end_group(pid)
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait()
        if self._process.returncode != 0:
            for leader in (self._process.pid, self._forked):
                if leader is not None:
                    system.end_group(leader)


class ThisProcess:
    """Forks a child of this process, which has the model, for each question.

    Args:
        serve: Run in the child.
        interrupts: Lets signals reach a wait for an answer.
    """

    lost = False

    def __init__(self, serve: Callable[[Wire], None], interrupts: Interrupts) -> None:
        self._serve, self._interrupts = serve, interrupts

    def tell(self, message: Message) -> None:
        """Each child is a new one already."""

    def ask(self, message: Message, *, until_s: float | None) -> Message:
        """As `TemplateProcess.ask`."""
        child = Child(self._serve)
        answer: Message | None = None
        try:
            child.ask(message["ask"])
            with self._interrupts.allowed(None):
                answer = child.listen(
                    None, left_s=message["left_s"], over_s=message["over_s"], may_be_stuck=message["may_be_stuck"]
                )
        finally:
            if answer is None or "death" not in answer:
                system.end_group(child.pid)
                child.end(why=None)
        assert answer is not None
        return answer if "death" in answer else {**answer, "stderr": child.tail.text}

    def close(self) -> None:
        """Nothing is left."""
