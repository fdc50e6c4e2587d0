"""A process that has made the imports of workers, and forks them: a new interpreter would take seconds for each."""

from __future__ import annotations

import os
import socket
import sys
import time
from multiprocessing.connection import Connection

from oomprobe.records.patience import Patience
from oomprobe.runners.workers.process import Kept, Process, start_worker

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
                self._kept: Kept | None = Kept.program("forking", call, {})
            except OSError:  # starting a worker will say why
                self._kept, self.refusal = None, ENDED

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

        def start(wire: Connection, stderr: int) -> Kept:
            return self._forked(wire, stderr) or start_worker(wire, stderr, {})

        return Process(start, patience=patience)

    def _forked(self, wire: Connection, stderr: int) -> Kept | None:
        """Fork a worker and its keeper; None if that cannot be.

        A process that must not be forked becomes the first worker.
        """
        if self._kept is None:
            return None
        if self._surroundings != _surroundings():
            self._end(SURROUNDINGS_CHANGED)
            return None
        self._link.settimeout(FORKING_S)
        ours, keepers = socket.socketpair()
        try:
            with keepers:
                given = [wire.fileno(), stderr, keepers.fileno()]
                socket.send_fds(self._link, [b"fork"], given)
            keeper = int(self._link.recv(2**10))
        except (OSError, ValueError):
            ours.close()
            self._end(ENDED)
            return None
        if not self.refusal:
            return Kept(keeper, ours)
        ours.close()
        self._link.close()
        worker, self._kept = self._kept, None
        return worker

    def _end(self, refusal: str) -> None:
        self.refusal = refusal
        self.end()

    def end(self) -> None:
        """End the process, and all workers that it has forked."""
        self._link.close()
        if self._kept is not None:
            self._kept.end()
        self._kept = None


def _surroundings() -> object:
    """Return what a new interpreter begins with."""
    return dict(os.environ), list(sys.path), list(sys.warnoptions), os.getcwd()
