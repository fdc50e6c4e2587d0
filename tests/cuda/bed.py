"""Run tests on the CUDA bed: in a forked child of this process (60 ms), or in a new interpreter (2 s).

    def peak(size):
        torch.ones(size, device="cuda")
        return torch.cuda.max_memory_allocated()

    assert forked(peak, 1000, memory="2GiB", context="300MiB") == 4096
    assert run_on_bed("print(json.dumps(torch.cuda.device_count()))", memory="1GiB,1GiB") == 2

Options in lower case are the bed's (context="300MiB" sets CUDASTUB_CONTEXT), names in upper case are environment variables;
tests/cuda_bed/README.md describes them. The process that runs the tests must not use CUDA, since the library reads the
options only once, nor run a backward, since autograd could not start its threads in the children.
"""

import contextlib
import ctypes
import faulthandler
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import traceback
import warnings

import torch
import torch._dynamo  # otherwise the first optimizer imports it in each child, in 3 s

OPTIONS = ("card", "shared", "context", "lazy", "nccl", "neighbour", "fail", "scribble", "log")
ILLEGAL_ADDRESS = 700


class ChildDiedError(Exception):
    """A child was killed by a signal, or exited without an answer; `signal` is the signal's number or None."""

    signal = None


def forked(function, *args, limit_s=60, **options):
    """Return what `function(*args)` returns in a child with its own bed; raise what it raises.

    The function may be a lambda or a closure; only its result and its errors are pickled. An error has the child's
    traceback as its cause and its stderr as a note.

    Raises:
        ChildDiedError: it was killed by a signal, or exited by os._exit.
        TimeoutError: it ran longer than `limit_s`; it and the processes it started (its process group) are killed.
    """
    return start(function, *args, **options).result(limit_s=limit_s)


def start(function, *args, **options):
    """Start a child as `forked` does, and return while it runs, for tests with several processes."""
    environment = _environment(**options)
    # Files, because a pipe could fill up, or stay open in a grandchild.
    answer, output = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about forking while pytest-xdist has threads
        pid = os.fork()
    if pid:
        return Child(pid, answer, output)
    try:
        _in_child(function, args, environment, answer, output)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _in_child(function, args, environment, answer, output):
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: die with the tests
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))  # noqa: SIM115
    faulthandler.enable()  # a crash prints its frames
    try:
        os.environ.clear()
        os.environ.update(environment)
        if ctypes.CDLL("libcuda.so.1").cudastub_configure():
            raise RuntimeError("CUDA was used in this process before the fork: torch may remember other devices")
        torch.set_num_threads(1)  # the parent's thread pool does not exist here
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


def _environment(*, memory="1GiB", **options):
    if unknown := {name for name in options if name.islower()} - {*OPTIONS}:
        raise TypeError(f"no such option of the bed: {', '.join(sorted(unknown))}")
    ours = ("CUDASTUB_", "CUDA_VISIBLE_DEVICES")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    own = {f"CUDASTUB_{name.upper()}" if name.islower() else name: str(value) for name, value in options.items()}
    return {**inherited, "CUDASTUB_MEMORY": memory, **own}


class Child:
    """A function running in a forked process."""

    def __init__(self, pid, answer, output):
        self.pid, self._answer, self._output, self._ended = pid, answer, output, os.pidfd_open(pid)
        with contextlib.suppress(OSError):  # the child does it too, whichever is first
            os.setpgid(pid, pid)

    def result(self, *, limit_s=60):
        """Wait for the child, and return the function's result or raise its error."""
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
            error = ChildDiedError(f"the child was killed by {signal.Signals(os.WTERMSIG(status)).name}")
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


def run_on_bed(code, *, limit_s=120, **options):
    """Run Python code in a new interpreter, with torch and json imported; return the JSON on the last line it prints.

    For settings that torch reads while it is loaded, such as PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync".
    """

    def run():
        # Without the interpreter's own exit: torch 2.14 aborts it now and then right after a backward pass, because its
        # autograd thread still drops a Python object (https://github.com/pytorch/pytorch/issues/190489).
        leave = "\nimport os, sys\nsys.stdout.flush()\nos._exit(0)"
        command = [sys.executable, "-c", "import json, torch\n" + textwrap.dedent(code) + leave]
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout

    return json.loads(forked(run, limit_s=limit_s, **options).splitlines()[-1])


def fail(what, *, in_calls=1, code=ILLEGAL_ADDRESS):
    """Make the driver's n-th call from now fail."""
    ctypes.CDLL("libcuda.so.1").cudastub_fail(what.encode(), ctypes.c_long(in_calls), code)


TARGET = textwrap.dedent(
    """
    import sys
    sys.path.insert(0, {tests!r})
    from cuda.bed import fail
    from cuda.models import MODELS

    def build():
        model, inner = MODELS[{name!r}]()

        def step(model, batch_size):
            {fault}
            inner(model, batch_size)

        return model, step
    """
)


def target(tmp_path, fault="pass", name="mlp"):
    path = tmp_path / "target.py"
    path.write_text(TARGET.format(tests=os.path.dirname(os.path.dirname(__file__)), name=name, fault=fault))
    return f"{path}:build"
