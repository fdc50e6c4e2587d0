"""What is read from trials written by hand."""

from dataclasses import replace

import pytest
from helpers import a_trial

from oomprobe.records.trials import CallRecord, DeviceInfo, Phase, Verdict
from oomprobe.rules.diagnosis import (
    ENDLESS_BATCH,
    Calls,
    ask_for_the_same,
    data_ended,
    growth,
    how_different,
    is_pressed,
    is_size_limit,
    known_so_far,
    line_through,
    same_memory_smaller,
    splits_from,
    step_leak_bytes,
)

OOM, CRASHED, POISONED = Verdict.OOM, Verdict.CRASHED, Verdict.POISONED
MIB = 2**20
BRACKET = [
    a_trial(8, steps=3),
    a_trial(15, steps=3),
    a_trial(16, OOM),
    a_trial(18, OOM),
    a_trial(1, steps=50),
]


@pytest.mark.parametrize(
    ("trials", "known"),
    [
        ([], ""),
        ([a_trial(4, CRASHED), a_trial(4, Verdict.TIMED_OUT), a_trial(2, Verdict.POISONED)], ""),
        ([a_trial(4, steps=1)], "after batch 4 ran for 1 step, "),
        ([a_trial(4)], "after batch 4 ran, "),
        ([a_trial(4, OOM)], "after batch 4 failed, "),
        (BRACKET, "after batch 15 ran for 3 steps and batch 16 failed, "),
        ([*BRACKET, a_trial(16, steps=6)], "after batch 16 ran for 6 steps and batch 18 failed, "),
        ([*BRACKET, a_trial(15, OOM)], "after batch 8 ran for 3 steps and batch 15 failed, "),
        ([a_trial(64, steps=3), *BRACKET], "after batch 15 ran for 3 steps and batch 16 failed, "),
        ([*BRACKET, a_trial(15, OOM, accumulation_steps=2)], "after batch 15 ran for 3 steps and batch 16 failed, "),
        ([a_trial(8, steps=3), a_trial(16, replayed=True), a_trial(32, OOM, replayed=True)], "after batch 8 ran for 3 steps, "),
    ],
)  # fmt: skip
def test_what_is_known_begins_with_the_bracket(trials, known):
    assert known_so_far(trials) == known


def taken(blocks=0, served_bytes=0, starting_s=0.0, call_s=0.0):
    return Calls(served_bytes=served_bytes, blocks=blocks, starting_s=starting_s, call_s=call_s)


def doubled(peaks, **rest):
    """Return trials that grew from size 1, with these peaks."""
    return [
        a_trial(2**number, peak_allocated_bytes=peak, **rest) for number, peak in enumerate(peaks)
    ]


def test_what_a_first_call_takes_longer_is_what_starting_takes():
    taken = [
        CallRecord(step="step", stepped=1, seconds=seconds, served_bytes=8)
        for seconds in (2.0, 0.5, 0.5)
    ]
    expected = Calls(
        served_bytes=16, each_served_bytes=(8, 8), blocks=0, starting_s=1.5, call_s=0.5
    )
    assert Calls.of(taken) == expected


@pytest.mark.parametrize(
    ("calls", "reserved_bytes", "factor"),
    [
        (taken(starting_s=1.1, call_s=0.01), MIB, 4),
        (taken(starting_s=1.0, call_s=0.01), MIB, 2),  # as long as other steps take
        (taken(starting_s=1.1, call_s=0.11), MIB, 2),  # ten calls take as long
        (taken(starting_s=1.1, call_s=0.109), MIB, 4),
        (taken(starting_s=9.0), 2 * MIB, 2),  # memory is not far
        (taken(starting_s=9.0), 2 * MIB - 1, 4),
        (taken(starting_s=9.0), None, 2),
        (None, MIB, 2),
    ],
)
def test_sizes_that_start_slowly_grow_by_four_while_memory_is_far(calls, reserved_bytes, factor):
    trial = a_trial(8, peak_reserved_bytes=reserved_bytes)
    assert growth(trial, {} if calls is None else {8: calls}, 32 * MIB, 1.0) == factor


@pytest.mark.parametrize(
    ("peaks", "served", "on_host", "smaller"),
    [
        ([5] * 11, [7] * 11, False, 1),
        ([5] * 12, [7] * 12, False, 2),  # ten doublings below the last
        ([5] * 10, [7] * 10, False, None),  # nine doublings
        ([5] * 10 + [6], [7] * 11, False, None),  # the peak rises
        ([5] * 11, [7] * 10 + [8], False, None),  # the requests grow
        ([5] * 10 + [5 + 16 * MIB], [7] * 11, True, 1),  # noise of the host
        ([5] * 10 + [6 + 16 * MIB], [7] * 11, True, None),
        ([5] * 24, [0] * 24, False, None),  # a device that does not count needs more doublings
        ([5] * 25, [0] * 25, False, 1),
    ],
)
def test_a_step_that_ignores_its_batch_size(peaks, served, on_host, smaller):
    trials = [*doubled(peaks), a_trial(2**30, OOM), a_trial(3, phase=Phase.BISECT)]
    calls = {2**number: taken(served_bytes=nbytes) for number, nbytes in enumerate(served)}
    found = same_memory_smaller(trials, calls, on_host=on_host)
    assert smaller == (found and found.batch_size)


def test_sizes_that_grow_again_are_compared_with_far_smaller_ones():
    calls = dict.fromkeys((1, 256, 1024), taken(served_bytes=7))
    trials = [*doubled([5] * 11), *doubled([5] * 9)]
    assert same_memory_smaller(trials, calls, on_host=False) is None
    trials += doubled([5] * 11)
    assert same_memory_smaller(trials, calls, on_host=False).batch_size == 1


def asking(*served, values=0):
    return replace(taken(), each_served_bytes=served, values=values)


COUNTING = DeviceInfo(
    name="a card", torch_device="cuda:0", total_bytes=MIB, on_host=False, counts_bytes=True
)
MPS, HOST = (
    replace(COUNTING, counts_bytes=False),
    replace(COUNTING, counts_bytes=False, on_host=True),
)


@pytest.mark.parametrize(
    ("device", "calls", "peaks", "same"),
    [
        (COUNTING, [asking(7, 7), asking(7)], [5, 5], True),
        (COUNTING, [asking(7, 7), asking(7, 8)], [5, 5], False),
        (COUNTING, [asking(7), asking(7)], [5, 6], False),
        (COUNTING, [asking(7, values=64), asking(7, values=32)], [5, 5], False),  # of 512 bytes
        (COUNTING, [asking(0), asking(0)], [5, 5], True),  # it runs nothing there
        (MPS, [asking(0), asking(0)], [5, 5], False),  # nothing is known
        (MPS, [asking(0, values=32), asking(0, values=32)], [5, 5], True),
        (MPS, [asking(0, values=32), asking(0, values=32)], [6, 5], False),
        (HOST, [asking(0, values=32), asking(0, values=32)], [5 + 16 * MIB, 5], True),
        (HOST, [asking(0, values=32), asking(0, values=32)], [6 + 16 * MIB, 5], False),
    ],
)
def test_half_a_size_asks_for_the_same(device, calls, peaks, same):
    trials = [
        a_trial(size, peak_allocated_bytes=peak) for size, peak in zip((64, 32), peaks, strict=True)
    ]
    assert ask_for_the_same(*trials, dict(zip((64, 32), calls, strict=True)), device) is same


@pytest.mark.parametrize(
    ("examples", "ended"),
    [
        ({2: 2, 64: 40}, True),
        ({2: 2, 64: 64}, False),
        ({2: 2, 64: 80}, False),  # several calls of the model
        ({1: 1, 64: 40}, False),  # one of anything
        ({2: 2, 64: 2}, False),  # pairs, or a first dimension that is none of examples
        ({2: 4, 64: 40}, False),  # it never followed
        ({2: 2}, False),  # not watched
        ({}, False),
    ],
)
def test_data_that_end_below_a_size(examples, ended):
    assert data_ended(examples, 64) is ended


def test_no_memory_holds_an_endless_batch():
    trials = [a_trial(1, peak_allocated_bytes=1), a_trial(ENDLESS_BATCH, peak_allocated_bytes=2)]
    assert same_memory_smaller(trials, {}, on_host=False) is trials[0]
    assert (
        same_memory_smaller(
            [trials[0], a_trial(ENDLESS_BATCH - 1, peak_allocated_bytes=2)], {}, on_host=False
        )
        is None
    )


@pytest.mark.parametrize(
    ("peaks", "blocks", "first"),
    [
        ([100, 100, 100, 100], [10, 16, 26, 42], 1),
        ([50, 100, 100, 100, 101], [9, 10, 16, 26, 42], 2),
        ([100, 100, 100, 102], [10, 16, 26, 42], None),  # the peak rises by more than 1 %
        ([100, 100, 100, 100], [10, 15, 26, 42], None),  # not by 1.6
        ([100, 100, 100, 100], [0, 0, 0, 0], None),
        ([100, 100, 100], [10, 16, 26], None),
    ],
)
def test_a_step_that_splits_its_batch(peaks, blocks, first):
    calls = {2**number: taken(blocks=count) for number, count in enumerate(blocks)}
    found = splits_from(doubled(peaks), calls)
    assert first == (found and found.batch_size)
    assert splits_from(doubled(peaks, replayed=True), calls) is None


@pytest.mark.parametrize(
    ("before", "after", "how"),
    [
        (a_trial(8), a_trial(8, OOM), f"{Verdict.FITS}, then {OOM}"),
        (a_trial(8, OOM), a_trial(8, OOM), None),
        (a_trial(8, peak_allocated_bytes=100), a_trial(8, peak_allocated_bytes=101), None),
        (
            a_trial(8, peak_allocated_bytes=100),
            a_trial(8, peak_allocated_bytes=102),
            "peaks of 100 B and 102 B",
        ),
        (
            a_trial(8, OOM, peak_allocated_bytes=100),
            a_trial(8, OOM, peak_allocated_bytes=200),
            None,
        ),
    ],
)
def test_how_two_trials_of_the_same_calls_differ(before, after, how):
    assert how_different(before, after) == how


@pytest.mark.parametrize(
    ("looked", "leaked_bytes"),
    [
        (None, 64),
        (a_trial(8, OOM, steps=50), 64),
        (a_trial(8, steps=6), 64),  # no longer than the answer's own trial
        (a_trial(8, steps=7), 0),  # it levelled off
        (a_trial(8, steps=7, step_leaked_bytes=1), 64),
    ],
)
def test_a_longer_look_tells_a_buffer_from_a_leak(looked, leaked_bytes):
    assert step_leak_bytes(a_trial(64, steps=6, step_leaked_bytes=64), looked) == leaked_bytes


@pytest.mark.parametrize(
    ("retries", "steps", "pressed"),
    [(3, 6, True), (2, 6, False), (0, 0, False), (1, 1, True), (9, 0, False)],
)
def test_an_allocator_that_empties_its_cache_on_half_of_the_calls(retries, steps, pressed):
    assert is_pressed(a_trial(8, alloc_retries=retries, steps=steps)) is pressed


@pytest.mark.parametrize(
    ("earlier", "limit"),
    [
        ([a_trial(4), a_trial(8, POISONED), a_trial(8, POISONED)], True),
        ([a_trial(4), a_trial(8, POISONED)], False),  # one process
        ([a_trial(8, POISONED), a_trial(8, POISONED)], False),  # nothing smaller ran
        ([a_trial(8), a_trial(8, POISONED), a_trial(8, POISONED)], False),
        ([a_trial(4), a_trial(8, POISONED), a_trial(16, POISONED)], False),
        ([a_trial(4), a_trial(8, CRASHED), a_trial(8, CRASHED)], False),
    ],
)
def test_a_size_at_which_two_processes_had_a_sticky_error(earlier, limit):
    assert is_size_limit(earlier, a_trial(8, POISONED)) is limit


@pytest.mark.parametrize(
    ("trial", "wanted_bytes", "size"),
    [
        (a_trial(12, peak_allocated_bytes=200), 150, 7),  # from (2, 100): 10 bytes a sample
        (a_trial(12, peak_allocated_bytes=200), 159, 7),
        (a_trial(12, peak_allocated_bytes=200), 300, 22),
        (a_trial(12, peak_allocated_bytes=200), 50, 2),
        (a_trial(12, peak_allocated_bytes=100), 150, None),  # no rise
        (a_trial(2, peak_allocated_bytes=200), 150, None),
    ],
)
def test_the_line_through_the_smallest_size_that_ran(trial, wanted_bytes, size):
    trials = [
        a_trial(1, OOM),
        a_trial(4, peak_allocated_bytes=900),
        a_trial(2, peak_allocated_bytes=100),
    ]
    assert line_through(trials, trial, wanted_bytes) == size
