"""Run a command, and leave nothing of it: ``python keeper.py FD COMMAND ...``, where FD is one end of a socketpair.

The keeper is the subreaper (prctl(2)) of all that the command starts, so daemons, processes in other sessions and those with
an emptied environment become its children. When the other end of FD closes, also because oomprobe was killed, or when the
command has ended, it terminates, then kills everything below it. It writes the command's wait status to FD, and how many
processes the command has left running.

It is a program of its own, without torch and oomprobe: its memory must be small, and the caller's process no subreaper.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
TICK_S = 0.02
GRACE_S = 2.0  # between SIGTERM and SIGKILL
# These have processes on other machines, which they end when they are terminated, but not when they are killed. Slurm itself
# waits 30 s (KillWait in slurm.conf).
REMOTE_LAUNCHERS, REMOTE_GRACE_S = (
    {"srun", "mpirun", "mpiexec", "orterun", "prterun", "mpiexec.hydra"},
    40.0,
)
KILLING_S = 5.0  # a killed process ends at once, unless it waits in the kernel
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # only FD ends the keeper


def main(wire: int, words: list[str]) -> int:
    """Run a command until it ends, or until the other end of the wire closes; then end all that it has started."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    os.set_inheritable(wire, False)

    def begin_command() -> None:
        for number in IGNORED:
            signal.signal(number, signal.SIG_DFL)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # the system's OOM killer takes the command, not the caller

    try:
        command = subprocess.Popen(words, start_new_session=True, preexec_fn=begin_command)
    except OSError as error:
        os.write(wire, f"cannot be started: {error}".encode())
        return 127
    while not select.select([wire], [], [], TICK_S)[0]:
        ended = reap() or {}
        if command.pid in ended:
            with contextlib.suppress(OSError):  # oomprobe may have been killed at this moment
                os.write(wire, b"%d %d" % (ended[command.pid], len(processes_below())))
            break
    end_all()
    return 0


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


def reap() -> dict[int, int] | None:
    """Return the wait statuses of children that have ended, by pid; None if no children are left."""
    ended: dict[int, int] = {}
    try:
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return ended
            ended[pid] = status
    except ChildProcessError:
        return ended or None


def end_all() -> None:
    """Terminate all descendants, then kill all which do not end, and all which appear meanwhile.

    A process whose main thread has ended may still hold memory, so wait until the system has let go of every child.
    """
    begun_s, terminated = time.monotonic(), set()
    while (
        reap() is not None and (waited_s := time.monotonic() - begun_s) < REMOTE_GRACE_S + KILLING_S
    ):
        for pid, name in processes_below().items():
            number = signal.SIGTERM
            if waited_s >= (REMOTE_GRACE_S if name in REMOTE_LAUNCHERS else GRACE_S):
                number = signal.SIGKILL
            elif pid in terminated:
                continue
            terminated.add(pid)
            with contextlib.suppress(OSError):
                os.kill(pid, number)
        time.sleep(TICK_S)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
