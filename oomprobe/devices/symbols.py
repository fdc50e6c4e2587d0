"""A thread-local variable of a loaded library, found by its name in the library's symbol table (64-bit ELF, elf(5)).

Read a piece at a time: this is asked when memory has just run out, and a library of torch is 400 MiB of address space.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

SYMBOL_TABLE, THREAD_LOCAL = 2, 6  # SHT_SYMTAB, STT_TLS
PIECE_BYTES = 2**20

_SECTION = np.dtype([("name", "<u4"), ("type", "<u4"), ("flags", "<u8"), ("address", "<u8"), ("offset", "<u8"),
                     ("size", "<u8"), ("link", "<u4"), ("info", "<u4"), ("align", "<u8"), ("entry", "<u8")])  # fmt: skip
_SYMBOL = np.dtype([("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"),
                    ("size", "<u8")])  # fmt: skip


def thread_local_int(library: Path, symbol: bytes) -> ctypes.c_int | None:
    """This thread's copy of a variable; None where it cannot be found, and before the thread has one.

    Raises:
        OSError, MemoryError: out of files or of memory now; another time it may be found.
    """
    try:
        offset = _offset(library, symbol)
    except (FileNotFoundError, PermissionError):
        return None
    block = None if offset is None else _block_of(library)
    return None if block is None or offset is None else ctypes.c_int.from_address(block + offset)


def _block_of(library: Path) -> int | None:
    if _known.blocks.get(library) is None:  # or not there when it was looked for: it is made when it is first used
        _known.blocks[library] = _thread_local_block(library)
    return _known.blocks[library]


class _Known(threading.local):
    """Where this thread's copies are: once made they stay there, and to find one takes a look at every library loaded."""

    def __init__(self) -> None:
        self.blocks: dict[Path, int | None] = {}


_known = _Known()


@cache
def _offset(library: Path, symbol: bytes) -> int | None:
    """Where in the library's thread-local block the variable lies."""
    with library.open("rb") as file:
        try:
            return _offset_in(file, symbol)
        except (ValueError, IndexError, OverflowError):  # not such a file, or cut off
            return None


def _offset_in(file: BinaryIO, symbol: bytes) -> int | None:
    header = file.read(64)
    if header[:6] != b"\x7fELF\x02\x01":  # 64 bits, little-endian
        return None
    start, count = int.from_bytes(header[40:48], "little"), int.from_bytes(header[60:62], "little")
    sections = np.frombuffer(_read(file, start, count * _SECTION.itemsize), _SECTION)
    for table in sections[sections["type"] == SYMBOL_TABLE]:
        name = _find(file, sections[table["link"]], b"\0" + symbol + b"\0")
        found = [] if name is None else list(_named(file, table, name + 1))
        if len(found) == 1 and found[0]["size"] == ctypes.sizeof(ctypes.c_int):
            return int(found[0]["value"])
    return None


def _find(file: BinaryIO, strings: Any, text: bytes) -> int | None:
    """Where a text begins in a section of strings."""
    for at, piece in _pieces(file, strings, overlap=len(text)):
        found = piece.find(text)
        if found >= 0:
            return at + found
    return None


def _named(file: BinaryIO, table: Any, name: int) -> Iterator[Any]:
    """The thread-local symbols of a table with a name."""
    for _, piece in _pieces(file, table, overlap=0):
        symbols = np.frombuffer(piece, _SYMBOL)
        yield from symbols[(symbols["name"] == name) & (symbols["info"] & 15 == THREAD_LOCAL)]


def _pieces(file: BinaryIO, section: Any, *, overlap: int) -> Iterator[tuple[int, bytes]]:
    size, step = int(section["size"]), PIECE_BYTES // _SYMBOL.itemsize * _SYMBOL.itemsize
    for at in range(0, size, step):
        yield at, _read(file, int(section["offset"]) + at, min(step + overlap, size - at))


def _read(file: BinaryIO, start: int, size: int) -> bytes:
    file.seek(start)
    return file.read(size)


class _LoadedObject(ctypes.Structure):  # struct dl_phdr_info (dl_iterate_phdr(3))
    _fields_ = [
        ("address", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("headers", ctypes.c_void_p),
        ("header_count", ctypes.c_uint16),
        ("adds", ctypes.c_ulonglong),
        ("subs", ctypes.c_ulonglong),
        ("tls_module", ctypes.c_size_t),
        ("tls_data", ctypes.c_void_p),
    ]


def _thread_local_block(library: Path) -> int | None:
    """Address of this thread's copy of the library's thread-local variables."""
    found: list[int] = []

    def look(loaded: ctypes._Pointer[_LoadedObject], size: int, data: object) -> int:
        if (loaded.contents.name or b"").endswith(b"/" + library.name.encode()) and loaded.contents.tls_data:
            found.append(int(loaded.contents.tls_data))
        return 0

    callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_LoadedObject), ctypes.c_size_t, ctypes.c_void_p)
    try:
        ctypes.CDLL(None).dl_iterate_phdr(callback(look), None)
    except AttributeError:
        return None
    return found[0] if len(found) == 1 else None
