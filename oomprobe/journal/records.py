"""A file of records that survives its process: one JSON line each with a checksum, only ever appended to.

A line is on the disk before `append` returns. What a crash, a full disk or a copy that ended early left of a line is
recognised by its checksum, and the next line does not begin on it.
"""

from __future__ import annotations

import errno
import json
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import tenacity

MAGIC = b'{"oomprobe_journal":'  # how the first record begins
Record = Mapping[str, Any]
ATTEMPTS = 3
# A network file system or a signal: it may pass. EIO and ESTALE are what NFS says while its server is away.
_TRANSIENT = frozenset({errno.EINTR, errno.EAGAIN, errno.ETIMEDOUT, errno.EIO, errno.ESTALE})
_CRC = b',"crc":"'


def pack(record: Record) -> bytes:
    r"""The line of a record.

    Example:
        >>> pack({"n": 1})
        b'{"n":1,"crc":"d44b3b7e"}\n'
    """
    body = json.dumps(record, separators=(",", ":"), default=str).encode()
    return body[:-1] + _CRC + b'%08x"}\n' % zlib.crc32(body)


def unpack(line: bytes) -> Record | None:
    """The record of a line; None where the line is torn or garbled.

    Example:
        >>> unpack(b'{"n":1,"crc":"d44b3b7e"}'), unpack(b'{"n":2,"crc":"d44b3b7e"}')
        ({'n': 1}, None)
    """
    body, _, checksum = line.strip().rpartition(_CRC)
    body += b"}"
    if checksum != b'%08x"}' % zlib.crc32(body):
        return None
    try:
        return json.loads(body)  # type: ignore[no-any-return]  # what ends so is an object
    except ValueError:
        return None


def begins_as_ours(line: bytes) -> bool:
    """Whether a line is our first one, or any beginning of it."""
    line = line.rstrip(b"\r\n")
    return line.startswith(MAGIC) or MAGIC.startswith(line)


def whole(lines: Iterable[bytes]) -> tuple[list[Record], int]:
    """Read lines.

    Returns:
        Their records, each number ``n`` once (a line whose sync failed was written again), and how many lines are
        torn or garbled.
    """
    records: dict[Any, Record] = {}
    skipped = 0
    for line in lines:
        record = unpack(line)
        if record is not None and isinstance(record.get("n"), int):
            records.setdefault(record["n"], record)
        elif line.strip():
            skipped += 1
    return list(records.values()), skipped


class Appender:
    """Writes records at the end of an open file.

    Args:
        fd: Open for appending; closed by `close`.
        torn: Whether the file ends within a line.
        sleep: Waits before what may pass is tried again.
    """

    def __init__(self, fd: int, *, torn: bool, sleep: Callable[[float], None]) -> None:
        self._fd, self._torn, self._sleep = fd, torn, sleep

    @property
    def size_bytes(self) -> int:
        """Of the file now."""
        return os.fstat(self._fd).st_size

    def append(self, record: Record) -> str | None:
        """Write a record and see it on the disk.

        Returns:
            None; or in words, why it could not be written.
        """
        line = pack(record)
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_result(_TRANSIENT.__contains__),
            stop=tenacity.stop_after_attempt(ATTEMPTS),
            wait=tenacity.wait_exponential(multiplier=0.1),
            retry_error_callback=lambda state: state.outcome.result() if state.outcome else errno.EIO,
            sleep=self._sleep,
        )
        error_number = retrying(lambda: self._attempt(line))
        return os.strerror(error_number) if error_number else None

    def _attempt(self, line: bytes) -> int:
        """After a failed sync the page may be dropped, and a second sync succeed for nothing: all is done anew."""
        try:
            self._write(line)
            os.fsync(self._fd)
        except OSError as error:
            return error.errno or errno.EIO
        return 0

    def _write(self, line: bytes) -> None:
        rest = b"\n" + line if self._torn else line
        self._torn = True  # also where a signal raises within
        while rest:
            rest = rest[os.write(self._fd, rest) :]
        self._torn = False

    def cut(self, size_bytes: int) -> None:
        """Take back what was written beyond a size; as far as that is possible."""
        with suppress(OSError):
            os.ftruncate(self._fd, size_bytes)
            os.fsync(self._fd)

    def close(self) -> None:
        """Close the file. Never fails."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with suppress(OSError):
                unlock(fd)
            with suppress(OSError):
                os.close(fd)


def lock(fd: int) -> bool:
    """Take the file for this process alone; False where another has it."""
    fcntl = _fcntl()
    try:
        if fcntl is not None:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)  # others: a file system without locks
    return True


def unlock(fd: int) -> None:
    """A worker that was forked meanwhile shares the lock, and would keep it."""
    fcntl = _fcntl()
    if fcntl is not None:
        fcntl.flock(fd, fcntl.LOCK_UN)


def _fcntl() -> Any:
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    return fcntl
