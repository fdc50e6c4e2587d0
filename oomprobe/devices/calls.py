"""What each call asks of torch's native CUDA allocator, and what it leaves there.

That allocator is deterministic: from the same layout, the same requests lead to the same layout, and to the same failure or none.
So a trial is replayed from where it began, by torch's memory history, and a fingerprint shows that calls repeat.
Sources: torch/cuda/memory.py (`memory_stats`, `_snapshot`) and c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from oomprobe.allocator.caching import CachingAllocator
from oomprobe.devices.statistics import Statistics
from oomprobe.errors import InvalidArgumentError
from oomprobe.tape.calls import LiveBlocks, RecordedCall
from oomprobe.tape.record import Beginning, NotRecorded, TapedTrial, cut_calls, record_calls
from oomprobe.tape.recording import MOST_EVENTS
from oomprobe.tape.reductions import Processors
from oomprobe.tape.snapshot import Snapshot, snapshots_of

_COUNTS = ("allocation", "all", "allocated"), ("allocation", "all", "freed")


_NO_POOL = (0, 0)
_AT_REST = {"active_allocated", "inactive"}  # not waiting for a stream
ENGINE = ({"name": "torch::autograd::Engine", "filename": ""},)  # a stack
USER_RECORDS = "the process records the allocator itself"


def user_records() -> bool:
    """Return whether the process records its allocator already: there is one recording for each."""
    is_enabled = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    if is_enabled is not None:
        return bool(is_enabled())
    return any(torch.cuda.memory._snapshot()["device_traces"])  # before torch 2.14


class MemoryHistory:
    """What torch records of one device.

    Attributes:
        segments: When recording began, by falling addresses, at which drivers mostly make them.
        settings: The allocator's, by torch's names.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._memory = device, torch.cuda.memory
        self.segments: list[dict[str, Any]] = []
        self.settings: Mapping[str, Any] = {}

    def start(self, *, stacks: bool = False) -> None:
        """Forget what was recorded, and record from here on, with `stacks` where asked for."""
        torch.cuda.synchronize(self._device)  # lets blocks that wait for a stream be freed first
        self._memory._record_memory_history(None)
        snapshot = self._memory._snapshot(self._device)
        index = self._device.index
        self.segments = [part for part in snapshot["segments"] if part["device"] == index]
        self.segments.sort(key=lambda part: part["address"], reverse=True)
        self.settings = snapshot.get("allocator_settings", {})
        context: dict[str, Any] = {"context": None}
        if stacks:  # those of C++ take ten times as long to read
            context = {"context": "alloc", "stacks": "python", "max_entries": MOST_EVENTS}
        self._memory._record_memory_history("all", device=self._device, **context)

    def stop(self) -> list[dict[str, Any]]:
        """Record no more, and return the entries."""
        return self.end()["device_traces"][self._device.index]  # type: ignore[no-any-return]

    def end(self) -> dict[str, Any]:
        """Record no more, and return what torch tells of all devices."""
        try:
            return self._memory._snapshot(self._device)  # type: ignore[no-any-return]
        finally:
            self._memory._record_memory_history(None)

    def end_with_stacks(self) -> list[Snapshot]:
        """Record no more, and return what was recorded of the device, if anything.

        Requests without a stack are those of autograd's own threads, which run no Python.
        """
        snapshots = list[Snapshot]()
        for snapshot in snapshots_of(self.end()):
            if snapshot.device == self._device.index:
                events = (
                    replace(event, frames=event.frames or ENGINE) for event in snapshot.events
                )
                snapshots.append(replace(snapshot, events=tuple(events)))
        return snapshots

    def blocks(self) -> dict[int, int]:
        """Return the requested bytes of the blocks that were in use when recording began, by address."""
        base: dict[int, int] = {}
        for segment in self.segments:
            base |= in_use(segment)
        return base


def in_use(segment: Mapping[str, Any]) -> dict[int, int]:
    """Return the requested bytes of a segment's blocks in use, by address."""
    return {
        block["address"]: block["requested_size"]
        for block in segment["blocks"]
        if block["state"] != "inactive"
    }


class CallHistory:
    """Records the calls of a device's trials; see `oomprobe.devices.base.CallRecorder`."""

    def __init__(
        self, device: torch.device, statistics: Statistics, usable_bytes: Callable[[], int]
    ) -> None:
        self._device, self._history = device, MemoryHistory(device)
        self._statistics, self._usable_bytes = statistics, usable_bytes
        self.calls: Sequence[RecordedCall] = ()
        self.reason = ""
        self._is_wanted = self._is_on = False
        self._most_calls = 0
        self._began: Beginning | None = None  # when the trial began
        self._cold: tuple[CachingAllocator, LiveBlocks] | None = None  # the same, as a model
        self._before = (0, 0, 0)  # requests, frees and retries, when it began
        self._ends: list[tuple[int, int]] = []

    @contextmanager
    def recording(self, most_calls: int) -> Iterator[None]:
        """Record the first calls of the trial that runs inside."""
        self.calls, self.reason, self._is_wanted = (), "", True
        self._most_calls = most_calls
        try:
            yield
        finally:
            self._is_wanted = False
            self._stop()

    def start_trial(self) -> None:
        """Take note of the memory in which a trial begins."""
        if not self._is_wanted:
            return
        if user_records():
            self.reason = USER_RECORDS
            return
        self._history.start()
        try:
            self._began = self._beginning()
            self._cold = self._began.allocator()
        except (InvalidArgumentError, ValueError) as error:  # settings or blocks that no model has
            self._history.stop()
            self.reason = str(error)
            return
        self._before, self._ends, self._is_on = self._counts(), [], True

    def _beginning(self) -> Beginning:
        """Return the allocator as it is now."""
        segments = []
        for segment in self._history.segments:
            blocks = [*in_use(segment).items()]
            segments.append((segment["address"], segment["total_size"], segment["stream"], blocks))
        return Beginning(
            segments=segments,
            settings=self._history.settings,
            most_bytes=self._usable_bytes(),
            total_bytes=torch.cuda.get_device_properties(self._device).total_memory,
        )

    def end_call(self) -> None:
        """Take note that a call has ended."""
        if not self._is_on:
            return
        requests, frees, _ = self._counts()
        self._ends.append((requests - self._before[0], frees - self._before[1]))
        if len(self._ends) == self._most_calls:
            self._stop()

    def _counts(self) -> tuple[int, int, int]:
        requests, frees = (self._statistics.total(*path) for path in _COUNTS)
        return requests, frees, self._statistics.total("num_alloc_retries")

    def _stop(self) -> None:
        """Stop recording, and cut what was recorded into calls."""
        if not self._is_on:
            return
        self._is_on, entries = False, self._history.stop()
        may_retry = self._counts()[2] > self._before[2]
        parts = cut_calls(entries, self._ends)
        try:
            self.calls = record_calls(parts, self._history.blocks(), may_retry=may_retry)
        except NotRecorded as error:
            self.reason = str(error)

    def taped_trial(self) -> TapedTrial | None:
        """Return what the last trial asked for, and how it began; None if it was not recorded."""
        if self._cold is None or self.reason:
            return None
        allocator, live = self._cold
        card = torch.cuda.get_device_properties(self._device)
        return TapedTrial(
            calls=self.calls,
            allocator=allocator,
            live=live,
            processors=Processors(
                (card.major, card.minor),
                card.multi_processor_count,
                card.max_threads_per_multi_processor,
            ),
            began=self._began,
        )


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
