"""A process that runs trials, as its parent sees it: started, asked, listened to, ended, and nothing of it left."""

from __future__ import annotations

import faulthandler
import os
import secrets
import select
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress

from oomprobe.devices import linux
from oomprobe.errors import UnreliableError
from oomprobe.isolation import system
from oomprobe.isolation.exit_status import ExitStatus
from oomprobe.isolation.wire import Message, Wire, above_standard

TAIL_BYTES = 2**14  # of what a process wrote to stderr, kept for the trial's record
GRACE_S = 2.0  # between SIGTERM and SIGKILL
TICK_S = 0.05  # between looks whether a process has ended while others hold its pipes open
LOOK_S = 1.0  # between looks at the processor time of a session
NO_FORK = (
    "no process could be started for a trial ({error}): the machine, or its cgroup, has no memory or no process to spare. "
    "Free some, or state a smaller budget, such as device='cpu:1GiB'"
)
# Before torch, which takes seconds to import: to die with whoever started it (linux/prctl.h, PR_SET_PDEATHSIG).
_COMMAND = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.getppid() == {parent} or os._exit(0); "
    "sys.path[:] = {path!r}; from oomprobe.isolation import worker; worker.main({end})"
)


class Process:
    """One process that runs trials, leader of a session of its own."""

    def __init__(self, start: Callable[[Wire, int, tuple[int, int]], int], mark: str = "") -> None:
        """Start one; see `forked` and `spawned`.

        Raises:
            UnreliableError: there is no memory for another process.
        """
        self._oom_kills, self._mark = linux.oom_kills(), mark
        here, there = (socket.socket(fileno=above_standard(end.detach())) for end in socket.socketpair())
        reading, writing = map(above_standard, os.pipe())
        self.wire, self._stderr = Wire(here), reading
        self._said, self._is_heard = b"", True  # whether what it writes to stderr is passed on
        os.set_blocking(reading, False)
        system.flush()
        try:
            self.pid = start(Wire(there), writing, (here.fileno(), reading))
        except OSError as error:
            self.wire.close()
            os.close(reading)
            raise UnreliableError(NO_FORK.format(error=error)) from error
        finally:
            there.close()
            os.close(writing)

    @classmethod
    def forked(cls, serve: Callable[[Wire], None]) -> Process:
        """Fork this process; `serve` runs in the child until it ends."""
        parent = os.getpid()

        def start(theirs: Wire, stderr: int, ours: tuple[int, int]) -> int:
            with warnings.catch_warnings():
                # Python 3.12 warns of threads, which libraries have; a child that waits for one is noticed.
                warnings.simplefilter("ignore")
                pid = os.fork()
            if not pid:
                for descriptor in ours:
                    os.close(descriptor)
                _live(parent, stderr, lambda: serve(theirs))
            return pid

        return cls(start)

    @classmethod
    def spawned(cls) -> Process:
        """Start a worker, a program of its own, and return while it still imports torch."""
        mark = secrets.token_hex(8)
        path = [entry for entry in sys.path if isinstance(entry, str)]  # Python's import ignores others
        options = [part for option in sys.warnoptions for part in ("-W", option)]

        def start(theirs: Wire, stderr: int, ours: tuple[int, int]) -> int:
            os.set_inheritable(theirs.fileno(), True)
            command = _COMMAND.format(parent=os.getpid(), path=path, end=theirs.fileno())
            files = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0), (os.POSIX_SPAWN_DUP2, stderr, 2)]
            if not _is_open(1):
                files.append((os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0))
            return os.posix_spawn(
                sys.executable,
                [sys.executable, *options, "-c", command],
                {**os.environ, system.MARK: mark},
                file_actions=files,
                setsid=True,
            )

        return cls(start, mark)

    @property
    def said(self) -> str:
        """The end of what it wrote to stderr."""
        return self._said.decode(errors="replace").strip()

    def tell(self, message: Message) -> None:
        """Send; a process that is gone shows itself when it is listened to."""
        with suppress(OSError):
            self.wire.send(message)

    def listen(self, *, deadline_s: float | None, stuck_s: float | None = None) -> Message | ExitStatus:
        """Wait for a message.

        Args:
            deadline_s: Until when, on the monotonic clock; None: for as long as it takes.
            stuck_s: After how long without any processor time it is taken to hang; None: never.

        Returns:
            The message, or how the process ended, or was ended.
        """
        idle = _Idle(self.pid)
        while True:
            if message := self._heard(TICK_S):
                return message
            if self.wire.ended or system.has_ended(self.pid):
                return self.end()
            if deadline_s is not None and time.monotonic() > deadline_s:
                return self.end("timed out")
            if stuck_s is not None and idle.for_s > stuck_s:
                return self.end("stuck")

    def _heard(self, wait_s: float) -> Message | None:
        poll = select.poll()
        poll.register(self._stderr, select.POLLIN)
        if not self.wire.ended:
            poll.register(self.wire, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(wait_s * 1000)}
        if self._stderr in ready:
            self._read_stderr()
        return next(iter(self.wire.read()), None) if self.wire.fileno() in ready else None

    def _read_stderr(self) -> None:
        """Take what is there, and pass it on."""
        with suppress(BlockingIOError):
            while said := os.read(self._stderr, 2**16):
                self._said = (self._said + said)[-TAIL_BYTES:]
                if self._is_heard:
                    with suppress(OSError):
                        os.write(2, said)

    def end(self, why: str | None = None) -> Message | ExitStatus:
        """End it, and whatever it started.

        Args:
            why: What was wrong with it; None: nothing, or it ended by itself.

        Returns:
            How it ended; or what it had still said, where it ended by itself.
        """
        if why is not None:  # SIGTERM first: it makes Python say where it hangs
            self._is_heard = False
            with suppress(OSError):
                os.kill(self.pid, signal.SIGTERM)
        if why is not None or self.wire.ended:  # where it closed its end, it may be dumping where it was
            until_s = time.monotonic() + GRACE_S
            while not system.has_ended(self.pid) and time.monotonic() < until_s:
                self._read_stderr()
                time.sleep(TICK_S / 5)
        last_words = None
        while why is None and last_words is None and not self.wire.ended and self._is_readable():
            last_words = next(iter(self.wire.read()), None)
        system.kill_session(self.pid)
        status, peak_bytes = system.reap(self.pid) or (0, 0)
        if self._mark:
            system.kill_marked(self._mark)
        self._read_stderr()
        kills = linux.oom_kills()
        os.close(self._stderr)
        self.wire.close()
        return last_words or ExitStatus(
            signal=os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
            code=os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
            why=why,
            stderr=self.said,
            peak_resident_bytes=peak_bytes,
            oom_kills=0 if kills is None or self._oom_kills is None else kills - self._oom_kills,
        )

    def _is_readable(self) -> bool:
        return bool(select.select([self.wire], [], [], 0)[0])


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


def begin() -> None:
    """What every process of trials does first: say where it is when it is ended, and leave Ctrl-C to the probe."""
    system.prefer_to_be_killed()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGTERM, file=2, chain=True)


def _live(parent: int, stderr: int, serve: Callable[[], None]) -> None:
    """What a forked child does, and its end: nothing of its parent's is run on the way out."""
    code = 0
    try:
        os.setsid()
        system.die_with_parent()
        if os.getppid() != parent:
            os._exit(0)
        os.dup2(stderr, 2)
        begin()
        serve()
    except BaseException:
        traceback.print_exc()
        code = 70
    system.flush()
    os._exit(code)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
