"""Messages between the processes of a probe: JSON objects, one a line."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from typing import Any

Message = dict[str, Any]
_CHUNK_BYTES = 2**16


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
        self._received = b""
        self.ended = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Send, and wait until all of it is on its way.

        Raises:
            OSError: the other end is closed.
        """
        self._socket.sendall(json.dumps(message, default=str).encode() + b"\n")

    def read(self) -> list[Message]:
        """The messages that have come whole, after waiting for some bytes, or for the other end to be closed."""
        try:
            received = self._socket.recv(_CHUNK_BYTES)
        except ConnectionError:
            received = b""
        self.ended = not received
        *whole, self._received = (self._received + received).split(b"\n")
        return [json.loads(line) for line in whole]

    def close(self) -> None:
        """Close this end."""
        self._socket.close()
