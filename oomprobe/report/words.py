"""Words and lines: plain ASCII in at most 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

WIDTH = 100  # columns: what job logs and code review show without wrapping


def bullets(heading: str, items: Iterable[str]) -> list[str]:
    """A heading and its items; nothing where there are none."""
    lines = [line for item in items for line in wrap(item, first="  - ", rest="    ")]
    return [heading, *lines] if lines else []


def wrap(sentence: str, *, first: str = "", rest: str = "") -> list[str]:
    """Lines of a sentence, the first with one indent and the others with another."""
    return textwrap.wrap(clean(sentence), WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)


def clip(line: str, width: int) -> str:
    """A line of at most so many columns, its end left out where it is longer."""
    return line if len(line) <= width else line[: max(0, width - 3)].rstrip() + "..."


def clean(foreign: str) -> str:
    """One line of printable ASCII: the user's texts may hold line ends, escape codes or any alphabet."""
    line = " ".join(foreign.split())
    return "".join(c if " " <= c <= "~" else c.encode("unicode_escape").decode("ascii") for c in line)


def shortened(error: str | None) -> str:
    """Two sentences of an error's first line: torch's text says there what was asked for, the others are advice."""
    first_line = (error or "").strip().partition("\n")[0]
    return ". ".join(first_line.split(". ")[:2])


def rate(samples_per_s: float) -> str:
    """Whole from 100 on; otherwise three digits."""
    return f"{samples_per_s:.0f}" if 100 <= samples_per_s < 1e9 else f"{samples_per_s:.3g}"


def count(number: int, one: str, many: str) -> str:
    """A number with its noun."""
    return f"{number} {one if number == 1 else many}"
