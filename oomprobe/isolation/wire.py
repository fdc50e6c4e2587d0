"""Messages between the processes of a probe: JSON, which nothing of the target is imported to read."""

from __future__ import annotations

import json
from multiprocessing.connection import Connection
from typing import Any

Message = dict[str, Any]


def send(wire: Connection, message: Message) -> None:
    """Send a message; an OSError where the other end is closed."""
    wire.send_bytes(json.dumps(message, default=str).encode())


def receive(wire: Connection) -> Message | None:
    """Wait for a message; None where the other end is closed."""
    try:
        message: Message = json.loads(wire.recv_bytes())
    except (EOFError, ConnectionError):
        return None
    return message
