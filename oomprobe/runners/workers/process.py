"""A process that runs trials, seen from its parent: start it, ask it, listen to it, and end it with all its descendants."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import NoReturn

from oomprobe.errors import UnreliableError
from oomprobe.ground import linux, processes
from oomprobe.ground.waiting import Held
from oomprobe.records.patience import PATIENCE, Patience
from oomprobe.runners import keeper
from oomprobe.runners.workers.exit_status import ExitStatus
from oomprobe.runners.workers.messages import Message, receive, send

TAIL_BYTES = 2**14  # of stderr, kept for the trial's error
TICK_S = 0.05  # between checks whether a process has ended while others hold its pipes open
NO_FORK = (
    "no process could be started for a trial ({error}): the machine or its cgroup has run out of memory or processes. "
    "Free some, or state a smaller budget, such as device='cpu:1GiB'"
)
_COMMAND = "import sys; sys.path[:] = {path!r}; from {package} import {module}; {call}"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process has ended."""

    status: int  # of wait(2)
    peak_kib: int  # resident


class Child:
    """A child that was forked from this process, and leads a session that ends with it."""

    def __init__(self, pid: int) -> None:
        self.session = pid

    def has_ended(self) -> bool:
        """Return whether it has ended; it stays a zombie, so that its pid is not reused."""
        return os.waitid(os.P_PID, self.session, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def terminate(self) -> None:
        """Ask it to end."""
        with suppress(OSError):
            os.kill(self.session, signal.SIGTERM)

    def end(self) -> Ended:
        """Kill it, and its session."""
        processes.kill_started(self.session)
        _, status, used = os.wait4(self.session, 0)
        return Ended(status, used.ru_maxrss)


class Kept:
    """The child of a keeper, which leads its session. `wire` is this end of the keeper's wire."""

    def __init__(self, keeper: int, wire: socket.socket) -> None:
        self.session, self._wire = keeper, wire

    @classmethod
    def program(
        cls, module: str, call: str, variables: Mapping[str, str], stderr: int | None = None
    ) -> Kept:
        """Start a new interpreter that calls a function of a module of this package.

        `variables` join its environment.
        """
        path = [entry for entry in sys.path if isinstance(entry, str)]  # import ignores all others
        options = [part for option in sys.warnoptions for part in ("-W", option)]
        code = _COMMAND.format(path=path, package=__package__, module=module, call=call)
        actions: list[tuple[int, ...] | tuple[int, int, str, int, int]] = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
        ]
        if stderr is not None:
            actions.append((os.POSIX_SPAWN_DUP2, stderr, 2))
        environment = {**os.environ, **variables, processes.MARK: "1"}
        wire, theirs = socket.socketpair()
        with theirs:
            os.set_inheritable(theirs.fileno(), True)
            keeping = ["-I", "-S", keeper.__file__, str(theirs.fileno()), "0", ""]
            words = [sys.executable, *keeping, sys.executable, *options, "-c", code]
            try:
                pid = os.posix_spawn(
                    sys.executable, words, environment, file_actions=actions, setsid=True
                )
            except OSError:
                wire.close()
                raise
        return cls(pid, wire)

    def has_ended(self) -> bool:
        """Return whether it has ended, or its keeper."""
        return bool(wait([self._wire], 0))

    def terminate(self) -> None:
        """Ask it to end."""
        with suppress(OSError):
            self._wire.send(b"t")

    def end(self) -> Ended:
        """End it, and all that it has started."""
        said = b""
        with self._wire, suppress(OSError):
            self._wire.shutdown(socket.SHUT_WR)
            while more := self._wire.recv(2**10):
                said += more
        with suppress(ChildProcessError):  # of a forked keeper, this process is not the parent
            os.waitpid(self.session, 0)
        if not said[:1].isdigit():  # the keeper was killed, and the kernel has killed its child
            processes.kill_started(self.session)
            return Ended(signal.SIGKILL, 0)
        status, _, peak_kib = map(int, said.split())
        return Ended(status, peak_kib)


class Process:
    """A process that runs trials. `label` precedes each line of its stderr that is passed on."""

    def __init__(
        self,
        start: Callable[[Connection, int], Child | Kept],
        label: str = "",
        patience: Patience = PATIENCE,
    ) -> None:
        """Start the process: `start` gets its end of the wire and the descriptor for its stderr."""
        self._oom_kills, self._label = linux.OomKills(), label.encode()
        self._patience = patience
        self._stderr_tail = self._unfinished = b""
        self._wire, theirs = Pipe()
        self._stderr, writing = os.pipe()
        os.set_blocking(self._stderr, False)
        processes.flush()
        try:
            self._child = start(theirs, writing)
        except OSError as error:
            self._close()
            raise UnreliableError(NO_FORK.format(error=error)) from error
        finally:
            theirs.close()
            os.close(writing)

    @classmethod
    def forked(cls, serve: Callable[[Connection], None], patience: Patience = PATIENCE) -> Process:
        """Fork this process, and run `serve` in the child."""
        parent = os.getpid()

        def start(wire: Connection, stderr: int) -> Child:
            pid = processes.fork()  # `Crew.ask` notices a child that waits for a thread
            if not pid:
                _live(parent, stderr, lambda: serve(wire))
            return Child(pid)

        return cls(start, patience=patience)

    @classmethod
    def spawned(
        cls,
        variables: Mapping[str, str] | None = None,
        label: str = "",
        patience: Patience = PATIENCE,
    ) -> Process:
        """Start a worker, a separate program, and return while it is still importing torch; `variables` join its environment."""
        return cls(partial(start_worker, variables=variables or {}), label, patience)

    @property
    def session(self) -> int:
        """Its session, in which it starts processes unless they make one of their own."""
        return self._child.session

    def tell(self, message: Message) -> None:
        """Send a message; if the process is gone, `poll` reports it."""
        with suppress(OSError):
            send(self._wire, message)

    @property
    def channels(self) -> list[Connection | int]:
        """What to wait for; then `poll`."""
        return [self._wire, self._stderr]

    def poll(self) -> Message | ExitStatus | None:
        """Return the next message, or the exit status if the process has ended, or None if there is nothing yet."""
        has_ended = self._child.has_ended()  # first: a message sent before the end still counts
        self._read_stderr(pass_on=True)
        if self._wire.poll():
            return receive(self._wire) or self.end(hung_up=True)
        if has_ended:
            return self.end()
        return None

    def _read_stderr(self, *, pass_on: bool) -> None:
        output = processes.drain(self._stderr)
        self._stderr_tail = (self._stderr_tail + output)[-TAIL_BYTES:]
        if not pass_on or not output:
            return
        if self._label:
            *lines, self._unfinished = (self._unfinished + output).split(b"\n")
            output = b"".join(self._label + line + b"\n" for line in lines)
        with suppress(OSError):
            os.write(2, output)

    def terminate(self) -> None:
        """Ask the process to end; faulthandler then writes where it hangs."""
        self._child.terminate()

    def end(self, why: str | None = None, *, hung_up: bool = False) -> ExitStatus:
        """End the process and all that it started. If it has `hung_up`, let it finish dumping its stack first.

        If there is a reason `why`, ask it to end first.
        """
        [status] = end_all([self], why, self._patience, hung_up=hung_up)
        return status

    def ended(self, why: str | None, until_s: float) -> ExitStatus:
        """Return how it has ended, it and all that it started; at `until_s` it is killed.

        `until_s` is on the monotonic clock.
        """
        while not self._child.has_ended() and time.monotonic() < until_s:
            self._read_stderr(pass_on=why is None)
            time.sleep(TICK_S / 5)
        ended = self._child.end()
        self._read_stderr(pass_on=why is None)
        oom_kills = int(self._oom_kills)
        self._close()
        return ExitStatus(
            signal=os.WTERMSIG(ended.status) if os.WIFSIGNALED(ended.status) else None,
            code=os.WEXITSTATUS(ended.status) if os.WIFEXITED(ended.status) else None,
            why=why,
            stderr=self._stderr_tail.decode(errors="replace").strip(),
            peak_resident_bytes=ended.peak_kib * 1024,
            oom_kills=oom_kills,
        )

    def _close(self) -> None:
        self._wire.close()
        os.close(self._stderr)


def end_all(
    processes: Sequence[Process],
    why: str | None = None,
    patience: Patience = PATIENCE,
    *,
    hung_up: bool = False,
) -> list[ExitStatus]:
    """End processes as `Process.end` does, all within the time that one may take."""
    until_s = time.monotonic()
    if why is not None or hung_up:
        until_s += patience.ending_s
    if why is not None:
        for process in processes:
            process.terminate()
    return [process.ended(why, until_s) for process in processes]


class Idle:
    """Whether a session has used no processor time for more than `longest_s`; None: it may."""

    def __init__(self, pid: int, reading_s: float, longest_s: float | None) -> None:
        self._pid, self._reading_s, self._longest_s, self._cpu_s = pid, reading_s, longest_s, -1.0
        self._held, self._read_at_s = Held(), time.monotonic()

    @property
    def is_too_long(self) -> bool:
        """Whether it has been idle for too long until now; to be read often."""
        if self._longest_s is None:
            return False
        now_s, before_s = time.monotonic(), self._cpu_s
        if now_s - self._read_at_s >= self._reading_s:
            self._cpu_s, self._read_at_s = processes.cpu_s(self._pid), now_s
        return self._held.for_s(self._cpu_s == before_s) > self._longest_s


def begin() -> None:
    """Prepare a process for trials: it dumps its stack when it is terminated or crashes, and leaves Ctrl-C to its parent."""
    processes.prefer_to_be_killed()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGTERM, file=2, chain=True)


def start_worker(wire: Connection, stderr: int, variables: Mapping[str, str]) -> Kept:
    """Start a worker as a new interpreter."""
    os.set_inheritable(wire.fileno(), True)
    return Kept.program("worker", f"worker.main({wire.fileno()})", variables, stderr)


def _live(parent: int, stderr: int, serve: Callable[[], None]) -> NoReturn:
    """Run a forked child from start to end; no exit handler of its parent runs in it."""
    code = 0
    try:
        os.setsid()
        processes.die_with_parent(parent)
        os.dup2(stderr, 2)
        begin()
        serve()
    except BaseException:
        traceback.print_exc()
        code = 70
    processes.flush()
    os._exit(code)
