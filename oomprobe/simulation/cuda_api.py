"""What ``torch.cuda`` answers in a simulated world: a table, put in place while a step runs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch

from oomprobe.simulation.allocator import CachingAllocator
from oomprobe.simulation.fakes import SEEN_CARD


class Stream:
    """There is one stream, and it is always done."""

    device, device_index, cuda_stream, stream_id = SEEN_CARD, 0, 0, 0

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def synchronize(self) -> None: ...
    def wait_stream(self, _: Any) -> None: ...
    def wait_event(self, _: Any) -> None: ...
    def is_capturing(self) -> bool:
        return False

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        event = event or Event()
        event.record()
        return event

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None: ...


class Event:
    """Keeps the time of the host: kernels take none here."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._at_s: float | None = None

    def record(self, *_: Any) -> None:
        self._at_s = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        if self._at_s is None or end._at_s is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return 1e3 * (end._at_s - self._at_s)

    def synchronize(self) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def query(self) -> bool:
        return True


class _DeviceContext(contextlib.nullcontext[None]):
    """``with torch.cuda.device(0):``."""

    def __init__(self, device: Any = None) -> None:
        super().__init__()
        self.idx = 0


def replacements(
    properties: Any, allocator: Callable[[], CachingAllocator], *, empty_cache: Callable[[], None],
    reset_peaks: Callable[[], None], peaks: Callable[[], tuple[int, int]], fraction: Callable[[], float],
    set_fraction: Callable[[float], None], total_bytes: int,
) -> dict[str, Any]:  # fmt: skip
    """Functions by the name they have in ``torch.cuda``."""

    def constant(value: Any) -> Callable[..., Any]:
        return lambda *_, **__: value

    def stats(*_: Any, **__: Any) -> dict[str, int]:
        allocated, reserved = peaks()
        return allocator().stats() | {"allocated_bytes.all.peak": allocated, "reserved_bytes.all.peak": reserved}

    def mem_get_info(*_: Any) -> tuple[int, int]:
        return allocator().capacity_bytes - allocator().reserved_bytes, total_bytes

    stream = Stream()
    nothing = constant(None)
    return {
        "is_available": constant(True),
        "is_initialized": constant(True),
        "is_bf16_supported": constant(properties.major >= 8),
        "is_tf32_supported": constant(properties.major >= 8),
        "is_current_stream_capturing": constant(False),
        "device_count": constant(1),
        "current_device": constant(0),
        "set_device": nothing,
        "init": nothing,
        "_lazy_init": nothing,
        "get_device_name": constant(properties.name),
        "get_device_capability": constant((properties.major, properties.minor)),
        "get_device_properties": constant(properties),
        "synchronize": nothing,
        "ipc_collect": nothing,
        "manual_seed": nothing,
        "manual_seed_all": nothing,
        "seed": nothing,
        "seed_all": nothing,
        "initial_seed": constant(0),
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "set_rng_state": nothing,
        "set_rng_state_all": nothing,
        "empty_cache": empty_cache,
        "memory_allocated": lambda *_: allocator().allocated_bytes,
        "memory_reserved": lambda *_: allocator().reserved_bytes,
        "max_memory_allocated": lambda *_: peaks()[0],
        "max_memory_reserved": lambda *_: peaks()[1],
        "reset_peak_memory_stats": lambda *_: reset_peaks(),
        "reset_accumulated_memory_stats": nothing,
        "reset_max_memory_allocated": lambda *_: reset_peaks(),
        "memory_stats": stats,
        "memory_summary": lambda *_, **__: "\n".join(f"{name}: {value}" for name, value in stats().items()),
        "mem_get_info": mem_get_info,
        "get_per_process_memory_fraction": lambda *_: fraction(),
        "set_per_process_memory_fraction": lambda share, *_: set_fraction(share),
        "utilization": constant(0),
        "stream": contextlib.nullcontext,
        "device": _DeviceContext,
        "device_of": _DeviceContext,
        "current_stream": constant(stream),
        "default_stream": constant(stream),
        "set_stream": nothing,
        "Stream": Stream,
        "Event": Event,
    }
