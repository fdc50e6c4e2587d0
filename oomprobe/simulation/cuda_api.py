"""What ``torch.cuda`` answers in a simulated world: a table, put in place while a step runs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch

from oomprobe.simulation.allocator import CachingAllocator
from oomprobe.simulation.fakes import SEEN_CARD

_WITHOUT_EFFECT = (
    "set_device", "init", "_lazy_init", "synchronize", "ipc_collect", "set_stream", "manual_seed", "manual_seed_all", "seed",
    "seed_all", "set_rng_state", "set_rng_state_all", "reset_accumulated_memory_stats",
)  # fmt: skip


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
    return {
        **dict.fromkeys(_WITHOUT_EFFECT, constant(None)),
        **dict.fromkeys(("is_available", "is_initialized"), constant(True)),
        **dict.fromkeys(("is_bf16_supported", "is_tf32_supported"), constant(properties.major >= 8)),
        **dict.fromkeys(("current_device", "initial_seed", "utilization"), constant(0)),
        **dict.fromkeys(("current_stream", "default_stream"), constant(stream)),
        **dict.fromkeys(("reset_peak_memory_stats", "reset_max_memory_allocated"), lambda *_: reset_peaks()),
        **dict.fromkeys(("device", "device_of"), _DeviceContext),
        "is_current_stream_capturing": constant(False),
        "device_count": constant(1),
        "get_device_name": constant(properties.name),
        "get_device_capability": constant((properties.major, properties.minor)),
        "get_device_properties": constant(properties),
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "empty_cache": empty_cache,
        "memory_allocated": lambda *_: allocator().allocated_bytes,
        "memory_reserved": lambda *_: allocator().reserved_bytes,
        "max_memory_allocated": lambda *_: peaks()[0],
        "max_memory_reserved": lambda *_: peaks()[1],
        "memory_stats": stats,
        "memory_summary": lambda *_, **__: "\n".join(f"{name}: {value}" for name, value in stats().items()),
        "mem_get_info": mem_get_info,
        "get_per_process_memory_fraction": lambda *_: fraction(),
        "set_per_process_memory_fraction": lambda share, *_: set_fraction(share),
        "stream": contextlib.nullcontext,
        "Stream": Stream,
        "Event": Event,
    }
