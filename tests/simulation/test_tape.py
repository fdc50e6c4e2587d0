import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomprobe.allocator.caching import CachingAllocator
from oomprobe.tape.calls import (
    ALLOCATED,
    FREED,
    KERNEL,
    RESULT,
    Kernel,
    RecordedCall,
    Tape,
    lengthen_turns,
    peak_bytes,
    replay_call,
    replay_calls,
)
from oomprobe.tape.fit import Predictor, lines_through

MIB = 2**20


def a_call(*sizes, leave=0, dead=(), ago=1):
    """Return a call that frees its blocks at once, except the last `leave`, and the `dead` blocks of an earlier call."""
    events = [(FREED, ago, index) for index in dead]
    for index in range(len(sizes)):
        events.append((ALLOCATED, index, 0))
        if index < len(sizes) - leave:
            events.append((FREED, 0, index))
    return RecordedCall(tuple(events), tuple(sizes))


@pytest.mark.parametrize(
    ("leave", "dead", "ago", "closed"),
    [
        (0, [], 1, True),
        (1, [1], 1, True),
        (1, [1], 2, True),
        (1, [1], 3, False),
        (1, [], 1, False),
        (1, [0], 1, False),
    ],
    ids=[
        "leaves nothing",
        "frees what was left",
        "frees it a call later",
        "frees it after more calls than were seen",
        "leaves a block each time",
        "frees another block",
    ],
)
def test_closed_calls_free_what_earlier_ones_left(leave, dead, ago, closed):
    call = a_call(1, 2, leave=leave, dead=dead, ago=ago)
    assert call.closed is closed
    assert call.core == a_call(1, 2, leave=leave).core


# --- lines ---


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), min_size=1, max_size=20),
    st.lists(st.integers(1, 10**4), min_size=2, max_size=2, unique=True),
    st.integers(1, 10**6),
)
def test_lines_are_found_and_followed_exactly(blocks, sizes, further):
    def at(n):
        return a_call(*(fixed + slope * n for fixed, slope in blocks))

    one, other = sizes
    [line] = lines_through(one, [at(one)], other, [at(other)])
    assert line.at(further) == at(further)


@pytest.mark.parametrize(
    "others",
    [
        [a_call(21)],  # half a byte per sample
        [a_call(20, 1)],  # another sequence
        [a_call(20, leave=1)],
        [a_call(20), a_call(20)],
    ],
)
def test_calls_that_follow_no_line_are_not_predicted(others):
    assert lines_through(2, [a_call(10)], 4, others) is None


@given(st.lists(st.lists(st.tuples(st.integers(1, 99), st.integers(0, 5)), max_size=5), max_size=5))
def test_a_long_call_is_cut_into_those_that_would_have_been_recorded(calls):
    """Each request of so many bytes follows the free of one of those that are live, if there are so many."""
    whole, parts, made, ends = Tape(), Tape(), [], []
    live = {tape: [] for tape in (whole, parts)}
    for requests in calls:
        for nbytes, dead in requests:
            for tape, names in live.items():
                if dead < len(names):
                    tape.freed(names.pop(dead))
                names.append(tape.allocated(nbytes))
                tape.kernel("kernel", 0, tape.launched([nbytes]))
        ends.append(whole.place)
        made.append(parts.finish())
        parts.start()
    assert whole.finish().cut(ends) == made


# --- replay ---


def step(batch_size, dead=(2,)):
    """Return a call with two activations and a gradient that lives until the next call."""
    born = (ALLOCATED, 0, 0), (ALLOCATED, 1, 0), (ALLOCATED, 2, 0)
    events = (*((FREED, 1, index) for index in dead), *born, (FREED, 0, 0), (FREED, 0, 1))
    return RecordedCall(events, (batch_size * MIB, 2 * batch_size * MIB, 4 * MIB))


def first(batch_size):
    """Return the cold call: no gradient to free, and a workspace to allocate."""
    call = step(batch_size, dead=())
    return RecordedCall((*call.events, (ALLOCATED, 3, 0)), (*call.sizes, 8 * MIB))


def cold(batch_size):
    return [first(batch_size), step(batch_size), step(batch_size)]


def learn(predictor, size, calls):
    return predictor.learn(size, ["train"] * len(calls), calls)


def predict(predictor, size, count):
    return predictor.calls(size, ["train"] * count)


def taught(*sizes):
    predictor = Predictor()
    for size in sizes:
        assert learn(predictor, size, cold(size))
    return predictor


def test_two_sizes_predict_the_calls_of_a_cold_trial():
    assert predict(taught(1), 100, 9) is None
    assert predict(taught(1, 2), 100, 1) == [first(100)]
    assert predict(taught(1, 2), 100, 4) == [first(100), step(100), step(100), step(100)]


def test_the_last_two_sizes_determine_the_line():
    """Batch size 1 often differs: a transposed tensor of one row needs no copy."""
    predictor = Predictor()
    odd = RecordedCall((*step(1).events, (ALLOCATED, 3, 0), (FREED, 0, 3)), (*step(1).sizes, MIB))
    for size, calls in ((1, [first(1), odd, odd]), (2, cold(2))):
        assert learn(predictor, size, calls)
        assert predictor.lines is None
    assert learn(predictor, 4, cold(4))
    assert predictor.lines is not None


def test_a_size_off_the_line_ends_replays():
    predictor = taught(1, 2, 4)
    assert not learn(predictor, 8, [first(8), *[RecordedCall(step(8).events, (1, 2, 3))] * 2])
    for size in (16, 32, 64):
        assert learn(predictor, size, cold(size))
        assert predictor.lines is None


def test_other_calls_with_the_predicted_peak_keep_the_lines():
    """A training loop whose smaller last batch only some sizes leave, and which then holds a number more or fewer."""

    def further(size, extra):
        """Return a cold trial whose calls go on after the predicted ones."""
        more = (ALLOCATED, 9, 0), (FREED, 0, 9)
        return [
            RecordedCall((*call.events, *more), (*(*call.sizes, *[0] * 9)[:9], extra))
            for call in cold(size)
        ]

    predictor = taught(1, 2)
    assert learn(predictor, 8, further(8, 8 * MIB))
    assert predict(predictor, 100, 2) == cold(100)[:2]
    assert not learn(predictor, 8, further(8, 80 * MIB))
    assert predictor.lines is None


def test_kernels_without_numbers_give_back_their_own_scratch():
    """They have the index of what follows: torch 2.15 takes a workspace so, for each product of matrices."""
    borrowed = Kernel(lambda nbytes: [nbytes, RESULT], (MIB,), 0)
    events = [(KERNEL, 0, (borrowed, part)) for part in (0, 1, 0, 1)]
    call = RecordedCall((*events, (ALLOCATED, 0, 0), (FREED, 0, 0)), (512,))
    allocator, live = CachingAllocator(10 * MIB), {}
    for _ in range(3):
        live = replay_call(allocator, call, live)
    assert (live, allocator.allocated_bytes) == ({}, 0)
    assert allocator.served == 9


def test_the_peak_counts_what_earlier_calls_left():
    assert (
        peak_bytes(cold(1)) == (4 + 8 + 1 + 2) * MIB
    )  # gradient of the first call is freed as the second one starts
    assert peak_bytes([a_call(5, leave=1), a_call(6, leave=1), a_call(7)]) == 18
    assert peak_bytes([]) == 0


def test_calls_of_several_steps_are_predicted_in_their_order():
    predictor, names = Predictor(), ["train", "train", "eval", "train", "eval"]

    def calls(size):
        other = a_call(3 * size)
        return [first(size), step(size), other, step(size), other]

    for size in (1, 2):
        assert predictor.learn(size, names, calls(size))
    assert predictor.calls(100, names) == calls(100)
    assert predictor.calls(100, names[:4]) == calls(100)[:4]
    *_, other = calls(100)
    assert predictor.calls(100, [*names, "eval"]) == [*calls(100), other.repetition]
    assert predictor.calls(100, [*names, "train"]) is None
    assert predictor.calls(100, ["train"]) == [first(100)]
    assert predictor.calls(100, ["eval"]) is None


@given(
    st.lists(st.integers(2, 6), min_size=4, max_size=5),
    st.lists(st.integers(1, 30), min_size=4, max_size=4),
)
def test_longer_turns_do_what_their_calls_would_do(lengths, mib):
    """Each step leaves a block that its next call frees, however many calls lie between."""
    state, trained, evaluated, scratch = (MIB * size for size in mib)

    def trial(lengths):
        names, calls, last = [], [], {}
        for turn, length in enumerate(lengths):
            name = ("train", "eval")[turn % 2]
            for _ in range(length):
                sizes = (scratch, trained) if name == "train" else (2 * scratch, evaluated)
                if not calls:
                    sizes = (*sizes, state)
                ago, is_first = len(calls) - last.get(name, 0), name not in last
                dead = [] if is_first else [1]
                calls.append(a_call(*sizes, leave=len(sizes) - 1, dead=dead, ago=ago))
                last[name] = len(names)
                names.append(name)
        return names, calls

    made, asked = trial([2] * len(lengths)), trial(lengths)
    lengthened = lengthen_turns(made[1], made[0], asked[0])
    ends = []
    for calls in (asked[1], lengthened):
        allocator, live = CachingAllocator(2**40), {}
        peaks = [*replay_calls(allocator, calls, live)]
        ends.append((peaks, allocator.peak_reserved_bytes, allocator.reserved_bytes))
    assert ends[0] == ends[1]
    assert peak_bytes(lengthened) == peak_bytes(asked[1])


def test_turns_whose_calls_do_not_repeat_have_no_longer_ones():
    names, other = ["train", "train", "eval", "eval"], a_call(5)
    calls = [first(1), step(1), other, other]
    assert lengthen_turns(calls, names, ["train", "train", "eval"]) is None  # a shorter turn
    assert lengthen_turns(calls, names, ["eval"] * 3) is None
    assert lengthen_turns(calls, names, [*names, "eval"]) == [*calls, other.repetition]
    assert lengthen_turns(calls, names, ["train", *names]) is None  # the two differ
    late = a_call(5, 6, leave=1, dead=[1], ago=2)
    assert lengthen_turns([late, late], ["eval"] * 2, ["eval"] * 3) is None


def test_a_later_turn_with_another_call_ends_predictions():
    predictor, names = Predictor(), ["train", "train", "eval", "train", "eval"]
    for size in (1, 2, 3):
        assert predictor.learn(
            size, names, [first(size), step(size), a_call(size), step(size), a_call(size, size)]
        )
    assert predictor.lines is None
    assert "'eval'" in predictor.reason


def test_calls_that_do_not_repeat_are_predicted_as_far_as_they_ran():
    predictor = Predictor()
    for size, made in ((1, 4), (2, 3)):
        assert learn(predictor, size, [a_call(number * size) for number in range(1, made + 1)])
    assert predict(predictor, 100, 3) == [a_call(100), a_call(200), a_call(300)]
    assert predict(predictor, 100, 4) is None


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 3)), min_size=1, max_size=12),
    st.integers(0, 3),
    st.lists(st.integers(1, 2), min_size=3, max_size=3),
)
def test_calls_that_repeat_are_replayed_until_nothing_changes(blocks, leave, ago):
    """Blocks of half a MiB, each of which is freed after some others, but the last ones by one of the next two calls."""
    events, alive = (
        [(FREED, ago[index], len(blocks) - 1 - index) for index in range(min(leave, len(blocks)))],
        [],
    )
    for index, (_, later) in enumerate(blocks):
        events.append((ALLOCATED, index, 0))
        alive.append((index, index + later))
        for block in [
            block for block, until in alive if until <= index and block < len(blocks) - leave
        ]:
            events.append((FREED, 0, block))
            alive = [of_block for of_block in alive if of_block[0] != block]
    events += [(FREED, 0, block) for block, _ in alive if block < len(blocks) - leave]
    call = RecordedCall(tuple(events), tuple(size * MIB // 2 for size, _ in blocks))
    assert call.closed
    every, live, short = CachingAllocator(2**40), {}, CachingAllocator(2**40)
    for _ in range(20):
        live = replay_call(every, call, live)
    for _ in replay_calls(short, [call] * 20, {}):
        pass
    assert (short.peak_reserved_bytes, short.peak_allocated_bytes) == (
        every.peak_reserved_bytes,
        every.peak_allocated_bytes,
    )
