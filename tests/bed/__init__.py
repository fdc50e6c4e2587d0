"""Run tests on the CUDA bed: in a forked child of this process (60 ms), or in a new interpreter (2 s).

    def peak(size):
        torch.ones(size, device="cuda")
        return torch.cuda.max_memory_allocated()

    assert forked(peak, 1000, memory="2GiB", context="300MiB") == 4096
    assert run_on_bed("print(json.dumps(torch.cuda.device_count()))", memory="1GiB,1GiB") == 2

Options in lower case are the bed's (context="300MiB" sets CUDASTUB_CONTEXT), names in upper case are environment variables;
tests/bed/README.md describes them. The process that runs the tests must not use CUDA, since the library reads the
options only once, nor run a backward, since autograd could not start its threads in the children.
"""

import contextlib
import ctypes
import json
import os
import subprocess
import sys
import textwrap
import time

import processes
import torch
import torch._dynamo  # otherwise the first optimizer imports it in each child, in 3 s
from processes import ChildDiedError as ChildDiedError

OPTIONS = ("card", "shared", "context", "lazy", "nccl", "neighbour", "fail", "scribble", "log")
ILLEGAL_ADDRESS = 700


def forked(function, *args, limit_s=60, **options):
    """Return what the function returns in a child with its own bed; as `processes.Child.result`."""
    return start(function, *args, **options).result(limit_s=limit_s)


def start(function, *args, memory="1GiB", **options):
    """Start a child as `forked` does, and return while it runs."""
    if unknown := {name for name in options if name.islower()} - {*OPTIONS}:
        raise TypeError(f"no such option of the bed: {', '.join(sorted(unknown))}")
    variables = {
        f"CUDASTUB_{name.upper()}" if name.islower() else name: str(value)
        for name, value in options.items()
    }
    return processes.start(_with_its_bed, {"CUDASTUB_MEMORY": memory, **variables}, function, args)


def _with_its_bed(variables, function, args):
    for name in [
        name for name in os.environ if name.startswith(("CUDASTUB_", "CUDA_VISIBLE_DEVICES"))
    ]:
        del os.environ[name]
    os.environ.update(variables)
    if ctypes.CDLL("libcuda.so.1").cudastub_configure():
        raise RuntimeError(
            "CUDA was used in this process before the fork: torch may remember other devices"
        )
    torch.set_num_threads(1)  # the parent's thread pool does not exist here
    return function(*args)


@contextlib.contextmanager
def holding(tmp_path, take, **options):
    """Yield a child that keeps what `take()` returns until the block ends."""

    def hold():
        kept = take()
        (tmp_path / "held").touch()
        time.sleep(60)
        del kept

    child = start(hold, **options)
    try:
        processes.until(
            lambda: not child.is_running() or (tmp_path / "held").exists(), every_s=0.01
        )
        yield child
    finally:
        child.kill()
        with contextlib.suppress(ChildDiedError):
            child.result()


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
