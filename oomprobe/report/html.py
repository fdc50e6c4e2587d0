"""A result as one HTML file without scripts or external resources."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping
from html import escape
from typing import TYPE_CHECKING, Any

from oomprobe.records.axis import text_of_value
from oomprobe.report.breakdown import advice, breakdown_rows
from oomprobe.report.plot import bracket_figure, result_figure
from oomprobe.report.table import foot_lines, table_figure, table_notes, table_rows, table_verdict
from oomprobe.report.text import facts, verdict_line, warning_lines
from oomprobe.report.trials import TEXT_COLUMNS, table_cells

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from oomprobe.records.result import ProbeResult
    from oomprobe.records.table import ProbeTable

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.35rem; } h2 { font-size: 1.05rem; margin-top: 2rem; }
.scroll { overflow-x: auto; } caption { text-align: left; color: #555; } table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #ddd; }
th.text, td.text { text-align: left; } tr.failed td { color: #8a1c1c; } tr.answer td { font-weight: 600; background: #eef4fb; }
td.why { text-align: left; white-space: normal; color: #555; font-size: .8rem; }
.warning { background: #fdecea; border-left: 4px solid #b3261e; padding: .5rem 1rem; }
.pictures { display: flex; flex-wrap: wrap; gap: 1rem; align-items: flex-start; } figure { margin: 0; flex: 1 1 20rem; max-width: 30rem; }
figure svg { width: 100%; height: auto; } dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; }
dt { color: #555; } dd { margin: 0; overflow-wrap: anywhere; }
details { border-top: 1px solid #ddd; padding: .4rem 0; } summary { cursor: pointer; font-weight: 600; }
"""


def page(result: ProbeResult) -> str:
    """Render a result as an HTML document."""
    heading = f"<h1>{escape(_sentence(verdict_line(result)))}</h1>"
    return _document(f"oomprobe: batch {result.batch_size} on {result.device}", [heading, *_body(result)])


def table_page(table: ProbeTable) -> str:
    """Render a table as an HTML document, with the report of each row folded."""
    folded = (
        f"<details><summary>{escape(f'{table.axis}={text_of_value(value)}: batch {result.batch_size}')}</summary>"
        f"{''.join(_body(result))}</details>"
        for value, result in table.fitting()
    )
    parts = [
        f"<h1>{escape(_sentence(table_verdict(table)))}</h1>",
        *dict.fromkeys(line for _, result in table.fitting() for line in _warning(result)),
        _rows(table),
        f'<div class="pictures">{_svg(table_figure(table), f"batch size for each {table.axis}")}</div>',
        *_list("Notes", table_notes(table)),
        "<h2>Rows</h2>",
        *folded,
    ]
    return _document(f"oomprobe: batch sizes over {table.axis}", parts)


def table_notebook(table: ProbeTable) -> str:
    """Render the table for a notebook."""
    return f"<p><b>{escape(table_verdict(table))}</b></p>{_rows(table)}"


def _rows(table: ProbeTable) -> str:
    heads, rows = table_rows(table)
    best, lines = table.best(), [f'<div class="scroll"><table><tr>{_cells("th", heads, heads)}</tr>']
    for value, cells, remark in rows:
        kind = "failed" if table.rows[value] is None else "answer" if value == best else "passed"
        lines.append(f'<tr class="{kind}">{_cells("td", heads, cells)}</tr>')
        if remark:
            lines.append(f'<tr><td class="why" colspan="{len(heads)}">{escape(remark)}</td></tr>')
    return "".join([*lines, "</table></div>", *(f"<p>{escape(line)}</p>" for line in foot_lines(table))])


def _sentence(verdict: str) -> str:
    text = verdict.removeprefix("verdict: ")
    return text[:1].upper() + text[1:]


def _warning(result: ProbeResult) -> list[str]:
    warning = " ".join(warning_lines(result)).replace("!! ", "")
    return [f'<p class="warning">{escape(warning)}</p>'] if warning else []


def _body(result: ProbeResult) -> list[str]:
    """Render all but the heading."""
    environment = {name: [_value(value)] for name, value in result.environment.items() if value not in (None, {}, "")}
    return [
        *_warning(result),
        _definitions({label: sentences for label, sentences in facts(result, verbose=True).items() if sentences}),
        f'<div class="pictures">{_svg(result_figure(result), "peak memory and throughput against batch size")}'
        f"{_svg(bracket_figure(result), 'each trial in order, closing in on the answer')}</div>",
        "<h2>Trials</h2>",
        _trials(result),
        *_breakdown(result),
        *_list("Notes", result.notes),
        *_list("Not covered by the trials", result.not_covered),
        "<h2>Environment</h2>",
        _definitions(environment),
    ]


def _document(title: str, parts: Iterable[str]) -> str:
    head = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n"
        f"<style>{STYLE}</style>\n</head>\n<body>\n"
    )
    return head + "\n".join(parts) + "\n</body>\n</html>\n"


def notebook(result: ProbeResult) -> str:
    """Render the verdict, the notes and the table for a notebook, which has its own style for tables."""
    notes = "".join(f"<p>{escape(note)}</p>" for note in (*warning_lines(result), *result.notes))
    return f"<p><b>{escape(verdict_line(result))}</b></p>{notes}{_trials(result)}"


def _trials(result: ProbeResult) -> str:
    title, heads, rows = table_cells(result.trials)
    lines = [f'<div class="scroll"><table><caption>{escape(title)}</caption>', f"<tr>{_cells('th', heads, heads)}</tr>"]
    for trial, cells, remark in rows:
        answers = trial.batch_size == result.batch_size and trial.phase == "confirm"
        kind = "failed" if not trial.passed else "answer" if answers else "passed"
        lines.append(f'<tr class="{kind}">{_cells("td", heads, cells)}</tr>')
        if remark:
            lines.append(f'<tr><td class="why" colspan="{len(heads)}">{escape(remark)}</td></tr>')
    return "".join([*lines, "</table></div>"])


def _cells(tag: str, heads: Iterable[str], cells: Iterable[str]) -> str:
    kinds = (' class="text"' if head in TEXT_COLUMNS else "" for head in heads)
    return "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))


def _breakdown(result: ProbeResult) -> list[str]:
    if result.breakdown is None:
        return []
    parts, modules = breakdown_rows(result.breakdown)
    titles = (
        f"Where the memory went, at the peak in {result.breakdown.peak_in}",
        "Modules that hold the most activation memory",
    )
    tables = []
    for title, rows in zip(titles, (parts, modules), strict=True):
        lines = (
            f'<tr><td>{size}</td><td>{share}</td><td class="text">{escape(what)}</td></tr>'
            for size, share, what in rows
        )
        tables.append(f'<h2>{title}</h2><div class="scroll"><table>{"".join(lines)}</table></div>')
    return [*tables, *_list("Advice", advice(result.breakdown))]


def _list(title: str, items: Iterable[str]) -> list[str]:
    lines = "".join(f"<li>{escape(item)}</li>" for item in items)
    return [f"<h2>{title}</h2>", f"<ul>{lines}</ul>"] if lines else []


def _definitions(sentences_of: Mapping[str, Iterable[str]]) -> str:
    lines = (
        f"<dt>{escape(label)}</dt><dd>{'<br>'.join(escape(one) for one in sentences)}</dd>"
        for label, sentences in sentences_of.items()
    )
    return f"<dl>{''.join(lines)}</dl>"


def _value(value: Any) -> str:
    return ", ".join(f"{name}={one}" for name, one in value.items()) if isinstance(value, Mapping) else str(value)


def _svg(figure: Figure, title: str) -> str:
    """Render a figure as inline SVG, without the prolog of a separate file."""
    from matplotlib import rc_context

    stream = io.StringIO()
    with rc_context({"svg.hashsalt": "oomprobe"}):  # without it ids are random, and the file differs each time
        figure.savefig(stream, format="svg", metadata={"Date": None})
    svg = stream.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    labelled = svg.replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1)
    return f"<figure>{labelled}</figure>"
