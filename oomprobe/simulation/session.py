"""Everything that makes code believe in the simulated card, put in place for the time of one call."""

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
from oomprobe.simulation.identity import Identity
from oomprobe.simulation.unknown import user_line
from oomprobe.simulation.world import World

_DEVICE: Any = FakeTensor.device  # the property as torch made it


@contextmanager
def session(world: World) -> Iterator[None]:
    """Run what is inside in the simulated world, in this thread."""
    thread = threading.get_ident()
    with ExitStack() as stack:
        if gc.isenabled():
            # Cycles die before a call, not at a random moment inside it: the same call is to make the same tape.
            stack.callback(gc.enable)
            gc.disable()
        stack.enter_context(patch.object(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True))
        stack.enter_context(Choices(lambda: threading.get_ident() == thread, world.memory.card.compute_capability))
        for owner, name, value in patches(world):
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(patch.object(torch, "save", _refuse_save))
        # oneDNN's recurrent nets are one operator, which does not say what it keeps for backward.
        stack.callback(torch._C._set_mkldnn_enabled, torch._C._get_mkldnn_enabled())
        torch._C._set_mkldnn_enabled(False)
        # Weights that autocast cast before are real, and none of the card's; those that it casts inside are fakes.
        stack.callback(torch.clear_autocast_cache)
        torch.clear_autocast_cache()
        identity = Identity(world)
        stack.enter_context(patch.object(FakeTensor, "tolist", lambda tensor: identity.values_of(tensor)))
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # a compiler would want real devices
        stack.enter_context(world.fake_mode)
        stack.enter_context(world)
        stack.enter_context(identity)
        yield


def patches(world: World) -> Iterator[tuple[Any, str, Any]]:
    """What is put in place of functions of torch, each with its owner and name."""
    for name, function in replacements(world.memory).items():
        for owner in (torch.cuda, torch.cuda.memory, torch.cuda.random, torch.accelerator):
            if hasattr(owner, name):
                yield owner, name, function
    yield FakeTensor, "device", property(_seen_device(world), _DEVICE.fset)
    yield torch.nn.Module, "_apply", _applied(world, torch.nn.Module._apply)
    yield GradScaler, "_maybe_opt_step", _always_step
    yield autocast_mode.autocast, "__init__", _on_cpu(autocast_mode.autocast.__init__)
    for name in ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled", "set_autocast_dtype"):
        yield torch, name, _asked_of_cpu(getattr(torch, name))
    yield torch, "get_autocast_gpu_dtype", lambda: torch.get_autocast_dtype("cpu")
    yield torch.nn.DataParallel, "forward", lambda wrapper, *args, **kwargs: wrapper.module(*args, **kwargs)  # one card
    yield torch.Tensor, "record_stream", lambda *_: None
    yield torch, "Generator", _Generator
    for name in ("range_push", "range_pop", "mark"):
        yield torch.cuda.nvtx, name, lambda *_, **__: 0
    checks = checkpoint._allowed_determinism_checks_to_fns
    yield checkpoint, "_allowed_determinism_checks_to_fns", {**checks, "default": _look}


def _refuse_save(*_: Any, **__: Any) -> None:
    raise SimulationError(
        f"{user_line()} saves a checkpoint, and a simulated card has nothing to save: leave that out of the step (it takes "
        "no memory of the card), or probe on a real device"
    )


class _AnyGenerator(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, torch._C.Generator)


class _Generator(metaclass=_AnyGenerator):
    """One for the card is one of the host: it only has to be there."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return torch._C.Generator("cpu")


def _look(tensor: torch.Tensor) -> dict[str, Any]:
    """What checkpointing compares of a tensor that was saved and made again: where it is depends on who asks."""
    return {"shape": tensor.shape, "dtype": tensor.dtype}


def _seen_device(world: World) -> Any:
    def device(tensor: FakeTensor) -> torch.device:
        if tensor.fake_mode is not world.fake_mode or world.depth or tensor.fake_mode.in_kernel_invocation:
            return _DEVICE.fget(tensor)  # type: ignore[no-any-return]
        return SEEN_CARD if tensor.fake_device == CARD else HOST

    return device


def _applied(world: World, apply: Any) -> Any:
    """A module that is moved to the card is already there, or is put there as it is."""

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
                    world.settle(tensor)
        return module

    return _apply


def _always_step(scaler: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
    """Gradients without values are finite: a skipped step would leave the optimizer's state out of the peak."""
    return optimizer.step(*args, **kwargs)


def _on_cpu(init: Any) -> Any:
    def __init__(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.float16
        init(self, device_type, dtype, *args, **kwargs)

    return __init__


def _asked_of_cpu(function: Any) -> Any:
    def asked(*args: Any, **kwargs: Any) -> Any:
        args = tuple("cpu" if arg == "cuda" else arg for arg in args)
        return function(*(args or ("cpu",)), **kwargs)

    return asked
