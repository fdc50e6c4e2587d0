"""The program of a template: import what workers import, and fork them.

It runs none of the user's code, so CUDA, autograd and the pools of threads are as new in a fork as in a new interpreter. Of the target's
file it only makes the imports of installed packages with which that begins.
"""

from __future__ import annotations

import ast
import gc
import os
import random
import signal
import socket
import sys
import sysconfig
import threading
import warnings
from collections.abc import Iterator
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch

from oomprobe.ground import processes
from oomprobe.runners import keeper
from oomprobe.runners.hooks import preload_dynamo
from oomprobe.runners.workers import worker
from oomprobe.runners.workers.template import READY

NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"  # with it, torch.cuda.is_available() does not load CUDA's driver library
STARTS_THREADS = "one of the target's imports starts threads"
LOADS_CUDA = "one of the target's imports loads CUDA's driver"


def main(descriptor: int, target: str) -> NoReturn:
    """Import, and fork a worker whenever the parent asks.

    If forks are not as good as new interpreters, tell the parent why, and become the first worker.
    """
    sys.argv = [""]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    link = socket.socket(fileno=descriptor)
    refusal = _prepare(target)
    gc.collect()
    gc.freeze()  # so that no fork scans or copies what is there
    with suppress(OSError):
        link.sendall(f"{READY}{refusal}".encode())
        while True:
            asked, given, _, _ = socket.recv_fds(link, 2**10, 3)
            if not asked:
                break
            wire, stderr, keepers = given
            if refusal:
                link.sendall(str(os.getpid()).encode())
                link.close()
                os.close(keepers)
                _serve_forks(wire, stderr)
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel waits for the keepers
            pid = processes.fork()
            if not pid:
                link.close()
                _keep_worker(wire, stderr, keepers)
            for descriptor in given:
                os.close(descriptor)
            link.sendall(str(pid).encode())
    os._exit(0)


def _prepare(target: str) -> str:
    """Import what a worker imports; return why it could not be forked from here, or ""."""
    preload_dynamo()
    # Before: the threads of numpy's linear algebra, which ends them before a fork and starts them after it; and whether torch itself has
    # loaded CUDA's driver, which does not initialise it.
    threads, has_driver = _threads(), _has_driver()
    before = os.environ.get(NVML_CHECK)
    os.environ[NVML_CHECK] = "1"
    for statement in _first_imports(target):
        with warnings.catch_warnings(), suppress(BaseException):
            warnings.simplefilter("ignore")
            exec(compile(ast.Module([statement], []), target, "exec"), {})
    del os.environ[NVML_CHECK]
    if before is not None:
        os.environ[NVML_CHECK] = before
    if threading.active_count() > 1 or _threads() > threads:
        return STARTS_THREADS
    if _has_driver() and not has_driver:
        return LOADS_CUDA
    return ""


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _has_driver() -> bool:
    return "libcuda.so" in Path("/proc/self/maps").read_text()


def _first_imports(target: str) -> Iterator[ast.stmt]:
    """Yield the statements that import installed packages with which a target's file begins."""
    place = target.rpartition(":")[0]
    if not place.endswith(".py"):
        return
    try:
        statements = ast.parse(Path(place).read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return  # the worker says so
    for statement in statements:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue  # the docstring
        names = []
        if isinstance(statement, ast.Import):
            names = [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and not statement.level:
            names = [statement.module or ""]
        if not names or not all(map(_is_installed, names)):
            return
        yield statement


def _is_installed(name: str) -> bool:
    """Return whether a module is torch's, Python's or an installed package's, rather than the user's own."""
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names:
        return True
    spec = PathFinder.find_spec(top)
    folders = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    return spec is not None and any(map(str(spec.origin).startswith, folders))


def _keep_worker(wire: int, stderr: int, keepers: int) -> NoReturn:
    """Be the keeper of a worker that is forked from here."""

    def start() -> int:
        pid = processes.fork()
        if not pid:
            os.close(keepers)
            keeper.begin()
            for generator in (random, np.random, torch.default_generator):
                generator.seed()  # by the system, as in a new interpreter
            _serve_forks(wire, stderr)
        return pid

    os.setsid()
    keeper.keep(keepers, start)
    os._exit(0)


def _serve_forks(wire: int, stderr: int) -> NoReturn:
    """Be a worker."""
    os.dup2(stderr, 2)
    worker.main(wire)
