"""What a call did to torch's native CUDA allocator, and what it left there.

That allocator is deterministic: from the same layout, the same requests lead to the same layout, and to the same failure or none.
Sources: torch/cuda/memory.py (`memory_stats`, `_snapshot`) and c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

_NO_POOL = (0, 0)
_AT_REST = {"active_allocated", "inactive"}  # not waiting for a stream


class Fingerprints:
    """Takes a fingerprint after each call, of all devices of this process.

    Each one begins a new count of peaks; `highest_bytes` has the highest peak of the device `index` since the first, by its statistic.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._counted: dict[object, int] = {}  # at the last fingerprint
        self.highest_bytes: dict[str, int] = {}

    def take(self) -> int | None:
        """Return a number that is the same for calls that did and left the same; None where the allocator has more state.

        Such state are streams beside the current one, pools of CUDA graphs, and the ages of blocks.
        """
        snapshot = torch.cuda.memory._snapshot()
        segments = snapshot["segments"]
        if not _is_all(segments, snapshot.get("allocator_settings", {})):
            return None
        layout = [
            (
                one["address"],
                one["total_size"],
                *((b["address"], b["size"], b["requested_size"], b["state"]) for b in one["blocks"]),
            )
            for one in segments
        ]
        indices = sorted({self._index, *(one["device"] for one in segments)})
        return hash((*layout, *(count for index in indices for count in self._counts(index))))

    def _counts(self, index: int) -> Iterator[int]:
        """Yield what is in use on a device, the peaks of the call, and by how much it moved each counter."""
        stats = torch.cuda.memory_stats_as_nested_dict(index)
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        yield total_bytes - free_bytes - stats["reserved_bytes"]["all"]["current"]
        for path, value in _flat(stats):
            if path[-1] in ("current", "peak"):
                yield value
            else:
                yield value - self._counted.get((index, path), 0)
                self._counted[index, path] = value
        if index == self._index:
            for name in ("allocated_bytes", "reserved_bytes"):
                self.highest_bytes[name] = max(self.highest_bytes.get(name, 0), stats[name]["all"]["peak"])
        torch.cuda.reset_peak_memory_stats(index)


def _is_all(segments: list[dict[str, Any]], settings: Mapping[str, Any]) -> bool:
    """Return whether the layout and the counters are all that decides how the allocator serves a request."""
    streams = {(one["device"], one["stream"]) for one in segments}
    states = {block["state"] for one in segments for block in one["blocks"]}
    return (
        len(streams) == len({device for device, _ in streams})
        and states <= _AT_REST
        and all(tuple(one["segment_pool_id"]) == _NO_POOL for one in segments)
        and not settings.get("garbage_collection_threshold")
    )


def _flat(stats: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], int]]:
    for name, value in stats.items():
        if isinstance(value, Mapping):
            yield from _flat(value, (*path, name))
        elif isinstance(value, int):
            yield (*path, name), value
