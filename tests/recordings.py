"""Recordings of physical cards (tests/data/recordings), and their requests fed to an allocator."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch

from oomprobe.allocator.caching import AllocatorOutOfMemory

FOLDER = Path(__file__).parent / "data" / "recordings"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
_SMALL = 2**20  # the largest request that a small segment, of twice this size, serves


@dataclass
class Recording:
    """What a card recorded; README.md in its folder describes the events."""

    name: str
    source: dict
    expandable_segments: bool
    begins: list
    events: list
    ends: list = field(default_factory=list)
    limit_bytes: int | None = None

    @classmethod
    def named(cls, name):
        return cls(name, **json.loads((FOLDER / f"{name}.json").read_text()))

    @property
    def requests(self):
        """What a program without places is compared with; see `requests_of`."""
        return requests_of(self.events, sum(len(inside) // 2 for _, _, *inside in self.begins))

    @property
    def blocks(self):
        """The number of requests that got a block."""
        return sum(isinstance(event, list) and isinstance(event[0], int) for event in self.events)

    @property
    def capacity_bytes(self):
        """What the allocator may reserve: the limit if there was one, else more than it did, or as much if it refused a request."""
        if self.limit_bytes is not None:
            return self.limit_bytes
        return self.peak_reserved_bytes if self.refused else 80 * 2**30

    @property
    def refused(self):
        """The number of requests that were refused."""
        return sum(isinstance(event, list) and event[0] == "o" for event in self.events)

    @property
    def peak_reserved_bytes(self):
        return max((reserved for *_, reserved in replay(self, Nothing())), default=0)


def requests_of(events, before=0):
    """Return sizes of requests, and for each block that is freed -1 less its number, counted without the first `before`."""
    kept = [event for event in events if isinstance(event, int) or isinstance(event[0], int)]
    return [event + before if isinstance(event, int) else event[0] for event in kept]


APART = 2**40  # between the addresses of segments


def snapshot_of(recording):
    """Return what `torch.cuda.memory._snapshot` would have returned when a recording ended, without stacks.

    A recording does not say the size of a block, so a free block in it may begin early, where one in use ends.
    """
    trace, live, numbered = [], {}, []  # in use: address -> requested bytes
    segments = {segment: size for segment, size, *_ in recording.begins}

    def happened(action, **more):
        trace.append({"action": action, "addr": 0, "stream": 0, "frames": []} | more)

    def made(address, nbytes):
        live[address] = nbytes
        numbered.append((address, nbytes))

    for segment, _, *inside in recording.begins:
        for offset, nbytes in zip(inside[::2], inside[1::2], strict=True):
            made(segment * APART + offset, nbytes)
    for event in recording.events:
        if isinstance(event, int):
            address, nbytes = numbered[-event - 1]
            del live[address]
            happened("free_requested", addr=address, size=nbytes)
            happened("free_completed", addr=address, size=nbytes)
            continue
        kind, *numbers = event
        match kind:
            case "s":
                segments[numbers[0]] = numbers[1]
                happened("segment_alloc", addr=numbers[0] * APART, size=numbers[1])
            case "r":
                happened("segment_free", addr=numbers[0] * APART, size=segments.pop(numbers[0]))
            case "m":
                happened("segment_map", size=numbers[0])
            case "u":
                happened("segment_unmap", size=numbers[0])
            case "o":
                free = (
                    0 if recording.limit_bytes is None else 2**36
                )  # a limit of torch's, on a card with memory left
                happened("oom", device_free=free, size=numbers[0])
            case nbytes:
                made(numbers[0] * APART + numbers[1], nbytes)
                happened("alloc", addr=numbers[0] * APART + numbers[1], size=nbytes)
    is_expandable = recording.expandable_segments
    if is_expandable:  # a recording does not say where pages are mapped: where there are blocks, and the rest anywhere
        shown = [
            segment_of(address, -(-nbytes // 512) * 512, (0, nbytes))
            for address, nbytes in live.items()
        ]
        rest = sum(size for _, size in recording.ends) - sum(
            segment["total_size"] for segment in shown
        )
        shown.append(segment_of(0, rest))
    else:
        shown = []
        for segment, size in segments.items():
            blocks = [(*divmod(address, APART), nbytes) for address, nbytes in sorted(live.items())]
            inside = [(offset, nbytes) for number, offset, nbytes in blocks if number == segment]
            shown.append(segment_of(segment * APART, size, *inside, is_expandable=False))
    settings = {
        "expandable_segments": is_expandable,
        "max_split_size": -1,
        "garbage_collection_threshold": 0.0,
    }
    return {"segments": shown, "device_traces": [trace], "allocator_settings": settings}


def segment_of(start, size, *live, frames=(), is_expandable=True):
    """Return a segment of a snapshot, or mapped pages of one that is expandable, with blocks in use: offset and bytes."""
    blocks, at = [], 0
    for offset, nbytes in [*live, (size, 0)]:
        if offset > at:
            blocks.append(
                {"size": offset - at, "requested_size": 0, "state": "inactive", "frames": []}
            )
        if nbytes:
            rounded = -(-nbytes // 512) * 512
            used = {
                "size": rounded,
                "requested_size": nbytes,
                "state": "active_allocated",
                "frames": [*frames],
            }
            blocks.append(used)
            at = offset + rounded
    segment = {
        "device": 0,
        "address": start,
        "total_size": size,
        "stream": 0,
        "segment_pool_id": (0, 0),
    }
    return segment | {"is_expandable": is_expandable, "blocks": blocks}


class Nothing:
    """An allocator that does nothing."""

    def malloc(self, nbytes):
        return None

    def free(self, block):
        pass

    def empty_cache(self):
        pass


def refuses(allocator, nbytes):
    try:
        allocator.malloc(nbytes)
    except (torch.OutOfMemoryError, AllocatorOutOfMemory):
        return True
    return isinstance(allocator, Nothing)


def replay(recording, allocator):
    """Feed the requests to an allocator; yield the block, the segment and offset, and the reserved bytes after each request.

    The place and the bytes are the card's; for a refused request, the block and the segment are None.

    Args:
        recording: Replayed from its beginning.
        allocator: Has the methods of `Nothing`.
    """
    blocks = _blocks_at_the_beginning(recording, allocator)
    sizes = {segment: size for segment, size, *_ in recording.begins}
    reserved, pending = sum(sizes.values()), False
    for event in recording.events:
        if isinstance(event, int):
            allocator.free(blocks[-event - 1])
            continue
        kind, *numbers = event
        if kind in ("r", "u"):
            reserved -= sizes.pop(numbers[0]) if kind == "r" else numbers[0]
            if not pending:
                allocator.empty_cache()
            pending = True
            continue
        pending = False
        if kind == "s":
            sizes[numbers[0]] = numbers[1]
        if kind in ("s", "m"):
            reserved += numbers[-1]
        elif kind == "o":
            assert refuses(allocator, numbers[0])
            yield None, None, reserved
        else:
            blocks.append(allocator.malloc(kind))
            yield blocks[-1], tuple(numbers), reserved


def _blocks_at_the_beginning(recording, allocator):
    """Bring an empty allocator into the state in which the recording begins; return the blocks in use.

    Each segment is made whole and then filled, so that the next one is made too; the gaps are freed at the end.
    """
    blocks, gaps = [], []
    for _, size, *inside in recording.begins:
        largest = _SMALL if size == 2 * _SMALL else size
        allocator.free(allocator.malloc(largest))
        at = 0
        for offset, nbytes in [*zip(inside[::2], inside[1::2], strict=True), (size, 0)]:
            gaps += [
                allocator.malloc(min(largest, offset - start))
                for start in range(at, offset, largest)
            ]
            if nbytes:
                blocks.append(allocator.malloc(nbytes))
            at = offset + nbytes
    for gap in gaps:
        allocator.free(gap)
    return blocks
