"""Exit status of a trial's process, and the verdict that follows from it."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from pathlib import Path

from oomprobe.devices.host import PRESSURE_SHARE
from oomprobe.ground.frames import is_library
from oomprobe.records.trials import Verdict
from oomprobe.verdicts import Evidence, Link, classify

SHOWN_CHARACTERS = 2000  # of stderr, in the error of the trial
LAST_LINES = 5  # of stderr that are searched for the cause of the exit
TRACE_LINES = 8
_TRACE = "(most recent call first):"  # Python's faulthandler
_CURRENT = "Current thread "
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in ', re.MULTILINE)
# In an exception these texts are ambiguous. A library that ends the process with them had no memory for its threads.
_NO_THREADS = re.compile(
    r"pthread_create failed|thread creation failed", re.IGNORECASE
)  # OpenBLAS, libgomp
_ANY_LIBRARY = re.compile(
    r"out of memory|failed to allocate|memory allocation failed", re.IGNORECASE
)  # bitsandbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitStatus:
    """How a trial's process ended without an answer."""

    signal: int | None  # that terminated it
    code: int | None  # that it exited with
    why: (
        str | None
    )  # why its parent terminated it, such as "timed out" (see `settling`); None: it ended by itself
    stderr: str  # the end of it
    peak_resident_bytes: int
    oom_kills: int  # of any process on the system while it ran

    def text(self) -> str:
        """Return the trial's error: how the process ended, the end of its stderr, and the innermost frames of its trace."""
        if self.why is not None:
            what = f"the trial's process {self.why} and was terminated"
        elif self.signal is None:
            what = f"the trial's process exited with code {self.code} before it answered"
        else:
            what = f"the trial's process was killed by {signal.Signals(self.signal).name}"
            if self.signal == signal.SIGKILL:
                what += f" ({self._killer()})"
        output, mark, trace = self.stderr.partition(_TRACE)
        shown = output[-SHOWN_CHARACTERS:] + mark + "\n".join(trace.splitlines()[:TRACE_LINES])
        if not shown:
            return what
        return f"{what}\nthe end of its stderr:\n{shown}"

    def _killer(self) -> str:
        if self.oom_kills:
            return "the system's OOM killer was active"
        return "not by the system's OOM killer"

    def where(self) -> str | None:
        """Return the line of the user's code that was running, from faulthandler's trace; None if unknown."""
        trace = (
            self.stderr.partition(_CURRENT)[2].partition("\n\n")[0].partition("\nThread ")[0]
        )  # of one thread
        for file, number in _FRAME.findall(trace):
            if not is_library(Path(file)):
                return f"{Path(file).name}:{number}"
        return None


def classify_exit(
    status: ExitStatus,
    *,
    smaller_passed: bool,
    on_host: bool,
    used_bytes: int,
    cap_bytes: int | None,
) -> Verdict:
    """Return the verdict on the size; CRASHED without evidence for anything else.

    `used_bytes` is the process's peak beyond what it held with the model loaded, and `cap_bytes` is its limit.
    """
    if status.why is not None:
        return Verdict.TIMED_OUT
    if status.signal == signal.SIGKILL:
        return Verdict.HOST_OOM if status.oom_kills else Verdict.CRASHED
    if status.signal in (
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGHUP,
        signal.SIGQUIT,
    ):  # sent on purpose
        return Verdict.CRASHED
    is_full = False
    if on_host and cap_bytes is not None:
        is_full = used_bytes >= PRESSURE_SHARE * cap_bytes
    evidence = Evidence(
        smaller_size_passed=smaller_passed, memory_pressure=is_full, on_host=on_host
    )
    verdict = _classify_words(_last_lines(status.stderr), evidence)
    if verdict is not None:
        return verdict
    if is_full and smaller_passed:
        return Verdict.OOM
    return Verdict.CRASHED


def _classify_words(words: str, evidence: Evidence) -> Verdict | None:
    verdict = classify((Link(classes=("builtins.RuntimeError",), text=words),), evidence)
    if verdict is not Verdict.BUG:
        return verdict
    if _NO_THREADS.search(words):
        return Verdict.OOM if evidence.on_host else Verdict.HOST_OOM
    if evidence.smaller_size_passed and _ANY_LIBRARY.search(words):
        return Verdict.OOM
    return None


def _last_lines(stderr: str) -> str:
    """Return the last lines of stderr before faulthandler's trace."""
    lines = stderr.partition("Fatal Python error")[0].splitlines()
    return "\n".join([line for line in lines if line.strip()][-LAST_LINES:])
