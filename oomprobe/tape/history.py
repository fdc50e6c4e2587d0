"""What a recorded history says: the state in which it begins, and what was live at the moment that matters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from oomprobe.allocator.blocks import SMALLEST_BLOCK
from oomprobe.allocator.segments import LARGE_SEGMENT
from oomprobe.tape.snapshot import NO_POOL, Event, Frames, Snapshot

_MAKES = {
    "segment_alloc": 1,
    "segment_map": 1,
    "segment_free": -1,
    "segment_unmap": -1,
}  # of reserved memory


class Contradiction(Exception):
    """An event cannot have happened, given those after it and the segments at the end."""


@dataclass(frozen=True, slots=True)
class Live:
    """A block in use: requested bytes, and where that was."""

    requested: int
    stream: int
    frames: Frames
    pool: tuple[int, ...] = NO_POOL

    @property
    def size(self) -> int:
        """Bytes of the block, as far as they are certain: the allocator rounds up to 512."""
        return -(-self.requested // SMALLEST_BLOCK) * SMALLEST_BLOCK


@dataclass(frozen=True, slots=True)
class Moment:
    """The last request that was refused, or the highest peak.

    Attributes:
        refused: The request; None if nothing was refused.
        live: Blocks in use.
        reserved_bytes: What the allocator held.
        number: How many events came before it.
    """

    refused: Event | None
    live: tuple[Live, ...]
    reserved_bytes: int
    number: int

    @property
    def live_bytes(self) -> int:
        return sum(block.size for block in self.live)


class History:
    """The events of a device, from the state in which they begin, which the state at their end tells.

    Args:
        snapshot: With segments as they were when the events ended.

    Raises:
        Contradiction: an event contradicts those after it or the segments at the end.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot, self.events = snapshot, snapshot.events
        self._actions = {event.action for event in snapshot.events}
        self.begins = {
            start: Live(nbytes, s.stream, frames, s.pool)
            for s in snapshot.segments
            for start, nbytes, frames in s.blocks
        }
        self.segments = {
            segment.address: (segment.size, segment.stream, segment.pool)
            for segment in snapshot.segments
        }
        self.reserved_at_end = sum(segment.size for segment in snapshot.segments)
        self.reserved_at_begin = self.reserved_at_end
        for number, event in reversed([*enumerate(self.events)]):
            self.reserved_at_begin -= _MAKES.get(event.action, 0) * event.size
            try:
                self._undo(event)
            except KeyError:
                what = f"event {number}, {event.action} of {event.size} bytes"
                raise Contradiction(f"{what}, contradicts what follows") from None

    def _undo(self, event: Event) -> None:
        match event.action:
            case "alloc":
                del self.begins[event.address]
            case "free_completed":
                self.begins[event.address] = Live(event.size, event.stream, (), event.pool)
            case "segment_alloc":
                del self.segments[event.address]
            case "segment_free":
                self.segments[event.address] = (event.size, event.stream, event.pool)

    @property
    def is_expandable(self) -> bool:
        """Whether the allocator had expandable segments."""
        return (
            any(segment.is_expandable for segment in self.snapshot.segments)
            or "segment_map" in self._actions
        )

    @property
    def tells_pages(self) -> bool:
        """Whether all segments are expandable, and have had the same pages from the beginning to the end."""
        return {s.is_expandable for s in self.snapshot.segments} == {
            True
        } and self._actions.isdisjoint(_MAKES)

    def reserved(self) -> Iterator[int]:
        """Yield what the allocator held after each event."""
        held_bytes = self.reserved_at_begin
        for event in self.events:
            held_bytes += _MAKES.get(event.action, 0) * event.size
            yield held_bytes

    def card_bytes(self) -> int:
        """Return the most that the allocator held and that was free on the device when a request was refused; 0: none was."""
        most = 0
        for event, reserved_bytes in zip(self.events, self.reserved(), strict=True):
            if event.action == "oom":
                most = max(most, reserved_bytes + event.address)
        return most

    def moment(self) -> Moment:
        """Return the last refusal, or the highest peak of live memory."""
        reserved = [*self.reserved()]
        refused = self.last_refused()
        if refused is None:
            totals = [*self.live_totals()]
            number = totals.index(max(totals))
            held_bytes = max(reserved, default=self.reserved_at_end)
        else:
            number = self.number_of(refused)
            held_bytes = reserved[number]
        live, _ = next(islice(self.states(), number, None))
        return Moment(refused, tuple(live.values()), held_bytes, number)

    def last_refused(self) -> Event | None:
        """Return the last request that was refused: a program, or cuDNN, may have done with less after those before it."""
        return next((event for event in reversed(self.events) if event.action == "oom"), None)

    def number_of(self, event: Event) -> int:
        """Return the number of an event, of equal ones that of the last."""
        return len(self.events) - 1 - self.events[::-1].index(event)

    def is_capped(self) -> bool:
        """Return whether the last refusal was a cap's: the device had room for any segment."""
        refused = self.last_refused()
        return refused is not None and refused.address >= refused.size + LARGE_SEGMENT

    def live_peak_bytes(self) -> int:
        """Return the most that was live at once, with the last refused request."""
        return max(self.live_totals())

    def live_totals(self) -> Iterator[int]:
        """Yield the live bytes at the beginning, and after each event with what it asks for."""
        sizes = {address: block.size for address, block in self.begins.items()}
        live = sum(sizes.values())
        yield live
        refused = self.last_refused()
        for event in self.events:
            asked = 0
            match event.action:
                case "alloc":
                    sizes[event.address] = Live(event.size, 0, ()).size
                    live += sizes[event.address]
                case "free_completed":
                    live -= sizes.pop(event.address)
                case "oom" if event is refused:
                    asked = Live(event.size, 0, ()).size
            yield live + asked

    def states(self) -> Iterator[tuple[dict[int, Live], dict[int, int]]]:
        """Yield the live blocks, oldest first, and the bytes of segments, by address: before each event, and at the end.

        Those that stand for expandable segments do not change.
        """
        live = dict(self.begins)
        segments = {address: size for address, (size, _, _) in self.segments.items()}
        for event in self.events:
            yield live, segments
            match event.action:
                case "alloc":
                    live[event.address] = Live(event.size, event.stream, event.frames)
                case "free_completed":
                    del live[event.address]
                case "segment_alloc":
                    segments[event.address] = event.size
                case "segment_free":
                    del segments[event.address]
        yield live, segments
