"""What is asked of Linux about processes: death with the parent, orphans, all descendants of one."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_REAP_S = 5.0  # a killed process goes at once, unless it waits in the kernel


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Let the kernel send a signal when the thread that made this process ends; 0 takes that back (prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Become the parent of descendants whose parents end, so that none is out of reach (prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def prefer_to_be_killed() -> None:
    """Let the system's OOM killer choose this process before any other (proc_pid_oom_score_adj(5))."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def flush() -> None:
    """Write what is buffered for the standard streams; a daemon may have closed them."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


def children_of(pid: int) -> set[int]:
    """Processes whose parent is `pid`, zombies too."""
    return {int(one) for one in _pids() if (fields := _stat(one)) and fields[1] == str(pid)}


def descendants_of(pid: int) -> set[int]:
    """Its children, theirs, and so on."""
    parents = {int(one): int(fields[1]) for one in _pids() if (fields := _stat(one))}
    found, last = set[int](), {pid}
    while last:
        last = {one for one, parent in parents.items() if parent in last} - found
        found |= last
    return found


def _pids() -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdigit()]


def _stat(pid: str) -> list[str]:
    """Fields of proc_pid_stat(5) from the third on: state, parent, group, session; empty where the process is gone."""
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def cpu_s(session: int) -> float:
    """Processor time that the processes of a session have used; a data loader's workers too."""
    stats = [fields for pid in _pids() if (fields := _stat(pid)) and fields[3] == str(session)]
    return sum(int(fields[11]) + int(fields[12]) for fields in stats) / os.sysconf("SC_CLK_TCK")


def end_group(pid: int) -> None:
    """Kill the process group that `pid` leads."""
    with suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


def end_session(session: int) -> None:
    """Kill what is left of a session, such as data loader workers that a trial has started."""
    for pid in _pids():
        if (fields := _stat(pid)) and fields[3] == str(session):
            with suppress(OSError):
                os.kill(int(pid), signal.SIGKILL)


def end_children(spared: set[int]) -> None:
    """Kill and reap all children of this process but those spared; orphans that come meanwhile too."""
    until = time.monotonic() + _REAP_S
    while (left := children_of(os.getpid()) - spared) and time.monotonic() < until:
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
            reap(pid, wait=False)
        time.sleep(0.005)


def reap(pid: int, *, wait: bool) -> tuple[int, int] | None:
    """Take a child off the list of processes.

    Returns:
        Its wait status and its peak of resident memory in bytes; None while it runs, or when it is not ours.
    """
    with suppress(ChildProcessError):
        done, status, used = os.wait4(pid, 0 if wait else os.WNOHANG)
        if done:
            return status, used.ru_maxrss * 1024
    return None


def has_ended(pid: int) -> bool:
    """Whether a child has ended; it stays a zombie, so that its group's number cannot be anybody else's."""
    with suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return True
