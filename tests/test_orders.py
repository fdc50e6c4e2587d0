"""Calls of a recording in other orders, beside trainings with the same lengths in these orders on the modelled allocator."""

import random
from dataclasses import replace

import pytest

from oomprobe.allocator.caching import AllocatorOutOfMemory, CachingAllocator
from oomprobe.allocator.settings import AllocatorSettings
from oomprobe.tape import orders
from oomprobe.tape.history import History
from oomprobe.tape.orders import Reordered, reorder
from oomprobe.tape.recording import Recording

MIB = 2**20
EXPANDABLE = AllocatorSettings(expandable_segments=True)
OF_OPTIMIZER, OF_USER = 4096, 4097  # bytes; what asks for so many, and frees nothing, has a stack
FRAMES = {
    OF_OPTIMIZER: [{"name": "wrapper", "filename": "/torch/optim/optimizer.py"}],
    OF_USER: [{"name": "forward", "filename": "/me/train.py"}],
}


def lengths_of(seed):
    draw = random.Random(seed)
    return [round(draw.lognormvariate(18, 0.4)) for _ in range(16)]


def train(lengths, capacity_bytes, settings=None, *, cap_bytes=None, keeps=1, streams=1):
    """Return how many requests each call made until one was refused, and the recording if one was."""
    allocator = CachingAllocator(capacity_bytes, settings or AllocatorSettings())
    allocator.limit_bytes = cap_bytes
    recording, left, served = Recording(allocator), [[]] * keeps, []
    try:
        for number, length in enumerate(lengths):
            served.append(0)
            allocator.use_stream(number % streams)
            if not number:
                allocator.malloc(30 * MIB)  # what lives throughout
            allocator.free(allocator.malloc(OF_USER))
            held = []
            for size in (length, 3 * length, length // 2, 2 * length):
                held.append(allocator.malloc(size))
                served[-1] += 1
                for block in left.pop(0) if len(held) == 2 else ():
                    allocator.free(block)
            left.append([held.pop()])
            allocator.free(allocator.malloc(OF_OPTIMIZER))
            for block in held:
                allocator.free(block)
    except AllocatorOutOfMemory:
        snapshot = recording.end()
        told = (replace(event, frames=FRAMES.get(event.size, ())) for event in snapshot.events)
        return served, History(replace(snapshot, events=tuple(told)))
    return served, None


@pytest.mark.parametrize("is_cap", [False, True])
@pytest.mark.parametrize(("seed", "runs"), [(5, 2), (8, 6)])
def test_calls_in_other_orders_end_as_training_does(seed, runs, is_cap, monkeypatch):
    monkeypatch.setattr(orders, "ORDERS", 12)
    lengths, most_bytes = lengths_of(seed), 700 * MIB
    card = {"cap_bytes": most_bytes} if is_cap else {}
    served, history = train(lengths, most_bytes * (1 + is_cap), **card)
    at = len(served) - 2
    movable, last = lengths[1:at], lengths[at : at + 2]
    counts = []
    for settings in (AllocatorSettings(), EXPANDABLE):
        counts.append(0)
        for number in range(12):
            order = [lengths[0], *random.Random(number).sample(movable, at - 1), *last]
            trained, refused = train(order, most_bytes * (1 + is_cap), settings, **card)
            counts[-1] += not refused or (len(trained) == at + 2 and trained[-1] > served[-1])
    found = reorder(history, AllocatorSettings(), most_bytes, is_cap=is_cap)
    run, run_expandable = counts
    assert found == Reordered(calls=at - 1, orders=12, run=run, run_expandable=run_expandable)
    assert run == runs
    assert found.lines()[0] == f"as recorded: {run} of 12 orders of {at - 1} calls run"


@pytest.mark.parametrize(
    ("lengths", "more", "frames", "available_mib"),
    [
        (lengths_of(8), {}, {OF_OPTIMIZER: ()}, 700),  # no ends of calls
        (lengths_of(8), {"keeps": 2}, FRAMES, 700),  # a call frees what another than the last made
        (lengths_of(8), {"streams": 2}, FRAMES, 700),
        ([10**8, *[9 * 10**7, 8 * 10**7] * 3, 2 * 10**8], {}, FRAMES, 700),  # two shapes change places
        (lengths_of(8), {}, FRAMES, 2000),  # what was refused would run
        (lengths_of(8), {}, FRAMES, 100),  # what ran is refused
    ],
)  # fmt: skip
def test_calls_that_cannot_change_places_are_left(lengths, more, frames, available_mib):
    _, history = train(lengths, 700 * MIB, **more)
    told = (replace(event, frames=frames.get(event.size, ())) for event in history.events)
    changed = History(replace(history.snapshot, events=tuple(told)))
    assert reorder(changed, AllocatorSettings(), available_mib * MIB, is_cap=False) is None
