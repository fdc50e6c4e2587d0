"""A recorded history, replayed on the simulated allocator: does it decide as the card did, and in how little memory does it run?"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace

from oomprobe.allocator.caching import AllocatorOutOfMemory, CachingAllocator, adopt
from oomprobe.allocator.pools import Pools
from oomprobe.allocator.segments import LARGE_SEGMENT, SMALL_SEGMENT
from oomprobe.allocator.settings import AllocatorSettings, BlockOrder
from oomprobe.errors import InvalidArgumentError
from oomprobe.ground.units import format_bytes
from oomprobe.tape.calls import (
    ALLOCATED,
    FREED,
    POOLED,
    RELEASED,
    LiveBlocks,
    RecordedCall,
    happen,
    replay_call,
)
from oomprobe.tape.calls import Event as CallEvent
from oomprobe.tape.history import Contradiction, History
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
    served, refused = [*history.events], history.last_refused()
    # With these, the allocator gives back some segments and keeps others; pages always all.
    is_partial = bool(as_recorded.max_split_size_mb or as_recorded.garbage_collection_threshold)
    is_partial &= not as_recorded.expandable_segments
    call = _call_of(history, served, gives_back_some=is_partial)
    on_card = [
        reserved_bytes
        for event, reserved_bytes in zip(served, history.reserved(), strict=True)
        if event.action == "alloc"
    ]
    same = -1
    for order in BlockOrder:
        settings = replace(as_recorded, block_order=order)
        equal = _same(history, call, settings, on_card)
        if equal > same:
            same, as_recorded = equal, settings
        if same == len(on_card):
            break
    if refused is not None:  # is served, and freed at once: what came after did not have it
        number = history.number_of(refused)
        served[number : number + 1] = (
            replace(refused, action=action, address=-1) for action in ("alloc", "free_completed")
        )
    expandable = replace(as_recorded, expandable_segments=True)
    call = _call_of(history, served)
    least_bytes = least_bytes_expandable = _least_bytes(history, call, expandable)
    cap_bytes = cap_bytes_expandable = _least_bytes(history, call, expandable, is_cap=True)
    if not history.is_expandable:
        call = _call_of(history, served, gives_back_some=is_partial)
        least_bytes = cap_bytes = _least_bytes(history, call, as_recorded)
    return Replay(
        same=same,
        requests=len(on_card),
        least_bytes=least_bytes,
        least_bytes_expandable=least_bytes_expandable,
        least_cap_bytes=cap_bytes,
        least_cap_bytes_expandable=cap_bytes_expandable,
        settings=as_recorded,
    )


def _same(
    history: History, call: RecordedCall, settings: AllocatorSettings, on_card: Iterable[int]
) -> int:
    """Return after how many requests the simulated allocator holds as much as the card's did."""
    allocator = CachingAllocator(
        _UNLIMITED, settings, total_bytes=history.card_bytes() or _UNLIMITED
    )
    live = begin(history, allocator)
    program = call.program(live)
    blocks = allocator.unnamed([live[name] for name in program.freed])
    same, reserved_bytes = 0, iter(on_card)
    for requests, event in program.sized(allocator):
        for request in requests:
            allocator.run((request,), blocks)
            same += request > 0 and allocator.reserved_bytes == next(reserved_bytes)
        happen(allocator, event, blocks)
    return same


def _least_bytes(
    history: History, call: RecordedCall, settings: AllocatorSettings, *, is_cap: bool = False
) -> int:
    """Return the capacity, or cap, with which the recording runs, and with 2 MiB less it does not.

    Still less may run: smaller segments are refused earlier, and leave other pieces.

    It is a multiple of 2 MiB. An expandable segment may extend as far as it needs to, as on a card
    with memory to spare.
    """
    enough = _peak_bytes(history, call, settings, _UNLIMITED)
    too_little = (history.live_peak_bytes() - 1) // SMALL_SEGMENT * SMALL_SEGMENT
    if enough is None:
        raise AllocatorOutOfMemory("the request that was refused is larger")
    if is_cap:
        enough += enough + LARGE_SEGMENT  # more than any request counts
        too_little -= LARGE_SEGMENT  # the last page that a request maps may lie beyond what counts
    while enough - too_little > SMALL_SEGMENT:
        tried = (enough + too_little) // 2 // SMALL_SEGMENT * SMALL_SEGMENT
        peak_bytes = _peak_bytes(history, call, settings, tried, is_cap=is_cap)
        if peak_bytes is None:
            too_little = tried
        elif is_cap:
            enough = tried
        else:
            enough = peak_bytes
    return enough


def _peak_bytes(
    history: History,
    call: RecordedCall,
    settings: AllocatorSettings,
    most_bytes: int,
    *,
    is_cap: bool = False,
) -> int | None:
    """Return the most that the allocator holds while it serves a call; None if it cannot."""
    allocator = CachingAllocator(most_bytes, settings, total_bytes=_UNLIMITED)
    if is_cap:
        allocator.limit_bytes = most_bytes
        allocator.capacity_bytes += LARGE_SEGMENT
    try:
        replay_call(allocator, call, begin(history, allocator))
    except AllocatorOutOfMemory:
        return None
    return int(allocator.peak_reserved_bytes)


def _call_of(
    history: History, served: Iterable[Event], *, gives_back_some: bool = False
) -> RecordedCall:
    """Return what was served as one call, after one that left what was in use when it began.

    With `gives_back_some`, the allocator gives back single segments, else all that are free.
    """
    names = {address: (1, number) for number, address in enumerate(sorted(history.begins))}
    events, sizes, serving = list[CallEvent](), list[int](), None
    for event in served:
        match event.action:
            case "alloc":
                if serving != (event.stream, event.pool):
                    serving = event.stream, event.pool
                    events.append((POOLED, 0, (_turn_to, serving, ())))
                names[event.address] = 0, len(sizes)
                events.append((ALLOCATED, len(sizes), 0))
                sizes.append(event.size)
            case "free_completed":
                events.append((FREED, *names.pop(event.address)))
            case "segment_free" | "segment_unmap":
                released = RELEASED, _number(event.pool), gives_back_some * event.size
                if gives_back_some:
                    events.append(released)
                elif events[-1:] != [released]:
                    serving = None
                    events += (POOLED, 0, (let_go, (event.pool,), ())), released
    return RecordedCall(tuple(events), tuple(sizes))


def _turn_to(pools: Pools, stream: int, pool: tuple[int, ...]) -> None:
    """Let a stream's next requests come from a pool, which stays until its segments go back."""
    pools.use_stream(stream)
    number = _number(pool)
    if pools.active == [number] or not (number or pools.active):
        return
    for used in [*pools.active]:
        pools.leave(used)
        pools.release(used)
    if number:
        if not pools.users[number]:
            pools.make(number)
        pools.use(number, captures=pool[0] > 0)


def let_go(pools: Pools, pool: tuple[int, ...]) -> None:
    """Leave what was in use; a private pool whose segments go back has lost its users."""
    _turn_to(pools, pools.stream, NO_POOL)
    if pool != NO_POOL:
        pools.users[_number(pool)] = 0


def _number(pool: tuple[int, ...]) -> int:
    """Return a private pool's number; of those of captures, the first part is not 0."""
    return pool[0] << 62 | pool[1]


def begin(history: History, allocator: CachingAllocator) -> LiveBlocks:
    """Bring an empty allocator into the state in which the history begins; return its blocks, by the rank of their address.

    The segments are taken over as they were, or the blocks are requested anew: a layout is of one setting.

    Raises:
        AllocatorOutOfMemory: they are larger than its memory.
        Contradiction: the blocks overlap.
    """
    requests_begin = allocator.settings.expandable_segments and not history.tells_pages
    live: LiveBlocks = {}
    addresses = sorted(history.begins)
    if requests_begin:
        for number, address in enumerate(addresses):
            _turn_to(allocator.pools, history.begins[address].stream, history.begins[address].pool)
            live[1, number] = allocator.malloc(history.begins[address].requested)
        return live
    room_ends = MOST_INT + _UNLIMITED
    for start, (size, stream, pool) in sorted(history.segments.items(), reverse=True):
        first, last = bisect_left(addresses, start), bisect_left(addresses, start + size)
        inside = addresses[first:last]
        _turn_to(allocator.pools, stream, pool)
        sizes = [(address, history.begins[address].requested) for address in inside]
        room = min(room_ends - start - size, _UNLIMITED)
        if room < 0:
            raise Contradiction(f"a segment of {size} bytes overlaps another")
        try:
            handles = adopt(allocator, start, size, sizes, room)
        except ValueError as error:
            raise Contradiction(str(error)) from None
        live |= {(1, first + number): handle for number, handle in enumerate(handles)}
        room_ends = start
    _turn_to(allocator.pools, 0, NO_POOL)
    if allocator.reserved_bytes > allocator.capacity_bytes:
        allocator.empty_cache()
        allocator.reset_peaks()
    if allocator.reserved_bytes > allocator.capacity_bytes:
        raise AllocatorOutOfMemory("the segments in use when recording began are larger")
    return live
