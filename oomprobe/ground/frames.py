"""What can be said of an exception without touching a device.

The user's line in a stack or traceback, the innermost that belongs neither to Python nor to torch nor to oomprobe; and tensors by
their shapes.
"""

from __future__ import annotations

import sys
import sysconfig
import traceback
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

TORCH, OOMPROBE = Path(torch.__file__).parent, Path(__file__).parents[1]
_PASSES_ON = (
    "oomprobe.simulation", "oomprobe.devices", "oomprobe.integrations", "oomprobe.demo", "oomprobe.runners.local",
)  # fmt: skip
_STANDARD = Path(sysconfig.get_paths()["stdlib"])


@cache
def is_library(path: Path) -> bool:
    """Return whether a file belongs to torch or oomprobe. The demo counts as a user's file, because it contains steps.

    Examples:
        >>> is_library(Path(__file__)), is_library(Path("/home/me/train.py"))
        (True, False)
    """
    return path.name != "demo.py" and not {OOMPROBE, TORCH}.isdisjoint(path.parents)


def user_line() -> str:
    """Return file and line of the innermost running frame of the user's code, such as ``"train.py:42"``."""
    return _innermost(traceback.walk_stack(sys._getframe())) or "an unknown line"


def is_in_users_code() -> bool:
    """Return whether the innermost caller outside oomprobe is the user's code or another library, not torch."""
    for frame, _ in traceback.walk_stack(sys._getframe()):
        path = Path(frame.f_code.co_filename)
        if not _says_nothing(path):
            return TORCH not in path.parents
    return False


def raised_at(error: BaseException) -> str | None:
    """Return file and line of the innermost frame of the user's code in a traceback."""
    return _innermost(reversed(list(traceback.walk_tb(error.__traceback__))))


def hide_frames(error: BaseException | None) -> None:
    """Take oomprobe's frames out of the tracebacks of a user's exception and its causes, and what a simulated card does below the user's line."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        shown = _shown(error.__traceback__)
        if shown:
            for link, following in zip(shown, [*shown[1:], None], strict=True):
                link.tb_next = following
            error.__traceback__ = shown[0]
        error = error.__cause__ or error.__context__


def _shown(link: TracebackType | None) -> list[TracebackType]:
    """Return what a traceback shows a user: no frames of oomprobe, and no more once they follow the user's last line."""
    links, end = list[TracebackType](), 0
    is_users = False  # and what it calls
    while link is not None:
        path = Path(link.tb_frame.f_code.co_filename)
        if _says_nothing(path):
            is_users = False
        else:
            links.append(link)
            if not is_library(path):
                is_users = True
            if is_users:
                end = len(links)
        link = link.tb_next
    return links[:end]


def _says_nothing(path: Path) -> bool:
    """Return whether a frame is oomprobe's, or belongs to an import."""
    if path.name.startswith("<frozen importlib"):
        return True
    return is_library(path) and TORCH not in path.parents


def is_own_fault(error: BaseException) -> bool:
    """Return whether an error comes from oomprobe's own code rather than from what that code called.

    Torch's errors pass through the simulation, a device's through `devices`, a framework's through the adapters, and errors of
    a step written in C through the call of it.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not frames:
        return False
    name: str = frames[-1].f_globals.get("__name__", "")
    return name.startswith("oomprobe.") and not name.startswith(_PASSES_ON)


def _innermost(frames: Iterable[tuple[FrameType, int]]) -> str | None:
    for frame, line in frames:
        path = Path(frame.f_code.co_filename)
        if path.name.startswith("<"):  # "<string>" is code without a file
            continue
        if not is_library(path) and not _is_standard(path):
            return f"{path.name}:{line}"
    return None


def _is_standard(path: Path) -> bool:
    """Return whether a file belongs to Python's standard library, such as ``copy.py``."""
    return _STANDARD in path.parents and "site-packages" not in path.parts


def interrupts_library(frame: FrameType | None) -> bool:
    """Return whether a signal that arrived at this frame interrupted torch or oomprobe rather than the user's code.

    There an exception may leave work half-done, end the process in C++ that does not expect one, or be lost in the
    callback of a weak reference.
    """
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.name == "weakref.py" or is_library(path):
            return True
        if not _is_standard(path):
            return False
        frame = frame.f_back
    return False


class TensorsByShape(TorchFunctionMode):
    """Let texts made inside give a tensor's shape, dtype and device: reading its values waits for the device and takes memory there.

    Examples:
        >>> with TensorsByShape():
        ...     str(KeyError(torch.zeros(3, 4)))
        'a tensor of shape (3, 4), torch.float32, on cpu'
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.Tensor.__repr__, torch.Tensor.__format__):
            return func(*args, **(kwargs or {}))
        return f"a tensor of shape {tuple(args[0].shape)}, {args[0].dtype}, on {args[0].device}"
