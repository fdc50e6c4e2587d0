"""Explain why memory ran out, from a snapshot or a log."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from oomprobe.allocator.segments import LARGE_SEGMENT, SMALL_SEGMENT, segment_size
from oomprobe.errors import InvalidArgumentError
from oomprobe.explaining.encodings import unpacked
from oomprobe.explaining.log import ALMOST_FULL, LogStory, OomText, read_log
from oomprobe.explaining.remedies import (
    RECORD,
    SAVINGS,
    SHAPES,
    UNCAP,
    WATCH,
    expansion_beside,
    remedies_for,
)
from oomprobe.ground.units import format_bytes
from oomprobe.ground.words import clip, shortened
from oomprobe.records.files import read_file
from oomprobe.results.why import BESIDE, ENGINE_NAMES, Explanation
from oomprobe.tape.history import Contradiction, History, Moment
from oomprobe.tape.orders import reorder
from oomprobe.tape.replay import NotSimulated, Replay, replayed
from oomprobe.tape.snapshot import MOST_FILE_BYTES, Event, Snapshot, is_pickle, read_snapshot
from oomprobe.tape.stacks import UNKNOWN, Stacks, total_by
from oomprobe.tape.timeline import timeline_of

MOST_LOG_BYTES = 2**28
RECORD_LESS = "record less, with _record_memory_history(max_entries=1_000_000)"
TOO_LONG = "a log may have {limit}: pass its end, tail -c 50M FILE | oomprobe explain -"
MOST_QUOTED = 600  # characters of an error
ADVICE: Mapping[str | None, tuple[str, ...]] = {
    "live": (SAVINGS,),
    "fragmentation": (SHAPES,),
    "cap": (UNCAP,),
    "unknown": (),
    None: (),
}
WHY_PINNED = (
    "torch rounds each pinned request up to a power of two, so that it takes up to twice what was "
    "asked for; the error names the device, whose memory may be half empty."
)
ROOM = (
    "More was free than was asked for: another process may have freed it since, or a limit that "
    "torch does not know holds it back, such as that of a virtual machine or of the driver."
)
BARELY = (
    "With expandable segments this request would have run, but they save less than 2 %: a slightly "
    "larger step runs out all the same."
)
UNSEEN = (
    "The driver did not see what this process holds, so that memory outside of torch's allocator "
    "may be its own or that of other processes."
)


def explain(path: str | Path, *, device: int | None = None) -> Explanation:
    """Explain why a device ran out of memory, from a snapshot or from a log.

    A snapshot with history is replayed on the simulated allocator, which decides as recorded cards did, to find the least memory in
    which it runs.

    Args:
        path: What ``torch.cuda.memory._dump_snapshot`` wrote, or a log with an out-of-memory error; ``"-"``: a log on stdin.
        device: The index of the device in a snapshot; None: that on which a request was refused, or which held the most.

    Returns:
        The cause, what was live, the least memory, and what to type; ``print`` shows it.

    Raises:
        InvalidArgumentError: the file cannot be read, or says nothing about memory. Nothing in it is run: it is read as plain data.

    Examples:
        >>> import oomprobe
        >>> oomprobe.explain("no such file")
        Traceback (most recent call last):
        oomprobe.errors.InvalidArgumentError: no such file cannot be explained: ...
    """
    try:
        data = _contents(path)
        if not is_pickle(data):
            return _of_log(str(path), read_log(data))
        snapshots = read_snapshot(data)
        return of_snapshot(_chosen(snapshots, device), source=str(path), beside=snapshots)
    except (OSError, InvalidArgumentError) as error:
        raise InvalidArgumentError(f"{path} cannot be explained: {error}") from None


def _contents(path: str | Path) -> bytes:
    if str(path) == "-":
        data = sys.stdin.buffer.read(MOST_FILE_BYTES)
    else:
        data = read_file(path, MOST_FILE_BYTES, RECORD_LESS)
    data = unpacked(data, MOST_LOG_BYTES)
    if len(data) > MOST_LOG_BYTES and not is_pickle(data):
        raise InvalidArgumentError(TOO_LONG.format(limit=format_bytes(MOST_LOG_BYTES)))
    return data


# --- of a log ---


def _of_log(source: str, story: LogStory) -> Explanation:
    error = story.error
    return Explanation(
        source=source,
        cause=error.cause(),
        engine=error.engine,
        went_on=story.went_on,
        ended_with=story.ended_with,
        ranks=story.ranks,
        requested_bytes=error.requested,
        live_bytes=error.live,
        reserved_bytes=error.reserved,
        free_bytes=error.free,
        held=_held_in(error),
        advice=remedies_for(error),
        notes=tuple(_notes_on_log(story)),
    )


def _held_in(error: OomText) -> dict[str, int]:
    """Return what a log tells apart, largest first."""
    live, reserved, own, others = (
        nbytes or 0 for nbytes in (error.live, error.reserved, error.own, error.others)
    )
    elsewhere = "other processes"
    if not own:
        elsewhere = "outside of torch's allocator, of this process and others"
    if error.vendor == "apple":
        elsewhere = BESIDE
    held_bytes = {
        "tensors of this process": live,
        "reserved by torch's allocator, but not allocated": reserved - live,
        "this process, outside of torch's allocator": own - reserved,
        elsewhere: others,
    }
    largest_first = sorted(held_bytes.items(), key=lambda item: -item[1])
    return {name: nbytes for name, nbytes in largest_first if nbytes > 0}


def _notes_on_log(story: LogStory) -> Iterator[str]:
    error = story.error
    yield from _notes_on_error(error)
    if story.count > 1:
        which = "the last"
        if len(story.ranks) > 1:
            which = f"that of {error.rank}"
        least = "" if story.is_whole else "at least "
        yield f"The log has {least}{story.count} such errors; this is about {which}."
    if RECORD[-1] in remedies_for(error):
        yield (
            "A snapshot would say which lines hold the memory: record one the next time with the "
            "last two lines above."
        )


def _notes_on_error(error: OomText) -> Iterator[str]:
    quoted = f"It is: {clip(shortened(error.line), MOST_QUOTED)}"
    by_figures = error.engine == "torch" and error.stated is None
    if by_figures and error.cause() != "request":
        quoted = f"Likely, not certain: the text does not say how free memory lies. {quoted}"
    yield quoted
    cause = error.cause()
    if cause == "pinned":
        yield WHY_PINNED
    if error.is_unseen:
        yield UNSEEN
    if error.engine in ENGINE_NAMES:
        name = ENGINE_NAMES[error.engine]
        yield f"It is an error of {name}: all that it states is above."
    elif cause == "unknown" and error.has_room():
        yield ROOM
    elif cause == "unknown":
        tool = WATCH[error.vendor]
        yield (
            "Other processes may hold the memory, or libraries outside of torch's allocator: "
            f"watch {tool} while it runs."
        )


# --- of a snapshot ---


def _chosen(snapshots: Sequence[Snapshot], device: int | None) -> Snapshot:
    """Return the device that was asked for; else that on which a request was refused, or which held the most."""
    if device is not None:
        snapshots = [snapshot for snapshot in snapshots if snapshot.device == device]
    if not snapshots:
        raise InvalidArgumentError(
            "it has neither memory nor history of this device: record before the first tensor"
        )
    return max(snapshots, key=lambda snapshot: (len(snapshot.refused()), snapshot.held_bytes()))


def of_snapshot(
    snapshot: Snapshot,
    *,
    source: str,
    beside: Sequence[Snapshot] = (),
    cap_bytes: int | None = None,
    before: str = UNKNOWN,
) -> Explanation:
    """Explain what was recorded of a device.

    Args:
        snapshot: With its events.
        source: Where it comes from.
        beside: Of the other devices.
        cap_bytes: The cap that the allocator was held to, which then counts as the memory there is;
            None: unknown, or none.
        before: The kind of blocks without a stack.
    """
    notes: list[str] = []
    history, replay = _replay_of(snapshot, notes)
    moment = history.moment()
    known: dict[str, Any] = {}
    refused = moment.refused
    if replay is not None:
        known |= {
            "least_bytes": replay.least_bytes,
            "least_bytes_expandable": replay.least_bytes_expandable,
            "least_cap_bytes": replay.least_cap_bytes,
        }
    stacks = Stacks((block.frames for block in moment.live), before)
    if refused is not None:
        where = stacks.line_of(refused.frames)
        known |= {"requested_bytes": refused.size, "free_bytes": refused.address, "where": where}
        cause, available_bytes = _cause_of(history, moment, refused, replay, cap_bytes)
        if history.snapshot is not snapshot:  # what was live when it was refused is not known
            cause = "unknown"
        known |= {"cause": cause, "available_bytes": available_bytes, "advice": ADVICE[cause]}
        expansion = expansion_beside(snapshot.settings)
        if history.is_expandable:
            expansion = ()
        is_cap = history.is_capped()
        if cause == "fragmentation":
            known["advice"] = (*expansion, *ADVICE[cause])
            if replay is not None:
                known["reordered"] = reorder(
                    history, replay.settings, available_bytes, is_cap=is_cap
                )
        elif expansion and replay is not None and replay.least(is_cap=is_cap)[1] <= available_bytes:
            known["advice"] = (*ADVICE[cause], *expansion)
            notes.append(BARELY)
    kinds = total_by(stacks.kind_of, moment.live)
    notes += _notes_on_others(beside, snapshot, kinds)
    return Explanation(
        source=source,
        cap_bytes=cap_bytes,
        live_bytes=moment.live_bytes,
        reserved_bytes=moment.reserved_bytes,
        held=total_by(stacks.line_of, moment.live),
        kinds=kinds,
        modules=stacks.equal_modules(moment.live),
        timeline=timeline_of(history, moment, stacks.line_of),
        notes=tuple(notes),
        **known,
    )


def _replay_of(snapshot: Snapshot, notes: list[str]) -> tuple[History, Replay | None]:
    """Return the history, as far as it can be known, and what its replay showed; add to the notes what was replayed, or why not."""
    try:
        history = History(snapshot)
        replay = replayed(history)
    except Contradiction as error:
        notes.append(
            f"Not replayed, and shown as it was at the end, because events are missing: {error}. Record without a pause, and with a larger max_entries."
        )
        return History(snapshot.without_events()), None
    except NotSimulated as error:
        notes.append(f"Not replayed: {error}.")
        return history, None
    notes.append(
        f"Replayed {replay.requests:,} requests: after {replay.same:,} of them the simulated allocator held as many bytes as the device's."
    )
    if history.begins:
        start = f"{format_bytes(sum(block.size for block in history.begins.values()))} were live when recording began"
        place = (
            "where the segments at the end tell; with expandable segments they are requested anew"
        )
        if history.tells_pages:
            place = "where the segments at the end tell"
        notes.append(f"{start}, {place}.")
    return history, replay


def _cause_of(
    history: History,
    moment: Moment,
    refused: Event,
    replay: Replay | None,
    cap_bytes: int | None,
) -> tuple[str, int]:
    """Return the cause, and what the allocator could have held when the request was refused."""
    is_capped = history.is_capped()
    is_unknown_cap = is_capped and cap_bytes is None
    available_bytes = moment.reserved_bytes + refused.address
    if cap_bytes is not None:
        available_bytes = min(available_bytes, cap_bytes)
    elif is_capped:  # it allowed all that was held, and not the segment that was refused
        refused_bytes = moment.reserved_bytes + segment_size(refused.size)
        allowed_bytes = max(history.reserved())
        if history.is_expandable:  # the last page may lie beyond what counts
            allowed_bytes -= LARGE_SEGMENT - SMALL_SEGMENT
        available_bytes = min(allowed_bytes, refused_bytes - SMALL_SEGMENT)
    is_fragmented = moment.live_bytes + refused.size <= ALMOST_FULL * available_bytes
    if replay is not None and not history.is_expandable:
        # A setting that saves next to nothing lets this step run, and not a later one.
        as_recorded, expandable = replay.least(is_cap=is_capped)
        is_fragmented = expandable <= min(available_bytes, ALMOST_FULL * as_recorded)
    if is_fragmented:
        return "fragmentation", available_bytes
    return "cap" if is_unknown_cap else "live", available_bytes


def _notes_on_others(
    snapshots: Sequence[Snapshot], chosen: Snapshot, kinds: Mapping[str, int]
) -> Iterator[str]:
    if len(chosen.refused()) > 1:
        yield f"{len(chosen.refused())} requests were refused; this is about the last."
    if chosen.events and {*kinds} <= {UNKNOWN}:
        yield "No stacks were recorded, so that no line can be named: leave context and stacks of _record_memory_history at their defaults."
    streams = chosen.streams()
    if len(streams) > 1:
        yield f"Blocks of {len(streams)} streams: each stream reuses its own, and a block counts as live until all streams are done with it."
    if private_bytes := chosen.held_bytes(private=True):
        yield f"Private pools, as CUDA graphs use them, held {format_bytes(private_bytes)} at the end."
    for snapshot in snapshots:
        if snapshot is not chosen:
            yield f"Device {snapshot.device} held {format_bytes(snapshot.held_bytes())} at the end: --device {snapshot.device} explains it."
