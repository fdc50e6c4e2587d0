"""Opening a journal's file: only a plain file, only one that is ours or empty, and only for one probe at a time."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

from oomprobe.errors import InvalidArgumentError
from oomprobe.journal.records import MAGIC, Appender, Record, begins_as_ours, lock, unpack, whole

_ANOTHER = "delete it, or name another file"


def open_records(name: str, *, sleep: Callable[[float], None]) -> tuple[Appender, list[Record], int]:
    """Open a file of records, or make it.

    Args:
        name: What `checked_path` returned.
        sleep: Waits before a write is tried again.

    Returns:
        What writes to it; its records, the first one first; how many of its lines are torn or garbled.

    Raises:
        InvalidArgumentError: it cannot be written or read, another probe has it, or it is something else.
    """
    fd = _opened(name)
    try:
        if not lock(fd):
            raise InvalidArgumentError(
                f"journal={name!r}: another probe is writing it (or a worker that one left behind). Wait for it, or name "
                "another file"
            )
        records, skipped, torn = _read(fd, name)
    except BaseException:
        os.close(fd)
        raise
    return Appender(fd, torn=torn, sleep=sleep), records, skipped


def checked_path(path: object) -> str:
    """The path of a plain file, or of none yet.

    A FIFO would wait for ever, and a device is no place to come back to.

    Raises:
        InvalidArgumentError: it is something else.
    """
    if not isinstance(path, str | bytes | os.PathLike):
        raise InvalidArgumentError(f"journal must be a path such as 'probe.jsonl', not {type(path).__name__}")
    name = os.fsdecode(path)
    try:
        mode = os.stat(name).st_mode
    except (OSError, ValueError):  # not there; or opening it says what is wrong
        return name
    if stat.S_ISDIR(mode):
        raise InvalidArgumentError(
            f"journal={name!r} is a folder: name a file in it, {str(Path(name, 'probe.jsonl'))!r}"
        )
    if not stat.S_ISREG(mode):
        raise InvalidArgumentError(f"journal={name!r} is no plain file: name one, such as 'probe.jsonl'")
    return name


def _opened(name: str) -> int:
    new = not os.path.exists(name)
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        fd = os.open(name, flags, 0o666)
    except (OSError, ValueError) as error:
        raise _refused(name, error) from None
    if new:
        _sync_folder(name)
    return fd


def _refused(name: str, error: OSError | ValueError) -> InvalidArgumentError:
    folder = Path(name).parent
    if isinstance(error, OSError) and error.errno == errno.ENOENT and not folder.exists():
        return InvalidArgumentError(
            f"journal={name!r}: there is no folder {str(folder)!r}. Make it (mkdir -p {folder}), or name another file"
        )
    reason = error.strerror if isinstance(error, OSError) else error
    return InvalidArgumentError(
        f"journal={name!r} cannot be written ({reason}): name a file in a folder that you may write to"
    )


def _sync_folder(name: str) -> None:
    """The name of a new file is in its folder, which is written on its own. Not every file system can."""
    with suppress(OSError):
        fd = os.open(Path(os.path.realpath(name)).parent, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _read(fd: int, name: str) -> tuple[list[Record], int, bool]:
    """Records, skipped lines, and whether the file ends within a line."""
    try:
        with open(fd, "rb", closefd=False) as stream:
            _refuse_others(stream, name)
            lines = _Lines(stream)
            records, skipped = whole(lines)
    except OSError as error:
        raise InvalidArgumentError(f"journal={name!r} cannot be read ({error.strerror}): {_ANOTHER}") from None
    return records, skipped, not lines.last.endswith(b"\n") and lines.last != b""


class _Lines:
    """The lines of a file; remembers the last."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self.last = stream, b""

    def __iter__(self) -> Iterator[bytes]:
        for line in self._stream:
            self.last = line
            yield line


def _refuse_others(stream: IO[bytes], name: str) -> None:
    """Ours begins with our first record; beginnings of it may stand before, where writing it had failed."""
    if not begins_as_ours(stream.read(len(MAGIC)).split(b"\n")[0]):  # before a large file is read
        raise InvalidArgumentError(
            f"journal={name!r} is not empty and no journal of oomprobe, so it is left as it is: name another file"
        )
    stream.seek(0)
    for line in stream:
        if not begins_as_ours(line):
            raise InvalidArgumentError(
                f"journal={name!r} does not begin with a whole record of a journal, so what it answers is not known: "
                f"{_ANOTHER}"
            )
        if unpack(line) is not None:
            break
    stream.seek(0)
