"""Linux process control: forks, processor time of a session, and killing what has no keeper."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MARK = "OOMPROBE_WORKER"  # environment variable of workers, commands and their descendants
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_REAP_S = 5.0  # a killed process ends at once, unless it waits in the kernel


def fork() -> int:
    """Fork this process (fork(2)), though it has threads, about which Python 3.12 warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return os.fork()


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when the thread that created it ends (prctl(2)); exit now if it has already ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def prefer_to_be_killed() -> None:
    """Make the system's OOM killer choose this process before any other (proc_pid_oom_score_adj(5))."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def flush() -> None:
    """Flush the standard streams; a daemon may have closed them."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


def drain(pipe: int) -> bytes:
    """Return what is in a pipe that does not block, up to 1 MiB: a flood of output must not keep this process busy."""
    read = b""
    with suppress(BlockingIOError):
        while len(read) < 2**20 and (more := os.read(pipe, 2**16)):
            read += more
    return read


def cpu_s(session: int) -> float:
    """Return the processor time of all processes in a session, including data loader workers."""
    ticks = sum(
        int(stat[11]) + int(stat[12]) for _, stat in _processes() if stat[3] == str(session)
    )
    return ticks / os.sysconf("SC_CLK_TCK")


def kill_started(leader: int, mark: str = "") -> None:
    """Kill a process that has no keeper any more, its session, and all that carry its mark."""
    until_s = time.monotonic() + _REAP_S
    while (living := list(_started(leader, mark))) and time.monotonic() < until_s:
        for pid in living:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def _started(leader: int, mark: str) -> Iterator[int]:
    for pid, stat in _processes():
        if stat[0] == "Z":  # a zombie, which has ended
            continue
        # The leader is listed by its pid because it may not have started its session yet.
        is_started = pid == leader or stat[3] == str(leader)
        if mark and not is_started:
            with suppress(OSError):  # proc_pid_environ(5)
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                is_started = f"{MARK}={mark}".encode() in variables
        if is_started:
            yield pid


def _processes() -> Iterator[tuple[int, list[str]]]:
    """Yield each pid with the fields of proc_pid_stat(5) from the third on: state, parent, group, session, ..."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):
                yield int(name), Path("/proc", name, "stat").read_text().rpartition(")")[2].split()
