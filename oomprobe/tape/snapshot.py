"""A snapshot of torch's allocator, read as plain data: nothing that a file names is ever looked up or called.

Source of the format: torch/csrc/cuda/memory_snapshot.cpp and torch/cuda/_memory_viz.py of PyTorch, 2.1 to 2.15.
"""

from __future__ import annotations

import io
import pickle
import re
import reprlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NoReturn, TypeVar

from oomprobe.errors import InvalidArgumentError
from oomprobe.ground.units import format_bytes

MOST_FILE_BYTES = 2**30
MOST_OBJECTS = 80_000_000  # texts, numbers, and lists and dicts, each of which counts as three
MOST_DEVICES = 1024
MOST_FRAMES = 256  # read of each stack
MOST_INT = 2**62  # addresses are smaller, and requests that were refused
MOST_BYTES = 2**41  # sizes are smaller: no card has as much
# Opcodes that make numbers, strings, lists and dicts, as torch's own snapshots have them. Not those of text protocols, of integers
# of any length, and of sizes beyond 4 GiB.
_PLAIN = (
    "PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT1 "
    "APPEND APPENDS SETITEM SETITEMS BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET"
)
_VALUES = "BININT BININT2 LONG1 BINFLOAT SHORT_BINUNICODE BINUNICODE"  # which take memory
_FREE = "inactive"  # the state of a block; all others are in use
_ACTIONS = {
    "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap", "oom",
}  # fmt: skip

NO_POOL = (0, 0)
_UNREADABLE = (KeyError, TypeError, ValueError, AttributeError, OverflowError)
T = TypeVar("T")
Frames = Sequence[
    Any
]  # of a stack, innermost first: dicts of name, filename and line, not yet checked


@dataclass(frozen=True, slots=True)
class Event:
    """What the allocator did.

    Attributes:
        action: As torch names it, such as ``"alloc"`` or ``"segment_free"``.
        address: Of the block or segment; of ``"oom"``, the bytes that were free on the device.
        size: Bytes requested, of a segment its size.
        stream: 0: the default one.
        pool: Identifies a private pool, as CUDA graphs have them; (0, 0): none.
        frames: The stack, if stacks were recorded.
    """

    action: str
    address: int
    size: int
    stream: int
    pool: tuple[int, ...]
    frames: Frames

    def is_inside(self, function: re.Pattern[str]) -> bool:
        """Whether its stack has a frame whose name and file this matches."""
        return any(
            function.match(f"{raw.get('name')} {raw.get('filename')}")
            for raw in self.frames[:MOST_FRAMES]
            if isinstance(raw, dict)
        )

    def entry(self) -> dict[str, Any]:
        """Return it as torch writes it, without its stack."""
        place = {"addr": self.address, "size": self.size, "stream": self.stream}
        return {"action": self.action, **place, "pool_id": self.pool}


@dataclass(frozen=True, slots=True)
class Segment:
    """Memory from the driver, when the snapshot was taken, and its blocks: address, requested bytes and stack of those in use."""

    address: int
    size: int
    stream: int
    pool: tuple[int, ...]
    is_expandable: bool
    blocks: tuple[tuple[int, int, Frames], ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One device of a snapshot.

    Attributes:
        device: Its index.
        events: In the order in which they happened; empty if no history was recorded.
        segments: When the snapshot was taken.
        settings: The allocator's, by torch's names.
    """

    device: int
    events: tuple[Event, ...]
    segments: tuple[Segment, ...]
    settings: Mapping[str, Any]

    def refused(self) -> list[Event]:
        """Return the requests that were refused."""
        return [event for event in self.events if event.action == "oom"]

    def streams(self) -> set[int]:
        """Return the streams that made requests."""
        return {event.stream for event in self.events if event.action == "alloc"}

    def held_bytes(self, *, private: bool = False) -> int:
        """Return what the allocator held when the snapshot was taken, in all or in private pools."""
        return sum(
            segment.size for segment in self.segments if not private or segment.pool != NO_POOL
        )

    def pools(self) -> set[tuple[int, ...]]:
        """Return the pools that have segments or events."""
        return {part.pool for parts in (self.events, self.segments) for part in parts}

    def without_events(self) -> Snapshot:
        """Return what is known if events are missing: the segments, and what was refused."""
        return replace(self, events=tuple(self.refused()))


_Unpickler: Any = pickle._Unpickler


class _PlainUnpickler(_Unpickler):  # type: ignore[misc]
    """Makes numbers, strings, lists and dicts; whatever else a file holds ends the reading.

    Python's own implementation is used because that in C reserves memory for as many objects as a file claims to have.
    """

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._objects = 0

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}, and a snapshot is plain data")

    def _count(self, objects: int) -> None:
        self._objects += objects
        if self._objects > MOST_OBJECTS:
            raise pickle.UnpicklingError(
                f"it has more than {MOST_OBJECTS:,} texts and numbers, lists and dicts as three each"
            )

    def _make(self, kind: Callable[[], Any]) -> None:
        self._count(3)
        self.append(kind())

    def _load(self, code: int) -> None:
        self._count(1)
        _Unpickler.dispatch[code](self)

    def _pack(self, length: int | None) -> None:
        """Make a list of a tuple, so that no key of a dict is nested."""
        if length is None:
            items = self.pop_mark()
        else:
            items = self.stack[-length:]
            del self.stack[-length:]
        self._make(lambda: items)

    def _refuse(self) -> NoReturn:
        raise pickle.UnpicklingError("it holds more than numbers, strings, lists and dicts")

    dispatch: ClassVar[dict[int, Callable[..., None]]] = dict.fromkeys(range(256), _refuse)
    dispatch |= {
        getattr(pickle, name)[0]: _Unpickler.dispatch[getattr(pickle, name)[0]]
        for name in _PLAIN.split()
    }
    for _name in _VALUES.split():
        dispatch[getattr(pickle, _name)[0]] = partial(_load, code=getattr(pickle, _name)[0])
    dispatch |= {
        pickle.EMPTY_LIST[0]: partial(_make, kind=list),
        pickle.EMPTY_DICT[0]: partial(_make, kind=dict),
    }
    dispatch |= {
        pickle.EMPTY_TUPLE[0]: partial(_make, kind=list),
        pickle.TUPLE[0]: partial(_pack, length=None),
    }
    dispatch |= {
        pickle.TUPLE1[0]: partial(_pack, length=1), pickle.TUPLE2[0]: partial(_pack, length=2), pickle.TUPLE3[0]: partial(_pack, length=3),
    }  # fmt: skip


def is_pickle(data: bytes) -> bool:
    """Return whether a file is a pickle of protocol 2 or later, rather than a text."""
    return data[:1] == pickle.PROTO and data[1:2] <= b"\x10"


def read_snapshot(data: bytes) -> tuple[Snapshot, ...]:
    """Return the devices of a snapshot that have events or segments.

    Args:
        data: What ``torch.cuda.memory._dump_snapshot`` wrote.

    Raises:
        InvalidArgumentError: it is no snapshot, is damaged, or holds anything but plain data.
    """
    try:
        document = _PlainUnpickler(data).load()
    except Exception as error:  # a damaged pickle raises almost anything
        raise InvalidArgumentError(f"it cannot be read as plain data: {error}") from None
    return snapshots_of(document)


def snapshots_of(document: Any) -> tuple[Snapshot, ...]:
    """Return the devices that have events or segments in what ``torch.cuda.memory._snapshot`` made.

    Raises:
        InvalidArgumentError: it is something else.
    """
    try:
        return tuple(_devices(document))
    except _UNREADABLE as error:
        raise InvalidArgumentError(
            f"it is not what torch.cuda.memory._dump_snapshot writes: {error!r}"
        ) from None


def _devices(document: Any) -> Iterator[Snapshot]:
    traces, settings = document.get("device_traces", []), document.get("allocator_settings", {})
    if len(traces) > MOST_DEVICES:
        raise ValueError(f"it has {len(traces)} device_traces")
    own_segments = defaultdict(list)
    for device, segment in _each(_segment, document["segments"], "segments"):
        own_segments[device].append(segment)
    for device in range(max(len(traces), *(index + 1 for index in own_segments), 0)):
        trace = traces[device] if device < len(traces) else []
        events = tuple(filter(None, _each(_event, trace, f"device_traces[{device}]")))
        if events or own_segments[device]:
            yield Snapshot(device, events, tuple(own_segments[device]), dict(settings))


def _each(read: Callable[[Any], T], items: Iterable[Any], place: str) -> Iterator[T]:
    """Yield what is read of each item; name its place in the file if it cannot be read."""
    for at, raw in enumerate(items):
        try:
            yield read(raw)
        except _UNREADABLE as error:
            raise InvalidArgumentError(
                f"it is not what torch.cuda.memory._dump_snapshot writes: {place}[{at}]: {error!r}"
            ) from None


def _event(raw: Any) -> Event | None:
    """Return an event; None for one of a kind that does not matter."""
    action, address = raw["action"], "addr"
    if action not in _ACTIONS:
        return None
    most_bytes = MOST_BYTES
    if action == "oom":
        address, most_bytes = "device_free", MOST_INT
    return Event(
        action,
        _whole(raw, address),
        _whole(raw, "size", most_bytes),
        _whole(raw, "stream"),
        _pool(raw, "pool_id"),
        _frames(raw),
    )


def _segment(raw: Any) -> tuple[int, Segment]:
    """Return the index of a segment's device, and the segment."""
    start, size = _whole(raw, "address"), _whole(raw, "total_size", MOST_BYTES)
    blocks, at = [], start
    for block in raw["blocks"]:
        if block["state"] != _FREE:
            requested = {"requested_size": block["size"], **block}
            blocks.append((at, _whole(requested, "requested_size", MOST_BYTES), _frames(block)))
        at += _whole(block, "size", MOST_BYTES)
    if at != start + size:
        raise ValueError(
            f"the blocks of a segment of {format_bytes(size)} take {format_bytes(at - start)}"
        )
    segment = Segment(
        start,
        size,
        _whole(raw, "stream"),
        _pool(raw, "segment_pool_id"),
        bool(raw.get("is_expandable")),
        tuple(blocks),
    )
    return _whole(raw, "device", MOST_DEVICES), segment


def _whole(raw: Any, name: str, most: int = MOST_INT) -> int:
    value = raw[name]
    if type(value) is not int or not 0 <= value < most:
        raise ValueError(f"{name} is {reprlib.repr(value)}")
    return value


def _pool(raw: Any, name: str) -> tuple[int, ...]:
    first, second = raw.get(name, NO_POOL)
    return int(first), int(second)


def _frames(raw: Any) -> Frames:
    frames = raw.get("frames", ())
    if not isinstance(frames, list):
        return ()
    return frames
