"""Text and location of an exception, without references that keep its frames alive."""

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
    """Text, location and facts of an exception."""

    facts: Facts
    text: str  # class and message, shortened
    where: str | None  # part of the step and the user's line, such as "backward, model.py:142"


def failure_of(error: BaseException) -> Failure:
    """Return the text, location and facts of an exception."""
    text = f"{type(error).__name__}: {text_of(error)}".strip()
    shortened = text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 4] + " ..."
    return Failure(facts=facts_of(error), text=shortened, where=_where(error))


def clear_frames(error: BaseException) -> None:
    """Free the device tensors that the failed step's frames hold, before the exception is raised to the user."""
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
        (Path(frame.f_code.co_filename), frame.f_code.co_name, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    user_lines = [(path.name, line) for path, _, line in frames if not is_library(path)]
    if not user_lines:
        return None
    part = "forward"
    for path, function, _ in frames:
        if _OPTIM in path.parents:
            part = "optimizer"
        elif function == "backward" and path in _BACKWARD_FILES:
            part = "backward"
    name, line = user_lines[-1]
    return f"{part}, {name}:{line}"


@cache
def is_library(path: Path) -> bool:
    """Return whether a file belongs to torch or oomprobe. The demo counts as a user's file, because it contains steps.

    Example:
        >>> is_library(Path(__file__)), is_library(Path("/home/me/train.py"))
        (True, False)
    """
    return path.name != "demo.py" and any(folder in path.parents for folder in (_OOMPROBE, _TORCH))
