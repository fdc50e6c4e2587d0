"""Cut the memory history that torch records into calls.

Source of its entries: c10/cuda/CUDACachingAllocator.cpp and torch/csrc/cuda/memory_snapshot.cpp of
PyTorch, 2.6 to 2.15.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from oomprobe.allocator.caching import CachingAllocator, adopt
from oomprobe.allocator.settings import AllocatorSettings
from oomprobe.errors import InvalidArgumentError
from oomprobe.tape.calls import (
    ALLOCATED,
    FREED,
    RELEASED,
    SWITCHED,
    Event,
    LiveBlocks,
    RecordedCall,
    ReplayedTrial,
    in_order,
)
from oomprobe.tape.reductions import Processors

STREAMS = "blocks wait for other streams"
INCOMPLETE = "torch's history lacks a part of what the allocator counted"
POOLS = "it has private pools, as CUDA graphs use them"
_NO_POOL = (0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """An allocator when a trial began.

    Attributes:
        segments: Address, bytes, stream, and the requested bytes of the blocks in use by address;
            in the order of their making.
        settings: By torch's names.
        most_bytes: What the process may reserve.
        total_bytes: The card's memory, by which expandable segments get address space.
    """

    segments: Sequence[tuple[int, int, int, Sequence[tuple[int, int]]]]
    settings: Mapping[str, Any]
    most_bytes: int
    total_bytes: int

    def allocator(self) -> tuple[CachingAllocator, LiveBlocks]:
        """Return its model, and the blocks in use.

        Raises:
            InvalidArgumentError, ValueError: it has settings or blocks that no model has.
        """
        allocator = CachingAllocator(
            self.most_bytes,
            AllocatorSettings.from_snapshot(self.settings),
            total_bytes=self.total_bytes,
        )
        handles, room_ends = list[int](), sys.maxsize
        for start, nbytes, stream, blocks in self.segments:
            allocator.use_stream(stream)
            # For pages, if it is expandable: torch reserves 9/8 of the card for each.
            room = min(room_ends - start, self.total_bytes * 9 // 8) - nbytes
            handles += adopt(allocator, start, nbytes, [(at, size) for at, size in blocks], room)
            room_ends = start
        allocator.use_stream(0)
        return allocator, {(1, number): handle for number, handle in enumerate(handles)}


@dataclass(frozen=True, slots=True, kw_only=True)
class TapedTrial:
    """What the calls of a cold trial asked for, and the allocator and its blocks before them.

    Attributes:
        processors: Those of a card whose history has bare sizes; None: the calls name their
            kernels.
        began: The same as plain data, where it comes from torch's history.
    """

    calls: Sequence[RecordedCall]
    allocator: CachingAllocator
    live: LiveBlocks
    processors: Processors | None = None
    began: Beginning | None = None

    def replay(
        self, calls: Sequence[RecordedCall], cap_bytes: int | None, workspace_bytes: int
    ) -> ReplayedTrial:
        """Replay another trial that begins so. What convolutions want is in what was recorded."""
        allocator = self.allocator.copy()
        allocator.limit_bytes = cap_bytes
        return ReplayedTrial.of(allocator, calls, self.live)

    def plain(self) -> list[Any]:
        """Return it for another process, as `read` takes it; of torch's history only."""
        assert self.began is not None
        calls = [(call.events, call.sizes) for call in self.calls]
        return [calls, asdict(self.began), self.processors]

    @classmethod
    def read(cls, plain: Sequence[Any]) -> TapedTrial:
        """Return what another process recorded."""
        calls, began, (capability, *counts) = plain[0], Beginning(**plain[1]), plain[2]
        allocator, live = began.allocator()
        recorded = [
            RecordedCall(tuple(map(tuple, events)), tuple(sizes)) for events, sizes in calls
        ]
        return cls(
            calls=recorded,
            allocator=allocator,
            live=live,
            processors=Processors(tuple(capability), *counts),
            began=began,
        )

    @classmethod
    def of_history(
        cls, history: Mapping[str, Any], *, most_bytes: int, total_bytes: int
    ) -> TapedTrial:
        """Return what a process has recorded since CUDA started in it.

        Args:
            history: As `runners/command/site` writes it.
            most_bytes: As of a `Beginning`.
            total_bytes: Likewise.

        Raises:
            NotRecorded: there is none, or it has what a tape cannot tell.
        """
        if history["unrecorded"]:
            raise NotRecorded(history["unrecorded"])
        ends = [(requests, frees) for requests, frees in history["ends"]]
        parts = cut_calls(history["entries"], ends)
        calls = record_calls(parts, (), may_retry=history["may_retry"])
        plain = [(call.events, call.sizes) for call in calls]
        began = Beginning(
            segments=(),
            settings=history["settings"],
            most_bytes=most_bytes,
            total_bytes=total_bytes,
        )
        try:
            return cls.read([plain, asdict(began), history["processors"]])
        except (InvalidArgumentError, ValueError) as error:  # settings that no model has
            raise NotRecorded(str(error)) from error


GIVES_BACK = ("segment_free", "segment_unmap")
Entry = Mapping[str, Any]


class NotRecorded(Exception):
    """A history has what a tape cannot tell; the text says what."""


def record_calls(
    parts: Iterable[Sequence[Entry]], before: Iterable[int], *, may_retry: bool
) -> list[RecordedCall]:
    """Return what each call asked for, from its part of a device's entries since a trial began.

    Args:
        parts: Of each call, in the order in which they happened.
        before: Addresses of the blocks in use at the start, in an order that is the same in each
            trial.
        may_retry: Whether the allocator has emptied its cache to serve a request; otherwise it is
            the step that has given back segments.

    Raises:
        NotRecorded: the calls use several streams or private pools, or entries are missing.
    """
    names = {address: (0, index) for index, address in enumerate(before)}
    calls, stream = list[RecordedCall](), 0
    for number, part in enumerate(parts, start=1):
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
            elif action in GIVES_BACK and not may_retry and events[-1:] != [(RELEASED, 0, 0)]:
                events.append((RELEASED, 0, 0))
        calls.append(RecordedCall(in_order(events), tuple(sizes)))
    return calls


def cut_calls(
    entries: Sequence[Entry], ends: Sequence[tuple[int, int]]
) -> Iterator[Sequence[Entry]]:
    """Yield the entries of each call; those after the last one are left out.

    `ends` are, for each call, how many requests and frees there had been once it had ended.
    """
    begin = end = requests = frees = 0
    for counts in ends:
        while (requests, frees) != counts:
            if end == len(entries):
                raise NotRecorded(INCOMPLETE)
            requests += entries[end]["action"] == "alloc"
            frees += entries[end]["action"] == "free_requested"
            end += 1
        end += [entry["action"] for entry in entries[end : end + 1]] == ["free_completed"]
        yield entries[begin:end]
        begin = end
