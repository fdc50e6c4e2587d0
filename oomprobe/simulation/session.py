"""Patches and modes that present the simulated card to one call of a step."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp import autocast_mode
from torch.amp.grad_scaler import GradScaler
from torch.utils import checkpoint

from oomprobe.errors import SimulationError
from oomprobe.simulation.choices import Choices
from oomprobe.simulation.cuda_api import replacements
from oomprobe.simulation.fakes import CARD, HOST, SEEN_CARD
from oomprobe.simulation.identity import BuildingIdentity, Identity
from oomprobe.simulation.unknown import user_line
from oomprobe.simulation.world import World

_DEVICE: Any = FakeTensor.device  # torch's own property


@contextmanager
def session(world: World) -> Iterator[None]:
    """Simulate the code inside, in this thread."""
    thread = threading.get_ident()
    with ExitStack() as stack:
        if gc.isenabled():
            # The collector must not free cycles at random moments: identical calls must make identical tapes.
            stack.callback(gc.enable)
            gc.disable()
        stack.enter_context(patch.object(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True))
        stack.enter_context(Choices(lambda: threading.get_ident() == thread, world.memory.card.compute_capability))
        for patched in _patches(world):
            stack.enter_context(patch.object(*patched))
        stack.enter_context(patch.object(torch, "save", _refuse_save))
        # oneDNN runs a recurrent network as one operator, which hides what it keeps for backward.
        stack.callback(torch._C._set_mkldnn_enabled, torch._C._get_mkldnn_enabled())
        torch._C._set_mkldnn_enabled(False)
        # Weights that autocast has already cast are real tensors on the host; those it casts inside are fakes.
        stack.callback(torch.clear_autocast_cache)
        torch.clear_autocast_cache()
        identity = Identity(world)
        stack.enter_context(patch.object(FakeTensor, "tolist", lambda tensor: identity.to_list(tensor)))
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # compilers need real devices
        stack.enter_context(world.fake_mode)
        stack.enter_context(world)
        stack.enter_context(identity)
        yield


@contextmanager
def building(world: World) -> Iterator[None]:
    """Run code that builds a model and moves it to ``"cuda"``; its tensors stay real, in host memory."""
    with ExitStack() as stack:
        for patched in _patches(world):
            stack.enter_context(patch.object(*patched))
        identity = BuildingIdentity(world)
        stack.enter_context(patch.object(torch, "load", identity.wrap_load(torch.load)))
        stack.enter_context(identity)
        yield


def _patches(world: World) -> Iterator[tuple[Any, str, Any]]:
    """Yield replacements for torch's attributes, each with its owner and name."""
    for name, function in replacements(world.memory).items():
        for owner in (torch.cuda, torch.cuda.memory, torch.cuda.random, torch.accelerator):
            if hasattr(owner, name):
                yield owner, name, function
    yield FakeTensor, "device", property(_device_getter(world), _DEVICE.fset)
    yield torch.nn.Module, "_apply", _wrap_apply(world, torch.nn.Module._apply)
    yield GradScaler, "_maybe_opt_step", _always_step
    yield autocast_mode.autocast, "__init__", _redirect_autocast(autocast_mode.autocast.__init__)
    for name in ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled", "set_autocast_dtype"):
        yield torch, name, _query_cpu(getattr(torch, name))
    yield torch, "get_autocast_gpu_dtype", lambda: torch.get_autocast_dtype("cpu")
    yield torch.nn.DataParallel, "forward", lambda wrapper, *args, **kwargs: wrapper.module(*args, **kwargs)  # one card
    yield torch.Tensor, "record_stream", lambda *_: None
    yield torch, "Generator", _Generator
    for name in ("range_push", "range_pop", "mark"):
        yield torch.cuda.nvtx, name, lambda *_, **__: 0
    checks = checkpoint._allowed_determinism_checks_to_fns
    yield checkpoint, "_allowed_determinism_checks_to_fns", {**checks, "default": _metadata}


def _refuse_save(*_: Any, **__: Any) -> None:
    raise SimulationError(
        f"{user_line()} saves a checkpoint, and a simulated card has nothing to save: leave that out of the step (it takes "
        "no memory on the card), or probe on a real device"
    )


class _AnyGenerator(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, torch._C.Generator)


class _Generator(metaclass=_AnyGenerator):
    """Host generator for any device; random values do not exist on the card."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return torch._C.Generator("cpu")


def _metadata(tensor: torch.Tensor) -> dict[str, Any]:
    """Return what checkpointing compares of a recomputed tensor; without its device, which depends on the caller."""
    return {"shape": tensor.shape, "dtype": tensor.dtype}


def _device_getter(world: World) -> Any:
    def device(tensor: FakeTensor) -> torch.device:
        if tensor.fake_mode is not world.fake_mode or world.depth or tensor.fake_mode.in_kernel_invocation:
            return _DEVICE.fget(tensor)  # type: ignore[no-any-return]
        return SEEN_CARD if tensor.fake_device == CARD else HOST

    return device


def _wrap_apply(world: World, apply: Any) -> Any:
    """Move a module to the card without replacing its tensors."""

    def _apply(module: torch.nn.Module, fn: Any, recurse: bool = True) -> torch.nn.Module:
        tensors = [*module.parameters(), *module.buffers()]
        probe = fn(torch.empty(0, dtype=tensors[0].dtype)) if tensors else None
        if (
            probe is None
            or any(t.is_meta for t in tensors)
            or any(t.is_floating_point() and t.dtype != probe.dtype for t in tensors)
        ):
            return apply(module, fn, recurse)  # type: ignore[no-any-return]
        if probe.device == SEEN_CARD:
            for tensor in tensors:
                if not world.is_on_card(tensor):
                    world.fakes.put_on_card(tensor)
        return module

    return _apply


def _always_step(scaler: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
    """Step without checking gradients for infinities; a skipped step would create no optimizer state."""
    return optimizer.step(*args, **kwargs)


def _redirect_autocast(init: Any) -> Any:
    def __init__(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.float16
        init(self, device_type, dtype, *args, **kwargs)

    return __init__


def _query_cpu(function: Any) -> Any:
    def query(*args: Any, **kwargs: Any) -> Any:
        args = tuple("cpu" if arg == "cuda" else arg for arg in args)
        return function(*(args or ("cpu",)), **kwargs)

    return query
