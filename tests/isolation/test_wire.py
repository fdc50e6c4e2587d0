import json
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomprobe.isolation.wire import Wire

MESSAGES = st.lists(st.dictionaries(st.text(max_size=8), st.integers() | st.text() | st.none()), max_size=4)


def pair():
    here, there = socket.socketpair()
    return Wire(here), there


def received(wire):
    messages = []
    while not wire.ended:
        messages += wire.read()
    return messages


@given(MESSAGES, st.integers(1, 50))
def test_messages_come_whole_however_they_were_cut(messages, chunk):
    wire, there = pair()
    data, came = b"".join(json.dumps(one).encode() + b"\n" for one in messages), []
    for start in range(0, len(data), chunk):
        there.sendall(data[start : start + chunk])
        came += wire.read()
    there.close()
    assert came + received(wire) == messages
    wire.close()


def test_sending_to_nobody_is_an_error_of_the_system():
    wire, there = pair()
    there.close()
    with pytest.raises(BrokenPipeError):
        wire.send({"x": "y" * 10**7})
    wire.close()


def test_an_end_that_was_torn_off_is_an_end():
    wire, there = pair()
    wire.send({"unread": True})
    there.close()  # with something unread, the system tells the other end that the connection was reset
    assert received(wire) == []
    wire.close()
