"""What a report is made of, and its text for a job log: plain ASCII of at most 100 columns, returned and never printed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from oomprobe.ground.words import WIDTH, clip, wrap

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOTES = "notes:"  # the title of a block
LABEL_WIDTH = 14  # of facts
# A note of a table may begin with the rows that it is about.
_WARNING = re.compile(r"(?:^|: )(?:weak|leak|marginal|not restored): |^the step varies|^THE MODEL")


def is_warning(note: str) -> bool:
    """Return whether a note says that the answer may not hold."""
    return _WARNING.search(note) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of a table."""

    cells: Sequence[str]
    remark: str = ""  # below the cells
    kind: str = "passed"  # or "failed", or "answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Cells in aligned columns."""

    heads: Sequence[str] = ()
    rows: Sequence[Row]
    texts: Set[int] = frozenset()  # columns that hold text; all others hold numbers
    marks: bool = False  # whether a star marks the row of the answer in text
    clips: bool = True  # whether text has room for one line of each remark
    foot: Sequence[str] = ()


Facts = Mapping[str, Sequence[str]]  # sentences by label


class Block(NamedTuple):
    """A part of a report: a sentence, a list of items, facts, or a table."""

    title: str
    content: str | Sequence[str] | Facts | Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that people read about a result or a table."""

    verdict: str
    warning: str = ""
    blocks: Sequence[Block]  # those without content are left out
    parts: Mapping[str, Report] = field(default_factory=dict)  # further reports, by name
    pictures: Mapping[str, Callable[[], Figure]] = field(default_factory=dict)  # by title; the first is the plot
    appendix: Sequence[Block] = ()  # of a page


def as_text(report: Report) -> str:
    """Render a report; only its first line begins with ``verdict:``, and so does that of each part."""
    heading = [report.verdict, *wrap(report.warning, first="!! ", rest="!! ")]
    texts = ["\n".join(lines) for lines in (heading, *map(block_lines, report.blocks)) if lines]
    parts = (f"\n--- {name} ---\n{as_text(part)}" for name, part in report.parts.items())
    return "\n\n".join(texts) + "\n" + "".join(parts)


def block_lines(block: Block) -> list[str]:
    """Render a block."""
    if not block.content:
        return []
    match block.content:
        case str(sentence):
            lines = wrap(sentence, rest="  ")
        case Table() as table:
            lines = _table_lines(table)
        case Mapping() as facts:
            lines = _fact_lines(facts)
        case items:
            lines = [line for item in items for line in wrap(item, first="  - ", rest="    ")]
    return [block.title, *lines] if block.title else lines


def _fact_lines(facts: Facts) -> list[str]:
    lines = []
    for label, sentences in facts.items():
        for number, sentence in enumerate(sentences):
            first = f"  {'' if number else label}".ljust(LABEL_WIDTH)
            lines += wrap(sentence, first=first, rest=" " * (LABEL_WIDTH + 2))
    return lines


def _table_lines(table: Table) -> list[str]:
    heads = [Row(cells=table.heads)] if table.heads else []
    widths = [max(map(len, column)) for column in zip(*(row.cells for row in (*heads, *table.rows)), strict=True)]
    indent = " " * (widths[0] + 4)
    lines = []
    for row in (*heads, *table.rows):
        aligned = (
            f"{cell:{'<' if place in table.texts else '>'}{width}}"
            for place, (cell, width) in enumerate(zip(row.cells, widths, strict=True))
        )
        mark = "*" if table.marks and row.kind == "answer" else " "
        lines.append(clip(f"{mark} {'  '.join(aligned)}".rstrip(), WIDTH))
        if row.remark and table.clips:
            lines.append(clip(f"{indent}^ {row.remark}", WIDTH))
        elif row.remark:
            lines += wrap(row.remark, first=f"{indent}^ ", rest=f"{indent}  ")
    return [*lines, *(clip(line, WIDTH) for line in table.foot)]
