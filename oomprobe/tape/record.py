"""Cut the memory history that torch records into calls.

Source of its entries: c10/cuda/CUDACachingAllocator.cpp and torch/csrc/cuda/memory_snapshot.cpp of
PyTorch, 2.6 to 2.15.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from oomprobe.tape.calls import ALLOCATED, FREED, RELEASED, SWITCHED, Event, RecordedCall, in_order

STREAMS = "blocks wait for other streams"
POOLS = "it has private pools, as CUDA graphs use them"
_NO_POOL = (0, 0)
_GIVES_BACK = ("segment_free", "segment_unmap")
Entry = Mapping[str, Any]


class NotRecorded(Exception):
    """A history has what a tape cannot tell; the text says what."""


def cut_calls(
    entries: Sequence[Entry],
    before: Iterable[int],
    ends: Sequence[tuple[int, int]],
    *,
    may_retry: bool,
) -> list[RecordedCall]:
    """Return what each call asked for, from a device's entries since the start of a trial.

    Args:
        entries: In the order in which they happened. Those after the last call are left out.
        before: Addresses of the blocks in use at the start, in an order that is the same in each trial.
        ends: For each call, how many requests and how many frees there had been once it had ended.
        may_retry: Whether the allocator has emptied its cache to serve a request; otherwise it is
            the step that has given back segments.

    Raises:
        NotRecorded: the calls use several streams at once, or private pools.
    """
    names = {address: (0, index) for index, address in enumerate(before)}
    calls, stream = list[RecordedCall](), 0
    for number, part in enumerate(_each_call(entries, ends), start=1):
        events, sizes = list[Event](), list[int]()
        requested: Entry = {}
        for entry in part:
            action, address = entry["action"], int(entry.get("addr", 0))
            if tuple(entry.get("pool_id", _NO_POOL)) != _NO_POOL:
                raise NotRecorded(POOLS)
            if requested and (action, address) != ("free_completed", requested["addr"]):
                raise NotRecorded(STREAMS)
            requested = {}
            if action == "alloc":
                if entry["stream"] != stream:
                    stream = entry["stream"]
                    events.append((SWITCHED, stream, 0))
                names[address] = number, len(sizes)
                events.append((ALLOCATED, len(sizes), 0))
                sizes.append(entry["size"])
            elif action == "free_requested":
                requested = entry
            elif action == "free_completed":
                call, index = names.pop(address)
                events.append((FREED, number - call, index))
            elif action in _GIVES_BACK and not may_retry and events[-1:] != [(RELEASED, 0, 0)]:
                events.append((RELEASED, 0, 0))
        calls.append(RecordedCall(in_order(events), tuple(sizes)))
    return calls


def _each_call(
    entries: Sequence[Entry], ends: Sequence[tuple[int, int]]
) -> Iterator[Sequence[Entry]]:
    """Yield the entries of each call."""
    begin = end = requests = frees = 0
    for counts in ends:
        while (requests, frees) != counts:
            requests += entries[end]["action"] == "alloc"
            frees += entries[end]["action"] == "free_requested"
            end += 1
        end += [entry["action"] for entry in entries[end : end + 1]] == ["free_completed"]
        yield entries[begin:end]
        begin = end
