"""Files of results: written whole or not at all, and read only as far as they can be one."""

from __future__ import annotations

import json
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from oomprobe.errors import InvalidArgumentError
from oomprobe.ground.units import format_bytes

MOST_JSON_BYTES = 2**26  # a thousand times the largest result seen
# Names of what this process has open: what else is written there follows in the same file.
_DESCRIPTORS = ("/dev/std", "/dev/fd/", "/proc/")


def write_file(path: str | Path | None, data: bytes) -> None:
    """Replace a file by one with these bytes, or leave it as it was, also if interrupted.

    A link stays a link, a file keeps its mode and owner, a device or a FIFO is written as it is.
    Without a path nothing is written.

    Raises:
        InvalidArgumentError: it cannot be written.
    """
    if path is None:
        return
    try:
        if _is_replaceable(path):
            _replace(Path(os.path.realpath(path)), data)
        else:
            Path(path).write_bytes(data)
    except OSError as error:
        # Only the error's reason, because it may name the part, which is gone.
        raise InvalidArgumentError(
            f"{path} cannot be written: {error.strerror or error}; a file that was there is "
            f"unchanged. The new one, of {format_bytes(len(data))}, is made beside it first: free "
            "as much space, or name a file in a folder that may be written to"
        ) from None


def is_writable(path: Path) -> bool:
    """Return whether a file may be written, as far as modes tell."""
    if path.is_dir() or (path.exists() and not os.access(path, os.W_OK)):
        return False
    return not _is_replaceable(path) or os.access(os.path.dirname(os.path.realpath(path)), os.W_OK)


def _is_replaceable(path: str | Path) -> bool:
    """Return whether there is a file at a path, or nothing yet."""
    if os.path.abspath(path).startswith(_DESCRIPTORS):
        return False
    return not os.path.exists(path) or os.path.isfile(path)


def _replace(target: Path, data: bytes) -> None:
    part = target.with_name(f".oomprobe-{secrets.token_hex(8)}")
    replaced = None
    with suppress(FileNotFoundError), open(target, "r+b") as file:  # a file that is read-only stays
        replaced = os.fstat(file.fileno())
    try:
        with open(part, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if replaced is not None:
            with suppress(OSError):  # only root may give files away
                os.chown(part, replaced.st_uid, replaced.st_gid)
            os.chmod(part, stat.S_IMODE(replaced.st_mode))
        os.replace(part, target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def read_file(path: str | Path, most_bytes: int, advice: str) -> bytes:
    """Return what a file or a pipe holds, or refuse what is larger; `advice` says what to do then.

    Raises:
        OSError: it cannot be read.
        InvalidArgumentError: it is larger, or a device, which may never end.
    """
    # A FIFO that nobody writes to is empty then; opening would wait for ever. Windows has no flag.
    no_waiting = getattr(os, "O_NONBLOCK", 0)
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | no_waiting)) as file:
        status, data = os.fstat(file.fileno()), b""
        if stat.S_ISFIFO(status.st_mode):
            os.set_blocking(file.fileno(), True)
        elif not stat.S_ISREG(status.st_mode):
            raise InvalidArgumentError("it is a device, which may never end: name a file")
        if status.st_size <= most_bytes:
            data = file.read(most_bytes + 1)  # it may grow meanwhile, and a pipe has no size
    if max(status.st_size, len(data)) > most_bytes:
        raise InvalidArgumentError(f"it is larger than {format_bytes(most_bytes)}: {advice}")
    return data


NO_RESULT = (
    "{path} cannot be read as a result: {error}. A result is what --json or to_json wrote; a log "
    "is for oomprobe explain"
)


def read_json(path: str | Path) -> Any:
    """Return what is in a JSON file.

    Raises:
        InvalidArgumentError: it cannot be read, is too large, or is no JSON.
    """
    try:
        return json.loads(read_file(path, MOST_JSON_BYTES, "no result is, so name another file"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(NO_RESULT.format(path=path, error=error)) from None
