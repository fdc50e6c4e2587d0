"""Start a process, and leave nothing of it: ``python keeper.py FD GRACE_S FOLDER COMMAND ...``; FD is one end of a socketpair.

The keeper is the subreaper (prctl(2)) of all that the process starts, so daemons, processes in other sessions and those with
an emptied environment become its children. When the other end of FD closes, also because oomprobe was killed, or when the
process has ended, it terminates, then kills everything below it, and removes FOLDER once the other end has closed. It writes
to FD how the process has ended, and a byte from there terminates the process.

It is a program of its own, without torch and oomprobe: its memory must be small, and the caller's process no subreaper.
Workers are forked together with a keeper, which costs no new interpreter.
"""

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
TICK_S = 0.02
# These have processes on other machines, which they end when they are terminated, but not when they are killed. Slurm itself
# waits 30 s (KillWait in slurm.conf).
REMOTE_LAUNCHERS, REMOTE_GRACE_S = (
    {"srun", "mpirun", "mpiexec", "orterun", "prterun", "mpiexec.hydra"},
    40.0,
)
KILLING_S = 5.0  # a killed process ends at once, unless it waits in the kernel
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # only FD ends the keeper


def main(wire: int, grace_s: float, folder: str, words: list[str]) -> int:
    """Keep a command."""
    os.set_inheritable(wire, False)

    def start() -> int:
        # The descriptors that the keeper has inherited are meant for the command.
        command = subprocess.Popen(words, close_fds=False, preexec_fn=begin)
        command.returncode = 0  # so that only `reap` waits for it
        return command.pid

    try:
        keep(wire, start, grace_s)
    except OSError as error:
        os.write(wire, f"cannot be started: {error}".encode())
    if folder:
        while heard(wire):
            pass
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def begin() -> None:
    """Begin the process that is kept, before it runs anything: in a group of its own, in the keeper's session."""
    os.setpgid(0, 0)
    signal.set_wakeup_fd(-1)
    for number in (*IGNORED, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # if the keeper is killed
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # the system's OOM killer takes it, not the caller


def keep(wire: int, start: Callable[[], int], grace_s: float = 0.0) -> None:
    """Keep the process that `start` starts, whose pid it returns, until it or the wire ends; then end all below this process."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    waking, woken = os.pipe()  # where Python writes a byte when a child has ended
    os.set_blocking(waking, False)
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    kept = start()
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor not in (wire, waking, woken):
            with suppress(OSError):  # the one that listed them is closed already
                os.close(descriptor)
    ended: dict[int, tuple[int, int]] = {}
    while kept not in ended:
        if wire in wait(waking, wire):
            if not heard(wire):
                break
            os.kill(kept, signal.SIGTERM)
        ended = reap() or {}
    else:
        status, peak_kib = ended[kept]
        with suppress(OSError):  # oomprobe may have been killed at this moment
            os.write(wire, b"%d %d %d" % (status, len(processes_below()), peak_kib))
    end_all(waking, grace_s)


def wait(waking: int, *wires: int, at_most_s: float | None = None) -> list[int]:
    """Wait until a child has ended, or there is something to read; return what to read."""
    ready, _, _ = select.select([waking, *wires], [], [], at_most_s)
    if waking in ready:
        os.read(waking, 2**12)
    return ready


def heard(wire: int) -> bytes:
    """Return a byte from the wire; b"" once its other end has closed."""
    with suppress(ConnectionError):  # closed before it had read everything
        return os.read(wire, 1)
    return b""


def processes_below() -> dict[int, str]:
    """Return the names of all living descendants by pid."""
    children: dict[int, list[tuple[int, str, str]]] = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/stat") as file:
                name, _, fields = file.read().partition("(")[2].rpartition(")")
        except OSError:
            continue
        state, parent = fields.split()[:2]
        children.setdefault(int(parent), []).append((int(entry), name, state))
    living, parents = {}, [os.getpid()]
    while parents:
        for pid, name, state in children.get(parents.pop(), ()):
            parents.append(pid)
            if state != "Z":
                living[pid] = name
    return living


def reap() -> dict[int, tuple[int, int]] | None:
    """Return the wait status and the peak in KiB of children that have ended, by pid; None if no children are left."""
    ended: dict[int, tuple[int, int]] = {}
    try:
        while True:
            pid, status, used = os.wait4(-1, os.WNOHANG)
            if not pid:
                return ended
            ended[pid] = status, used.ru_maxrss
    except ChildProcessError:
        return ended or None


def end_all(waking: int, grace_s: float) -> None:
    """Terminate all descendants, then kill all which do not end, and all which appear meanwhile.

    A process whose main thread has ended may still hold memory, so wait until the system has let go of every child.
    """
    begun_s, terminated = time.monotonic(), set()
    while reap() is not None:
        waited_s, longest_s = time.monotonic() - begun_s, grace_s
        for pid, name in processes_below().items():
            allowed_s = grace_s
            if name in REMOTE_LAUNCHERS:
                allowed_s = REMOTE_GRACE_S
            longest_s = max(longest_s, allowed_s)
            number = signal.SIGTERM
            if waited_s >= allowed_s:
                number = signal.SIGKILL
            elif pid in terminated:
                continue
            terminated.add(pid)
            with suppress(OSError):
                os.kill(pid, number)
        if waited_s > longest_s + KILLING_S:
            return
        wait(waking, at_most_s=TICK_S)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3], sys.argv[4:]))
