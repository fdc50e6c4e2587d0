"""A process that has made the imports of workers, and forks them: a new interpreter would take seconds for each."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import time
from multiprocessing.connection import Connection

from oomprobe.ground import processes
from oomprobe.records.patience import Patience
from oomprobe.runners.workers.process import Process, start_program, start_worker

FORKING_S = 10.0  # for a fork, which takes milliseconds
READY = "ready "  # its first message, before the refusal, if there is one
SURROUNDINGS_CHANGED = "the environment or the folder has changed since the first was started"
TOO_SLOW = "their imports took too long"
ENDED = "the process to fork them from has ended"


class Template:
    """Forks workers that build a target.

    Attributes:
        refusal: Why it cannot, so that workers are started anew; "" if it can, or its imports are not done.
    """

    def __init__(self, target: str) -> None:
        self.refusal = ""
        self._is_ready = False
        self._surroundings = _surroundings()
        self._link, theirs = socket.socketpair()
        with theirs:
            os.set_inheritable(theirs.fileno(), True)
            call = f"forking.main({theirs.fileno()}, {target!r})"
            try:
                self._pid = start_program("forking", call, {processes.MARK: secrets.token_hex(8)})
            except OSError:  # starting a worker will say why
                self._pid, self.refusal = 0, ENDED

    @classmethod
    def of(cls, target: str) -> Template | None:
        """Return a template for a target; None if this system has none."""
        return cls(target) if sys.platform == "linux" else None

    def wait(self, until_s: float) -> None:
        """Wait until its imports are done, or until a time on the monotonic clock."""
        if self._is_ready or self.refusal:
            return
        self._is_ready = True
        self._link.settimeout(max(0.1, until_s - time.monotonic()))
        try:
            self.refusal = self._link.recv(2**10).decode().removeprefix(READY)
        except OSError:
            self._end(TOO_SLOW)

    @property
    def how(self) -> str:
        """How workers begin."""
        if not self.refusal:
            return "forked from a process that has made the imports"
        return f"started anew: {self.refusal}"

    def process(self, patience: Patience) -> Process:
        """Fork a worker, or start one, and return it while it waits for its task."""
        mark = secrets.token_hex(8)

        def start(wire: Connection, stderr: int) -> int:
            return self._forked(mark, wire, stderr) or start_worker(mark, wire, stderr)

        return Process(start, mark, patience=patience)

    def _forked(self, mark: str, wire: Connection, stderr: int) -> int:
        """Fork a worker, and return its pid; 0 if that cannot be. A process that must not be forked becomes the first worker."""
        if not self._pid:
            return 0
        if self._surroundings != _surroundings():
            self._end(SURROUNDINGS_CHANGED)
            return 0
        self._link.settimeout(FORKING_S)
        try:
            with processes.adopting_orphans():
                socket.send_fds(self._link, [mark.encode()], [wire.fileno(), stderr])
                pid = int(self._link.recv(2**10))
        except (OSError, ValueError):
            self._end(ENDED)
            return 0
        if self.refusal:
            self._link.close()
            self._pid = 0
        return pid

    def _end(self, refusal: str) -> None:
        self.refusal = refusal
        self.end()

    def end(self) -> None:
        """End the process; its forks go on."""
        self._link.close()
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        self._pid = 0


def _surroundings() -> object:
    """Return what a new interpreter begins with."""
    return dict(os.environ), list(sys.path), list(sys.warnoptions), os.getcwd()
