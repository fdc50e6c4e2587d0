"""Random number generators and global flags of torch, numpy and Python."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from oomprobe.state.compare import same

Flag = tuple[Callable[[], Any], Callable[..., object]]

_UNREADABLE = object()


def _read(get: Callable[[], Any]) -> Any:
    """A value, unless torch refuses to tell it, as it does where its two precision interfaces were mixed."""
    try:
        return get()
    except Exception:
        return _UNREADABLE


def _attribute(owner: Any, name: str) -> Flag:
    return partial(getattr, owner, name), partial(setattr, owner, name)


def _of_torch(get: str, put: str) -> Flag:
    """Of torch._C, where not every torch has them."""
    return lambda: getattr(torch._C, get)(), lambda *value: getattr(torch._C, put)(*value)


def _reductions(kind: str) -> Flag:
    """Two flags behind one name of ``torch.backends.cuda.matmul``: at reduced precision, and there with split k."""
    get, put = _of_torch(*(f"_{verb}_cublas_allow_{kind}_reduced_precision_reduction" for verb in ("get", "set")))
    return get, lambda value: put(*(value if isinstance(value, tuple) else (value,)))


def _precisions() -> dict[str, Flag]:
    """Torch's newer precision flags. The general ones come first: a flag that is not set shows the one above it."""
    found: dict[str, Flag] = {}
    of_mkldnn = ("mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")
    for path in ("", "cudnn", "mkldnn", "cuda.matmul", "cudnn.conv", "cudnn.rnn", *of_mkldnn):
        owner: Any = torch.backends
        for name in filter(None, path.split(".")):
            owner = getattr(owner, name, None)
        if owner is not None and _read(partial(getattr, owner, "fp32_precision")) is not _UNREADABLE:
            found[f"{path}.fp32_precision".lstrip(".")] = _attribute(owner, "fp32_precision")
    return found


def _default_device() -> torch.device | None:
    """The one that was set; a ``with torch.device(...)`` around the probe is not a setting."""
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


def _flags(device_type: str) -> dict[str, Flag]:
    """The flags a step may change for everybody, by name, each with its getter and setter."""
    cudnn, mkldnn, matmul, sdp = (
        torch.backends.cudnn,
        torch.backends.mkldnn,
        torch.backends.cuda.matmul,
        torch.backends.cuda,
    )
    mha, fill = torch.backends.mha, torch.utils.deterministic
    flags: dict[str, Flag] = {
        "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
        "default device": (_default_device, torch.set_default_device),
        "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
        "deterministic algorithms": (
            lambda: (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
        ),
        "anomaly detection": (
            lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
            lambda value: torch.set_anomaly_enabled(*value),
        ),
        "threads": (torch.get_num_threads, torch.set_num_threads),
        "warn always": (torch.is_warn_always_enabled, torch.set_warn_always),
        "fill uninitialised memory": _attribute(fill, "fill_uninitialized_memory"),
        "autograd multithreading": _of_torch("_is_multithreading_enabled", "_set_multithreading_enabled"),
        "autocast cache": (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
        "float32 matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        "fp16 reduced precision reduction": _reductions("fp16"),
        "bf16 reduced precision reduction": _reductions("bf16"),
        "fp16 accumulation": _attribute(matmul, "allow_fp16_accumulation"),
        **{
            f"cudnn.{name}": _attribute(cudnn, name)
            for name in ("enabled", "benchmark", "benchmark_limit", "allow_tf32", "deterministic")
        },
        "mkldnn.enabled": _attribute(mkldnn, "enabled"),
        "mkldnn.deterministic": _attribute(mkldnn, "deterministic"),
        "nnpack": _of_torch("_get_nnpack_enabled", "_set_nnpack_enabled"),
        "flash attention": (sdp.flash_sdp_enabled, sdp.enable_flash_sdp),
        "memory-efficient attention": (sdp.mem_efficient_sdp_enabled, sdp.enable_mem_efficient_sdp),
        "math attention": (sdp.math_sdp_enabled, sdp.enable_math_sdp),
        "cudnn attention": (sdp.cudnn_sdp_enabled, sdp.enable_cudnn_sdp),
        "reduced precision in the math attention": (
            sdp.fp16_bf16_reduction_math_sdp_allowed,
            sdp.allow_fp16_bf16_reduction_math_sdp,
        ),
        "attention fast path": (mha.get_fastpath_enabled, mha.set_fastpath_enabled),
    }
    for kind in {"cpu", "cuda", device_type}:  # CUDA's is what torch.set_autocast_enabled(True) sets, on any device
        flags[f"autocast {kind}"] = partial(torch.is_autocast_enabled, kind), partial(torch.set_autocast_enabled, kind)
        flags[f"autocast {kind} dtype"] = (
            partial(torch.get_autocast_dtype, kind),
            partial(torch.set_autocast_dtype, kind),
        )
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
    """Their values as they were; what could not be read is left out."""

    def __init__(self, device_type: str) -> None:
        self._flags = {**_precisions(), **_flags(device_type), **generators(device_type)}
        read = {name: _read(get) for name, (get, _) in self._flags.items()}
        self._values = {name: value for name, value in read.items() if value is not _UNREADABLE}

    def restore(self, *, device_lost: bool = False) -> list[str]:
        """Restore them all; the names of those that could not be set."""
        lost = {name for name in self._values if device_lost and name.startswith("torch (") and name != "torch (cpu)"}
        failed: list[str] = []
        for _ in range(2):  # torch's older precision flags and its newer ones set each other
            failed = [name for name in self._values if name not in lost and not self._set(name)]
        return failed

    def _set(self, name: str) -> bool:
        get, put = self._flags[name]
        try:
            if not same(_read(get), self._values[name]):
                put(self._values[name])
        except Exception:  # the rest is still to be restored
            return False
        return True

    def differences(self) -> list[str]:
        """Names of what is not as it was."""
        return [name for name, value in self._values.items() if not same(_read(self._flags[name][0]), value)]
