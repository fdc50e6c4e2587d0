"""What a call did to torch's native CUDA allocator, and what it left there.

That allocator is deterministic: from the same layout, the same requests lead to the same layout, and to the same failure or none.
Sources: torch/cuda/memory.py (`memory_stats`, `_snapshot`) and c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from oomprobe.devices.statistics import Statistics

_NO_POOL = (0, 0)
_AT_REST = {"active_allocated", "inactive"}  # not waiting for a stream


def fingerprint(statistics: Statistics, index: int) -> int | None:
    """Return a number that is the same for calls that did and left the same, on `index` and all other devices that are used.

    None where the allocator has more state: streams beside the current one, pools of CUDA graphs, and the ages of blocks.
    """
    snapshot = torch.cuda.memory._snapshot()
    segments = snapshot["segments"]
    if not _is_all(segments, snapshot.get("allocator_settings", {})):
        return None
    layout: list[object] = []
    devices = {index}
    for segment in segments:
        devices.add(segment["device"])
        layout += [segment["address"], segment["total_size"]]
        layout += [
            (b["address"], b["size"], b["requested_size"], b["state"]) for b in segment["blocks"]
        ]
    did = []
    for used in sorted(devices):
        free_bytes, total_bytes = torch.cuda.mem_get_info(used)
        reserved_bytes = torch.cuda.memory_reserved(used)
        did += [total_bytes - free_bytes - reserved_bytes, *statistics.end_call(used)]
    return hash((*layout, *did))


def _is_all(segments: list[dict[str, Any]], settings: Mapping[str, Any]) -> bool:
    """Return whether the layout and the counters are all that decides how the allocator serves a request."""
    streams: dict[int, int] = {}  # the one of each device
    for segment in segments:
        if tuple(segment["segment_pool_id"]) != _NO_POOL:
            return False
        if streams.setdefault(segment["device"], segment["stream"]) != segment["stream"]:
            return False
        if any(block["state"] not in _AT_REST for block in segment["blocks"]):
            return False
    return not settings.get("garbage_collection_threshold")
