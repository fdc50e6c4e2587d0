"""Whose code a file is: a user's, or that of torch and oomprobe."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path


def is_library(path: Path) -> bool:
    """Whether a file is torch's or oomprobe's own. The demo's steps are written as a user's would be, and count as one's.

    Example:
        >>> is_library(Path(__file__)), is_library(Path("/home/me/train.py"))
        (True, False)
    """
    torch = sys.modules.get("torch")  # not imported here: the modules that ask this are pure
    return path.name != "demo.py" and any(
        is_within(path, folder) for folder in _folders(getattr(torch, "__file__", ""))
    )


@cache
def _folders(torch_file: str) -> tuple[Path, ...]:
    return (Path(__file__).parent, *([Path(torch_file).parent] if torch_file else []))


@cache
def is_within(path: Path, folder: Path) -> bool:
    """Whether a file lies in a folder; asked of the same few files after each failure."""
    return folder in path.parents
