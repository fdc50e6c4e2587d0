"""Text layout: plain ASCII in at most 100 columns."""

from __future__ import annotations

import textwrap

WIDTH = 100  # columns: what job logs and code review show without wrapping


def wrap(sentence: str, *, first: str = "", rest: str = "") -> list[str]:
    """Wrap a sentence; indent the first line by `first` and all others by `rest`."""
    return textwrap.wrap(clean(sentence), WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)


def clip(line: str, width: int) -> str:
    """Shorten a line to `width` columns."""
    return line if len(line) <= width else line[: max(0, width - 3)].rstrip() + "..."


def clean(text: str) -> str:
    """Return one line of printable ASCII: text from outside may contain line breaks, escape codes and any alphabet."""
    line = " ".join(text.split())
    return "".join(c if " " <= c <= "~" else c.encode("unicode_escape").decode("ascii") for c in line)


def shortened(error: str | None) -> str:
    """Return two sentences of an error's first line: torch says there how much was requested, and gives advice after it."""
    first_line = (error or "").strip().partition("\n")[0]
    return ". ".join(first_line.split(". ")[:2])


def rate(samples_per_s: float) -> str:
    """Format a rate: as an integer from 100 on, otherwise with three digits."""
    return f"{samples_per_s:.0f}" if 100 <= samples_per_s < 1e9 else f"{samples_per_s:.3g}"


def count(number: int, one: str, many: str) -> str:
    """Return a number with its noun in singular or plural."""
    return f"{number} {one if number == 1 else many}"
