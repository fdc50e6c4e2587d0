"""A recorded history, replayed on the simulated allocator: does it decide as the card did, and in how little memory does it run?"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace

from oomprobe.allocator.caching import AllocatorOutOfMemory, CachingAllocator, adopt
from oomprobe.allocator.segments import LARGE_SEGMENT, SMALL_SEGMENT
from oomprobe.allocator.settings import AllocatorSettings, BlockOrder
from oomprobe.errors import InvalidArgumentError
from oomprobe.ground.units import format_bytes
from oomprobe.tape.history import Contradiction, History
from oomprobe.tape.record import GIVES_BACK
from oomprobe.tape.snapshot import MOST_INT, NO_POOL, Event

_UNLIMITED = 2**41  # more than any card has, and little beside the addresses that there are


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What replaying showed.

    Attributes:
        same: Requests after which the simulated allocator held as many bytes as the card's.
        requests: All that were served.
        least_bytes: The smallest memory in which the recording runs, with the last request that was refused.
        least_bytes_expandable: The same with expandable segments.
        least_cap_bytes: The smallest cap on a larger card in which it runs.
        least_cap_bytes_expandable: The same with expandable segments.
        settings: The allocator's, by the rule that fits best.
    """

    same: int
    requests: int
    least_bytes: int
    least_bytes_expandable: int
    least_cap_bytes: int
    least_cap_bytes_expandable: int
    settings: AllocatorSettings

    def least(self, *, is_cap: bool) -> tuple[int, int]:
        """Return what the recording needs, as recorded and with expandable segments."""
        if is_cap:
            return self.least_cap_bytes, self.least_cap_bytes_expandable
        return self.least_bytes, self.least_bytes_expandable


class NotSimulated(Exception):
    """The simulated allocator does not do what the recorded one did."""


def replayed(history: History) -> Replay:
    """Replay a history under both settings, by the rule of torch's versions that fits it best.

    Raises:
        NotSimulated: the allocator had settings that are not simulated.
        Contradiction: the blocks in use when recording began overlap.
    """
    snapshot = history.snapshot
    if not any(event.action in ("alloc", "oom") for event in snapshot.events):
        raise NotSimulated("no request was recorded, so that this is the state at the end")
    try:
        return _replayed(history, _recorded(history))
    except AllocatorOutOfMemory:
        raise NotSimulated(
            f"it takes more than {format_bytes(_UNLIMITED)}, which no card has"
        ) from None


def _recorded(history: History) -> AllocatorSettings:
    """Return the settings that a snapshot tells."""
    try:
        settings = AllocatorSettings.from_snapshot(history.snapshot.settings)
    except (InvalidArgumentError, TypeError, AttributeError):
        raise NotSimulated(
            "the allocator's settings, as the snapshot tells them, are none of torch's"
        ) from None
    return replace(settings, expandable_segments=history.is_expandable)


def _replayed(history: History, as_recorded: AllocatorSettings) -> Replay:
    requests = sum(event.action == "alloc" for event in history.events)
    same = -1
    for order in BlockOrder:
        settings = replace(as_recorded, block_order=order)
        equal = _same(history, settings)
        if equal > same:
            same, as_recorded = equal, settings
        if same == requests:
            break
    expandable = replace(as_recorded, expandable_segments=True)
    least_bytes = least_bytes_expandable = _least_bytes(history, expandable)
    cap_bytes = cap_bytes_expandable = _least_bytes(history, expandable, is_cap=True)
    if not history.is_expandable:
        least_bytes = cap_bytes = _least_bytes(history, as_recorded)
    return Replay(
        same=same,
        requests=requests,
        least_bytes=least_bytes,
        least_bytes_expandable=least_bytes_expandable,
        least_cap_bytes=cap_bytes,
        least_cap_bytes_expandable=cap_bytes_expandable,
        settings=as_recorded,
    )


def _same(history: History, settings: AllocatorSettings) -> int:
    """Return after how many requests the simulated allocator holds as much as the card's did."""
    allocator = CachingAllocator(
        _UNLIMITED, settings, total_bytes=history.card_bytes() or _UNLIMITED
    )
    same = 0
    for event, reserved_bytes in zip(
        _serve(history, settings, allocator), history.reserved(), strict=True
    ):
        same += event.action == "alloc" and allocator.reserved_bytes == reserved_bytes
    return same


def _least_bytes(history: History, settings: AllocatorSettings, *, is_cap: bool = False) -> int:
    """Return the capacity, or cap, with which the recording runs, and with 2 MiB less it does not.

    Still less may run: smaller segments are refused earlier, and leave other pieces.

    It is a multiple of 2 MiB. An expandable segment may extend as far as it needs to, as on a card
    with memory to spare.
    """
    enough = _peak_bytes(history, settings, _UNLIMITED)
    too_little = (history.live_peak_bytes() - 1) // SMALL_SEGMENT * SMALL_SEGMENT
    if enough is None:
        raise AllocatorOutOfMemory("the request that was refused is larger")
    if is_cap:
        enough += enough + LARGE_SEGMENT  # more than any request counts
        too_little -= LARGE_SEGMENT  # the last page that a request maps may lie beyond what counts
    while enough - too_little > SMALL_SEGMENT:
        tried = (enough + too_little) // 2 // SMALL_SEGMENT * SMALL_SEGMENT
        peak_bytes = _peak_bytes(history, settings, tried, is_cap=is_cap)
        if peak_bytes is None:
            too_little = tried
        elif is_cap:
            enough = tried
        else:
            enough = peak_bytes
    return enough


def _peak_bytes(
    history: History, settings: AllocatorSettings, most_bytes: int, *, is_cap: bool = False
) -> int | None:
    """Return the most that the allocator holds while it serves all requests; None if it cannot.

    The last request that was refused is one of them.
    """
    allocator = CachingAllocator(most_bytes, settings, total_bytes=_UNLIMITED)
    if is_cap:
        allocator.limit_bytes = most_bytes
        allocator.capacity_bytes += LARGE_SEGMENT
    refused = history.last_refused()
    try:
        for event in _serve(history, settings, allocator):
            if (
                event is refused
            ):  # served this time, and its block freed at once: what came after did not have it
                _turn_to(allocator, event.stream, event.pool)
                allocator.free(allocator.malloc(event.size))
    except AllocatorOutOfMemory:
        return None
    return int(allocator.peak_reserved_bytes)


def _serve(
    history: History, settings: AllocatorSettings, allocator: CachingAllocator
) -> Iterator[Event]:
    """Give an empty allocator the requests of a history, and yield each event once it has happened, a request before it is refused."""
    blocks = begin(history, allocator)
    releasing: tuple[int, ...] | None = None  # the pool whose segments are given back
    # With these, the allocator gives back some segments and keeps others; pages always all.
    is_partial = bool(settings.max_split_size_mb or settings.garbage_collection_threshold)
    is_partial &= not settings.expandable_segments
    for event in history.events:
        is_release = event.action in GIVES_BACK
        match event.action:
            case "alloc":
                _turn_to(allocator, event.stream, event.pool)
                blocks[event.address] = allocator.malloc(event.size)
            case "free_completed":
                allocator.free(blocks.pop(event.address))
        if is_release and is_partial:
            allocator.segments.release_one(event.size)
        elif is_release and event.pool != releasing:
            _release(allocator, event.pool)
        releasing = event.pool if is_release else None
        yield event


def _turn_to(allocator: CachingAllocator, stream: int, pool: tuple[int, ...]) -> None:
    """Let a stream's next requests come from a pool, which stays until its segments go back."""
    allocator.use_stream(stream)
    number = _number(pool)
    if allocator.pools.active == [number] or not (number or allocator.pools.active):
        return
    for used in [*allocator.pools.active]:
        allocator.pools.leave(used)
        allocator.pools.release(used)
    if number:
        if not allocator.pools.users[number]:
            allocator.pools.make(number)
        allocator.pools.use(number, captures=pool[0] > 0)


def _release(allocator: CachingAllocator, pool: tuple[int, ...]) -> None:
    """Give back what a pool has free; a private one has then lost its users."""
    _turn_to(allocator, allocator.stream, NO_POOL)
    number = _number(pool)
    if number:
        allocator.pools.users[number] = 0
    allocator.empty_cache(number)


def _number(pool: tuple[int, ...]) -> int:
    """Return a private pool's number; of those of captures, the first part is not 0."""
    return pool[0] << 62 | pool[1]


def begin(history: History, allocator: CachingAllocator) -> dict[int, int]:
    """Bring an empty allocator into the state in which the history begins; return the handles of blocks by address.

    The segments are taken over as they were, or the blocks are requested anew: a layout is of one setting.

    Raises:
        AllocatorOutOfMemory: they are larger than its memory.
        Contradiction: the blocks overlap.
    """
    requests_begin = allocator.settings.expandable_segments and not history.tells_pages
    blocks: dict[int, int] = {}
    addresses = sorted(history.begins)
    if requests_begin:
        for address in addresses:
            _turn_to(allocator, history.begins[address].stream, history.begins[address].pool)
            blocks[address] = allocator.malloc(history.begins[address].requested)
        return blocks
    room_ends = MOST_INT + _UNLIMITED
    for start, (size, stream, pool) in sorted(history.segments.items(), reverse=True):
        inside = addresses[bisect_left(addresses, start) : bisect_left(addresses, start + size)]
        _turn_to(allocator, stream, pool)
        sizes = [(address, history.begins[address].requested) for address in inside]
        room = min(room_ends - start - size, _UNLIMITED)
        if room < 0:
            raise Contradiction(f"a segment of {size} bytes overlaps another")
        try:
            handles = adopt(allocator, start, size, sizes, room)
        except ValueError as error:
            raise Contradiction(str(error)) from None
        blocks |= zip(inside, handles, strict=True)
        room_ends = start
    _turn_to(allocator, 0, NO_POOL)
    if allocator.reserved_bytes > allocator.capacity_bytes:
        allocator.empty_cache()
        allocator.reset_peaks()
    if allocator.reserved_bytes > allocator.capacity_bytes:
        raise AllocatorOutOfMemory("the segments in use when recording began are larger")
    return blocks
