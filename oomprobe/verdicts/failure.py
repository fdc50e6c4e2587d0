"""Text and location of an exception, without references that keep its frames alive."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from pathlib import Path

from oomprobe.errors import text_of
from oomprobe.ground.frames import TORCH, raised_at
from oomprobe.verdicts.classify import ErrorFacts, facts_of_error

MAX_TEXT = 600
_OPTIM = TORCH / "optim"
_BACKWARD_FILES = {TORCH / "_tensor.py", TORCH / "autograd" / "__init__.py"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Text, location and facts of an exception."""

    facts: ErrorFacts
    text: str  # class and message, shortened
    where: str | None  # part of the step and the user's line, such as "backward, model.py:142"


def failure_of(error: BaseException) -> Failure:
    """Return the text, location and facts of an exception."""
    text = f"{type(error).__name__}: {text_of(error)}".strip()
    if len(text) > MAX_TEXT:
        text = text[: MAX_TEXT - 4] + " ..."
    return Failure(facts=facts_of_error(error), text=text, where=_place_of(error))


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


def _place_of(error: BaseException) -> str | None:
    line = raised_at(error)
    if line is None:
        return None
    part = "forward"
    for frame, _ in traceback.walk_tb(error.__traceback__):
        path = Path(frame.f_code.co_filename)
        if _OPTIM in path.parents:
            part = "optimizer"
        elif frame.f_code.co_name == "backward" and path in _BACKWARD_FILES:
            part = "backward"
    return f"{part}, {line}"
