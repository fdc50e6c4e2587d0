"""Messages between the processes of a probe: JSON objects with their length and a checksum before them."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import zlib
from typing import Any

Message = dict[str, Any]
_HEAD = struct.Struct("<4sII")  # a mark, the length, CRC-32 of the text
_MARK = b"oomp"
LARGEST_MESSAGE_BYTES = 2**26  # texts are shortened long before
_CHUNK_BYTES = 2**16


class GarbledError(Exception):
    """What came is not what was sent."""


def pack(message: Message) -> bytes:
    """A message as bytes."""
    text = json.dumps(message, default=str).encode()
    return _HEAD.pack(_MARK, len(text), zlib.crc32(text)) + text


def above_standard(descriptor: int) -> int:
    """The same, not as one of the standard descriptors, which a daemon may have closed."""
    if descriptor > 2:
        return descriptor
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(descriptor)
    return moved


class Wire:
    """One end of a pair of sockets.

    Example:
        >>> here, there = socket.socketpair()
        >>> one, other = Wire(here), Wire(there)
        >>> one.send({"do": "hello"})
        >>> other.read(), other.ended
        ([{'do': 'hello'}], False)
        >>> one.close(), other.read(), other.ended
        (None, [], True)
        >>> other.close()
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._received = bytearray()
        self.ended = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Send, and wait until all of it is on its way.

        Raises:
            OSError: the other end is closed.
        """
        self._socket.sendall(pack(message))

    def read(self) -> list[Message]:
        """The messages that have come whole, after waiting for some bytes, or for the other end to be closed.

        Raises:
            GarbledError: the bytes are no messages.
        """
        try:
            received = self._socket.recv(_CHUNK_BYTES)
        except ConnectionError:
            received = b""
        self.ended = not received
        self._received += received
        return list(self._whole())

    def _whole(self) -> list[Message]:
        messages = []
        while len(self._received) >= _HEAD.size:
            mark, length, checksum = _HEAD.unpack_from(self._received)
            if mark != _MARK or length > LARGEST_MESSAGE_BYTES:
                raise GarbledError("the head of a message is none")
            text = bytes(self._received[_HEAD.size : _HEAD.size + length])
            if len(text) < length:
                break
            if zlib.crc32(text) != checksum:
                raise GarbledError("the checksum of a message does not hold")
            del self._received[: _HEAD.size + length]
            message = json.loads(text)
            if not isinstance(message, dict):
                raise GarbledError("a message is no object")
            messages.append(message)
        return messages

    @property
    def unfinished(self) -> bool:
        """Whether a part of a message has come, and not the rest."""
        return bool(self._received)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()
