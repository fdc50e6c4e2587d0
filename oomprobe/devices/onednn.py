"""The one thing on the host that an exhausted memory poisons: oneDNN's code generator.

When Xbyak, inside oneDNN, gets no memory for code, it sets an error for the thread that nothing clears: every later
primitive of a new shape fails with "could not create a primitive", at any size, with all the memory free again
(oneDNN pull request 5907, merged August 2026; seen with torch 2.13). A search would take each of those failures for a
limit, and the user's process would stay broken. So the error is looked for after each failure, and cleared.
"""

from __future__ import annotations

import ctypes
import itertools
from pathlib import Path

import torch

from oomprobe.devices.symbols import thread_local_int

# Xbyak::local::GetErrorRef()::err, a thread-local int; ERR_NONE is 0 and the enumeration ends below 64 (xbyak.h)
ERROR_SYMBOL = b"_ZZN5Xbyak5local11GetErrorRefEvE3err"
LARGEST_ERROR = 64

_widths = itertools.count(8)


def is_sound() -> bool:
    """Whether oneDNN makes primitives in this thread, if need be once its error is cleared.

    Where the error can be read, it is: a primitive made to see would keep half a MiB of code each time, and without memory
    it can end the process. So none is made where there is no memory to look, or nothing uses oneDNN.
    """
    try:
        cell = _error()
    except (OSError, MemoryError):
        return True
    if cell is None or not 0 <= cell.value < LARGEST_ERROR:  # not what is looked for
        return _unused() or makes_primitives()
    return cell.value == 0 or (clear_error() and (_unused() or makes_primitives()))


def _unused() -> bool:
    """Whether oneDNN is switched off."""
    return not torch.backends.mkldnn.enabled


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
    """Clear this thread's error; False where there is none or it cannot be found, and then nothing was touched."""
    try:
        cell = _error()
    except (OSError, MemoryError):
        return False
    if cell is None or not 0 < cell.value < LARGEST_ERROR:
        return False
    cell.value = 0
    return True


def _error() -> ctypes.c_int | None:
    library = _library()
    return None if library is None else thread_local_int(library, ERROR_SYMBOL)


def _library() -> Path | None:
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    return path if path.is_file() else None
