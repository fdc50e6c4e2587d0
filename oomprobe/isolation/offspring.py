"""A child as its template sees it: forked, listened to, ended, and nothing of it left."""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import socket
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from oomprobe.devices import linux
from oomprobe.errors import UnreliableError
from oomprobe.isolation import system
from oomprobe.isolation.wire import Message, Wire, above_standard

TAIL_BYTES = 2**14  # of what a child wrote to stderr, kept for the trial's record
GRACE_S = 2.0  # between SIGTERM and SIGKILL
TICK_S = 0.05  # between looks whether a child has ended whose grandchildren hold its pipes open
STUCK_S = 10.0  # of a child that is not ready yet and uses no processor: it waits for threads that are not there
STUCK_IN_STEP_S = 60.0  # the same in a step, which may wait for data
LOOK_S = 1.0  # between looks at the processor time of a session
NO_FORK = (
    "no process could be forked for a trial ({error}): the machine, or its cgroup, has no memory or no process to spare. "
    "Free some, or state a smaller budget, such as device='cpu:1GiB'"
)


class Tail:
    """The end of what comes through a pipe; all of it is passed on to stderr."""

    def __init__(self, end: int) -> None:
        os.set_blocking(end, False)
        self._end, self._kept = end, b""
        self.ended = False

    def fileno(self) -> int:
        return self._end

    def read(self) -> None:
        """Take what is there."""
        with suppress(BlockingIOError):
            while True:
                read = os.read(self._end, 2**16)
                if not read:
                    self.ended = True
                    return
                self._kept = (self._kept + read)[-TAIL_BYTES:]
                with suppress(OSError):
                    os.write(2, read)

    @property
    def text(self) -> str:
        return self._kept.decode(errors="replace").strip()

    def close(self) -> None:
        """Close the pipe."""
        os.close(self._end)


class Child:
    """One process that runs trials, leader of a session of its own."""

    def __init__(self, serve: Callable[[Wire], None], theirs: Wire | None = None) -> None:
        """Fork.

        Args:
            serve: Run in the child, until it ends.
            theirs: A template's own wire, which the child has no use for; None in the user's process.

        Raises:
            UnreliableError: there is no memory for another process.
        """
        self._is_in_template = theirs is not None
        self._spared = system.children_of(os.getpid())
        self._oom_kills = linux.oom_kills()
        here, there = (socket.socket(fileno=above_standard(end.detach())) for end in socket.socketpair())
        reading, writing = map(above_standard, os.pipe())
        system.flush()
        template = os.getpid()
        with warnings.catch_warnings():
            # Python 3.12 warns of threads, which libraries have; a child that waits for one is noticed.
            warnings.simplefilter("ignore")
            try:
                self.pid = os.fork()
            except OSError as error:
                for descriptor in (reading, writing, here.detach(), there.detach()):
                    os.close(descriptor)
                raise UnreliableError(NO_FORK.format(error=error)) from error
        if not self.pid:
            _begin(template, writing)
            for end in (here, theirs, reading):
                if end is not None:
                    os.close(end if isinstance(end, int) else end.fileno())
            _live(serve, Wire(there))
        there.close()
        os.close(writing)
        self.wire, self.tail = Wire(here), Tail(reading)
        self.ready_s: float | None = None  # since when, on the monotonic clock

    def ask(self, message: Message) -> None:
        """Send; a child that is gone shows itself when it is listened to."""
        with suppress(OSError):
            self.wire.send(message)

    def listen(
        self, parent: Wire | None, *, left_s: float | None, over_s: float | None, may_be_stuck: bool
    ) -> Message | None:
        """Wait for an answer.

        Args:
            parent: Watched too: whoever started the template may end. None in the user's process.
            left_s: How long a child that is ready may take; None: for as long as it likes.
            over_s: How long one that is not ready yet may take; None: the same.
            may_be_stuck: Whether a child that uses no processor is taken to hang.

        Returns:
            The answer, or a death; None when the parent has ended.
        """
        idle, asked_s = _Idle(self.pid), time.monotonic()
        while True:
            self._wait_for(parent)
            if parent is not None and parent.ended:
                return None
            answer = self._answer()
            if answer is not None:
                return answer
            if self.wire.ended or system.has_ended(self.pid):
                return self.end(why=None)
            since_s = None if self.ready_s is None else max(asked_s, self.ready_s)
            if left_s is not None and since_s is not None and time.monotonic() - since_s > left_s:
                return self.end(why="timed out")
            if self.ready_s is None and over_s is not None and time.monotonic() - asked_s > over_s:
                return self.end(why="timed out")
            if may_be_stuck and idle.for_s > (STUCK_S if since_s is None else STUCK_IN_STEP_S):
                return self.end(why="stuck")

    def _wait_for(self, parent: Wire | None) -> None:
        poll = select.poll()
        ends = [end for end in (self.wire, self.tail, parent) if end is not None and not end.ended]
        for end in ends:
            poll.register(end, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(TICK_S * 1000)}
        if self.tail.fileno() in ready and not self.tail.ended:
            self.tail.read()
        self._readable = self.wire.fileno() in ready and not self.wire.ended
        if parent is not None and parent.fileno() in ready:
            parent.read()  # it sends nothing while it waits: this is its end

    def _answer(self) -> Message | None:
        for message in self.wire.read() if self._readable else []:
            if "ready" not in message:
                return message
            self.ready_s = time.monotonic()
        return None

    def end(self, why: str | None) -> Message:
        """End it, and whatever it started.

        Args:
            why: What was wrong with it; None: it ended by itself.

        Returns:
            Its death.
        """
        if why is not None:
            self._terminate()
        elif self.wire.ended:
            self._ended_within(GRACE_S)  # closed its end, and may be dumping where it was
        last_words = self._last_words() if why is None else None
        system.end_group(self.pid)
        with suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)  # it may not lead a group yet
        ended = system.reap(self.pid, wait=True)
        if self._is_in_template:
            system.end_children(self._spared)  # orphans too, which it has adopted
        else:
            system.end_session(self.pid)
        self.tail.read()
        kills = linux.oom_kills()
        death = _death(ended, why=why, stderr=self.tail.text, oom_kills=_rise(self._oom_kills, kills))
        self.tail.close()
        self.wire.close()
        return last_words or death

    def _last_words(self) -> Message | None:
        """An answer that came whole before the end."""
        with suppress(OSError):
            while not self.wire.ended and select.select([self.wire], [], [], 0)[0]:
                for message in self.wire.read():
                    if "ready" not in message:
                        return message
        return None

    def _terminate(self) -> None:
        """SIGTERM first: it makes Python say where it hangs."""
        with suppress(OSError):
            os.killpg(self.pid, signal.SIGTERM)
        self._ended_within(GRACE_S)

    def _ended_within(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not system.has_ended(self.pid) and time.monotonic() < until:
            self.tail.read()
            time.sleep(TICK_S / 5)


class _Idle:
    """How long a process has used no processor."""

    def __init__(self, pid: int) -> None:
        self._pid, self._cpu_s = pid, -1.0
        self._since_s = self._looked_s = time.monotonic()

    @property
    def for_s(self) -> float:
        now = time.monotonic()
        if now - self._looked_s >= LOOK_S:
            cpu_s, self._looked_s = system.cpu_s(self._pid), now
            if cpu_s != self._cpu_s:
                self._cpu_s, self._since_s = cpu_s, now
        return now - self._since_s


def _begin(template: int, stderr: int) -> None:
    """The first that a child does."""
    os.setsid()
    system.die_with_parent()
    if os.getppid() != template:
        os._exit(0)
    system.prefer_to_be_killed()
    os.dup2(stderr, 2)
    os.close(stderr)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the probe, which ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGTERM, file=2, chain=True)


def _live(serve: Callable[[Wire], None], wire: Wire) -> None:
    """What a child does, and its end: nothing of the template's is run on the way out."""
    code = 0
    try:
        serve(wire)
    except BaseException:
        traceback.print_exc()
        code = 70
    system.flush()
    os._exit(code)


def _rise(before: int | None, after: int | None) -> int:
    return 0 if before is None or after is None else after - before


def _death(ended: tuple[int, int] | None, **seen: Any) -> Message:
    status, peak_bytes = ended or (0, 0)
    return {
        "death": {
            "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
            "code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
            "peak_resident_bytes": peak_bytes,
            **seen,
        }
    }
