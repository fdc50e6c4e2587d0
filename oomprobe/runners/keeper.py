"""Start a process, and leave nothing of it: ``python keeper.py FD GRACE_S FOLDER COMMAND ...``.

The keeper is the subreaper (prctl(2)) of all that the process starts, so daemons, processes in
other sessions and those with an emptied environment become its children. FD is one end of a
socketpair. When its other end closes, also because oomprobe was killed, or when the process has
ended, the keeper terminates, then kills everything below it. It writes to FD how the process has
ended, how many processes that has left, and its peak of memory. A byte from FD terminates the
process. Once the other end has closed, the keeper removes FOLDER.

It is a program of its own, without torch and oomprobe: its memory must be small, and the caller's
process no subreaper. Workers are forked together with a keeper, which costs no new interpreter.
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
TICK_MS = 20
# These have processes on other machines, which they end when they are terminated, but not when they
# are killed. Slurm itself waits 30 s (KillWait in slurm.conf).
REMOTE_LAUNCHERS, REMOTE_GRACE_S = (
    {"srun", "mpirun", "mpiexec", "orterun", "prterun", "mpiexec.hydra"},
    40.0,
)
KILLING_S = 5.0  # a killed process ends at once, unless it waits in the kernel
# Only FD ends the keeper. By name, because Windows, where this is imported, has no SIGHUP.
IGNORED = ("SIGINT", "SIGTERM", "SIGHUP")


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
        say(wire, f"cannot be started: {error}")
    if folder:
        while heard(wire):
            pass
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def begin() -> None:
    """Begin the process that is kept: in a group of its own, in the keeper's session."""
    os.setpgid(0, 0)
    signal.set_wakeup_fd(-1)
    for name in (*IGNORED, "SIGCHLD"):
        signal.signal(signal.Signals[name], signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # if the keeper is killed
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # the system's OOM killer takes it, not the caller


def keep(wire: int, start: Callable[[], int], grace_s: float = 0.0) -> None:
    """Keep a process until it or the wire ends, then end all that is left of it.

    `start` starts it, and returns its pid.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for name in IGNORED:
        signal.signal(signal.Signals[name], signal.SIG_IGN)
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
    ended: dict[int, tuple[int, int]] = {}  # wait status and peak in KiB by pid
    while kept not in ended:
        if wire in wait(waking, wire):
            if not heard(wire):
                break
            os.kill(kept, signal.SIGTERM)
        reap(ended)
    left = 0
    if kept in ended:
        left = len(processes_below())
    else:
        end_all(waking, grace_s, ended)
    if kept in ended:
        status, peak_kib = ended[kept]
        say(wire, f"{status} {left} {peak_kib}")
    end_all(waking, grace_s, ended)


def wait(waking: int, *wires: int, at_most_ms: int | None = None) -> list[int]:
    """Wait until a child has ended, or there is something to read; return what to read."""
    poll = select.poll()
    for descriptor in (waking, *wires):
        poll.register(descriptor, select.POLLIN)
    ready = [descriptor for descriptor, _ in poll.poll(at_most_ms)]
    if waking in ready:
        os.read(waking, 2**12)
    return ready


def say(wire: int, words: str) -> None:
    """Write to the other end of the wire, unless it has closed."""
    with suppress(OSError):
        os.write(wire, words.encode())


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


def reap(ended: dict[int, tuple[int, int]]) -> bool:
    """Add the children that have ended; return whether others are left."""
    with suppress(ChildProcessError):
        while True:
            pid, status, used = os.wait4(-1, os.WNOHANG)
            if not pid:
                return True
            ended[pid] = status, used.ru_maxrss
    return False


def end_all(waking: int, grace_s: float, ended: dict[int, tuple[int, int]]) -> None:
    """Terminate all descendants, then kill all which do not end, and all which appear meanwhile.

    A process whose main thread has ended may still hold memory, so wait until the system has let go
    of every child.
    """
    begun_s, terminated = time.monotonic(), set()
    while reap(ended):
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
        wait(waking, at_most_ms=TICK_MS)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3], sys.argv[4:]))
