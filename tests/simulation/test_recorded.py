import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomprobe.simulation.recorded import replay_trace
from oomprobe.simulation.settings import AllocatorSettings

MIB = 2**20
PLAIN = AllocatorSettings()

# What torch 2.13.0's own allocator recorded, on a driver that only counts bytes (160 MiB): action, address, size, stream.
TORCH_RECORDED = """
segment_alloc 139637976727552 2097152 0
alloc 139637976727552 100 0
segment_alloc 139637978824704 20971520 0
alloc 139637978824704 8519680 0
segment_alloc 139637999796224 31457280 7
alloc 139637999796224 30000000 7
free_requested 139637976727552 100 0
free_completed 139637976727552 100 0
alloc 139637987344384 5000000 0
free_requested 139637978824704 8519680 0
free_completed 139637978824704 8519680 0
alloc 139637976727552 1048576 0
free_requested 139637999796224 30000000 7
free_completed 139637999796224 30000000 7
segment_alloc 139638031253504 50331648 0
alloc 139638031253504 50000000 0
free_requested 139637987344384 5000000 0
free_completed 139637987344384 5000000 0
segment_free 139637978824704 20971520 0
segment_free 139637999796224 31457280 7
segment_alloc 139638081585152 71303168 0
alloc 139638081585152 70000000 0
"""
TORCH_RECORDED_EXPANDABLE = """
segment_map 139637976727552 2097152 0
alloc 139637976727552 100 0
segment_map 139638175956992 20971520 0
alloc 139638175956992 8519680 0
segment_map 139638385672192 41943040 7
alloc 139638385672192 30000000 7
free_requested 139637976727552 100 0
free_completed 139637976727552 100 0
alloc 139638184476672 5000000 0
free_requested 139638175956992 8519680 0
free_completed 139638175956992 8519680 0
alloc 139637976727552 1048576 0
free_requested 139638385672192 30000000 7
free_completed 139638385672192 30000000 7
segment_map 139638196928512 62914560 0
alloc 139638189476864 50000000 0
free_requested 139638184476672 5000000 0
free_completed 139638184476672 5000000 0
segment_unmap 139638385672192 41943040 7
segment_map 139638259843072 62914560 0
alloc 139638239477248 70000000 0
"""


def read(text):
    for line in text.split("\n"):
        if line:
            action, addr, size, stream = line.split()
            yield {"action": action, "addr": int(addr), "size": int(size), "stream": int(stream), "frames": []}


def event(action, addr, size=1000, stream=0):
    return {"action": action, "addr": addr, "size": size, "stream": stream}


@pytest.mark.parametrize(
    ("text", "settings", "reserved_bytes"),
    [
        (TORCH_RECORDED, PLAIN, (2 + 68 + 48) * MIB),
        (TORCH_RECORDED_EXPANDABLE, AllocatorSettings(expandable_segments=True), 142 * MIB),
    ],
)
def test_reserves_what_torch_reserved(text, settings, reserved_bytes):
    replay = replay_trace(read(text), settings, 160 * MIB)
    assert replay.peak_reserved_bytes == replay.recorded_peak_reserved_bytes == reserved_bytes
    assert (replay.allocations, replay.frees, replay.alloc_retries) == (7, 4, 1)
    assert replay.out_of_memory is None
    assert replay.unknown_frees == replay.unknown_segment_bytes == replay.missing_frees == 0


def test_on_a_larger_card_nothing_is_given_back():
    replay = replay_trace(read(TORCH_RECORDED), PLAIN, 1000 * MIB)
    assert replay.alloc_retries == 0
    assert replay.peak_reserved_bytes == (2 + 20 + 30 + 48 + 68) * MIB


def test_a_refusal_ends_the_replay():
    replay = replay_trace(read(TORCH_RECORDED), PLAIN, 100 * MIB)
    assert replay.out_of_memory is not None
    assert replay.out_of_memory.startswith("CUDA out of memory. Tried to allocate 68.00 MiB. GPU 0 has a total")
    assert (replay.allocations, replay.frees) == (6, 4)
    assert replay.recorded_peak_reserved_bytes == 118 * MIB  # of the whole recording


def test_survives_json():
    replay = replay_trace(json.loads(json.dumps(list(read(TORCH_RECORDED)))), PLAIN, 160 * MIB)
    assert replay == replay_trace(read(TORCH_RECORDED), PLAIN, 160 * MIB)


def test_what_was_alive_before_is_counted():
    trace = [
        event("free_requested", 1, 300),
        event("free_completed", 1, 300),
        event("free_requested", 2, 500),
        event("segment_free", 0, 2 * MIB),
        event("segment_alloc", 0, 20 * MIB),
        event("alloc", 1, 3 * MIB),
    ]
    replay = replay_trace(trace, PLAIN, 160 * MIB)
    assert (replay.unknown_frees, replay.unknown_freed_bytes) == (2, 800)
    assert replay.unknown_segment_bytes == 2 * MIB
    assert (replay.recorded_peak_reserved_bytes, replay.frees) == (20 * MIB, 0)


def test_a_block_waits_until_its_free_is_completed():
    kept = [
        event("alloc", 1, 12 * MIB),
        event("free_requested", 1, 12 * MIB),  # another stream still uses it
        event("alloc", 2, 12 * MIB),
        event("free_completed", 1, 12 * MIB),
        event("alloc", 1, 12 * MIB),
    ]
    assert replay_trace(kept, PLAIN, 160 * MIB).peak_reserved_bytes == 24 * MIB
    without = [entry for entry in kept if entry["action"] != "free_completed"]
    assert replay_trace(without, PLAIN, 160 * MIB).peak_allocated_bytes == 24 * MIB
    early = without[:3]
    assert replay_trace(early, PLAIN, 160 * MIB).peak_allocated_bytes == 12 * MIB


def test_a_completion_belongs_to_the_last_allocation_before_it():
    one = [event("alloc", 1), event("free_requested", 1)]
    other = [event("alloc", 1), event("free_requested", 1), event("free_completed", 1)]
    replay = replay_trace(one + other, PLAIN, 160 * MIB)
    assert (replay.frees, replay.missing_frees) == (2, 0)


def test_an_address_handed_out_twice_is_counted():
    replay = replay_trace([event("alloc", 1, 12 * MIB), event("alloc", 1, 12 * MIB)], PLAIN, 160 * MIB)
    assert (replay.missing_frees, replay.peak_allocated_bytes) == (1, 12 * MIB)


def test_other_events_are_passed_over():
    trace = [
        {"action": "oom", "device_free": 5, "size": 10 * MIB, "stream": 0},
        {"action": "snapshot", "addr": 0, "size": 0, "stream": 0},
        {"action": "user_defined", "addr": 0, "size": 0, "stream": 0},
        event("alloc", 1),
        event("alloc", 2, 0),
        event("free_completed", 2, 0),
    ]
    replay = replay_trace(trace, PLAIN, 160 * MIB)
    assert (replay.recorded_ooms, replay.allocations, replay.frees) == (1, 2, 1)
    assert replay_trace([], PLAIN, 0).peak_reserved_bytes == 0


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 30 * MIB), st.booleans()), max_size=40))
def test_nothing_is_lost(drawn):
    trace, alive, unknown = [], set(), 0
    for address, size, freed in drawn:
        if freed:
            unknown += address not in alive
            alive.discard(address)
            trace += [event("free_requested", address, size), event("free_completed", address, size)]
        elif address not in alive:
            alive.add(address)
            trace.append(event("alloc", address, size))
    replay = replay_trace(trace, PLAIN, 10**12)
    assert replay.allocations - replay.frees == len(alive)
    assert (replay.unknown_frees, replay.missing_frees) == (unknown, 0)
    assert replay.peak_allocated_bytes <= replay.peak_reserved_bytes
