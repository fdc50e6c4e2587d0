"""A failed call as strings: what an exception said and where, without the exception and what it holds alive."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from oomprobe.errors import text_of
from oomprobe.verdicts.classify import Facts, facts_of

MAX_TEXT = 600
_TORCH, _OOMPROBE = Path(torch.__file__).parent, Path(__file__).parents[1]
_OPTIM = _TORCH / "optim"
_BACKWARD_FILES = {_TORCH / "_tensor.py", _TORCH / "autograd" / "__init__.py"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What is kept of an exception."""

    facts: Facts
    text: str  # class and message, shortened
    where: str | None  # the part of the step and the user's line, such as "backward, model.py:142"


def failure_of(error: BaseException) -> Failure:
    """Read an exception."""
    text = f"{type(error).__name__}: {text_of(error)}".strip()
    shortened = text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 4] + " ..."
    return Failure(facts=facts_of(error), text=shortened, where=_where(error))


def clear_frames(error: BaseException) -> None:
    """Let go of what the failed step's frames hold, in an exception that goes on to the user: tensors on the device."""
    chain: list[BaseException | None] = [error]
    seen: set[int] = set()
    while chain:
        link = chain.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            traceback.clear_frames(link.__traceback__)
            chain += [link.__cause__, link.__context__]


def _where(error: BaseException) -> str | None:
    frames = [
        (_path(frame.f_code.co_filename), frame.f_code.co_name, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    of_user = [(path.name, line) for path, _, line in frames if not is_library(path)]
    if not of_user:
        return None
    part = "forward"
    for path, function, _ in frames:
        if _OPTIM in path.parents:
            part = "optimizer"
        elif function == "backward" and path in _BACKWARD_FILES:
            part = "backward"
    name, line = of_user[-1]
    return f"{part}, {name}:{line}"


_path = cache(Path)  # failures pass through the same few files


@cache
def is_library(path: Path) -> bool:
    """Whether a file is torch's or oomprobe's own. The demo's steps are written as a user's would be, and count as one's.

    Example:
        >>> is_library(Path(__file__)), is_library(Path("/home/me/train.py"))
        (True, False)
    """
    return path.name != "demo.py" and any(folder in path.parents for folder in (_OOMPROBE, _TORCH))
