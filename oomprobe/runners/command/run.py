"""One run of a command, by its keeper: start it, read its output, end it with all that it started."""

from __future__ import annotations

import codecs
import contextlib
import os
import secrets
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from oomprobe.errors import UnreliableError
from oomprobe.ground import linux, processes
from oomprobe.runners import keeper
from oomprobe.runners.command.files import TrialFiles
from oomprobe.runners.command.output import Output
from oomprobe.runners.command.reports import RunReports
from oomprobe.tape.record import TapedTrial

HERE = Path(__file__).parent
BATCH, DIR = "{batch}", "{dir}"
BATCH_VARIABLE = "OOMPROBE_BATCH"
GRACE_S = 2.0  # between SIGTERM and SIGKILL
ENDING_S = 60.0  # longer than a keeper takes
# Trials must not appear among a team's experiments. Hydra shows whole tracebacks only on request.
OFFLINE = {
    "WANDB_MODE": "offline",
    "COMET_MODE": "OFFLINE",
    "COMET_START_ONLINE": "0",
    "NEPTUNE_MODE": "offline",
    "CLEARML_OFFLINE_MODE": "1",
    "SWANLAB_MODE": "offline",
    "HYDRA_FULL_ERROR": "1",
}
OFFLINE_FOLDERS = {"WANDB_DIR": "", "COMET_OFFLINE_DIRECTORY": "", "MLFLOW_TRACKING_URI": "file:"}


class Run:
    """A running command. As a context manager it ends the command, and removes its folder, on exit.

    Args:
        command: Its words, in which BATCH and DIR stand for what they name.
        batch_size: The size to try.
        variables: Further variables of its environment.
        files: Where it writes.
    """

    def __init__(
        self, command: Sequence[str], batch_size: int, variables: dict[str, str], files: TrialFiles
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="oomprobe-")).resolve()
        self.oom_kills, self._mark = linux.OomKills(), secrets.token_hex(8)
        self.output, self.started_s = Output(), time.monotonic()
        self.start_up_s = 0.0  # until it had made the steps of a trial
        self.status: int | None = None  # its exit status once it has ended by itself
        self.left_running = 0  # processes, at that time
        self._reports = self.folder / "reports"
        scratch = self.folder / "run"
        for folder in (self._reports, scratch, self.folder / "tmp"):
            folder.mkdir()
        words = [
            word.replace(BATCH, str(batch_size)).replace(DIR, str(scratch)) for word in command
        ]
        words, redirecting = files.redirected(words, self.folder)
        python_path = [str(HERE / "site")]
        if users := os.environ.get("PYTHONPATH"):
            python_path.append(users)
        environment = {
            **os.environ,
            **OFFLINE,
            **{name: f"{scheme}{scratch}" for name, scheme in OFFLINE_FOLDERS.items()},
            "PYTHONPATH": os.pathsep.join(python_path),
            "PYTHONUNBUFFERED": "1",  # otherwise the last lines of a killed process are lost
            BATCH_VARIABLE: str(batch_size),
            "OOMPROBE_VISIBLE": os.environ.get("CUDA_VISIBLE_DEVICES", "all"),
            "OOMPROBE_REPORTS": str(self._reports),
            processes.MARK: self._mark,
            **redirecting,
            **variables,
        }
        self._wire, theirs = socket.socketpair()
        self._pipe, writing = os.pipe()
        os.set_blocking(self._pipe, False)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        keeping = [str(theirs.fileno()), str(GRACE_S), str(self.folder)]
        try:
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", keeper.__file__, *keeping, *words],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )
        except OSError as error:
            self._close()
            raise UnreliableError(
                f"no process could be started for a trial ({error}): free memory or processes"
            ) from error
        finally:
            theirs.close()
            os.close(writing)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._close()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started_s

    def reports(self) -> RunReports:
        """Return what its processes have reported."""
        return RunReports.read(self._reports)

    def recorded(self) -> list[Path]:
        """Return the files in which processes on a simulated card have recorded their calls."""
        return [*self._reports.glob("*.calls")]

    def tapes(self, seen: RunReports) -> tuple[TapedTrial, ...]:
        """Return what its ranks on real cards have recorded; see `RunReports.tapes`."""
        return seen.tapes(self._reports)

    def has_ended(self, wait_s: float) -> bool:
        """Read output for up to `wait_s`; return whether it has ended, and then set `status`: negative for a signal."""
        wire = self._wire.fileno()
        ready, _, _ = select.select([wire, self._pipe], [], [], wait_s)
        self._read_output()
        if wire not in ready:
            if ready:
                time.sleep(wait_s / 10)  # a flood of output must not keep this process busy
            return False
        with contextlib.suppress(ConnectionError):
            said = self._wire.recv(4096).decode(errors="replace")
            if not said[:1].isdigit():
                raise UnreliableError(f"the command {said or 'was lost: its keeper was killed'}")
            status, self.left_running, _ = map(int, said.split())
            self.status = os.waitstatus_to_exitcode(status)
        self._read_output()
        self.output.close()
        return True

    def end(self) -> None:
        """End it and all that it has started. What it says from here on is not read."""
        with contextlib.suppress(OSError):
            self._wire.shutdown(socket.SHUT_WR)
        until_s = time.monotonic() + ENDING_S
        while self._keeper.poll() is None:
            if time.monotonic() > until_s:
                self._keeper.kill()
            select.select([self._pipe], [], [], 0.02)
            processes.drain(self._pipe)
        if self._keeper.returncode < 0:  # it was killed, so do its work
            processes.kill_started(self._keeper.pid, self._mark)

    def _read_output(self) -> None:
        self.output.feed(self._decoder.decode(processes.drain(self._pipe)))

    def _close(self) -> None:
        self._wire.close()
        os.close(self._pipe)
        shutil.rmtree(self.folder, ignore_errors=True)  # gone, unless the keeper was killed
