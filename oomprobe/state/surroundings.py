"""Random number generators, global flags of torch, numpy and Python, environment variables, garbage collection."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import torch

from oomprobe.state.compare import same

GetterAndSetter = tuple[Callable[[], Any], Callable[[Any], object]]

_UNREADABLE = object()


def _value_of(get: Callable[[], Any]) -> Any:
    """Return the value, or `_UNREADABLE` if torch raises, as it does after its two precision interfaces were mixed."""
    with suppress(Exception):
        return get()
    return _UNREADABLE


def _accessors(owner: Any, name: str) -> GetterAndSetter:
    return partial(getattr, owner, name), partial(setattr, owner, name)


def _global_flags(device_type: str) -> dict[str, GetterAndSetter]:
    """Return the global flags that a step may change, by name."""
    backends = torch.backends
    # General before specific: a precision that is not set reads as the more general one.
    precise = {"": backends, "cudnn.": backends.cudnn, "cuda.matmul.": backends.cuda.matmul}
    precise |= {f"cudnn.{name}.": getattr(backends.cudnn, name, None) for name in ("conv", "rnn")}
    flags = {
        f"{path}fp32_precision": _accessors(owner, "fp32_precision")
        for path, owner in precise.items()
    }
    flags |= {
        "os.environ": (os.environ.copy, _put_environment),
        "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
        "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
        "deterministic algorithms": (
            torch.get_deterministic_debug_mode,
            torch.set_deterministic_debug_mode,
        ),
        "threads": (torch.get_num_threads, torch.set_num_threads),
        "float32 matmul precision": (
            torch.get_float32_matmul_precision,
            torch.set_float32_matmul_precision,
        ),
    }
    for name in ("enabled", "benchmark", "allow_tf32", "deterministic"):
        flags[f"cudnn.{name}"] = _accessors(backends.cudnn, name)
    for kind in {
        "cpu",
        "cuda",
        device_type,
    }:  # torch.set_autocast_enabled(True) sets CUDA's on any device
        flags[f"autocast {kind}"] = (
            partial(torch.is_autocast_enabled, kind),
            partial(torch.set_autocast_enabled, kind),
        )
        dtype = partial(torch.get_autocast_dtype, kind), partial(torch.set_autocast_dtype, kind)
        flags[f"autocast {kind} dtype"] = dtype
    return flags


def _put_environment(variables: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)


def generators(device_type: str) -> dict[str, GetterAndSetter]:
    """Return the getter and setter of each default random number generator, by name."""
    by_name: dict[str, GetterAndSetter] = {
        "random": (random.getstate, random.setstate),
        "numpy.random": (np.random.get_state, np.random.set_state),
        "torch (cpu)": (torch.get_rng_state, torch.set_rng_state),
    }
    if device_type == "cpu":
        return by_name
    module = torch.get_device_module(device_type)
    for index in range(module.device_count()):
        put = partial(module.set_rng_state, device=index)
        by_name[f"torch ({device_type}:{index})"] = (
            partial(module.get_rng_state, device=index),
            put,
        )
    return by_name


def generator_states(device_type: str) -> list[tuple[Callable[[Any], object], Any]]:
    """Return the setter and the present state of each default random number generator."""
    return [(put, get()) for get, put in generators(device_type).values()]


class Surroundings:
    """Saved random number generators and global flags, without those that could not be read."""

    def __init__(self, device_type: str) -> None:
        self._global_flags = {**_global_flags(device_type), **generators(device_type)}
        self._values: dict[str, Any] = {}
        for name, (get, _) in self._global_flags.items():
            value = _value_of(get)
            if value is not _UNREADABLE:
                self._values[name] = value

    def restore(self) -> list[str]:
        """Restore all values, and return the names of those that could not be set."""
        for _ in range(2):  # torch's old and new precision flags set each other
            failed = [name for name in self._values if not self._set(name)]
        return failed

    def _set(self, name: str) -> bool:
        with suppress(Exception):  # continue with the others
            if self._differs(name):
                _, put = self._global_flags[name]
                put(self._values[name])
            return True
        return False

    def differences(self) -> list[str]:
        """Return the names of the values that have changed."""
        return list(filter(self._differs, self._values))

    def _differs(self, name: str) -> bool:
        get, _ = self._global_flags[name]
        return not same(_value_of(get), self._values[name])


FROZEN_BY_PYTHON = (
    1000  # at most: collecting garbage in 3.12 freezes immortal objects, 375 at the start
)


@contextmanager
def garbage_frozen() -> Iterator[None]:
    """Freeze existing objects so that garbage collection scans only new ones: 0.01 ms, not 98, with frameworks imported.

    Forked children inherit this and copy fewer pages. Freeze nothing if the caller has frozen objects, because unfreezing
    would unfreeze theirs too.
    """
    if gc.get_freeze_count() > FROZEN_BY_PYTHON:
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
