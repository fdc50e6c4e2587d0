"""From how a process ended to a verdict on the size it ran."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, replace
from pathlib import Path

from oomprobe.devices.host import PRESSURE_SHARE
from oomprobe.verdicts import Evidence, Link, Verdict, classify
from oomprobe.verdicts.failure import is_library

LAST_WORDS = 2000  # characters of stderr that are shown
LAST_LINES = 5  # of it that can be about the end
TRACE_LINES = 8
_TRACE = "(most recent call first):"  # Python's faulthandler
_CURRENT = "Current thread "
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in ', re.MULTILINE)
# What C libraries print before they leave the process for want of memory.
_HOST_LIBRARIES = re.compile(
    r"std::bad_alloc"  # libstdc++, through std::terminate
    r"|libgomp: Out of memory|libgomp: Thread creation failed"  # libgomp/error.c, team.c
    r"|OpenBLAS.{0,80}(?:pthread_create failed|allocation still failed|could not be allocated)"  # OpenBLAS, memory.c
    r"|cannot allocate memory",  # strerror(ENOMEM)
    re.IGNORECASE,
)
_ANY_LIBRARY = re.compile(r"out of memory|failed to allocate|memory allocation failed", re.IGNORECASE)  # bitsandbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitStatus:
    """How a process of trials ended without an answer."""

    signal: int | None  # that ended it
    code: int | None  # that it left with
    why: str | None  # what it was ended for: "timed out", "stuck"; None: it ended by itself
    stderr: str  # the end of what it wrote there
    peak_resident_bytes: int
    oom_kills: int  # of the whole system, while it ran

    @property
    def is_hang(self) -> bool:
        """Whether it did not end by itself."""
        return self.why is not None

    def text(self) -> str:
        """The error of the trial: how it ended, the end of stderr, and the innermost lines of faulthandler's trace."""
        if self.is_hang:
            what = f"the process of the trial {self.why} and was ended"
        elif self.signal is None:
            what = f"the process of the trial left with exit code {self.code} before it answered"
        else:
            what = f"the process of the trial was ended by {_name(self.signal)}"
        if self.signal == signal.SIGKILL and not self.is_hang:
            killed = "the OOM killer of the system was at work" if self.oom_kills else "not by the system's OOM killer"
            what += f" ({killed})"
        said, mark, trace = self.stderr.partition(_TRACE)
        words = said[-LAST_WORDS:] + mark + "\n".join(trace.splitlines()[:TRACE_LINES])
        return f"{what}\nthe end of its stderr:\n{words}" if words else what

    def where(self) -> str | None:
        """The line of the user's code that it was at, where Python's faulthandler could still tell; None: not known."""
        trace = self.stderr.partition(_CURRENT)[2].partition("\n\n")[0].partition("\nThread ")[0]  # of one thread
        lines = ((Path(file), number) for file, number in _FRAME.findall(trace))
        return next((f"{file.name}:{number}" for file, number in lines if not is_library(file)), None)


def classify_exit(status: ExitStatus, evidence: Evidence, *, used_bytes: int, cap_bytes: int | None) -> Verdict:
    """What a status says of the size: CRASHED where there is no evidence for more.

    The pressure on memory is judged here: `used_bytes` is what the process had come to use beyond what it had with the
    model in it, `cap_bytes` what it was held to.
    """
    if status.is_hang:
        return Verdict.TIMED_OUT
    if status.signal == signal.SIGKILL:
        return Verdict.HOST_OOM if status.oom_kills else Verdict.CRASHED
    if status.signal in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):  # somebody's will
        return Verdict.CRASHED
    full = evidence.on_host and cap_bytes is not None and used_bytes >= PRESSURE_SHARE * cap_bytes
    spoken = _classify_words(_last_lines(status.stderr), replace(evidence, memory_pressure=full))
    if spoken is not None:
        return spoken
    return Verdict.OOM if full and evidence.smaller_size_passed else Verdict.CRASHED


def _classify_words(words: str, evidence: Evidence) -> Verdict | None:
    verdict = classify((Link(classes=("builtins.RuntimeError",), text=words),), evidence)
    if verdict is not Verdict.POISONED and _HOST_LIBRARIES.search(words):
        return Verdict.OOM if evidence.on_host else Verdict.HOST_OOM
    if verdict is not Verdict.BUG:
        return verdict
    return Verdict.OOM if _ANY_LIBRARY.search(words) and evidence.smaller_size_passed else None


def _last_lines(stderr: str) -> str:
    """The last lines of stderr before faulthandler's traceback."""
    said = stderr.partition("Fatal Python error")[0].splitlines()
    return "\n".join([line for line in said if line.strip()][-LAST_LINES:])


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
