import contextlib
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomprobe.isolation.wire import LARGEST_MESSAGE_BYTES, GarbledError, Wire, pack

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
    data, came = b"".join(map(pack, messages)), []
    for start in range(0, len(data), chunk):
        there.sendall(data[start : start + chunk])
        came += wire.read()
    there.close()
    assert came + received(wire) == messages
    wire.close()


@given(st.integers(0, 200), st.integers(1, 255))
def test_a_changed_byte_never_gives_another_message(place, change):
    sent = {"ran": {"batch_size": 64, "verdict": "fits"}, "text": "x" * 40}
    data = bytearray(pack(sent))
    data[place % len(data)] ^= change
    wire, there = pair()
    there.sendall(data)
    there.close()
    with contextlib.suppress(GarbledError):
        assert received(wire) == []  # the length says that more is to come
    wire.close()


@pytest.mark.parametrize("cut", [1, 11, 12, 20])
def test_half_a_message_is_none(cut):
    wire, there = pair()
    there.sendall(pack({"a": 1, "b": 2})[:cut])
    there.close()
    assert received(wire) == []
    assert wire.ended
    wire.close()


def test_a_length_that_nothing_has_is_refused_at_once():
    wire, there = pair()
    there.sendall(b"oomp" + (LARGEST_MESSAGE_BYTES + 1).to_bytes(4, "little") + bytes(4))
    with pytest.raises(GarbledError):
        wire.read()
    there.close()
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
