"""Recordings of physical cards, fed to the simulated allocator, which decides as the card did; see docs/evidence.md."""

from collections import Counter

import pytest
import recorded_step
from gpu_check.models import MODELS
from recordings import NAMES, Recording, replay

from oomprobe.allocator.caching import CachingAllocator
from oomprobe.allocator.settings import AllocatorSettings, BlockOrder
from oomprobe.devices.simulated import SimulatedDevice
from oomprobe.ground.torch_versions import VERSION

MIB = 2**20
APART = 2**44  # between segments, so that only their order matters
RECORDINGS = {name: Recording.named(name) for name in NAMES}
SEGMENTS = [name for name in NAMES if not RECORDINGS[name].expandable_segments]
PAGES = [name for name in NAMES if RECORDINGS[name].expandable_segments]


class Replayed(CachingAllocator):
    """An allocator of torch 2.11 or earlier, which made the recordings."""

    def __init__(self, recording):
        settings = AllocatorSettings(
            expandable_segments=recording.expandable_segments, block_order=BlockOrder.ADDRESS
        )
        super().__init__(recording.capacity_bytes, settings)


class Addressed(Replayed):
    """Its segments get the recorded addresses; it counts those that it releases."""

    def __init__(self, recording):
        super().__init__(recording)
        self.to_make = [(segment, size) for segment, size, *_ in recording.begins]
        self.to_make += [
            (e[1], e[2]) for e in recording.events if isinstance(e, list) and e[0] == "s"
        ]
        self.released = Counter()

        self.segments.next_range = self.next_range
        self.release_whole = self.segments.release_whole
        self.segments.release_whole = self.count_released

    def next_range(self, nbytes):
        segment, size = self.to_make.pop(0)
        assert nbytes == size
        return segment * APART

    def count_released(self, block):
        segment = self.segments.blocks.address(block) // APART
        size = self.release_whole(block)
        self.released[segment] += size > 0
        return size


@pytest.mark.parametrize("name", SEGMENTS)
def test_blocks_and_segments_are_where_the_card_put_them(name):
    recording = RECORDINGS[name]
    card = Addressed(recording)
    for block, place, reserved_bytes in replay(recording, card):
        assert block is None or divmod(card.address(block), APART) == place
        assert card.reserved_bytes == reserved_bytes
    assert card.ooms == recording.refused
    assert card.to_make == []
    assert card.released == Counter(
        e[1] for e in recording.events if isinstance(e, list) and e[0] == "r"
    )
    card = Replayed(recording)  # with its own addresses
    assert all(
        card.reserved_bytes == reserved_bytes for *_, reserved_bytes in replay(recording, card)
    )


@pytest.mark.parametrize("name", PAGES)
def test_expandable_segments(name):
    """Every block has its place in its segment, pages are mapped and unmapped alike, and one request is refused.

    Where the recording does not tell the card's capacity, it is the most that was mapped.
    """
    recording = RECORDINGS[name]
    card = Replayed(recording)
    starts = {}
    for block, place, reserved_bytes in replay(recording, card):
        assert card.reserved_bytes == reserved_bytes
        if block is not None:
            segment, offset = place
            start = card.address(block) - offset
            assert starts.setdefault(segment, start) == start
    assert len({*starts.values()}) == len(starts)
    assert sum(size for _, size in recording.ends) == card.reserved_bytes
    assert card.ooms == recording.refused


def test_a_simulated_step_makes_the_requests_of_the_card():
    card = SimulatedDevice("A100-40GB")
    with card.building():
        model, step = recorded_step.build()
    card.place([*model.parameters(), *model.buffers()])
    card.start_trial()
    for _ in range(2):
        with card.session():
            step()
    with card.session(), card.history() as history:
        step()
    numbers, requests = {}, []
    for block, nbytes in history.events:
        if nbytes > 0:
            numbers[block] = len(numbers)
        requests.append(nbytes if nbytes > 0 else -1 - numbers[block])
    recording = RECORDINGS[recorded_step.RECORDING]
    assert requests == recording.requests
    assert card.usage().peak_reserved_bytes == recording.peak_reserved_bytes


@pytest.mark.skipif(VERSION < (2, 10), reason="chooses another attention kernel")
@pytest.mark.parametrize(
    (
        "name",
        "workspaces",
    ),  # what cuDNN took for convolutions in each call, which no simulation knows
    [
        ("h200-gpt-bfloat16", []),
        ("h200-conv-net", [33849360, 50626707, 54887135, 67182608, 100737171, 106227199]),
    ],
)
def test_simulated_steps_make_the_large_requests_of_an_h200(name, workspaces):
    card = SimulatedDevice("H200-141GB")
    source = RECORDINGS[name].source
    with card.history() as history:
        with card.building():
            model, step = MODELS[source["model"]]()
        card.place([*model.parameters(), *model.buffers()])
        card.start_trial()
        for _ in range(3):
            with card.session():
                step(model, source["batch_size"])
    simulated = Counter(nbytes for _, nbytes in history.events if nbytes > 2 * MIB)
    on_card = Counter(nbytes for nbytes in RECORDINGS[name].requests if nbytes > 2 * MIB)
    assert on_card == simulated + Counter(3 * workspaces)


def test_what_the_recordings_cover():
    """The figures in docs/evidence.md."""
    blocks = {name: recording.blocks for name, recording in RECORDINGS.items()}
    assert (len(SEGMENTS), sum(blocks[name] for name in SEGMENTS)) == (15, 25_339)
    assert (len(PAGES), sum(blocks[name] for name in PAGES)) == (4, 12_483)
    assert len({recording.source["repository"] for recording in RECORDINGS.values()}) == 11
