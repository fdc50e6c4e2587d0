"""Processes as listed in /proc, without help from the package."""

import contextlib
import os
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
MARK = "OOMPROBE_FAULT_TEST"  # environment variable of all processes that descend from a test
PATIENCE_S = 90


def environment(mark, **more):
    """Return an environment in which a new process finds the package and these modules."""
    paths = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")])
    return {**os.environ, "PYTHONPATH": paths, MARK: mark, **more}


def marked(mark):
    """Return {pid: command} of running processes with this mark; zombies are not listed."""
    wanted = f"{MARK}={mark}".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def is_gone(pid):
    """Return whether a process has ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def children():
    """Return {pid: state} of this process's children, including zombies."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit():
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if int(parent) == os.getpid():
                    found[int(entry.name)] = state
    return found


def open_files():
    """Return {descriptor: file} of this process."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def until(happens, *, within_s=PATIENCE_S):
    """Wait until `happens()` is true, and return its value."""
    end_s = time.monotonic() + within_s
    while not (value := happens()):
        if time.monotonic() > end_s:
            pytest.fail(f"nothing within {within_s} s")
        time.sleep(0.05)
    return value
