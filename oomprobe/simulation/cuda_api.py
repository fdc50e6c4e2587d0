"""Replacements for functions of ``torch.cuda`` while a step is simulated."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from oomprobe.simulation.fakes import SEEN_CARD
from oomprobe.simulation.memory import CardMemory

_WITHOUT_EFFECT = (
    "set_device", "set_device_index", "init", "_lazy_init", "synchronize", "set_stream", "manual_seed", "manual_seed_all",
    "set_rng_state",
)  # fmt: skip


class CompletedStream:
    """A stream or an event: there is only one stream, and its work is always done."""

    device, device_index, cuda_stream, stream_id = SEEN_CARD, 0, 0, 0

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def __enter__(self) -> CompletedStream:
        return self

    def __exit__(self, *_: object) -> None: ...
    def wait(self, *_: Any) -> None: ...

    record = synchronize = wait_stream = wait_event = wait

    def record_event(self, event: Any = None) -> Any:
        return event or CompletedStream()

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def elapsed_time(self, _: CompletedStream) -> float:
        return 1.0  # not 0: steps divide by it


def replacements(memory: CardMemory) -> dict[str, Any]:
    """Return replacements by their names in ``torch.cuda`` and ``torch.accelerator``."""
    card = memory.card
    major, minor = card.compute_capability
    properties = SimpleNamespace(
        name=card.full_name, major=major, minor=minor, total_memory=card.total_bytes,
        multi_processor_count=card.multi_processor_count,
    )  # fmt: skip

    def constant(value: Any) -> Callable[..., Any]:
        return lambda *_, **__: value

    def mem_get_info(*_: Any) -> tuple[int, int]:
        return card.available_bytes - memory.allocator.reserved_bytes, card.total_bytes

    return {
        **dict.fromkeys(_WITHOUT_EFFECT, constant(None)),
        **dict.fromkeys(("is_available", "is_initialized"), constant(True)),
        **dict.fromkeys(("is_bf16_supported", "is_tf32_supported"), constant(major >= 8)),
        **dict.fromkeys(("current_device", "current_device_index"), constant(0)),
        **dict.fromkeys(("current_stream", "default_stream"), constant(CompletedStream())),
        **dict.fromkeys(("device", "device_of", "stream"), contextlib.nullcontext),
        **dict.fromkeys(("Stream", "Event"), CompletedStream),
        **dict.fromkeys(("mem_get_info", "get_memory_info"), mem_get_info),
        "current_accelerator": constant(torch.device("cuda")),
        "is_current_stream_capturing": constant(False),
        "device_count": constant(1),
        "get_device_name": constant(card.full_name),
        "get_device_capability": constant((major, minor)),
        "get_device_properties": constant(properties),
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "empty_cache": lambda: memory.empty_cache(by_step=True),
        "reset_peak_memory_stats": lambda *_: memory.reset_peaks(),
        "memory_allocated": lambda *_: memory.allocator.allocated_bytes,
        "memory_reserved": lambda *_: memory.allocator.reserved_bytes,
        "max_memory_allocated": lambda *_: memory.allocator.peak_allocated_bytes,
        "max_memory_reserved": lambda *_: memory.allocator.peak_reserved_bytes,
        "memory_stats": lambda *_, **__: memory.allocator.stats(),
        "memory_summary": lambda *_, **__: str(memory.allocator.stats()),
        "get_per_process_memory_fraction": lambda *_: memory.fraction,
        "set_per_process_memory_fraction": lambda fraction, *_: memory.set_fraction(fraction),
    }
