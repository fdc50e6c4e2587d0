"""The one thing on the host that an exhausted memory poisons: oneDNN's code generator.

When Xbyak, inside oneDNN, gets no memory for code, it sets an error for the thread that nothing clears: every later
primitive of a new shape fails with "could not create a primitive", at any size, with all the memory free again
(oneDNN pull request 5907, merged August 2026; seen with torch 2.13). A search would take each of those failures for a
limit, and the user's process would stay broken. So the error is looked for after each failure, and cleared.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
from pathlib import Path

import numpy as np
import torch

# Xbyak::local::GetErrorRef()::err, a thread-local int; ERR_NONE is 0 and the enumeration ends below 64 (xbyak.h)
ERROR_SYMBOL = b"_ZZN5Xbyak5local11GetErrorRefEvE3err"
LARGEST_ERROR = 64
TLS_SYMBOL_TYPE = 6  # STT_TLS (elf.h)

_widths = itertools.count(8)


def makes_primitives() -> bool:
    """Whether oneDNN can make a primitive of a shape it has not seen; True where torch has no oneDNN."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return True
    width = next(_widths) % 1024 + 8
    with torch.no_grad():
        image, weight = torch.ones(2, 1, 3, width), torch.ones(1, 1, 3, 3)
        try:
            made = torch.mkldnn_convolution(image, weight, None, [0, 0], [1, 1], [1, 1], 1)
        except RuntimeError:
            return False
    return float(made[0, 0, 0, 0]) == 9.0


def clear_error() -> bool:
    """Clear this thread's error; False where it cannot be found, and then nothing was touched."""
    library = _library()
    offset = None if library is None else _offset_of_error(library)
    if library is None or offset is None:
        return False
    block = _thread_local_block(library)
    if block is None:
        return False
    error = ctypes.c_int.from_address(block + offset)
    if not 0 < error.value < LARGEST_ERROR:
        return False
    error.value = 0
    return True


def _library() -> Path | None:
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    return path if path.is_file() else None


def _offset_of_error(library: Path) -> int | None:
    """Where in the library's thread-local block the error lies, from its symbol table (64-bit ELF)."""
    section = np.dtype([("name", "<u4"), ("type", "<u4"), ("flags", "<u8"), ("address", "<u8"), ("offset", "<u8"),
                        ("size", "<u8"), ("link", "<u4"), ("info", "<u4"), ("align", "<u8"), ("entry", "<u8")])  # fmt: skip
    symbol = np.dtype([("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"),
                       ("size", "<u8")])  # fmt: skip
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as image:
        if image[:6] != b"\x7fELF\x02\x01":  # 64 bits, little-endian
            return None
        start = int.from_bytes(image[40:48], "little")
        count = int.from_bytes(image[60:62], "little")
        sections = np.frombuffer(image[start : start + count * section.itemsize], section)
        for table in sections[sections["type"] == 2]:  # SHT_SYMTAB
            strings = sections[table["link"]]
            first = int(strings["offset"])
            found = image.find(b"\0" + ERROR_SYMBOL + b"\0", first, first + int(strings["size"]))
            if found < 0:
                continue
            begin = int(table["offset"])
            symbols = np.frombuffer(image[begin : begin + int(table["size"])], symbol)
            match = symbols[(symbols["name"] == found + 1 - first) & (symbols["info"] & 15 == TLS_SYMBOL_TYPE)]
            if len(match) == 1 and match["size"][0] == ctypes.sizeof(ctypes.c_int):
                return int(match["value"][0])
    return None


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
    except (AttributeError, OSError):
        return None
    return found[0] if len(found) == 1 else None
