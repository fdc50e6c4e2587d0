"""What /proc tells of processes: whose children they are, and which carry the mark of a run in their environment."""

import ctypes
import os
import signal
from contextlib import suppress
from pathlib import Path

MARK = "OOMPROBE_SOAK"  # its value is the folder of the run


def prctl(*arguments):
    return ctypes.CDLL(None, use_errno=True).prctl(*arguments)


def adopt_orphans():
    """Descendants whose parents end become children of this process, so that none escapes."""
    prctl(36, 1)  # PR_SET_CHILD_SUBREAPER, linux/prctl.h


def state_and_parent(pid):
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None, None
    return fields[0], int(fields[1])


def is_alive(pid):
    return state_and_parent(pid)[0] not in (None, "Z", "X")


def all_pids():
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def children_of(pid, *, zombies=False):
    found = []
    for one in all_pids():
        state, parent = state_and_parent(one)
        if parent == pid and (zombies or state not in ("Z", "X")):
            found.append(one)
    return found


def marked(folder):
    """Live processes that were started with this run's folder in their environment."""
    found = []
    for pid in all_pids():
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        if f"{MARK}={folder}".encode() in environment.split(b"\0") and is_alive(pid):
            found.append(pid)
    return found


def command_of(pid):
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def send(pid, number):
    """Whether a live process was sent the signal."""
    if not is_alive(pid):
        return False
    with suppress(OSError):
        os.kill(pid, number)
        return True
    return False


def end(pids):
    for pid in pids:
        send(pid, signal.SIGCONT)
        send(pid, signal.SIGKILL)


def target_of(role, worker, folder):
    """The process that plays a role in a run; None while there is none."""
    if role == "probe":
        return worker
    if role == "grandchild":
        return next((pid for pid in marked(folder) if command_of(pid).startswith("sleep ")), None)
    template = next((pid for pid in children_of(worker) if "template.main" in command_of(pid)), None)
    if role == "template" or template is None:
        return template
    return next(iter(children_of(template)), None)
