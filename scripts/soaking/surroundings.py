"""What a probe has to leave as it was, in the process that asked for it."""

import gc
import hashlib
import os
import random
import resource
import signal
import sys
import threading
import warnings
from contextlib import suppress

import torch
from torch.optim import optimizer as torch_optimizer

from soaking.processes import children_of, prctl


def look(model, optimizer):
    """As text and numbers that can be compared."""
    return {
        "open files": _open_files(),
        "children": children_of(os.getpid(), zombies=True),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "handlers": {str(number): repr(signal.getsignal(number)) for number in sorted(signal.valid_signals())},
        "blocked": sorted(int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "limits": {
            name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name[:7] == "RLIMIT_"
        },
        "timer": signal.getitimer(signal.ITIMER_REAL)[0] > 0,
        "adopts orphans": _adopts_orphans(),
        "flags": _flags(),
        "temporary files": sorted(os.listdir(os.environ["TMPDIR"])),
        "model": _digest(model, optimizer),
        "random": _random_states(),
    }


def _open_files():
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found[name] = os.readlink(f"/proc/self/fd/{name}")
    return {name: place for name, place in found.items() if not place.startswith(f"/proc/{os.getpid()}")}


def _adopts_orphans():
    import ctypes

    value = ctypes.c_int()
    prctl(37, ctypes.byref(value))  # PR_GET_CHILD_SUBREAPER
    return value.value


def _flags():
    mask = os.umask(0)
    os.umask(mask)
    return {
        "dtype": str(torch.get_default_dtype()),
        "grad": torch.is_grad_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "benchmark": torch.backends.cudnn.benchmark,
        "precision": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
        "hooks": [len(torch_optimizer._global_optimizer_pre_hooks), len(torch_optimizer._global_optimizer_post_hooks)],
        "collects": [gc.isenabled(), list(gc.get_threshold()), len(gc.callbacks)],
        "folder": os.getcwd(),
        "umask": mask,
        "path": list(sys.path),
        "environment": hashlib.sha256(repr(sorted(os.environ.items())).encode()).hexdigest(),
        "warnings": len(warnings.filters),
        "hook": repr(sys.excepthook),
    }


def _digest(model, optimizer):
    tensors = [(name, tensor.detach().numpy().tobytes()) for name, tensor in model.state_dict().items()]
    grads = [None if p.grad is None else p.grad.numpy().tobytes() for p in model.parameters()]
    modes = [module.training for module in model.modules()]
    state = repr(optimizer.state_dict())
    return hashlib.sha256(repr((tensors, grads, modes, state)).encode()).hexdigest()


def _random_states():
    import numpy

    states = (torch.get_rng_state().numpy().tobytes(), random.getstate(), repr(numpy.random.get_state()))
    return hashlib.sha256(repr(states).encode()).hexdigest()


def differences(before, after):
    """In words."""
    found = []
    for name, was in before.items():
        now = after[name]
        if was == now:
            continue
        if isinstance(was, dict):
            changed = {
                key: (was.get(key), now.get(key)) for key in was.keys() | now.keys() if was.get(key) != now.get(key)
            }
            found.append(f"{name}: {changed}")
        else:
            found.append(f"{name}: {was} became {now}")
    return found
