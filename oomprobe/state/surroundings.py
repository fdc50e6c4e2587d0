"""Random number generators and global flags of torch, numpy and Python."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

Flag = tuple[Callable[[], Any], Callable[[Any], object]]


def _attribute(owner: Any, name: str) -> Flag:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


def _autocast(kind: str) -> list[Flag]:
    return [
        (lambda: torch.is_autocast_enabled(kind), lambda on: torch.set_autocast_enabled(kind, on)),
        (lambda: torch.get_autocast_dtype(kind), lambda dtype: torch.set_autocast_dtype(kind, dtype)),
    ]


def _deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def global_flags(device_type: str) -> dict[str, Flag]:
    """The flags a step may change for everybody, by name, each with its getter and setter."""
    cudnn, sdp = torch.backends.cudnn, torch.backends.cuda
    flags: dict[str, Flag] = {
        "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
        "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
        "deterministic algorithms": (
            lambda: (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            _deterministic,
        ),
        "anomaly detection": (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
        "threads": (torch.get_num_threads, torch.set_num_threads),
        "float32 matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        "autocast cache": (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
        "cudnn.enabled": _attribute(cudnn, "enabled"),
        "cudnn.benchmark": _attribute(cudnn, "benchmark"),
        "cudnn.deterministic": _attribute(cudnn, "deterministic"),
        "flash attention": (sdp.flash_sdp_enabled, sdp.enable_flash_sdp),
        "memory-efficient attention": (sdp.mem_efficient_sdp_enabled, sdp.enable_mem_efficient_sdp),
        "math attention": (sdp.math_sdp_enabled, sdp.enable_math_sdp),
    }
    for kind in {"cpu", device_type}:
        on, dtype = _autocast(kind)
        flags[f"autocast {kind}"], flags[f"autocast {kind} dtype"] = on, dtype
    return flags


def generators(device_type: str) -> dict[str, Flag]:
    """The default random number generators, by name, each with its getter and setter."""
    found: dict[str, Flag] = {
        "random": (random.getstate, random.setstate),
        "numpy.random": (np.random.get_state, np.random.set_state),
        "torch (cpu)": (torch.get_rng_state, torch.set_rng_state),
    }
    if device_type == "cpu":
        return found
    module = torch.get_device_module(device_type)
    count = 1 if device_type == "mps" else module.device_count()
    for index in range(count):
        args = () if device_type == "mps" else (index,)
        put = partial(_set_rng_state, module, args)
        found[f"torch ({device_type}:{index})"] = (partial(module.get_rng_state, *args), put)
    return found


def _set_rng_state(module: Any, args: tuple[int, ...], state: torch.Tensor) -> None:
    module.set_rng_state(state, *args)


class Surroundings:
    """Their values as they were."""

    def __init__(self, device_type: str) -> None:
        self._flags = {**global_flags(device_type), **generators(device_type)}
        self._values = {name: get() for name, (get, _) in self._flags.items()}

    def put_back(self, *, device_lost: bool = False) -> None:
        for name, (get, put) in self._flags.items():
            lost = device_lost and name.startswith("torch (") and name != "torch (cpu)"
            if not lost and not same(get(), self._values[name]):
                put(self._values[name])

    def differences(self) -> list[str]:
        """Names of what is not as it was."""
        return [name for name, (get, _) in self._flags.items() if not same(get(), self._values[name])]


def same(one: Any, other: Any) -> bool:
    """Equality that looks into tuples, lists, dicts, arrays and tensors, and takes NaN bits as they are.

    Example:
        >>> same({"a": (1, np.zeros(2))}, {"a": (1, np.zeros(2))}), same([1], [2])
        (True, False)
    """
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bool(torch.equal(_bits(one), _bits(other)))
    if isinstance(one, np.ndarray):
        return bool(one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and one != one:
        return bool(other != other)
    try:
        return bool(one == other)
    except Exception:  # an object whose comparison is not a truth value
        return one is other


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
