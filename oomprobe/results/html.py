"""A report as one HTML file without scripts or external resources."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from oomprobe.ground.words import visible
from oomprobe.results.blocks import NOTES, VERDICT, Block, Report, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Of an SVG: what says nothing on a page, and digits too small to see.
UNUSED = re.compile(
    r"(?s)<metadata>.*?</metadata>|font-family: [^;\"]*;?|(?<=\d\.\d\d)\d+|(?<=\n) +"
)

HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
/* Pictures name their colours --c and six digits; a dark page has others for those that need it. */
:root {
  color-scheme: light dark;
  --back: #fff; --text: #222; --soft: #595959; --line: #ddd;
  --bad: #8a1c1c; --well: #f3f4f6; --warn: #fdecea;
}
@media (prefers-color-scheme: dark) {
  :root {
    --back: #16181c; --text: #e4e4e4; --soft: #a5a5a5; --line: #3a3d42;
    --bad: #ff9d97; --well: #24272d; --warn: #3d1c1a;
    --cffffff: var(--back); --c000000: var(--text); --c737373: var(--soft); --c1b4f8a: #6ba4e8;
  }
}
body {
  font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back);
  max-width: 62rem; margin: 0 auto; padding: 1rem;
}
h1 { font-size: 1.35rem; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin-top: 2rem; }
/* A shadow at the edge behind which a table goes on: the first two layers move with the table
   and cover it at the ends. */
.scroll {
  overflow-x: auto;
  background: linear-gradient(90deg, var(--back) 50%, #0000) left / 3rem 100% no-repeat local,
    linear-gradient(-90deg, var(--back) 50%, #0000) right / 3rem 100% no-repeat local,
    linear-gradient(90deg, #8888, #0000) left / .8rem 100% no-repeat,
    linear-gradient(-90deg, #8888, #0000) right / .8rem 100% no-repeat;
}
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td {
  padding: .2rem .6rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line);
}
caption, figcaption, dt, td.why { color: var(--soft); }
caption, .text, td.why { text-align: left; }
tr.failed td { color: var(--bad); }
tr.answer td { font-weight: 600; background: #4a90e226; }
td.why { white-space: normal; font-size: .8rem; }
.warning { background: var(--warn); border-left: 4px solid #b3261e; padding: .5rem 1rem; }
.pictures { display: flex; flex-wrap: wrap; gap: 1rem 2rem; align-items: flex-start; }
.pictures > * { flex: 1 1 20rem; min-width: 0; }
figure { margin: 0; max-width: 30rem; }
figure svg { width: 100%; height: auto; fill: currentColor; }
figcaption { font-size: .8rem; }
pre {
  background: var(--well); padding: .5rem .75rem; margin: .5rem 0; font-size: .85rem;
  white-space: pre-wrap; overflow-wrap: anywhere; user-select: all; -webkit-user-select: all;
}
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; }
dd { margin: 0; overflow-wrap: anywhere; }
details { border-top: 1px solid var(--line); padding: .4rem 0; }
summary { cursor: pointer; font-weight: 600; }
@media (max-width: 40rem) {
  table { font-size: .72rem; }
  th, td { padding: .15rem .25rem; }
  .text { white-space: normal; min-width: 8em; }
  td.why { font-size: .68rem; }
}
</style>
"""

IN_NOTEBOOK = """<style>
.oomprobe :is(.text, .why) { text-align: left !important; } .oomprobe :is(.failed, .warning) { color: #c0392b; }
.oomprobe :is(.answer, .warning) { font-weight: 600; }
.oomprobe dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; } .oomprobe :is(dt, dd) { margin: 0; }
</style>"""


def page(report: Report) -> str:
    """Render a report as an HTML document, with the report of each row folded."""
    verdict = _escape(_sentence(report.verdict))
    body = "\n".join([f"<h1>{verdict}</h1>", *_body(report)])
    return f"{HEAD}<title>oomprobe: {verdict}</title>\n</head>\n<body>\n{body}\n</body>\n</html>\n"


def notebook(report: Report) -> str:
    """Render a brief report for a notebook; the notes come first."""
    lines = [IN_NOTEBOOK, f"<p><b>{_escape(VERDICT + report.verdict)}</b></p>", *_warning(report)]
    for block in sorted(report.blocks, key=lambda block: block.title != NOTES):
        lines.append(_render_block(block, heading="h4"))
    return '<div class="oomprobe">\n' + "\n".join(lines) + "\n</div>"


def _body(report: Report) -> list[str]:
    """Render all but the heading: the first picture beside what to paste and facts; then the rest."""
    facts, others = [], []
    for block in report.blocks:
        if isinstance(block.content, Mapping):
            facts.append(_render_block(block))
        elif block.content is not report.to_paste:
            others.append(_render_block(block))
    first, *more = [_svg(title, draw) for title, draw in report.pictures.items()] or [""]
    beside = "".join([*(f"<pre>{_escape(line)}</pre>" for line in report.to_paste), *facts])
    lines = [*_warning(report), _side_by_side(first, f"<div>{beside}</div>")]
    lines += [_side_by_side(*more), *others]
    if report.parts:
        lines.append("<h2>In detail</h2>")
    for name, part in report.parts.items():
        summary = _escape(f"{name}: {_sentence(part.verdict)}")
        lines.append(f"<details><summary>{summary}</summary>{''.join(_body(part))}</details>")
    return [*lines, *map(_render_block, report.appendix)]


def _side_by_side(*parts: str) -> str:
    return f'<div class="pictures">{"".join(parts)}</div>'


def _warning(report: Report) -> list[str]:
    if not report.warning:
        return []
    return [f'<p class="warning">{_escape(report.warning)}</p>']


def _escape(text: str) -> str:
    """Return a text as a page shows it: no tag, and nothing that a browser obeys."""
    return escape(visible(text))


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _render_block(block: Block, heading: str = "h2") -> str:
    content = _render_content(block)
    if not block.title or not block.content:
        return content
    return f"<{heading}>{_escape(_sentence(block.title.rstrip(':')))}</{heading}>{content}"


def _render_content(block: Block) -> str:
    match block.content:
        case str(sentence):
            return f"<p>{_escape(sentence)}</p>"
        case Table() as table:
            return _render_table(table, block.caption)
        case Mapping() as facts:
            lines = ""
            for label, sentences in facts.items():
                texts = "<br>".join(_escape(fact.text) for fact in sentences)
                lines += f"<dt>{_escape(label)}</dt><dd>{texts}</dd>"
            return f"<dl>{lines}</dl>"
        case items:
            return f"<ul>{''.join(f'<li>{_escape(item)}</li>' for item in items)}</ul>"


def _render_table(table: Table, caption: str) -> str:
    lines = []
    if caption:
        lines.append(f"<caption>{_escape(caption)}</caption>")
    if table.heads:
        lines.append(f"<tr>{_render_cells('th', table.heads, table)}</tr>")
    for row in table.rows:
        first, *rest = row.cells
        if table.is_marked(row):
            first = f"* {first}"
        lines.append(f'<tr class="{row.kind}">{_render_cells("td", [first, *rest], table)}</tr>')
        if row.remark:
            lines.append(
                f'<tr><td class="why" colspan="{len(row.cells)}">{_escape(row.remark)}</td></tr>'
            )
    foot = "".join(f"<p>{_escape(line)}</p>" for line in table.foot)
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>{foot}'


def _render_cells(tag: str, cells: Sequence[str], table: Table) -> str:
    line = ""
    for place, text in enumerate(cells):
        kind = ' class="text"' if place in table.texts else ""
        line += f"<{tag}{kind}>{_escape(text.strip())}</{tag}>"
    return line


def _svg(title: str, draw: Callable[[], Figure]) -> str:
    """Render a picture as inline SVG, whose font and colours are the page's."""
    from matplotlib import rc_context

    stream = io.StringIO()
    # Without a salt ids are random, and the file differs each time.
    with rc_context({"svg.hashsalt": "oomprobe", "svg.fonttype": "none"}):
        draw().savefig(stream, format="svg", metadata={"Date": None}, transparent=True)
    svg = stream.getvalue()
    svg = UNUSED.sub("", svg[svg.index("<svg") :])
    svg = re.sub(r"#([0-9a-f]{6})\b", r"var(--c\1, #\1)", svg)
    labelled = svg.replace("<svg ", f'<svg role="img" aria-label="{_escape(title)}" ', 1)
    return f"<figure>{labelled}<figcaption>{_escape(_sentence(title))}</figcaption></figure>"
