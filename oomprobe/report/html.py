"""A report as one HTML file without scripts or external resources."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING

from oomprobe.report.blocks import NOTES, Block, Facts, Report, Row, Table
from oomprobe.report.table import report_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from oomprobe.records.result import ProbeResult
    from oomprobe.records.table import ProbeTable

HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.35rem; } h2 { font-size: 1.05rem; margin-top: 2rem; }
/* A shadow at the edge behind which a table goes on: the first two layers move with the table and cover it at the ends. */
.scroll { overflow-x: auto; background: linear-gradient(90deg, #fff 50%, #fff0) left / 3rem 100% no-repeat local,
  linear-gradient(-90deg, #fff 50%, #fff0) right / 3rem 100% no-repeat local,
  linear-gradient(90deg, #0004, #0000) left / .8rem 100% no-repeat, linear-gradient(-90deg, #0004, #0000) right / .8rem 100% no-repeat; }
caption { text-align: left; color: #555; } table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #ddd; }
.text { text-align: left; } tr.failed td { color: #8a1c1c; } tr.answer td { font-weight: 600; background: #4a90e21a; }
td.why { text-align: left; white-space: normal; color: #555; font-size: .8rem; }
.warning { background: #fdecea; border-left: 4px solid #b3261e; padding: .5rem 1rem; }
.pictures { display: flex; flex-wrap: wrap; gap: 1rem; align-items: flex-start; } figure { margin: 0; flex: 1 1 20rem; max-width: 30rem; }
figure svg { width: 100%; height: auto; } dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; }
dt { color: #555; } dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 40rem) { table { font-size: .72rem; } th, td { padding: .15rem .25rem; } .text { white-space: normal; } td.why { font-size: .68rem; } }
details { border-top: 1px solid #ddd; padding: .4rem 0; } summary { cursor: pointer; font-weight: 600; }
</style>
"""

IN_NOTEBOOK = """<style>
.oomprobe :is(.text, .why) { text-align: left !important; } .oomprobe :is(.failed, .warning) { color: #c0392b; }
.oomprobe :is(.answer, .warning) { font-weight: 600; }
.oomprobe dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; } .oomprobe :is(dt, dd) { margin: 0; }
</style>"""


def page(found: ProbeResult | ProbeTable) -> str:
    """Render a result or a table as an HTML document, with the report of each row folded."""
    report = report_of(found, verbose=True)
    verdict = escape(_sentence(report.verdict))
    body = "\n".join([f"<h1>{verdict}</h1>", *_body(report)])
    return f"{HEAD}<title>oomprobe: {verdict}</title>\n</head>\n<body>\n{body}\n</body>\n</html>\n"


def notebook(found: ProbeResult | ProbeTable) -> str:
    """Render the brief report for a notebook; the notes come first."""
    report = report_of(found)
    blocks = sorted(report.blocks, key=lambda block: block.title != NOTES)
    shown = (_block(block, heading="h4") for block in blocks if block.content)
    lines = [IN_NOTEBOOK, f"<p><b>{escape(report.verdict)}</b></p>", *_warning(report), *shown]
    return '<div class="oomprobe">\n' + "\n".join(lines) + "\n</div>"


def _body(report: Report) -> list[str]:
    """Render all but the heading; the pictures come between blocks without and with a title."""
    blocks = [block for block in report.blocks if block.content]
    pictures = "".join(_svg(title, draw) for title, draw in report.pictures.items())
    return [
        *_warning(report),
        *(_block(block) for block in blocks if not block.title),
        f'<div class="pictures">{pictures}</div>',
        *(_block(block) for block in blocks if block.title),
        *(["<h2>Rows</h2>"] if report.parts else []),
        *(
            f"<details><summary>{escape(f'{name}: {_sentence(part.verdict)}')}</summary>{''.join(_body(part))}</details>"
            for name, part in report.parts.items()
        ),
        *map(_block, report.appendix),
    ]


def _warning(report: Report) -> list[str]:
    return [f'<p class="warning">{escape(report.warning)}</p>'] if report.warning else []


def _sentence(text: str) -> str:
    text = text.removeprefix("verdict: ")
    return text[:1].upper() + text[1:]


def _block(block: Block, heading: str = "h2") -> str:
    title, _, detail = block.title.rstrip(":").partition(" (")
    head = f"<{heading}>{escape(_sentence(title))}</{heading}>" if title else ""
    return head + _content(block.content, detail.rstrip(")"))


def _content(content: str | Iterable[str] | Facts | Table, caption: str = "") -> str:
    match content:
        case str(sentence):
            return f"<p>{escape(sentence)}</p>"
        case Table() as table:
            return _table(table, caption)
        case Mapping() as facts:
            lines = (
                f"<dt>{escape(label)}</dt><dd>{'<br>'.join(map(escape, sentences))}</dd>"
                for label, sentences in facts.items()
            )
            return f"<dl>{''.join(lines)}</dl>"
        case items:
            return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>"


def _table(table: Table, caption: str) -> str:
    def line(tag: str, row: Row) -> str:
        kinds = (' class="text"' if place in table.texts else "" for place in range(len(row.cells)))
        cells = zip(kinds, row.cells, strict=True)
        return "".join(f"<{tag}{kind}>{escape(cell.strip())}</{tag}>" for kind, cell in cells)

    lines = [f"<caption>{escape(caption)}</caption>"] if caption else []
    lines += [f"<tr>{line('th', Row(cells=table.heads))}</tr>"] if table.heads else []
    for row in table.rows:
        if table.marks and row.kind == "answer":
            row = replace(row, cells=[f"* {row.cells[0]}", *row.cells[1:]])
        lines.append(f'<tr class="{row.kind}">{line("td", row)}</tr>')
        if row.remark:
            lines.append(f'<tr><td class="why" colspan="{len(row.cells)}">{escape(row.remark)}</td></tr>')
    foot = "".join(f"<p>{escape(one)}</p>" for one in table.foot)
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>{foot}'


def _svg(title: str, draw: Callable[[], Figure]) -> str:
    """Render a picture as inline SVG, without the prolog of a separate file."""
    from matplotlib import rc_context

    stream = io.StringIO()
    with rc_context({"svg.hashsalt": "oomprobe"}):  # without it ids are random, and the file differs each time
        draw().savefig(stream, format="svg", metadata={"Date": None})
    svg = stream.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    labelled = svg.replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1)
    return f"<figure>{labelled}</figure>"
