import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomprobe.simulation.tape import BORN, DIED, Call, Tape, line_through


def a_call(*sizes, leave=0, dead=()):
    """Blocks are born and die at once, but for the last ones; `dead` are those of the call before."""
    events = [(DIED, 1, index) for index in dead]
    for index in range(len(sizes)):
        events.append((BORN, index, 0))
        if index < len(sizes) - leave:
            events.append((DIED, 0, index))
    return Call(tuple(events), tuple(sizes))


def test_a_tape_names_blocks_by_call_and_index():
    tape = Tape()
    tape.start()
    kept = tape.born(10)
    tape.died(tape.born(20))
    assert tape.finish() == Call(((BORN, 0, 0), (BORN, 1, 0), (DIED, 0, 1)), (10, 20))
    tape.start()
    tape.died(kept)
    assert tape.finish() == Call(((DIED, 1, 0),), ())


def test_what_happens_between_calls_is_on_neither():
    tape = Tape()
    tape.start()
    kept = tape.born(10)
    tape.finish()
    tape.died(kept)
    tape.start()
    assert tape.finish() == Call((), ())


def test_closed_calls_free_what_they_left():
    assert a_call(1, 2, leave=1, dead=[1]).closed
    assert not a_call(1, 2, leave=1).closed  # leaves a block each time
    assert not a_call(1, 2, leave=1, dead=[0]).closed  # frees another one than it left
    assert a_call(1, 2).closed
    assert a_call(1, 2, leave=1, dead=[1]).core == a_call(1, 2, leave=1).core


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), min_size=1, max_size=20),
    st.lists(st.integers(1, 10**4), min_size=2, max_size=5, unique=True),
    st.integers(1, 10**6),
)
def test_lines_are_found_and_followed_exactly(blocks, sizes, further):
    def at(n):
        return a_call(*(fixed + slope * n for fixed, slope in blocks))

    line = line_through([(n, at(n)) for n in sizes])
    assert line.at(further) == at(further)


@pytest.mark.parametrize(
    "calls",
    [
        [(1, a_call(10))],
        [(2, a_call(10)), (4, a_call(21))],  # half a byte a sample
        [(1, a_call(10)), (2, a_call(20)), (4, a_call(41))],
        [(1, a_call(10)), (2, a_call(20)), (4, a_call(40, 1))],  # another sequence
        [(1, a_call(1)), (2, a_call(4)), (3, a_call(9))],  # a square
        [(2, a_call(512)), (4, a_call(512)), (6, a_call(1024))],  # padding
        [(1, a_call(10)), (2, a_call(20, leave=1))],
    ],
)
def test_what_follows_no_line_is_not_predicted(calls):
    assert line_through(calls) is None
