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
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch

from oomprobe.ground import processes
from oomprobe.runners.hooks import preload_dynamo
from oomprobe.runners.workers import worker
from oomprobe.runners.workers.template import READY

NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"  # with it, torch.cuda.is_available() does not load CUDA's driver library
STARTS_THREADS = "one of the target's imports starts threads"
LOADS_CUDA = "one of the target's imports loads CUDA's driver"


def main(descriptor: int, target: str) -> NoReturn:
    """Import, tell the parent whether forks are as good as new interpreters, and fork one for each mark that it sends.

    If they are not, become the first worker.
    """
    sys.argv = [""]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent, link = os.getppid(), socket.socket(fileno=descriptor)
    refusal = _prepare(target)
    gc.collect()
    gc.freeze()  # so that no fork scans or copies what is there
    with suppress(OSError):
        link.sendall(f"{READY}{refusal}".encode())
        while True:
            mark, descriptors, _, _ = socket.recv_fds(link, 2**10, 2)
            if not mark:
                break
            serve = partial(_serve, link, mark.decode(), *descriptors)
            if refusal:
                link.sendall(str(os.getpid()).encode())
                serve()
            pid = _fork_orphan(parent, serve)
            for of_worker in descriptors:
                os.close(of_worker)
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
    return spec is not None and any(str(spec.origin).startswith(folder) for folder in folders)


def _fork_orphan(parent: int, serve: Callable[[], NoReturn]) -> int:
    """Fork a worker whose parent will be this process's own, which adopts orphans; return its pid once it has."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from Python 3.12 on, about numpy's threads
        between = os.fork()
        if not between:
            _fork_worker(parent, writing, serve)
    os.waitpid(between, 0)
    os.close(writing)
    with open(reading) as pipe:
        return int(pipe.read())


def _fork_worker(parent: int, writing: int, serve: Callable[[], NoReturn]) -> NoReturn:
    """In the process between: fork, tell the pid, and end."""
    between, pid = os.getpid(), os.fork()
    if pid:
        os.write(writing, str(pid).encode())
        os._exit(0)
    os.close(writing)
    while os.getppid() == between:
        time.sleep(0.001)
    os.setsid()
    processes.die_with_parent(parent)
    for generator in (random, np.random, torch.default_generator):
        generator.seed()  # by the system, as in a new interpreter
    serve()


def _serve(link: socket.socket, mark: str, wire: int, stderr: int) -> NoReturn:
    """Be a worker."""
    link.close()
    processes.mark_as(mark)
    os.dup2(stderr, 2)
    worker.main(wire)
