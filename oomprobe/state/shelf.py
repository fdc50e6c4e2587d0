"""Bytes kept where a limit on address space does not count them: in a file in memory that is mapped nowhere.

Beside a limit of the user's own (``ulimit -v``) a copy in this process would take from what the trials may use, and the
training that comes after the probe has no such copy.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Iterator

import torch

PIECE_BYTES = 2**18  # read at a time


class OnShelf:
    """Bytes on a shelf, from `start` on."""

    def __init__(self, shelf: Shelf, start: int, length: int) -> None:
        self._shelf, self._start, self._length = shelf, start, length

    def __len__(self) -> int:
        return self._length

    def __del__(self) -> None:
        self._shelf.give_back(self._start, self._length)

    def same_as(self, data: torch.Tensor) -> bool:
        return all(torch.equal(part, self._shelf.piece(self._start + at, len(part))) for at, part in _parts(data))

    def write_to(self, data: torch.Tensor) -> None:
        self._shelf.read(self._start, data)

    def whole(self) -> torch.Tensor:
        return self._shelf.read(self._start, torch.empty(self._length, dtype=torch.uint8, device="cpu"))


class Shelf:
    """A file in memory, there for as long as anything lies on it; one for a whole probe, for a process has few descriptors.

    Room for a piece is taken before: the state is compared where a step that a signal ended may still hold all memory.

    Example:
        >>> kept = Shelf().put(torch.arange(3, dtype=torch.uint8))
        >>> kept.same_as(torch.tensor([0, 1, 2], dtype=torch.uint8, device="cpu")), kept.whole().tolist()
        (True, [0, 1, 2])
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8, device="cpu")
        self._owner = os.getpid()
        self._file = os.memfd_create("oomprobe")
        self._end = 0
        self._free: dict[int, list[int]] = {}  # by length, where something lay: each step may make an optimizer anew
        self._let_go = weakref.finalize(self, _close, self._file, self._owner)

    def put(self, data: torch.Tensor) -> OnShelf:
        """Put bytes in host memory on it.

        Raises:
            OSError: they do not go there.
        """
        if os.getpid() != self._owner:
            raise OSError("the file is that of the process this one was forked from, which goes on writing to it")
        free = self._free.get(len(data))
        start = free.pop() if free else self._end
        for at, part in _parts(data):
            self._write(start + at, part)
        self._end = max(self._end, start + len(data))
        return OnShelf(self, start, len(data))

    def give_back(self, start: int, length: int) -> None:
        """What lay there is no longer needed."""
        self._free.setdefault(length, []).append(start)

    def close(self) -> None:
        """Give the memory back now; nothing can be read afterwards."""
        self._let_go()
        self._file = -1  # the number may be another file's next

    def _write(self, start: int, data: torch.Tensor) -> None:
        view = _memory_of(data)
        while view:
            written = os.pwrite(self._file, view, start)
            start, view = start + written, view[written:]

    def piece(self, start: int, length: int) -> torch.Tensor:
        """At most `PIECE_BYTES`, until the next is read."""
        return self.read(start, self._buffer[:length])

    def read(self, start: int, into: torch.Tensor) -> torch.Tensor:
        """Fill a tensor of bytes in host memory."""
        view = _memory_of(into)
        while view:
            count = os.preadv(self._file, [view], start)
            if not count:
                raise OSError(f"the copy of the model's state ends at byte {start}, and {len(view)} more were kept")
            start, view = start + count, view[count:]
        return into


def _close(file: int, owner: int) -> None:
    if os.getpid() == owner:  # a child forked meanwhile, as a data loader's worker, has it open for as long as it lives
        os.ftruncate(file, 0)
    os.close(file)


def _memory_of(data: torch.Tensor) -> memoryview:
    """Its memory, not by way of an array: `Tensor.numpy` leaves the storage unable to change its size."""
    return memoryview((ctypes.c_ubyte * data.numel()).from_address(data.data_ptr())).cast("B")


def _parts(data: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    return ((at, data[at : at + PIECE_BYTES]) for at in range(0, data.numel(), PIECE_BYTES))


def shelf_beside_limits() -> Shelf | None:
    """Where copies of host memory go; None: into this process, where nothing of the user's own limits it."""
    return None


def with_room(shelf: Shelf | None, needed_bytes: int, free_bytes: int | None) -> Shelf | None:
    """The shelf, where the machine has room for all that the limits leave and the copy too.

    Otherwise the copy must count against the limits: or a trial that uses all they leave brings the system's OOM killer.
    """
    return shelf
