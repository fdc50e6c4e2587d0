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
# OpenBLAS, libgomp; then bitsandbytes.
_NO_THREADS = re.compile(r"pthread_create failed|thread creation failed", re.IGNORECASE)
_ANY_LIBRARY = re.compile(
    r"out of memory|failed to allocate|memory allocation failed", re.IGNORECASE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitStatus:
    """How a trial's process ended without an answer."""

    signal: int | None  # that terminated it
    code: int | None  # that it exited with
    # Why its parent terminated it, such as "timed out" (see `settling`); None: it ended by itself.
    why: str | None
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
                killer = "the system's OOM killer"
                what += f" ({killer} was active)" if self.oom_kills else f" (not by {killer})"
        output, mark, trace = self.stderr.partition(_TRACE)
        shown = output[-SHOWN_CHARACTERS:] + mark + "\n".join(trace.splitlines()[:TRACE_LINES])
        if not shown:
            return what
        return f"{what}\nthe end of its stderr:\n{shown}"

    def where(self) -> str | None:
        """Return the line of the user's code that was running, from faulthandler's trace; None if unknown."""
        of_threads = self.stderr.partition(_CURRENT)[2].partition("\n\n")[0]
        trace = of_threads.partition("\nThread ")[0]  # of one of them
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
    # Sent on purpose.
    if status.signal in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        return Verdict.CRASHED
    is_full = False
    if on_host and cap_bytes is not None:
        is_full = used_bytes >= PRESSURE_SHARE * cap_bytes
    evidence = Evidence(
        smaller_size_passed=smaller_passed, memory_pressure=is_full, on_host=on_host
    )
    # Those before faulthandler's trace.
    lines = status.stderr.partition("Fatal Python error")[0].splitlines()
    last_lines = [*filter(str.strip, lines)][-LAST_LINES:]
    verdict = _classify_words("\n".join(last_lines), evidence)
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
