"""Patches and modes that present the simulated card to one call of a step."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp import autocast_mode
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad
from torch.optim import optimizer as optimizers
from torch.utils import checkpoint
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from oomprobe.ground.frames import user_line
from oomprobe.ground.replaced import Patch, replaced
from oomprobe.ground.torch_versions import INFERENCE_KEEPS_CASTS
from oomprobe.ground.units import known
from oomprobe.simulation.card_mode import CardMode, zeros_of
from oomprobe.simulation.cuda_api import called_by_torch, set_default_tensor_type
from oomprobe.simulation.cuda_kernels import CudaKernels
from oomprobe.simulation.device_mode import BuildingMode, DeviceMode
from oomprobe.simulation.fakes import CARD, HOST, SEEN
from oomprobe.simulation.memory import CardMemory

SKIPPED_SAVE = "{line} saves to a file: nothing was written, since tensors of a simulated card have no values and the file may be a checkpoint"
HELD = "memory for which record_stream was called was held until the end of the step: a card may give it back earlier"
_DEVICE: Any = FakeTensor.device  # torch's own property


@contextmanager
def simulated(card_mode: CardMode) -> Iterator[None]:
    """Simulate the code inside, in this thread."""
    with ExitStack() as stack:
        if gc.isenabled():
            # The collector must not free cycles at random moments: identical calls must make identical tapes.
            stack.callback(gc.enable)
            gc.disable()
        with (
            replaced([(torch, "save", _wrap_save(card_mode, torch.save))]),
            without_values(card_mode),
        ):
            yield


@contextmanager
def without_values(card_mode: CardMode) -> Iterator[None]:
    """Run code inside on tensors without data, in this thread."""
    device_mode = DeviceMode(card_mode)
    push = torch._C._autograd._push_saved_tensors_default_hooks
    of_mode: list[Patch] = [
        (FakeTensor, "tolist", lambda tensor: device_mode.to_list(tensor)),
        (torch._C._autograd, push.__name__, lambda *hooks: push(*map(device_mode, hooks))),
        *card_mode.threads.starting(
            lambda: _on_card(card_mode), in_step=not card_mode.whole_program
        ),
    ]
    on_cuda = _on_cuda(card_mode, device_mode)
    with on_cuda, replaced(of_mode), card_mode.fake_mode, card_mode, device_mode:
        yield


@contextmanager
def _on_card(card_mode: CardMode) -> Iterator[None]:
    """Run a thread's code inside on the card."""
    modes, lock = ExitStack(), card_mode.threads.lock
    with lock:  # they note what they find in one place for all threads
        for mode in (card_mode.fake_mode, card_mode, DeviceMode(card_mode)):
            modes.enter_context(mode)
    try:
        yield
    finally:
        with lock:
            modes.close()


@contextmanager
def building(card_mode: CardMode) -> Iterator[None]:
    """Run code that builds a model and moves it to ``"cuda"``; its tensors stay real, in host memory."""
    device_mode = BuildingMode(card_mode)
    loading = replaced([(torch, "load", device_mode.wrap_load(torch.load))])
    with _on_cuda(card_mode, device_mode), loading, card_mode.building(), device_mode:
        yield


@contextmanager
def _on_cuda(card_mode: CardMode, device_mode: DeviceMode) -> Iterator[None]:
    """Let code inside take CUDA's paths, in this thread."""
    threads = card_mode.threads
    with ExitStack() as stack:
        threads.enter()
        stack.callback(threads.leave)
        kernels = CudaKernels(threads.are_simulated_here, card_mode.memory.card.compute_capability)
        stack.enter_context(kernels)
        stack.enter_context(replaced(_patches(card_mode, device_mode, kernels)))
        # Inference mode would pass operators such as einsum to the mode whole, with what they allocate out of sight.
        stack.enter_context(_without_inference_mode())
        # oneDNN runs a recurrent network as one operator, which hides what it keeps for backward.
        stack.callback(torch._C._set_mkldnn_enabled, torch._C._get_mkldnn_enabled())
        torch._C._set_mkldnn_enabled(False)
        # Weights that autocast has already cast are real tensors on the host; those it casts inside are fakes.
        stack.callback(torch.clear_autocast_cache)
        torch.clear_autocast_cache()
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # compilers need real devices
        yield


def _patches(card_mode: CardMode, device_mode: DeviceMode, kernels: CudaKernels) -> Iterator[Patch]:
    """Yield replacements for torch's attributes, each with its owner and name."""
    for name, function in card_mode.cuda_api.items():
        for owner in (
            torch.cuda,
            torch.cuda.graphs,
            torch.cuda.memory,
            torch.cuda.random,
            torch.accelerator,
        ):
            if hasattr(owner, name):
                yield owner, name, function
    for name, function in called_by_torch(card_mode.memory).items():
        yield torch._C, name, function  # torch for the CPU has only some
    yield logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True
    yield FakeTensor, "device", property(_device_getter(card_mode), _DEVICE.fset)
    yield torch.nn.Module, "_apply", _wrap_apply(card_mode, torch.nn.Module._apply)
    # Gradients are not checked for infinities: a skipped step would create no optimizer state.
    step = "_maybe_opt_step"
    yield (
        GradScaler,
        step,
        lambda _, optimizer, state, *args, **kwargs: optimizer.step(*args, **kwargs),
    )
    yield autocast_mode.autocast, "__init__", _redirect_autocast(autocast_mode.autocast.__init__)
    for name in ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_dtype"):
        yield torch, name, _query_cpu(getattr(torch, name))
    yield torch, "set_autocast_enabled", _query_cpu(kernels.set_autocast_enabled)
    yield torch, "get_autocast_gpu_dtype", lambda: torch.get_autocast_dtype("cpu")
    # There is one card.
    yield (
        torch.nn.DataParallel,
        "forward",
        lambda wrapper, *args, **kwargs: wrapper.module(*args, **kwargs),
    )

    def record_stream(tensor: torch.Tensor, stream: Any) -> None:
        if card_mode.fakes.record_stream(tensor, stream.stream_id):
            card_mode.notes[HELD] = None

    yield torch.Tensor, "record_stream", record_stream
    # Of plain tensors, which fakes stand for.
    yield clip_grad, "_has_foreach_support", lambda *_, **__: True
    yield optimizers, "_foreach_supported_types", [*optimizers._foreach_supported_types, FakeTensor]
    yield (
        torch.UntypedStorage,
        "resize_",
        _resize_on_card(card_mode.memory, torch.UntypedStorage.resize_),
    )
    data_ptr = torch.UntypedStorage.data_ptr

    def address(storage: torch.UntypedStorage) -> int:
        """While a model is built, storages on the meta device have the address that torch says."""
        is_built = card_mode.is_building and storage.device.type == "meta"
        return 0 if is_built else data_ptr(storage)

    yield torch.UntypedStorage, "data_ptr", address
    yield torch, "Generator", _Generator
    yield torch.nn.RNNBase, "flatten_parameters", lambda module: None  # asks cuDNN, if it is there
    for name in ("Stream", "Event"):
        yield torch, name, card_mode.cuda_api[name]
    autograd: Any = torch.autograd
    # Functions that lead here turn the mode off; the user's code in backward and in hooks needs it.
    run_backward = card_mode.memory.outside_pools()(device_mode(autograd._engine_run_backward))
    yield autograd, "_engine_run_backward", card_mode.device_thread.wrap(run_backward)
    yield torch, "set_default_tensor_type", set_default_tensor_type
    for name in ("range_push", "range_pop", "mark"):
        yield torch.cuda.nvtx, name, lambda *_, **__: 0
    transformers = sys.modules.get("transformers.utils.import_utils")
    # It makes masks that are not needed where it cannot look at values.
    if hasattr(transformers, "is_fake_tensor"):
        values = card_mode.fakes.values
        yield (
            transformers,
            "is_fake_tensor",
            lambda it: isinstance(it, FakeTensor) and not values.knows(it),
        )
    checks = checkpoint._allowed_determinism_checks_to_fns
    # What is compared of a recomputed tensor; without its device, which depends on the caller.
    compared = {**checks, "default": lambda tensor: {"shape": tensor.shape, "dtype": tensor.dtype}}
    yield checkpoint, "_allowed_determinism_checks_to_fns", compared


@contextmanager
def _without_inference_mode() -> Iterator[None]:
    """Leave inference mode, and let code inside turn off only what follows from it instead of entering it.

    Autocast that the code has entered for good stays on: the end of the guard would turn it off.
    """
    gradients, casts = torch.is_grad_enabled(), False
    try:
        with (
            torch.inference_mode(False),
            torch.set_grad_enabled(gradients),
            replaced([(torch.inference_mode, "__enter__", _imitate_inference_mode)]),
        ):
            try:
                yield
            finally:
                casts = torch.is_autocast_enabled("cpu")
    finally:
        torch.set_autocast_enabled("cpu", casts)


def _imitate_inference_mode(guard: Any) -> None:
    guard._inference_mode_context = stack = ExitStack()
    stack.enter_context(torch.set_grad_enabled(not guard.mode))
    if guard.mode and not INFERENCE_KEEPS_CASTS:
        stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(False)
        stack.enter_context(
            replaced([(torch, "set_autocast_cache_enabled", lambda _: None)])
        )  # by autocast inside


def _wrap_save(card_mode: CardMode, save: Any) -> Any:
    """Make ``torch.save`` write zeros for tensors without data to a buffer, and nothing to a file, which may be a checkpoint."""

    def wrapped(value: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        is_file = isinstance(f, str | os.PathLike)
        with suppress(AttributeError, OSError):  # a buffer in memory has none
            is_file |= isinstance(f.fileno(), int)
        if is_file:
            card_mode.notes[SKIPPED_SAVE.format(line=user_line())] = None
            return
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            save(tree_map_only(FakeTensor, zeros_of, value), f, *args, **kwargs)

    return wrapped


def _resize_on_card(memory: CardMemory, resize: Any) -> Any:
    """Give a resized storage another block, of which no mode learns: so FSDP2 frees whole parameters, and gathers them again."""

    def resize_(storage: torch.UntypedStorage, nbytes: int) -> Any:
        result = resize(storage, nbytes)
        if memory.holds(storage):
            memory.resize(storage)
        return result

    return resize_


class _AnyGenerator(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, torch._C.Generator)


class _Generator(metaclass=_AnyGenerator):
    """Host generator for any device; random values do not exist on the card."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return torch._C.Generator("cpu")


def _device_getter(card_mode: CardMode) -> Any:
    def device(tensor: FakeTensor) -> torch.device:
        if (
            tensor.fake_mode is not card_mode.fake_mode
            or card_mode.depth
            or tensor.fake_mode.in_kernel_invocation
        ):
            return _DEVICE.fget(tensor)  # type: ignore[no-any-return]
        return SEEN.device if tensor.fake_device == CARD else HOST

    return device


def _wrap_apply(card_mode: CardMode, apply: Any) -> Any:
    """Move a module to the card in torch's order, without replacing its tensors unless more than their place changes."""

    def _apply(module: torch.nn.Module, fn: Any, recurse: bool = True) -> torch.nn.Module:
        if recurse:
            for child in module.children():
                child._apply(fn)  # type: ignore[no-untyped-call]
        tensors = known([*module._parameters.values(), *module._buffers.values()])
        if not tensors:
            return apply(module, fn, recurse=False)  # type: ignore[no-any-return]
        probe = fn(torch.empty(0, dtype=tensors[0].dtype))
        for tensor in tensors:
            if not _only_moves(probe, tensor, card_mode):
                if any(isinstance(tensor, FakeTensor) for tensor in tensors):
                    return _apply_to_fakes(module, fn)
                return apply(module, fn, recurse=False)  # type: ignore[no-any-return]
        if probe.device == SEEN.device:
            for tensor in tensors:
                card_mode.put_on_card(tensor)
                if isinstance(tensor, torch.nn.Parameter) and tensor.grad is not None:
                    card_mode.put_on_card(tensor.grad)
        return module

    return _apply


def _apply_to_fakes(module: torch.nn.Module, fn: Any) -> torch.nn.Module:
    """Do what torch's `_apply` does, which would swap the tensors, and fakes cannot be swapped."""
    with torch.no_grad():
        for parameter in known(module._parameters.values()):
            for tensor in known([parameter, parameter.grad]):
                tensor.data = fn(tensor.data)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = fn(buffer)
    return module


def _only_moves(probe: torch.Tensor, tensor: torch.Tensor, card_mode: CardMode) -> bool:
    """Whether a function, which made `probe` of an empty tensor, surely leaves a tensor as it is on another device."""
    if tensor.is_meta or (tensor.is_floating_point() and tensor.dtype != probe.dtype):
        return False
    if not card_mode.is_building:  # in a step, a module keeps its tensors
        return True
    is_whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    may_change_format = tensor.dim() in (4, 5)
    return is_whole and not may_change_format


def _redirect_autocast(init: Any) -> Any:
    def __init__(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.float16
        init(self, device_type, dtype, *args, **kwargs)

    return __init__


def _query_cpu(function: Any) -> Any:
    def query(*args: Any, **kwargs: Any) -> Any:
        device_type, *rest = args or ("cuda",)
        if device_type == "cuda":
            device_type = "cpu"
        return function(device_type, *rest, **kwargs)

    return query
