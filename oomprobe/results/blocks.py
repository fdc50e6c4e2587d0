"""What a report is made of, and its text for a job log: plain ASCII of at most 100 columns, returned and never printed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from oomprobe.ground.words import WIDTH, clean, clip, wrap

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOTES = "notes:"  # the title of a block
VERDICT = "verdict: "  # begins the first line of a report
VERDICT_WIDTH = WIDTH - len(VERDICT)  # columns for the verdict itself
LABEL_WIDTH = 14  # of facts
UNKNOWN = "-"  # the cell of a value that was not measured


@dataclass(frozen=True, slots=True)
class Fact:
    """A sentence, and the batch sizes that it is about: a short table of trials keeps theirs."""

    text: str
    sizes: tuple[int, ...] = ()


Facts = Mapping[str, Sequence[Fact]]  # by label


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

    def is_marked(self, row: Row) -> bool:
        """Return whether a star marks this row: it is the answer."""
        return self.marks and row.kind == "answer"


class Block(NamedTuple):
    """A part of a report: a sentence, a list of items, facts, or a table."""

    title: str
    content: str | Sequence[str] | Facts | Table
    caption: str = ""  # what to know to read a table


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that people read about a result or a table."""

    subject: str = ""  # what was probed
    verdict: str  # in one line
    warning: str = ""
    to_paste: Sequence[str] = ()  # of a page: what to copy from it
    blocks: Sequence[Block]  # those without content are left out
    parts: Mapping[str, Report] = field(default_factory=dict)  # further reports, by name
    pictures: Mapping[str, Callable[[], Figure]] = field(
        default_factory=dict
    )  # by title; the first is the plot
    appendix: Sequence[Block] = ()  # of a page


def cell(value: Any, write: Callable[[Any], str] = str) -> str:
    """Return the cell of a value that may be unknown, which is None."""
    if value is None:
        return UNKNOWN
    return write(value)


def measured_columns(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, always: int
) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Return the heads and the cells of each row, without the columns in which all cells are unknown; the first `always` stay."""
    columns = list(zip(heads, *rows, strict=True))
    used = columns[:always]
    for head, *cells in columns[always:]:
        if set(cells) != {UNKNOWN}:
            used.append((head, *cells))
    used_heads, *used_rows = zip(*used, strict=True)
    return used_heads, used_rows


def as_text(report: Report, width: int = WIDTH) -> str:
    """Render a report; only its first line begins with ``verdict:``, and so does that of each part.

    On a terminal of fewer columns, `width`, sentences are wrapped, and the last columns of wide
    tables follow below.
    """
    verdict = wrap(report.verdict, first=VERDICT, rest="  ", width=width)
    paragraphs = [[*verdict, *wrap(report.warning, first="!! ", rest="!! ", width=width)]]
    for block in report.blocks:
        if block.content:
            paragraphs.append(block_lines(block, width))
    text = "\n\n".join(map("\n".join, paragraphs)) + "\n"
    for name, part in report.parts.items():
        text += f"\n--- {clean(name)} ---\n{as_text(part, width)}"
    return text


def block_lines(block: Block, width: int = WIDTH) -> list[str]:
    """Render a block that has content."""
    lines = []
    if block.caption:
        lines += wrap(f"{block.title} ({block.caption})", width=width)
    elif block.title:
        lines.append(clean(block.title))
    match block.content:
        case str(sentence):
            lines += wrap(sentence, rest="  ", width=width)
        case Table() as table:
            lines += _table_lines(table, width)
        case Mapping() as facts:
            lines += _fact_lines(facts, width)
        case items:
            for item in items:
                lines += wrap(item, first="  - ", rest="    ", width=width)
    return lines


def _fact_lines(facts: Facts, width: int) -> list[str]:
    lines = []
    indent = "".ljust(LABEL_WIDTH)
    for label, sentences in facts.items():
        first = f"  {label}".ljust(LABEL_WIDTH)
        for fact in sentences:
            lines += wrap(fact.text, first=first, rest=f"{indent}  ", width=width)
            first = indent
    return lines


def _table_lines(table: Table, width: int) -> list[str]:
    rows = list(table.rows)
    if table.heads:
        rows.insert(0, Row(cells=table.heads))
    columns = []
    for place, cells in enumerate(zip(*(map(clean, row.cells) for row in rows), strict=True)):
        width_of_column = max(map(len, cells))
        justify = str.ljust if place in table.texts else str.rjust
        columns.append([justify(text, width_of_column) for text in cells])
    indent = "".ljust(len(columns[0][0]) + 4)
    lines = []
    for part in _parts_that_fit(columns, width):
        for row, cells in zip(rows, zip(*part, strict=True), strict=True):
            mark = "*" if table.is_marked(row) else " "
            lines.append(clip(f"{mark} {'  '.join(cells)}".rstrip(), width))
            if part[-1] is not columns[-1]:  # the last part has the remarks
                continue
            if row.remark and table.clips:
                lines.append(clip(f"{indent}^ {clean(row.remark)}", width))
            elif row.remark:
                lines += wrap(row.remark, first=f"{indent}^ ", rest=f"{indent}  ", width=width)
    for line in table.foot:
        margin = line.removesuffix(line.lstrip())
        lines += wrap(line, first=margin, rest=f"{margin}  ", width=width)
    return lines


def _parts_that_fit(columns: Sequence[Sequence[str]], width: int) -> Iterator[Sequence[Any]]:
    """Yield the columns in parts that fit a terminal; the first names the rows of each."""
    part = [columns[0]]
    for column in columns[1:]:
        if sum(len(cells[0]) + 2 for cells in (*part, column)) > width < WIDTH:
            yield part
            part = [columns[0]]
        part.append(column)
    yield part
