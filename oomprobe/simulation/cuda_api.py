"""What ``torch.cuda`` answers in a simulated world: a table, put in place while a step runs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from oomprobe.simulation.fakes import SEEN_CARD
from oomprobe.simulation.memory import Memory

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


def replacements(memory: Memory) -> dict[str, Any]:
    """Functions by the name they have in ``torch.cuda``."""
    card = memory.card
    major, minor = card.compute_capability
    properties = SimpleNamespace(
        name=card.full_name, major=major, minor=minor, total_memory=card.total_bytes,
        multi_processor_count=card.multi_processor_count, warp_size=32, is_integrated=0, is_multi_gpu_board=0,
    )  # fmt: skip

    def constant(value: Any) -> Callable[..., Any]:
        return lambda *_, **__: value

    def summary(*_: Any, **__: Any) -> str:
        return "\n".join(f"{name}: {value}" for name, value in memory.allocator.stats().items())

    stream = Stream()
    return {
        **dict.fromkeys(_WITHOUT_EFFECT, constant(None)),
        **dict.fromkeys(("is_available", "is_initialized"), constant(True)),
        **dict.fromkeys(("is_bf16_supported", "is_tf32_supported"), constant(major >= 8)),
        **dict.fromkeys(("current_device", "initial_seed", "utilization"), constant(0)),
        **dict.fromkeys(("current_stream", "default_stream"), constant(stream)),
        **dict.fromkeys(("reset_peak_memory_stats", "reset_max_memory_allocated"), lambda *_: memory.reset_peaks()),
        **dict.fromkeys(("device", "device_of"), _DeviceContext),
        "is_current_stream_capturing": constant(False),
        "device_count": constant(1),
        "get_device_name": constant(card.full_name),
        "get_device_capability": constant((major, minor)),
        "get_device_properties": constant(properties),
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "empty_cache": lambda: memory.empty_cache(by_step=True),
        "memory_allocated": lambda *_: memory.allocator.allocated_bytes,
        "memory_reserved": lambda *_: memory.allocator.reserved_bytes,
        "max_memory_allocated": lambda *_: memory.allocator.peak_allocated_bytes,
        "max_memory_reserved": lambda *_: memory.allocator.peak_reserved_bytes,
        "memory_stats": lambda *_, **__: memory.allocator.stats(),
        "memory_summary": summary,
        "mem_get_info": lambda *_: (card.available_bytes - memory.allocator.reserved_bytes, card.total_bytes),
        "get_per_process_memory_fraction": lambda *_: memory.fraction,
        "set_per_process_memory_fraction": lambda share, *_: memory.set_fraction(share),
        "stream": contextlib.nullcontext,
        "Stream": Stream,
        "Event": Event,
    }
