"""Replacements for the names of ``torch.cuda`` and ``torch.accelerator`` while a step is simulated.

Each public name that needs CUDA is answered here, or refused in a sentence (tests/simulation/test_cuda_api.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

from oomprobe.errors import SimulationError
from oomprobe.ground.frames import is_in_users_code, user_line
from oomprobe.records.trials import SIDE_STREAMS
from oomprobe.simulation.fakes import SEEN, requested_device
from oomprobe.simulation.graphs import pools_of
from oomprobe.simulation.memory import CardMemory

_WITHOUT_EFFECT = (
    "init", "_lazy_init", "synchronize", "manual_seed", "manual_seed_all", "set_rng_state", "set_rng_state_all",
    "set_sync_debug_mode", "ipc_collect",
    "reset_accumulated_host_memory_stats", "caching_allocator_enable", "check_error",
)  # fmt: skip
# Answered with 0.
_MEASURED = (
    "utilization",
    "memory_usage",
    "temperature",
    "power_draw",
    "clock_rate",
    "get_sync_debug_mode",
)
_REFUSED = {
    "takes memory past the simulated allocator: make a tensor": (
        "caching_allocator_alloc", "caching_allocator_delete", "change_current_allocator", "CUDAPluggableAllocator", "MemPoolContext",
    ),
    "captures kernels, and none run: use torch.cuda.graph, or leave CUDA graphs out of the step": (
        "Graph", "make_graphed_callables",
    ),
    "is for C code, which a simulated card cannot run: leave it out, or probe on a real device": (
        "current_blas_handle", "current_solver_handle", "get_stream_from_external", "ExternalStream", "GreenContext", "cudart",
    ),
    "tells blocks by their addresses, and a simulated card has none: use memory_stats()": (
        "memory_snapshot", "_snapshot", "_dump_snapshot",
    ),
}  # fmt: skip
LEGACY_TYPES = {
    "FloatTensor": torch.float32, "DoubleTensor": torch.float64, "HalfTensor": torch.float16, "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8, "CharTensor": torch.int8, "ShortTensor": torch.int16, "IntTensor": torch.int32,
    "LongTensor": torch.int64, "BoolTensor": torch.bool,
}  # fmt: skip
NO_HISTORY = "what torch's memory history records, of which a simulated card has none"
REFUSAL = "torch.cuda.{name} at {line} {why}"


class Event:
    """An event, which has always happened."""

    device = property(lambda _: SEEN.device)

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait(self, *_: Any, **__: Any) -> None: ...

    record = synchronize = wait

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Event) -> float:
        return 1.0  # not 0: steps divide by it


class Stream:
    """A stream of a card, whose work is always done: it decides which free blocks serve a request.

    Args:
        device: Ignored: there is only one.
        priority: -1 or less for urgent work.
        stream_id: Number of an existing stream; None: another one.
    """

    memory: CardMemory  # of the card, in a class for each
    leave_out: Callable[[str], None]
    device_type, device_index = 1, 0  # 1: CUDA, as torch's C++ numbers them
    device = property(lambda _: SEEN.device)

    def __init__(
        self, device: Any = None, priority: int = 0, *, stream_id: int | None = None, **_: Any
    ) -> None:
        self.stream_id = self.memory.numbers.next(priority) if stream_id is None else stream_id
        self.cuda_stream, self.priority = self.stream_id, priority
        self._before: list[int] = []

    def use(self) -> None:
        """Become the current stream."""
        if self.stream_id and is_in_users_code():
            self.leave_out(SIDE_STREAMS)
        self.memory.use_stream(self.stream_id)

    def __enter__(self) -> Stream:
        self._before.append(self.memory.allocator.stream)
        self.use()
        return self

    def __exit__(self, *_: object) -> None:
        self.memory.use_stream(self._before.pop())

    def __eq__(self, value: object) -> bool:
        return isinstance(value, Stream) and value.stream_id == self.stream_id

    def __hash__(self) -> int:
        return hash(self.stream_id)

    def wait(self, *_: Any, **__: Any) -> None: ...

    synchronize = wait_stream = wait_event = wait

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return self.memory.allocator.pools.captures > 0


class OneDevice:
    """Selects a device: there is only one."""

    idx, prev_idx = 0, 0

    def __init__(self, device: Any) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


class OneDeviceOf(OneDevice):
    """Selects the device of an object."""

    def __init__(self, obj: Any) -> None: ...


class StreamContext:
    """Makes a stream the current one; None changes nothing."""

    idx = 0

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream
        self._inside = nullcontext() if stream is None else stream

    def __enter__(self) -> None:
        self._inside.__enter__()

    def __exit__(self, *_: object) -> None:
        self._inside.__exit__(None, None, None)


class _OfLegacyType(type):
    dtype: torch.dtype

    def __instancecheck__(cls, value: object) -> bool:
        return (
            isinstance(value, torch.Tensor)
            and value.device.type == "cuda"
            and value.dtype is cls.dtype
        )


def _legacy(name: str, dtype: torch.dtype) -> type:
    """Return what stands for a type such as ``torch.cuda.FloatTensor``, which makes tensors of sizes or of data."""

    def make(_: type, *args: Any) -> torch.Tensor:
        if len(args) == 1 and not isinstance(args[0], int | torch.Size):
            return torch.as_tensor(args[0], dtype=dtype, device="cuda")
        return torch.empty(*args or (0,), dtype=dtype, device="cuda")

    return _OfLegacyType(
        name, (), {"__new__": make, "__module__": "torch.cuda", "dtype": dtype, "is_cuda": True}
    )


def legacy_type(dtype: torch.dtype, *, on_card: bool) -> str:
    """Return the name that ``tensor.type()`` gives."""
    for name, known in LEGACY_TYPES.items():
        if known is dtype:
            return f"torch.cuda.{name}" if on_card else f"torch.{name}"
    return f"torch.{dtype}"


def set_default_tensor_type(kind: Any) -> None:
    """Answer ``torch.set_default_tensor_type``."""
    name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__name__}"
    torch.set_default_dtype(LEGACY_TYPES[name.rpartition(".")[2]])
    torch.set_default_device("cuda" if name.startswith("torch.cuda.") else None)


def _refused_names() -> dict[str, type]:
    """Return classes that stand for classes and functions, by their names, and refuse to be called."""

    def refuse(kind: Any, *_: Any, **__: Any) -> NoReturn:
        raise SimulationError(REFUSAL.format(name=kind.__name__, line=user_line(), why=kind.why))

    refusals = {}
    for why, names in _REFUSED.items():
        for name in names:
            refusals[name] = type(name, (), {"__new__": refuse, "why": why})
    return refusals


def _nested(stats: dict[str, int]) -> dict[str, Any]:
    """Return statistics as `memory_stats_as_nested_dict` does."""
    nested: dict[str, Any] = {}
    for name, number in stats.items():
        *groups, last = name.split(".")
        inside = nested
        for group in groups:
            inside = inside.setdefault(group, {})
        inside[last] = number
    return nested


def replacements(memory: CardMemory, leave_out: Callable[[str], object]) -> dict[str, Any]:
    """Return replacements by their names in ``torch.cuda`` and ``torch.accelerator``; `leave_out` learns what they do not cover."""
    card = memory.card
    major, minor = card.compute_capability
    stream_type = type(
        "Stream", (Stream,), {"memory": memory, "leave_out": staticmethod(leave_out)}
    )

    def properties(*_: Any, **__: Any) -> SimpleNamespace:
        return SimpleNamespace(
            name=card.full_name, major=major, minor=minor, total_memory=card.total_bytes, uuid=f"sim-{SEEN.device.index}",
            multi_processor_count=card.multi_processor_count,
        )  # fmt: skip

    def constant(value: Any) -> Callable[..., Any]:
        return lambda *_, **__: value

    def constants(names: Iterable[str], value: Any) -> dict[str, Any]:
        # One for each: compilers tell functions apart.
        return {name: constant(value) for name in names}

    def mem_get_info(*_: Any, **__: Any) -> tuple[int, int]:
        return memory.card.available_bytes - memory.allocator.reserved_bytes, card.total_bytes

    def current_stream(*_: Any, **__: Any) -> Any:
        return stream_type(stream_id=memory.allocator.stream)

    def set_stream(stream: Stream | None) -> None:
        if stream is not None:
            stream.use()

    return {
        **_refused_names(),
        **pools_of(memory, leave_out),
        **{name: _legacy(name, dtype) for name, dtype in LEGACY_TYPES.items()},
        **constants(_WITHOUT_EFFECT, None),
        **constants(_MEASURED, 0),
        "empty_host_cache": memory.host.pinned.empty_cache,
        "reset_peak_host_memory_stats": memory.host.pinned.reset_peaks,
        "host_memory_stats": lambda: memory.host.pinned.stats(),
        "host_memory_stats_as_nested_dict": lambda: _nested(memory.host.pinned.stats()),
        **constants(("is_available", "is_initialized"), True),
        **constants(("is_bf16_supported", "is_tf32_supported"), major >= 8),
        **dict.fromkeys(("set_device", "set_device_index", "set_device_idx"), requested_device),
        **dict.fromkeys(
            ("current_device", "current_device_index", "current_device_idx"),
            lambda: SEEN.device.index,
        ),
        **dict.fromkeys(("seed", "seed_all"), lambda: torch.default_generator.seed()),
        "initial_seed": lambda: torch.default_generator.initial_seed(),
        "default_generators": (torch.default_generator,),
        "get_allocator_backend": constant("native"),
        "get_arch_list": constant([f"sm_{major}{minor}"]),
        "can_device_access_peer": constant(False),
        "list_gpu_processes": constant(""),
        "current_stream": current_stream,
        "default_stream": lambda *_, **__: stream_type(stream_id=0),
        "set_stream": set_stream,
        **dict.fromkeys(("stream", "StreamContext"), StreamContext),
        "Stream": stream_type,
        "Event": Event,
        **dict.fromkeys(("mem_get_info", "get_memory_info"), mem_get_info),
        "device": OneDevice,
        "device_of": OneDeviceOf,
        "current_accelerator": constant(torch.device("cuda")),
        "device_count": lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1")),  # torchrun's
        "get_device_name": constant(card.full_name),
        "get_device_capability": constant((major, minor)),
        "get_device_properties": properties,
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "_record_memory_history": lambda *_, **__: leave_out(NO_HISTORY),
        "empty_cache": lambda: memory.empty_cache(by_step=True),
        "memory_allocated": lambda *_, **__: memory.allocator.allocated_bytes,
        "max_memory_allocated": lambda *_, **__: memory.allocator.peak_allocated_bytes,
        **dict.fromkeys(
            ("memory_reserved", "memory_cached"), lambda *_, **__: memory.allocator.reserved_bytes
        ),
        **dict.fromkeys(
            ("max_memory_reserved", "max_memory_cached"),
            lambda *_, **__: memory.allocator.peak_reserved_bytes,
        ),
        "memory_stats": lambda *_, **__: memory.allocator.stats(),
        "memory_stats_as_nested_dict": lambda *_, **__: _nested(memory.allocator.stats()),
        "device_memory_used": lambda *_, **__: memory.allocator.reserved_bytes,
        "memory_summary": lambda *_, **__: str(memory.allocator.stats()),
        "get_per_process_memory_fraction": lambda *_, **__: memory.fraction,
        "set_per_process_memory_fraction": lambda fraction, *_, **__: memory.set_fraction(fraction),
    }


def called_by_torch(memory: CardMemory) -> dict[str, Callable[..., Any]]:
    """Return what functions of ``torch.cuda`` and ``torch.accelerator`` call, which a program may have imported by name."""
    return {
        **dict.fromkeys(
            ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats"), memory.reset_peaks
        ),
        **dict.fromkeys(
            ("_cuda_resetAccumulatedMemoryStats", "_accelerator_resetAccumulatedStats"),
            memory.reset_counters,
        ),
        **dict.fromkeys(
            ("_cuda_emptyCache", "_accelerator_emptyCache"),
            lambda: memory.empty_cache(by_step=True),
        ),
        **dict.fromkeys(
            (
                "_accelerator_setAllocatorSettings",
                "_cuda_cudaCachingAllocator_set_allocator_settings",
            ),
            memory.change_settings,
        ),
        **dict.fromkeys(
            ("_host_emptyCache", "_accelerator_emptyHostCache"), memory.host.pinned.empty_cache
        ),
        "_accelerator_isAllocatorInitialized": lambda: True,
        "_cuda_synchronize": lambda: None,
    }
