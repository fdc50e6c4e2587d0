"""Faults that happen inside a probe: in its step, its device's answers, its files. Each leaves a file when it happens.

A run is a folder: `run.json` says what is to happen, `calls` grows by a byte with every call of the step, in whatever
process, and `fault-N` is there once fault N has happened, and makes sure that it happens once.
"""

import errno
import json
import os
import signal
import socket
import subprocess
import time
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import torch

from soaking.processes import MARK

LIES = {
    "zero": lambda true: 0,
    "negative": lambda true: -(2**30),
    "huge": lambda true: 2**60,
    "none": lambda true: None,
}
HANG_S = 600.0
_kept = []  # grandchildren, so that nobody reaps them


def folder():
    return os.environ.get(MARK)


@lru_cache(maxsize=1)
def _faults_of(place):
    return json.loads(Path(place, "run.json").read_text())["faults"]


def planned(*kinds):
    """Faults of this run that have not happened."""
    place = folder()
    if place is None:
        return []
    return [f for f in _faults_of(place) if f["kind"] in kinds and not has_happened(place, f)]


def has_happened(place, fault):
    return os.path.exists(f"{place}/fault-{fault['id']}")


def claim(place, fault):
    """Whether this is the first to let it happen."""
    with suppress(FileExistsError):
        os.close(os.open(f"{place}/fault-{fault['id']}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        return True
    return False


def count(place, name):
    """One more of something, in whatever process; how many there are now."""
    fd = os.open(f"{place}/{name}", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    try:
        os.write(fd, b".")
        return os.fstat(fd).st_size
    finally:
        os.close(fd)


# --- in a step ---


def at_call(card):
    """At the beginning of every call of a step."""
    place = folder()
    if place is None:
        return
    calls = count(place, "calls")
    _start_grandchild(place)
    if card is not None:
        card.neighbours = _neighbours(place, calls, card.total_bytes)
    for fault in planned(*_IN_STEP):
        if calls >= fault["call"] and claim(place, fault):
            _IN_STEP[fault["kind"]](card, fault)


def _neighbours(place, calls, total_bytes):
    held = 0
    for fault in _faults_of(place):
        if fault["kind"] == "neighbour" and fault["call"] <= calls < fault["call"] + fault["calls"]:
            claim(place, fault)
            held += int(fault["share"] * total_bytes)
    return held


def _oom(card, fault):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB (injected)")


def _hang(card, fault):
    time.sleep(HANG_S)


def _leak(card, fault):
    card.leak(fault["bytes"])


def _answer_sockets():
    """The child's end of the socket it answers by."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:") and int(name) > 2:
                found.append(int(name))
    return found


def _garble(card, fault):
    pack = __import__("struct").pack
    said = {
        "garbage": bytes(fault["bytes"]),
        "half": pack("<4sII", b"oomp", 3000, 12345) + b'{"ran": {"tri',
        "short": b"oom",
        "checksum": pack("<4sII", b"oomp", 2, 1) + b"{}",
    }[fault["said"]]
    for fd in _answer_sockets():
        with suppress(OSError), socket.socket(fileno=os.dup(fd)) as end:
            end.sendall(said)
    if fault["then"] == "exit":
        os._exit(0)
    if fault["then"] == "die":
        os.kill(os.getpid(), signal.SIGKILL)


def _start_grandchild(place):
    wanted = [f for f in _faults_of(place) if f.get("role") == "grandchild"]
    if wanted and not os.path.exists(f"{place}/grandchild-{os.getpid()}"):
        Path(place, f"grandchild-{os.getpid()}").touch()
        _kept.append(subprocess.Popen(["sleep", "600"], start_new_session=wanted[0]["detached"]))


def _plant(card, fault):
    """What no probe may leave, or answer: the judge has to see it."""
    planted = {
        "process": lambda: subprocess.run(
            ["sh", "-c", "sleep 600 >/dev/null 2>&1 &"], start_new_session=True, check=True
        ),
        "file": lambda: Path(os.environ["TMPDIR"], "planted").touch(),
        "open file": lambda: os.open("/dev/null", os.O_RDONLY),
        "flag": lambda: os.umask(0o77),
        "hang": lambda: time.sleep(HANG_S),
        "answer": lambda: setattr(card, "total_bytes", 2 * card.total_bytes),
        "exception": lambda: setattr(card, "live_bytes", None),
    }
    planted[fault["what"]]()


_IN_STEP = {"oom": _oom, "hang": _hang, "leak": _leak, "garble": _garble, "plant": _plant}


# --- in a device's answers ---


def told(method, true):
    """What a device answers."""
    place = folder()
    if place is None or not any(f["kind"] == "lie" for f in _faults_of(place)):
        return true
    asked = count(place, f"asked-{method}")
    for fault in _faults_of(place):
        if fault["kind"] == "lie" and fault["method"] == method and asked >= fault["call"]:
            first = claim(place, fault)
            if first or fault["for_good"]:
                if fault["value"] == "raise":
                    raise RuntimeError("Driver Not Loaded (injected)")
                return LIES[fault["value"]](true)
    return true


# --- in a file ---


class Disk:
    """Between the journal and its disk: `os.write` and `os.fsync` of that file alone, for as long as it is entered."""

    def __init__(self, journal):
        self._journal, self._own = os.path.realpath(journal), (os.write, os.fsync)

    def __enter__(self):
        os.write, os.fsync = self._write, self._sync

    def __exit__(self, *_):
        os.write, os.fsync = self._own

    def _ours(self, fd):
        with suppress(OSError):
            return os.readlink(f"/proc/self/fd/{fd}") == self._journal
        return False

    def _faults(self, kind, fd):
        if not self._ours(fd):
            return
        place = folder()
        nth = count(place, f"done-{kind}")
        for fault in _faults_of(place):
            if fault["kind"] == kind and nth >= fault["call"]:
                first = claim(place, fault)
                if first or fault["for_good"]:
                    yield fault

    def _write(self, fd, data):
        own_write = self._own[0]
        for fault in self._faults("disk_full", fd):
            if fault["short"]:
                own_write(fd, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return own_write(fd, data)

    def _sync(self, fd):
        for _ in self._faults("sync_fails", fd):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        for fault in self._faults("slow_store", fd):
            time.sleep(fault["sleep_s"])
        self._own[1](fd)
