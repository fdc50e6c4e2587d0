"""What is asked of Linux about processes: death with the parent, sessions, and whatever carries the mark of a probe."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MARK = "OOMPROBE_WORKER"  # in the environment of a worker, and of whatever it starts
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_REAP_S = 5.0  # a killed process goes at once, unless it waits in the kernel


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when the thread that made it ends (prctl(2)); now, where it has ended already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def prefer_to_be_killed() -> None:
    """Let the system's OOM killer choose this process before any other (proc_pid_oom_score_adj(5))."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def flush() -> None:
    """Write what is buffered for the standard streams; a daemon may have closed them."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


def cpu_s(session: int) -> float:
    """Processor time that the processes of a session have used; a data loader's workers too."""
    ticks = sum(int(stat[11]) + int(stat[12]) for _, stat in _processes() if stat[3] == str(session))
    return ticks / os.sysconf("SC_CLK_TCK")


def kill_started(leader: int, mark: str) -> None:
    """Kill a process, its session, and whatever carries its mark: orphans, and leaders of sessions of their own."""
    until_s = time.monotonic() + _REAP_S
    while (living := list(_started(leader, mark))) and time.monotonic() < until_s:
        for pid in living:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def _started(leader: int, mark: str) -> Iterator[int]:
    for pid, stat in _processes():
        # It may not lead a session yet. A zombie has ended.
        if stat[0] != "Z" and (pid == leader or stat[3] == str(leader) or (mark and _is_marked(pid, mark))):
            yield pid


def _is_marked(pid: int, mark: str) -> bool:
    """What a process was started with can be read by its owner (proc_pid_environ(5))."""
    with suppress(OSError):
        return f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def _processes() -> Iterator[tuple[int, list[str]]]:
    """Each process, and fields of proc_pid_stat(5) from the third on: state, parent, group, session."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):
                yield int(name), Path("/proc", name, "stat").read_text().rpartition(")")[2].split()


def has_ended(pid: int) -> bool:
    """Whether a child has ended; it stays a zombie, so that its number cannot be anybody else's."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
