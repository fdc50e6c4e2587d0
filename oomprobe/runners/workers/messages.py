"""Messages between the processes of a probe: JSON, because unpickling could import the target.

A failure in a child is sent to its parent as a message, and raised there as the original error.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from oomprobe import errors
from oomprobe.records.trials import RunnerInfo
from oomprobe.verdicts.failure import failure_of

LONGEST_TEXT = 16_000
Message = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first message of a process that is ready to run trials."""

    facts: RunnerInfo
    resident_bytes: int  # with the model loaded
    trials_in_children: bool  # whether that process forks a child for each trial, as on host memory
    available_bytes: int | None  # None: it changes between trials
    outside_bytes: int | None = None  # in use on the device, but not by the process's allocator


def send(wire: Connection, message: Message) -> None:
    """Send a message; raise OSError if the other end is closed."""
    wire.send_bytes(json.dumps(message, default=str).encode())


def receive(wire: Connection) -> Message | None:
    """Wait for a message; return None if the other end is closed."""
    try:
        message: Message = json.loads(wire.recv_bytes())
    except (EOFError, ConnectionError):
        return None
    return message


def failure_message(error: BaseException, *, building: str | None) -> Message:
    """Turn an exception into a message; `building` names the target if it was raised while building it."""
    cause = error.__cause__ if isinstance(error, errors.StepFailedError) and error.__cause__ is not None else error
    text = failure_of(cause).text
    is_plain = all(isinstance(argument, str | int | float | None) for argument in cause.args)
    return {
        "failed": {
            "kind": type(error).__name__ if isinstance(error, errors.OomProbeError) else None,
            "exited": isinstance(error, SystemExit),
            "text": errors.text_of(error)[:LONGEST_TEXT],
            "building": building,
            "cause": {
                "module": type(cause).__module__,
                "name": type(cause).__qualname__,
                "text": text,
                "arguments": cause.args if is_plain else [text],
                "traceback": errors.traceback_of(cause)[-LONGEST_TEXT:],
            },
        }
    }


def raise_failure(failed: dict[str, Any], batch_size: int) -> NoReturn:
    """Raise the error that a child reported at this size; oomprobe's errors keep their class."""
    cause = _rebuild(failed["cause"])
    if failed["kind"] == "StepFailedError":
        raise errors.StepFailedError(failed["text"], batch_size=batch_size) from cause
    if failed["kind"] is not None:
        raise getattr(errors, failed["kind"], errors.OomProbeError)(failed["text"]) from cause
    if failed["exited"]:
        where = f"the target {failed['building']}" if failed["building"] else f"the step at batch size {batch_size}"
        raise errors.StepFailedError(
            f"{where} left the process, sys.exit({failed['text']}), without an answer. Remove that call",
            batch_size=batch_size,
        ) from cause
    if failed["building"] is not None:
        raise errors.target_failed(cause, failed["building"]) from cause
    raise cause


def _rebuild(cause: dict[str, Any]) -> BaseException:
    """Rebuild the child's exception, with its own class if that is already imported here."""
    kind = getattr(sys.modules.get(cause["module"]), cause["name"], None)
    error: BaseException = RuntimeError(cause["text"])
    if isinstance(kind, type) and issubclass(kind, BaseException):
        with suppress(Exception):  # its constructor may take other arguments
            error = kind(*cause["arguments"])
    error.add_note(f"in the trial's process:\n{cause['traceback']}")
    return error
