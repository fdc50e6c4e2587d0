"""A recorded allocator trace, replayed in the model: what a real device did beside what the model says.

Record with ``torch.cuda.memory._record_memory_history()``, take ``torch.cuda.memory._snapshot()["device_traces"][0]``
and keep it as JSON or as a pickle: nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oomprobe.simulation.allocator import AllocatorOutOfMemory, CachingAllocator
from oomprobe.simulation.settings import AllocatorSettings

_SIGN = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What came out of a replay. Peaks count what the trace itself shows: nothing that was there before it.

    Args:
        allocations: How many allocations were replayed.
        frees: How many frees were.
        peak_allocated_bytes: The model's.
        peak_reserved_bytes: The model's, which empties its cache only when it must.
        recorded_peak_reserved_bytes: By the recorded events of segments.
        alloc_retries: How often the model had to give its cache back.
        recorded_ooms: How many ``oom`` events the recording has.
        unknown_frees: Frees of blocks that were alive before the recording began; not replayed.
        unknown_freed_bytes: What they held: by so much, at least, the recording had a head start.
        unknown_segment_bytes: Given back by the recorded device although it was had before the recording began.
        missing_frees: Addresses handed out twice without a free between; the first was freed when the second came.
        out_of_memory: The model's refusal, at which the replay ended; None: it went to the end.
    """

    allocations: int
    frees: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    recorded_peak_reserved_bytes: int
    alloc_retries: int
    recorded_ooms: int
    unknown_frees: int
    unknown_freed_bytes: int
    unknown_segment_bytes: int
    missing_frees: int
    out_of_memory: str | None


def replay_trace(
    trace_entries: Iterable[Mapping[str, Any]], settings: AllocatorSettings, capacity_bytes: int
) -> Replay:
    """Replay the allocations and frees of a trace; sizes and streams are the recorded ones, addresses the model's own.

    Args:
        trace_entries: The events of one device, in order: ``action``, ``addr``, ``size``, ``stream``.
        settings: What the model's allocator is told.
        capacity_bytes: What it may have, 0 or more.

    Example:
        >>> trace = [
        ...     {"action": "segment_alloc", "addr": 0, "size": 20 * 2**20, "stream": 0},
        ...     {"action": "alloc", "addr": 0, "size": 8_519_680, "stream": 0},
        ... ]
        >>> replay = replay_trace(trace, AllocatorSettings(), 2**30)
        >>> replay.peak_reserved_bytes == replay.recorded_peak_reserved_bytes == 20 * 2**20
        True
    """
    entries = list(trace_entries)
    player = _Player(CachingAllocator(capacity_bytes, settings))
    refusal: str | None = None
    try:
        for entry in _memory_events(entries):
            player.play(entry)
    except AllocatorOutOfMemory as error:
        refusal = str(error)
    recorded_peak_bytes, unknown_segment_bytes = _recorded_reserved(entries)
    return Replay(
        allocations=player.allocations,
        frees=player.frees,
        peak_allocated_bytes=player.allocator.peak_allocated_bytes,
        peak_reserved_bytes=player.allocator.peak_reserved_bytes,
        recorded_peak_reserved_bytes=recorded_peak_bytes,
        alloc_retries=player.allocator.alloc_retries,
        recorded_ooms=sum(entry["action"] == "oom" for entry in entries),
        unknown_frees=player.unknown_frees,
        unknown_freed_bytes=player.unknown_freed_bytes,
        unknown_segment_bytes=unknown_segment_bytes,
        missing_frees=player.missing_frees,
        out_of_memory=refusal,
    )


class _Player:
    """Hands a trace's events to an allocator and counts."""

    def __init__(self, allocator: CachingAllocator) -> None:
        self.allocator = allocator
        self.allocations = self.frees = self.missing_frees = 0
        self.unknown_frees = self.unknown_freed_bytes = 0
        self._handles: dict[int, int] = {}

    def play(self, entry: Mapping[str, Any]) -> None:
        if entry["action"] == "alloc":
            self._alloc(entry["addr"], entry["size"], entry.get("stream", 0))
        else:
            self._free(entry["addr"], entry["size"])

    def _alloc(self, address: int, nbytes: int, stream: int) -> None:
        if address in self._handles:
            self.missing_frees += 1
            self.allocator.free(self._handles.pop(address))
        self._handles[address] = self.allocator.malloc(nbytes, stream)
        self.allocations += 1

    def _free(self, address: int, nbytes: int) -> None:
        if address not in self._handles:
            self.unknown_frees += 1
            self.unknown_freed_bytes += nbytes
            return
        self.allocator.free(self._handles.pop(address))
        self.frees += 1


def _memory_events(entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Allocations, and each free once: when it is completed, or requested where no completion was recorded.

    A block that another stream uses is cached only with ``free_completed``.
    """
    events: list[Mapping[str, Any]] = []
    completed_later: set[int] = set()
    for entry in reversed(entries):
        action = entry["action"]
        if action == "alloc":
            completed_later.discard(entry["addr"])
        elif action == "free_completed":
            completed_later.add(entry["addr"])
        elif action != "free_requested" or entry["addr"] in completed_later:
            continue
        events.append(entry)
    events.reverse()
    return events


def _recorded_reserved(entries: Iterable[Mapping[str, Any]]) -> tuple[int, int]:
    """The peak of what the trace's segments hold, and what was given back beyond what they had."""
    reserved = peak = unknown = 0
    for entry in entries:
        reserved += _SIGN.get(entry["action"], 0) * entry["size"]
        if reserved < 0:
            reserved, unknown = 0, unknown - reserved
        peak = max(peak, reserved)
    return peak, unknown
