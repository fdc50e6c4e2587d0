"""malloc's heap, where the C library is one that can be asked about it: what it has handed out, and its holes."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable
from functools import cache


class _Mallinfo2(ctypes.Structure):  # mallinfo(3), glibc 2.33
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


@cache  # asked a few times in each trial
def _library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(None)
    except OSError:
        return None


@cache
def _mallinfo2() -> Callable[[], _Mallinfo2] | None:
    mallinfo2 = getattr(_library(), "mallinfo2", None)
    if mallinfo2 is not None:
        mallinfo2.restype = _Mallinfo2
    return mallinfo2


def malloced_bytes() -> int | None:
    """Bytes that malloc has handed out and not got back; None where the C library cannot say."""
    ask = _mallinfo2()
    return None if ask is None else int((info := ask()).uordblks + info.hblkhd)


def free_in_heap_bytes() -> int:
    """Bytes in the holes of malloc's heap; 0 where the C library cannot say."""
    ask = _mallinfo2()
    return 0 if ask is None else int(ask().fordblks)


def trim_heap() -> None:
    """Give the free top and free pages of the heap back to the system, where the C library can."""
    trim = getattr(_library(), "malloc_trim", None)
    if trim is not None:
        trim(0)


SMALLEST_HOLE_BYTES = 2**14
ARENA_BYTES = 2**26  # what an arena other than the first reserves (glibc, arena.c: HEAP_MAX_SIZE)


@cache
def _malloc_and_free() -> tuple[Callable[[int], int | None], Callable[[int], None]]:
    library = ctypes.CDLL(None)  # not the one above: what is said of arguments here holds for this one only
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.restype, library.free.argtypes = None, [ctypes.c_void_p]
    return library.malloc, library.free


class Plugs:
    """Fills the holes that earlier trials left in malloc's heap, so that a trial cannot be served from them.

    A fresh process has no such holes, and a limit on address space does not count them. Nothing is written to the
    plugs, so they cost no memory. Only sensible while the address space cannot grow: otherwise malloc makes room.
    Room to note them all is taken first: once the holes are full, not even a list could grow.
    """

    def __init__(self) -> None:
        self._malloc, self._free = _malloc_and_free()
        self._largest_bytes = 1 << max(ARENA_BYTES, free_in_heap_bytes()).bit_length()  # no hole is larger
        self._plugs = array("Q", [0]) * (self._largest_bytes // SMALLEST_HOLE_BYTES)
        self._count = 0

    def fill(self) -> None:
        """Take what this thread's mallocs could be served from.

        A malloc looks into the thread's own arena, and where that has nothing into one other (glibc, arena.c:
        arena_get_retry), always the same: what it refuses once it refuses again. An arena reserves memory ahead, which
        no limit counts a second time; the other arenas are other threads', and not reached from here.
        """
        size = self._largest_bytes
        while size >= SMALLEST_HOLE_BYTES:
            while self._count < len(self._plugs) and (plug := self._malloc(size)):
                self._plugs[self._count] = plug
                self._count += 1
            size //= 2

    def drain(self) -> None:
        """Free them, and the room to note them: plugs are of one trial."""
        while self._count:
            self._count -= 1
            self._free(self._plugs[self._count])
        self._plugs = array("Q")
