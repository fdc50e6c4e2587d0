"""What is asked of Linux about processes: death with the parent, sessions, and whatever carries the mark of a probe."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

MARK = "OOMPROBE_WORKER"  # in the environment of a worker, and of whatever it starts
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_REAP_S = 5.0  # a killed process goes at once, unless it waits in the kernel


def die_with_parent() -> None:
    """Let the kernel kill this process when the thread that made it ends (prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def prefer_to_be_killed() -> None:
    """Let the system's OOM killer choose this process before any other (proc_pid_oom_score_adj(5))."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def flush() -> None:
    """Write what is buffered for the standard streams; a daemon may have closed them."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _stat(pid: int) -> list[str]:
    """Fields of proc_pid_stat(5) from the third on: state, parent, group, session; empty where the process is gone."""
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def cpu_s(session: int) -> float:
    """Processor time that the processes of a session have used; a data loader's workers too."""
    stats = [fields for pid in _pids() if (fields := _stat(pid)) and fields[3] == str(session)]
    return sum(int(fields[11]) + int(fields[12]) for fields in stats) / os.sysconf("SC_CLK_TCK")


def kill_session(session: int) -> None:
    """Kill every process of a session, such as data loader workers that a trial has started."""
    with suppress(OSError):
        os.kill(session, signal.SIGKILL)  # it may not lead a session yet
    for pid in _pids():
        if (fields := _stat(pid)) and fields[3] == str(session):
            _kill(pid)


def kill_marked(mark: str) -> None:
    """Kill what a worker started, wherever it has gone: orphans, and leaders of sessions of their own.

    What a process was started with can be read by its owner (proc_pid_environ(5)); zombies have nothing to read.
    """
    until_s = time.monotonic() + _REAP_S
    while (marked := _marked(mark)) and time.monotonic() < until_s:
        for pid in marked:
            _kill(pid)
        time.sleep(0.005)


def _marked(mark: str) -> list[int]:
    wanted, found = f"{MARK}={mark}".encode(), []
    for pid in _pids():
        with suppress(OSError):
            if pid != os.getpid() and wanted in Path("/proc", str(pid), "environ").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def _kill(pid: int) -> None:
    with suppress(OSError):
        os.kill(pid, signal.SIGKILL)


def reap(pid: int) -> tuple[int, int] | None:
    """Wait for a child to end.

    Returns:
        Its wait status and its peak of resident memory in bytes; None when it is not ours.
    """
    with suppress(ChildProcessError):
        _, status, used = os.wait4(pid, 0)
        return status, used.ru_maxrss * 1024
    return None


def has_ended(pid: int) -> bool:
    """Whether a child has ended; it stays a zombie, so that its number cannot be anybody else's."""
    with suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return True
