"""Messages between the processes of a probe: JSON, because unpickling could import the target.

A failure in a child is sent to its parent as a message, and raised there as the original error.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from oomprobe import errors
from oomprobe.ground.frames import hide_frames
from oomprobe.records.options import Options
from oomprobe.records.plain import from_plain
from oomprobe.records.trials import Call, CallRecord, Measured, Outcome, Request, RunnerInfo
from oomprobe.verdicts.failure import failure_of

LONGEST_TEXT = 16_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The first message to a worker: what to build."""

    target: str
    device: str  # pickled, as hexadecimal digits
    axis: str  # likewise
    options: Options
    ranks: int | None = None  # of the process group that the target makes; None: it is no rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """The wish for a sample of the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The first message of a process that is ready to run trials."""

    facts: RunnerInfo
    resident_bytes: int  # with the model loaded
    trials_in_children: bool  # whether that process forks a child for each trial, as on host memory
    available_bytes: int | None  # None: it changes between trials
    outside_bytes: int | None = None  # in use on the device, but not by the process's allocator


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What the calls showed that a rank has made since it last asked, to ask how the trial goes on."""

    records: tuple[CallRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Further:
    """The calls with which the trial goes on, on every rank; none: it ends."""

    calls: tuple[Call, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """The device was lost between trials."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """An exception that a process raised, with its cause."""

    kind: str | None  # the class, if it is one of oomprobe's
    exited: bool
    text: str
    building: str | None  # the target, if it was raised while that was built
    module: str  # of the cause
    name: str
    cause: str
    arguments: tuple[Any, ...]
    traceback: str

    @property
    def cause_text(self) -> str:
        """The cause as Python prints it, in one line."""
        return f"{self.name}: {self.cause}".partition("\n")[0]


Message = Task | Measure | Request | Ready | Shown | Further | Lost | Failed | Measured | Outcome
_KINDS: dict[str, type[Message]] = {
    kind.__name__: kind
    for kind in (Task, Measure, Request, Ready, Shown, Further, Lost, Failed, Measured, Outcome)
}


def send(wire: Connection, message: Message) -> None:
    """Send a message; raise OSError if the other end is closed."""
    wire.send_bytes(json.dumps([type(message).__name__, asdict(message)], default=str).encode())


def receive(wire: Connection) -> Message | None:
    """Wait for a message; return None if the other end is closed."""
    with suppress(EOFError, ConnectionError):
        kind, data = json.loads(wire.recv_bytes())
        return from_plain(_KINDS[kind], data)
    return None


def failed(error: BaseException, *, building: str | None = None) -> Failed:
    """Turn an exception into a message; `building` names the target if it was raised while building it."""
    cause = error
    if isinstance(error, errors.StepFailedError) and error.__cause__ is not None:
        cause = error.__cause__
    text = failure_of(cause).text
    if building is not None:
        hide_frames(cause)
    is_plain = all(isinstance(argument, str | int | float | None) for argument in cause.args)
    return Failed(
        kind=type(error).__name__ if isinstance(error, errors.OomProbeError) else None,
        exited=isinstance(error, SystemExit),
        text=errors.text_of(error)[:LONGEST_TEXT],
        building=building,
        module=type(cause).__module__,
        name=type(cause).__qualname__,
        cause=text,
        arguments=cause.args if is_plain else (text,),
        traceback=errors.traceback_of(cause)[-LONGEST_TEXT:],
    )


def raise_failure(failed: Failed, batch_size: int) -> NoReturn:
    """Raise the error that a child reported at this size; oomprobe's errors keep their class."""
    cause = _rebuild(failed)
    if failed.kind == "StepFailedError":
        raise errors.StepFailedError(failed.text, batch_size=batch_size) from cause
    if failed.kind is not None:
        raise getattr(errors, failed.kind, errors.OomProbeError)(failed.text) from cause
    if failed.exited:
        where = f"the step at batch size {batch_size}"
        if failed.building is not None:
            where = f"the target {failed.building}"
        raise errors.StepFailedError(
            f"{where} left the process, sys.exit({failed.text}), without an answer. Remove that call",
            batch_size=batch_size,
        ) from cause
    if failed.building is not None:
        raise errors.target_failed(cause, failed.building) from cause
    raise cause


def _rebuild(failed: Failed) -> BaseException:
    """Rebuild the child's exception, with its own class if that is already imported here."""
    kind = getattr(sys.modules.get(failed.module), failed.name, None)
    error: BaseException = RuntimeError(failed.cause)
    if isinstance(kind, type) and issubclass(kind, BaseException):
        with suppress(Exception):  # its constructor may take other arguments
            error = kind(*failed.arguments)
    error.add_note(errors.IN_CHILD + failed.traceback)
    return error
