"""A process that runs trials, seen from its parent: start it, ask it, listen to it, and end it with all its descendants."""

from __future__ import annotations

import faulthandler
import os
import secrets
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import NoReturn

from oomprobe.errors import UnreliableError
from oomprobe.ground import linux, processes
from oomprobe.ground.waiting import Held
from oomprobe.records.patience import PATIENCE, Patience
from oomprobe.runners.workers.exit_status import ExitStatus
from oomprobe.runners.workers.messages import Message, receive, send

TAIL_BYTES = 2**14  # of stderr, kept for the trial's error
TICK_S = 0.05  # between checks whether a process has ended while others hold its pipes open
NO_FORK = (
    "no process could be started for a trial ({error}): the machine or its cgroup has run out of memory or processes. "
    "Free some, or state a smaller budget, such as device='cpu:1GiB'"
)
_COMMAND = (
    f"import sys; sys.path[:] = {{path!r}}; from {processes.__name__} import die_with_parent; "
    f"die_with_parent({{parent}}); from {__package__} import {{module}}; {{call}}"
)


class Process:
    """A process that runs trials and leads its own session. `label` precedes each line of its stderr that is passed on."""

    def __init__(
        self,
        start: Callable[[Connection, int], int],
        mark: str = "",
        label: str = "",
        patience: Patience = PATIENCE,
    ) -> None:
        """Start the process: `start` gets its end of the wire and the descriptor for its stderr, and returns its pid."""
        self._oom_kills, self._mark, self._label = linux.OomKills(), mark, label.encode()
        self._patience = patience
        self._stderr_tail = self._unfinished = b""
        self._wire, theirs = Pipe()
        self._stderr, writing = os.pipe()
        os.set_blocking(self._stderr, False)
        processes.flush()
        try:
            self.pid = start(theirs, writing)
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

        def start(wire: Connection, stderr: int) -> int:
            with warnings.catch_warnings():
                # Python 3.12 warns if there are threads, and libraries start some. `Crew.ask` notices a child that waits for one.
                warnings.simplefilter("ignore")
                pid = os.fork()
            if not pid:
                _live(parent, stderr, lambda: serve(wire))
            return pid

        return cls(start, patience=patience)

    @classmethod
    def spawned(
        cls,
        variables: Mapping[str, str] | None = None,
        label: str = "",
        patience: Patience = PATIENCE,
    ) -> Process:
        """Start a worker, a separate program, and return while it is still importing torch; `variables` join its environment."""
        mark = secrets.token_hex(8)

        return cls(partial(start_worker, mark, variables=variables), mark, label, patience)

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
        has_ended = processes.has_ended(
            self.pid
        )  # checked first: a message sent before the end still counts
        self._read_stderr(pass_on=True)
        if self._wire.poll():
            return receive(self._wire) or self.end(hung_up=True)
        if has_ended:
            return self.end()
        return None

    def _read_stderr(self, *, pass_on: bool) -> None:
        output = processes.drain(self._stderr)
        self._stderr_tail = (self._stderr_tail + output)[-TAIL_BYTES:]
        if pass_on and output:
            with suppress(OSError):
                os.write(2, self._labelled(output))

    def _labelled(self, output: bytes) -> bytes:
        if not self._label:
            return output
        *lines, self._unfinished = (self._unfinished + output).split(b"\n")
        return b"".join(self._label + line + b"\n" for line in lines)

    def terminate(self) -> None:
        """Ask the process to end; faulthandler then writes where it hangs."""
        with suppress(OSError):
            os.kill(self.pid, signal.SIGTERM)

    def end(
        self, why: str | None = None, *, hung_up: bool = False, until_s: float | None = None
    ) -> ExitStatus:
        """End the process and all that it started. If it has `hung_up`, let it finish dumping its stack first.

        If there is a reason `why`, ask it to end first. It is killed at `until_s` on the monotonic clock, if it was asked before.
        """
        if until_s is None:
            until_s = time.monotonic()
            if why is not None:
                self.terminate()
            if why is not None or hung_up:
                until_s += self._patience.ending_s
        while not processes.has_ended(self.pid) and time.monotonic() < until_s:
            self._read_stderr(pass_on=why is None)
            time.sleep(TICK_S / 5)
        processes.kill_started(self.pid, self._mark)
        _, status, used = os.wait4(self.pid, 0)
        self._read_stderr(pass_on=why is None)
        oom_kills = int(self._oom_kills)
        self._close()
        return ExitStatus(
            signal=os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
            code=os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
            why=why,
            stderr=self._stderr_tail.decode(errors="replace").strip(),
            peak_resident_bytes=used.ru_maxrss * 1024,
            oom_kills=oom_kills,
        )

    def _close(self) -> None:
        self._wire.close()
        os.close(self._stderr)


def end_all(
    processes: Sequence[Process], why: str | None = None, patience: Patience = PATIENCE
) -> list[ExitStatus]:
    """End processes as `Process.end` does, all within the time that one may take."""
    until_s = time.monotonic()
    if why is not None:
        until_s += patience.ending_s
        for process in processes:
            process.terminate()
    return [process.end(why, until_s=until_s) for process in processes]


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
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGTERM, file=2, chain=True)


def start_program(
    module: str, call: str, variables: Mapping[str, str], stderr: int | None = None
) -> int:
    """Start a new interpreter that calls a function of a module of this package, and return its pid; `variables` join its environment."""
    path = [entry for entry in sys.path if isinstance(entry, str)]  # import ignores all others
    options = [part for option in sys.warnoptions for part in ("-W", option)]
    command = _COMMAND.format(parent=os.getpid(), path=path, module=module, call=call)
    actions: list[tuple[int, ...] | tuple[int, int, str, int, int]] = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
    ]
    if stderr is not None:
        actions.append((os.POSIX_SPAWN_DUP2, stderr, 2))
    environment = {**os.environ, **variables}
    arguments = [sys.executable, *options, "-c", command]
    return os.posix_spawn(sys.executable, arguments, environment, file_actions=actions, setsid=True)


def start_worker(
    mark: str, wire: Connection, stderr: int, variables: Mapping[str, str] | None = None
) -> int:
    """Start a worker as a new interpreter, and return its pid."""
    os.set_inheritable(wire.fileno(), True)
    return start_program(
        "worker",
        f"worker.main({wire.fileno()})",
        {**(variables or {}), processes.MARK: mark},
        stderr,
    )


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
