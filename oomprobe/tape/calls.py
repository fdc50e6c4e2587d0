"""Allocator events of each call of a step, and their replay on an allocator alone."""

from __future__ import annotations

import os
import pickle
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

from oomprobe.allocator.caching import AllocatorOutOfMemory, CachingAllocator
from oomprobe.allocator.settings import AllocatorSettings
from oomprobe.tape.reductions import Processors, Reduction, buffers

# Bytes of a block to take; -n, to give back the n-th last of the blocks that the kernel holds; RESULT, where its next result
# is allocated, and all that follow if it is the last. The end gives back what is held.
RESULT = None
Steps = tuple[int | None, ...]


def in_turn(groups: Iterable[tuple[int, ...]]) -> Steps:
    """Return the steps that hold the blocks of each group together, one group after the other."""
    steps: list[int] = []
    for group in groups:
        steps += (*group, *(-1,) * len(group))
    return tuple(steps)


def reducing(kind: Reduction, offset: int, *layout: int) -> Steps:
    """Take what a reduction of a tensor of this offset, shape and strides needs, by kernel."""
    shape, strides = layout[: len(layout) // 2], layout[len(layout) // 2 :]
    return in_turn(buffers(kind, shape, strides, offset))


@dataclass(frozen=True, slots=True)
class Kernel:
    """A rule for a kernel's steps; its arguments are fixed values and `count` numbers that vary with the batch."""

    rule: Callable[..., Steps]
    fixed: tuple[Any, ...]
    count: int

    def on(self, processors: Processors) -> Kernel:
        """Return the rule on a card of the same compute capability with these processors."""
        fixed = list(self.fixed)
        for at, value in enumerate(fixed):
            if isinstance(value, Reduction):
                fixed[at] = replace(value, processors=processors)
            elif isinstance(value, Processors):
                fixed[at] = processors
        return replace(self, fixed=tuple(fixed))


@lru_cache(maxsize=4096)
def parts_of(kernel: Kernel, numbers: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return a kernel's steps before each of its results, and after the last."""
    parts: list[list[int]] = [[]]
    for step in kernel.rule(*kernel.fixed, *numbers):
        if step is RESULT:
            parts.append([])
        else:
            parts[-1].append(step)
    return tuple(map(tuple, parts))


# Events are (ALLOCATED, index, 0), (FREED, calls ago, index), (RELEASED, pool, 0) for a cache, or
# (RELEASED, pool, bytes) for one segment of it, and
# (KERNEL, index, (kernel, part)) before each result of a kernel with scratch memory and after the last.
# An index points into the list of sizes; a kernel's sizes are the numbers from which its rule computes
# its scratch memory. (SWITCHED, stream, 0) makes a stream the current one, and
# (SHARED, calls ago, (index, stream)) lets another stream use a block. (SET, 0, settings) changes the allocator's.
# (POOLED, 0, (method, arguments, options)) is what `Pools` does.
ALLOCATED, FREED, RELEASED, KERNEL, SWITCHED, SHARED, SET, POOLED = range(8)
Event = tuple[int, int, Any]
_END: Event = (-1, 0, 0)
Name = tuple[int, int]  # of a block: calls ago, index in that call
LiveBlocks = dict[Name, int]  # handles
LONGEST_LIFE = 2  # calls that a block may outlive where two in a row show that calls repeat


@dataclass(frozen=True)
class RecordedCall:
    """One call of a step: its events in order, and their sizes.

    Attributes:
        is_again: Whether it repeats the call before it, and those that follow count the two as one.
    """

    events: tuple[Event, ...]
    sizes: tuple[int, ...]
    is_again: bool = False

    @cached_property
    def core(self) -> tuple[Event, ...]:
        """Events except frees of earlier calls' blocks, which a clean-up between calls may already have freed."""
        core = []
        for event in self.events:
            kind, ago, _ = event
            if kind != FREED or ago == 0:
                core.append(event)
        return tuple(core)

    @cached_property
    def asked(self) -> tuple[Event, ...]:
        """Events except frees: threads of libraries such as NCCL free blocks at no fixed time."""
        return tuple(event for event in self.events if event[0] != FREED)

    @cached_property
    def _earlier(self) -> tuple[dict[Name, None], dict[Name, None]]:
        """Names of blocks of earlier calls that it frees, and of those that it shares."""
        freed, shared = dict[Name, None](), dict[Name, None]()
        for kind, ago, detail in self.events:
            if kind == FREED and ago:
                freed[ago, detail] = None
            elif kind == SHARED and ago:
                shared[ago, detail[0]] = None
        return freed, shared

    @cached_property
    def _programs(self) -> dict[object, Program]:
        return {}

    def program(self, live: LiveBlocks) -> Program:
        """Return its program, without the blocks that a clean-up between calls has freed."""
        freed, shared = self._earlier
        key = (
            tuple(name for name in freed if live.get(name)),
            tuple(name for name in shared if live.get(name) and name not in freed),
        )
        if key not in self._programs:
            self._programs[key] = Program(self, *key)
        return self._programs[key]

    @cached_property
    def closed(self) -> bool:
        """Whether the call frees exactly what identical calls before it leave."""
        left = Counter[int]()
        for kind, index, detail in self.events:
            if kind == ALLOCATED:
                left[index] += 1
            elif kind == FREED:
                left[detail] -= 1
        return self._lived <= LONGEST_LIFE and not any(left.values())

    @property
    def _lived(self) -> int:
        """For how many calls the oldest block lived that it frees; 0: it frees its own."""
        freed, _ = self._earlier
        return max(freed, default=(0, 0))[0]

    def repeats(self, before: RecordedCall) -> bool:
        """Whether it did what the call before it did, so that another one would too."""
        is_alike = self is before or (self.core, self.sizes) == (before.core, before.sizes)
        return is_alike and self.closed

    @property
    def repetition(self) -> RecordedCall:
        """What it does once more; later calls count both as one, unless it frees older blocks."""
        return replace(self, is_again=self._lived <= 1)

    def repeats_anywhere(self, before: RecordedCall) -> bool:
        """Whether it repeats a call, and a later one cannot tell how often."""
        return self.repeats(before) and self._lived <= 1

    def cut(self, ends: Sequence[tuple[int, int]]) -> list[RecordedCall]:
        """Return the calls that it is made of; each ends after so many events and sizes.

        It must be the first call of a trial that begins without blocks.
        """
        calls, firsts = list[RecordedCall](), [0]
        began = 0
        for number, (ended, last) in enumerate(ends):
            events = list[Event]()
            for kind, index, detail in self.events[began:ended]:
                if kind in (ALLOCATED, KERNEL):
                    index -= firsts[-1]
                elif kind == FREED:
                    made = bisect_right(firsts, detail) - 1
                    index, detail = number - made, detail - firsts[made]
                events.append((kind, index, detail))
            calls.append(RecordedCall(tuple(events), self.sizes[firsts[-1] : last]))
            began = ended
            firsts.append(last)
        return calls


def lengthen_turns(
    calls: Sequence[RecordedCall], names: Sequence[str], asked: Sequence[str]
) -> list[RecordedCall] | None:
    """Return the calls of a trial in which steps take longer turns: the last call of each repeats.

    Args:
        calls: Of a trial.
        names: The step of each.
        asked: The steps of the longer trial, or of its first turns.

    Returns:
        None if the turns are others, or if a step ends the longer ones with other calls.

    Example:
        >>> call = RecordedCall(((ALLOCATED, 0, 0), (FREED, 0, 0)), (512,))
        >>> len(lengthen_turns([call, call], ["train"] * 2, ["train"] * 5))
        5
    """
    of_step, rest = defaultdict[str, list[RecordedCall]](list), [*calls]
    for name, call in zip(names, calls, strict=True):
        of_step[name].append(call)
    turns, longer = (
        [(name, len([*turn])) for name, turn in groupby(order)] for order in (names, asked)
    )
    if len(longer) > len(turns):
        return None
    result = list[RecordedCall]()
    for (name, made), (asked_name, length) in zip(turns, longer, strict=False):
        turn, rest, more = rest[:made], rest[made:], length - made
        *before, last = of_step[name]
        goes_on = before and last.repeats_anywhere(before[-1]) and last.repeats(turn[-1])
        if asked_name != name or more < 0 or (more and not goes_on):
            return None
        result += [*turn, *[last.repetition] * more]
    return result


def write_calls(calls: Iterable[RecordedCall], path: str) -> None:
    """Write calls to a file, which another process may read at any time."""
    with open(f"{path}.part", "wb") as file:
        pickle.dump([(in_order(call.events), call.sizes) for call in calls], file)
    os.replace(f"{path}.part", path)


def in_order(events: Sequence[Event]) -> tuple[Event, ...]:
    """Return events with frees that follow each other in a fixed order: what a set held, or a cycle, dies in one that varies."""
    ordered: list[Event] = []
    for are_frees, group in groupby(events, lambda event: event[0] == FREED):
        run = list(group)
        if are_frees:
            run.sort()
        ordered += run
    return tuple(ordered)


def read_calls(path: Path) -> list[RecordedCall]:
    """Return what `write_calls` has written."""
    return [RecordedCall(events, sizes) for events, sizes in pickle.loads(path.read_bytes())]


class Tape:
    """Recorder of the current call."""

    def __init__(self) -> None:
        self.call_number = 0
        self._events: list[Event] = []
        self._sizes: list[int] = []

    def start_trial(self, count: int) -> list[tuple[int, int]]:
        """Start a trial; return names for its `count` existing blocks, the same in every trial."""
        self.call_number = 0
        self._events, self._sizes = [], [0] * count
        return [(0, index) for index in range(count)]

    def start(self) -> None:
        """Start a call, dropping events since the last one."""
        self.call_number += 1
        self._events, self._sizes = [], []

    @property
    def place(self) -> tuple[int, int]:
        """How many events and sizes the call has so far."""
        return len(self._events), len(self._sizes)

    def allocated(self, nbytes: int) -> tuple[int, int]:
        """Record an allocated block; return its name."""
        index = len(self._sizes)
        self._sizes.append(nbytes)
        self._events.append((ALLOCATED, index, 0))
        return self.call_number, index

    def freed(self, name: tuple[int, int]) -> None:
        call_number, index = name
        self._events.append((FREED, self.call_number - call_number, index))

    def launched(self, numbers: Sequence[int]) -> int:
        """Record the numbers of a kernel with scratch memory; return their index."""
        index = len(self._sizes)
        self._sizes.extend(numbers)
        return index

    def kernel(self, kernel: Kernel, part: int, index: int) -> None:
        """Record that a kernel has made the requests of a part."""
        self._events.append((KERNEL, index, (kernel, part)))

    def cache_released(self, private: int = 0) -> None:
        self._events.append((RELEASED, private, 0))

    def pooled(self, act: Callable[..., None], args: tuple[int, ...], **options: bool) -> None:
        """Record a call of a method of `Pools`."""
        self._events.append((POOLED, 0, (act, args, (*options.items(),))))

    def switched(self, stream: int) -> None:
        self._events.append((SWITCHED, stream, 0))

    def shared(self, name: tuple[int, int], stream: int) -> None:
        call_number, index = name
        self._events.append((SHARED, self.call_number - call_number, (index, stream)))

    def changed(self, settings: AllocatorSettings) -> None:
        self._events.append((SET, 0, settings))

    def finish(self) -> RecordedCall:
        return RecordedCall(tuple(self._events), tuple(self._sizes))


class Program:
    """A call as `CachingAllocator.run` takes it.

    Its blocks are numbered: first those of earlier calls, then its own in turn.

    Attributes:
        freed: Names of blocks of earlier calls that it frees.
        shared: Names of those that it only lets another stream use.
        parts: Requests, and the event that follows them and is none.
        left: Number of each block that it leaves, by index.
        empty: Indices of those that it leaves without a byte.
        nbytes: Bytes of each block by number, 0 for those of earlier calls.
    """

    def __init__(self, call: RecordedCall, freed: Sequence[Name], shared: Sequence[Name]) -> None:
        self.freed, self.shared = freed, shared
        numbers = {name: number for number, name in enumerate([*freed, *shared])}
        self.nbytes = [0] * len(numbers)
        self.parts: list[tuple[list[int], Event]] = []
        self._sized: dict[object, list[int]] = {}
        self._requests: list[int] = []
        scratch = defaultdict[int, list[int]](list)  # of kernels
        for kind, index, detail in (*call.events, _END):
            if kind == ALLOCATED:
                numbers[0, index] = self._ask(call.sizes[index])
            elif kind == FREED:
                self._give(numbers.pop((index, detail), -1))  # `index` is calls ago
            elif kind == KERNEL:
                kernel, part = detail
                parts = parts_of(kernel, call.sizes[index : index + kernel.count])
                self._serve(parts[part], scratch[index], is_last=part == len(parts) - 1)
            else:
                if kind == SHARED:
                    name, detail = detail
                    index = numbers.get((index, name), -1)
                self.parts.append((self._requests, (kind, index, detail)))
                self._requests = []
        own = {index: number for (ago, index), number in numbers.items() if ago == 0}
        self.left = {index: number for index, number in own.items() if number >= 0}
        self.empty = own.keys() - self.left.keys()

    def sized(self, allocator: CachingAllocator) -> Iterator[tuple[list[int], Event]]:
        """Yield the parts with requests as this allocator rounds them by then."""
        for number, (part, event) in enumerate(self.parts):
            key = number, allocator.settings.roundup_power2_divisions
            if key not in self._sized:
                self._sized[key] = allocator.in_sizes(part)
            yield self._sized[key], event

    def _ask(self, nbytes: int) -> int:
        """Request a block; return its number, -1 for no bytes."""
        if nbytes <= 0:
            return -1
        self._requests.append(nbytes)
        self.nbytes.append(nbytes)
        return len(self.nbytes) - 1

    def _give(self, number: int) -> None:
        if number >= 0:
            self._requests.append(number - len(self.nbytes))

    def _serve(self, steps: Iterable[int], scratch: list[int], *, is_last: bool) -> None:
        """Make the requests of a part of a kernel, which holds these blocks until its last part."""
        for step in steps:
            if step < 0:
                self._give(scratch.pop(step))
            else:
                scratch.append(self._ask(step))
        if is_last:
            for number in scratch:
                self._give(number)
            scratch.clear()  # a kernel without numbers has the index of the next one


def replay_call(allocator: CachingAllocator, call: RecordedCall, live: LiveBlocks) -> LiveBlocks:
    """Replay a call's events on an allocator, which is changed in place and may raise.

    Args:
        allocator: Allocator in the state before the call.
        call: The call to replay.
        live: Blocks left by earlier calls.

    Returns:
        The blocks alive after the call, named for the next call.
    """
    program = call.program(live)
    live = dict(live)
    blocks = allocator.unnamed([live.pop(name) for name in program.freed])
    blocks += [allocator.block(live[name]) for name in program.shared]
    for requests, event in program.sized(allocator):
        allocator.run(requests, blocks)
        happen(allocator, event, blocks)
    allocator.synchronize()
    numbers = program.left.values()
    handles = allocator.named(
        [blocks[number] for number in numbers], [program.nbytes[number] for number in numbers]
    )
    allocator.served += len(blocks) - len(program.freed) - len(program.shared) - len(handles)
    allocator.served_bytes += sum(program.nbytes)
    passed = 0 if call.is_again else 1
    left = {(ago + passed, index): block for (ago, index), block in live.items()}
    left |= {(1, index): 0 for index in program.empty}
    left |= {(1, index): handle for index, handle in zip(program.left, handles, strict=True)}
    return left


def happen(allocator: CachingAllocator, event: Event, blocks: Sequence[int]) -> None:
    """Let an event happen that is no request, among the blocks of a program."""
    kind, index, detail = event
    if kind == RELEASED and detail:
        allocator.segments.release_one(detail)
    elif kind == RELEASED:
        allocator.empty_cache(index)
    elif kind == SWITCHED:
        allocator.use_stream(index)
    elif kind == SHARED and index >= 0:
        allocator.share(blocks[index], detail)
    elif kind == SET:
        allocator.set(detail)
    elif kind == POOLED:
        act, args, options = detail
        act(allocator.pools, *args, **dict(options))


def replay_calls(
    allocator: CachingAllocator, calls: Iterable[RecordedCall], live: LiveBlocks
) -> Iterator[int]:
    """Replay calls as `replay_call` does, one that repeats until it changes nothing more; yield the peak allocated after each."""
    last, began = None, None
    for call in calls:
        state = state_of(allocator, live)
        if call is not last or state != began:
            live = replay_call(allocator, call, live)
        last, began = call, state
        yield allocator.peak_allocated_bytes


def replay_trial(
    allocator: CachingAllocator, calls: Iterable[RecordedCall], live: LiveBlocks
) -> tuple[AllocatorOutOfMemory | None, int]:
    """Replay a trial; return the refusal that ended it, if one did, and the number of the call that failed, or took the most."""
    peaks_bytes: list[int] = []
    try:
        for peak_bytes in replay_calls(allocator, calls, live):
            peaks_bytes.append(peak_bytes)
    except AllocatorOutOfMemory as refusal:
        return refusal, len(peaks_bytes)
    return None, peaks_bytes.index(peaks_bytes[-1])


@dataclass(frozen=True, kw_only=True)
class ReplayedTrial:
    """How a replayed trial ended: `error` if it ran out of memory, in call `limiting`, from 0."""

    error: str | None
    limiting: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_upper_bytes: int | None = None
    alloc_retries: int

    @classmethod
    def of(
        cls, allocator: CachingAllocator, calls: Iterable[RecordedCall], live: LiveBlocks
    ) -> ReplayedTrial:
        """Replay a trial on an allocator in the state where it begins."""
        refusal, limiting = replay_trial(allocator, calls, live)
        return cls(
            error=None if refusal is None else f"OutOfMemoryError: {refusal}",
            limiting=limiting,
            peak_allocated_bytes=allocator.peak_allocated_bytes,
            peak_reserved_bytes=allocator.peak_reserved_bytes,
            alloc_retries=allocator.alloc_retries,
        )


def state_of(allocator: CachingAllocator, live: LiveBlocks) -> object:
    """Return the state that decides how a repetition of the last call goes."""
    left = {name: block for name, block in live.items() if name[0] <= LONGEST_LIFE}
    return [*left], allocator.layout(left.values())


def peak_bytes(calls: Sequence[RecordedCall]) -> int:
    """Return the most bytes that calls, made one after the other, request at any time."""
    now = most = 0
    live: dict[Name, int] = {}
    for call in calls:
        program = call.program(live)
        nbytes = program.nbytes.copy()
        for number, name in enumerate(program.freed):
            nbytes[number] = live.pop(name)
        count = len(program.freed) + len(program.shared)
        for requests, _ in program.parts:
            for request in requests:
                if request < 0:
                    now -= nbytes[count + request]
                else:
                    count += 1
                    now += request
                most = max(most, now)
        passed = 0 if call.is_again else 1
        live = {(ago + passed, index): size for (ago, index), size in live.items()}
        live |= {(1, index): nbytes[number] for index, number in program.left.items()}
    return most
