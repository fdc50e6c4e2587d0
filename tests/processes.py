"""Processes in tests: how they are started, and how they are seen in /proc, without help from the package.

`run_python` runs code in a new interpreter, which costs seconds if it imports torch. `start` runs a function in a forked child,
in 60 ms; this process must not have computed with torch, whose threads a child lacks. `bed.forked` starts a child with a card.
"""

import contextlib
import ctypes
import faulthandler
import io
import ipaddress
import os
import pickle
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
import warnings
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
REPOSITORY = TESTS.parent
MARK = "OOMPROBE_FAULT_TEST"  # environment variable of all processes that descend from a test
PATIENCE_S = 90


def environment(**more):
    """Return an environment in which a new process finds the package and the modules of the tests."""
    path = os.pathsep.join(
        filter(None, [str(REPOSITORY), str(TESTS), os.environ.get("PYTHONPATH")])
    )
    return {**os.environ, "PYTHONPATH": path, **more}


def run_python(code, timeout_s=120, warnings="error", stdin=""):
    """Run code in a new process, which can import the test modules, and return its output."""
    child = subprocess.run(
        [sys.executable, "-W", warnings, "-c", textwrap.dedent(code)],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=environment(OMP_NUM_THREADS="2"),
        cwd=REPOSITORY,
        check=False,
    )
    assert child.returncode == 0, f"exit code {child.returncode}\n{child.stdout}\n{child.stderr}"
    return child.stdout


# --- forks ---


class ChildDiedError(Exception):
    """A child was killed by a signal, or exited without an answer; `signal` is the signal's number or None."""

    signal = None


def start(function, *args):
    """Start a child that runs `function(*args)`, which may be a lambda or a closure; only its result or error is pickled."""
    # Files, because a pipe could fill up, or stay open in a grandchild.
    answer, output = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # about forking while pytest-xdist has threads
        pid = os.fork()
    if pid:
        return Child(pid, answer, output)
    try:
        _in_child(function, args, answer, output)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _in_child(function, args, answer, output):
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: die with the tests
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))  # noqa: SIM115
    faulthandler.enable()  # a crash prints its frames
    try:
        outcome = pickle.dumps((function(*args), None, None))
    except BaseException as error:
        outcome = _pickled_error(error)
    with open(answer.fileno(), "wb", closefd=False) as file:
        file.write(outcome)
    sys.stdout.flush()
    sys.stderr.flush()


def _pickled_error(error):
    text = "".join(traceback.format_exception(error))
    try:
        outcome = pickle.dumps((None, error, text))
        pickle.loads(outcome)  # some errors pickle but do not unpickle
    except Exception:
        outcome = pickle.dumps((None, RuntimeError(f"{type(error).__qualname__}: {error}"), text))
    return outcome


class Child:
    """A function running in a forked process."""

    def __init__(self, pid, answer, output):
        self.pid, self._answer, self._output, self._ended = pid, answer, output, os.pidfd_open(pid)
        with contextlib.suppress(OSError):  # the child does it too, whichever is first
            os.setpgid(pid, pid)

    def result(self, *, limit_s=60):
        """Wait for the child, and return what its function returns or raise what it raises.

        An error has the child's traceback as its cause and its stderr as a note.

        Raises:
            ChildDiedError: it was killed by a signal, or exited by os._exit.
            TimeoutError: it ran longer than `limit_s`; it and the processes it started (its process group) are killed.
        """
        try:
            ended, _, _ = select.select([self._ended], [], [], limit_s)
        finally:  # on Ctrl-C too
            status = self._end()
        printed = self._read(self._output).decode(errors="replace")
        answer = self._read(self._answer)
        sys.stderr.write(printed)
        if not ended:
            error = TimeoutError(f"the child ran longer than {limit_s} s")
        elif os.WIFSIGNALED(status):
            error = ChildDiedError(
                f"the child was killed by {signal.Signals(os.WTERMSIG(status)).name}"
            )
            error.signal = os.WTERMSIG(status)
        elif not answer:
            error = ChildDiedError(
                f"the child exited without an answer, exit status {os.waitstatus_to_exitcode(status)}"
            )
        else:
            value, error, text = pickle.loads(answer)
            if error is None:
                return value
            error.__cause__ = Exception(f"in the child:\n{text}")
        error.add_note(f"stdout and stderr of the child:\n{printed or '(nothing)'}")
        raise error

    def is_running(self):
        return not select.select([self._ended], [], [], 0)[0]

    def kill(self, signal_number=signal.SIGKILL):
        os.kill(self.pid, signal_number)

    def _end(self):
        self.kill()  # if it has ended, its status does not change
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # processes that it left running
        os.close(self._ended)
        return os.waitpid(self.pid, 0)[1]

    @staticmethod
    def _read(file):
        with file:
            file.seek(0)
            return file.read()


def run_script(script, *arguments):
    """Run a script in a child, as ``python script arguments`` in its folder; return its exit status, stdout and stderr."""
    return start(in_child, script, *arguments).result(limit_s=300)


def in_child(script, *arguments, folder=None):
    """Run a script in this process, a child, as `run_script` does; in its folder unless another is given."""
    import torch

    torch.set_num_threads(1)  # the threads of the parent do not exist here
    warnings.simplefilter("default")
    os.chdir(folder or script.parent)
    sys.argv, status = [script.name, *arguments], 0
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as left:
            status = left.code
        except BaseException:
            traceback.print_exc()
            status = 1
    return status, out.getvalue(), err.getvalue()


# --- in /proc ---


def marked(mark):
    """Return {pid: command} of running processes with this mark; zombies are not listed."""
    wanted = f"{MARK}={mark}".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                )
    return found


def is_gone(pid):
    """Return whether a process has ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def parents():
    """Return {pid: (parent, state)} of all processes."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit():
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                found[int(entry.name)] = (int(parent), state)
    return found


def children(of=None):
    """Return {pid: state} of a process's children, including zombies; of this one, unless another is given."""
    of = of or os.getpid()
    return {pid: state for pid, (parent, state) in parents().items() if parent == of}


def with_all_below(pid):
    """Return this pid and those of all descendants."""
    return [pid, *(one for child in children(pid) for one in with_all_below(child))]


def running(word):
    """Return the pids of processes in whose command line a word stands."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if word.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def listening(pids):
    """Return the addresses on which these processes accept connections (proc_pid_net(5))."""
    sockets = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                sockets.add(os.readlink(entry))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in sockets:
                words = bytes.fromhex(local.partition(":")[0])  # of four bytes, the last one first
                swapped = b"".join(
                    words[start : start + 4][::-1] for start in range(0, len(words), 4)
                )
                found.add(ipaddress.ip_address(swapped))
    return found


def open_files():
    """Return {descriptor: file} of this process."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def until(happens, *, within_s=PATIENCE_S, every_s=0.05):
    """Wait until `happens()` is true, and return its value."""
    end_s = time.monotonic() + within_s
    while not (value := happens()):
        if time.monotonic() > end_s:
            pytest.fail(f"nothing within {within_s} s")
        time.sleep(every_s)
    return value
