"""Text layout: plain ASCII in at most 100 columns."""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Iterable

WIDTH = 100  # columns: what job logs and code review show without wrapping
LONGEST = 10_000  # characters of a text that is shown
_UNPRINTABLE = re.compile(r"[^ -~]")
# Control characters but for tabs and line breaks, marks that turn the direction of what follows,
# and halves of characters.
_HIDDEN = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def wrap(sentence: str, *, first: str = "", rest: str = "", width: int = WIDTH) -> list[str]:
    """Wrap a sentence; indent the first line by `first` and all others by `rest`."""
    return textwrap.wrap(
        clean(sentence), width, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
    )


def clip(line: str, width: int) -> str:
    """Shorten a line to `width` columns."""
    if len(line) <= width:
        return line
    return line[: max(0, width - 3)].rstrip() + "..."


def clean(text: str) -> str:
    """Return one line of printable ASCII: text from outside may contain line breaks, escape codes and any alphabet."""
    return _UNPRINTABLE.sub(_escaped, clip(" ".join(text.split()), LONGEST))


def visible(text: str) -> str:
    r"""Return a text without what a terminal or a browser obeys instead of showing it.

    Examples:
        >>> visible("gr\u00f6\u00dfer \x1b[31m")
        'größer \\x1b[31m'
    """
    return _HIDDEN.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii")


def shortened(error: str | None) -> str:
    """Return two sentences of an error's first line: torch says there how much was requested, and gives advice after it."""
    first_line = (error or "").strip().partition("\n")[0]
    return ". ".join(first_line.split(". ")[:2])


def rate(samples_per_s: float) -> str:
    """Format a rate: as an integer from 100 on, otherwise with three digits."""
    return f"{samples_per_s:.0f}" if 100 <= samples_per_s < 1e9 else f"{samples_per_s:.3g}"


def count(number: int, singular: str, plural: str) -> str:
    """Return a number with its noun."""
    return f"{number} {singular if number == 1 else plural}"


def nearest(word: str, known: Iterable[str], most: int = 1) -> list[str]:
    """Return the known words that `word` may be a slip for, the likeliest first."""
    return difflib.get_close_matches(word, list(known), n=most, cutoff=0.55)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of a sentence about an unknown word: the nearest known one, or nothing.

    Examples:
        >>> did_you_mean("--multipleof", ["--max-batch", "--multiple-of"])
        '; did you mean --multiple-of?'
    """
    return "".join(f"; did you mean {likely}?" for likely in nearest(word, known))
