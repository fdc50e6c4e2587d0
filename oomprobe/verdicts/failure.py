"""A failed call as strings: what an exception said and where, without the exception and what it holds alive."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from oomprobe.verdicts.classify import SIGNALS, Facts, facts_of

MAX_TEXT = 600
_TORCH, _OOMPROBE = Path(torch.__file__).parent, Path(__file__).parents[1]
_OPTIM = _TORCH / "optim"
_BACKWARD_FILES = {_TORCH / "_tensor.py", _TORCH / "autograd" / "__init__.py"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What is kept of an exception.

    Attributes:
        facts: What the verdict is judged from.
        text: Class and message, shortened.
        where: Part of the step and the user's line, such as ``"backward, model.py:142"``.
    """

    facts: Facts
    text: str
    where: str | None


def failure_of(error: BaseException) -> Failure:
    """Read an exception; nothing of it is kept."""
    return Failure(facts=facts_of(error), text=_text(error), where=_where(error))


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


def _text(error: BaseException) -> str:
    try:
        message = str(error)
    except SIGNALS:
        raise
    except BaseException:
        message = "(no text)"
    text = f"{type(error).__name__}: {message}".strip()
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 4] + " ..."


def _where(error: BaseException) -> str | None:
    frames = [
        (Path(frame.f_code.co_filename), frame.f_code.co_name, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    of_user = [(path.name, line) for path, _, line in frames if not is_library(path)]
    if not of_user:
        return None
    name, line = of_user[-1]
    return f"{_part(frames)}, {name}:{line}"


def _part(frames: list[tuple[Path, str, int]]) -> str:
    """Forward, backward or optimizer, by the functions of torch that the failure went through."""
    for path, function, _ in reversed(frames):
        if is_within(path, _OPTIM):
            return "optimizer"
        if function == "backward" and path in _BACKWARD_FILES:
            return "backward"
    return "forward"


def is_library(path: Path) -> bool:
    """Whether a file is torch's or oomprobe's own. The demo's steps are written as a user's would be, and count as one's.

    Example:
        >>> is_library(Path(__file__)), is_library(Path("/home/me/train.py"))
        (True, False)
    """
    return path.name != "demo.py" and any(is_within(path, folder) for folder in (_OOMPROBE, _TORCH))


@cache
def is_within(path: Path, folder: Path) -> bool:
    """Whether a file lies in a folder; asked of the same few files after each failure."""
    return folder in path.parents
