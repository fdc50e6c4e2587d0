"""A table over an axis as a report."""

from __future__ import annotations

from collections import defaultdict
from functools import partial

from oomprobe.ground.units import format_bytes, format_seconds
from oomprobe.ground.words import WIDTH, clean, clip, count, rate
from oomprobe.records.axis import CARDS, text_of_value
from oomprobe.records.result import ProbeResult
from oomprobe.records.table import ProbeTable
from oomprobe.records.trials import last_of
from oomprobe.report.blocks import NOTES, Block, Report, Row, Table, as_text, is_warning
from oomprobe.report.plot import table_figure
from oomprobe.report.result import WARNING, appendix, facts, not_covered, result_report, within

_SHARED = ("ranks", "holds for", "state")  # facts that are the same for all rows


def report_of(found: ProbeResult | ProbeTable, *, verbose: bool = False) -> Report:
    """Make a report; a verbose one adds details of the fit, the estimates, and what was not covered."""
    if isinstance(found, ProbeTable):
        return table_report(found, verbose=verbose)
    return result_report(found, verbose=verbose)


def text(found: ProbeResult | ProbeTable, *, verbose: bool = False) -> str:
    """Render a result or a table for a job log."""
    return as_text(report_of(found, verbose=verbose))


def in_one_line(found: ProbeResult | ProbeTable) -> str:
    """Return the verdict, as the ``repr`` of a result or a table."""
    return f"<{type(found).__name__}: {report_of(found).verdict.removeprefix('verdict: ')}>"


def table_report(table: ProbeTable, *, verbose: bool = False) -> Report:
    """Make the report of a table; a verbose one contains that of each row."""
    results = [result for _, result in table.fitting()]
    told = facts(results[-1], verbose=False) if results else {}
    shared = {label: told[label][:1] for label in _SHARED if label in told}
    parts = {
        f"{table.axis}={text_of_value(value)}": result_report(result, verbose=True) for value, result in table.fitting()
    }
    return Report(
        verdict=_verdict(table),
        warning=WARNING if any(result.contaminated for result in results) else "",
        blocks=[
            Block("", _rows(table)),
            Block("", {**shared, "time": [_time(table)]}),
            Block(NOTES, _notes(table)),
            *([] if verbose or not results else [not_covered(results[-1], verbose=False)]),
        ],
        parts=parts if verbose else {},
        appendix=appendix(results[-1]) if results else [],
        pictures={f"batch size for each {table.axis}": partial(table_figure, table)},
    )


def _verdict(table: ProbeTable) -> str:
    if table.axis == CARDS:
        return clip(f"verdict: {_cards_verdict(table)}", WIDTH)
    results = [result for _, result in table.fitting()]
    start = f"verdict: {len(results)} of {count(len(table.rows), 'value', 'values')} of {clean(table.axis)}"
    return clip(within(results[-1], f"{start} fit") if results else f"{start} fit", WIDTH)


def _cards_verdict(table: ProbeTable) -> str:
    """Name the smallest card on which the required size runs or, if none is required, the range of answers."""
    cards, required, sizes = count(len(table.rows), "card", "cards"), table.required, table.batch_sizes()
    if required is not None:
        able = sum(size >= required for size in sizes.values())
        smallest = f"; the smallest is {table.smallest()}" if able else ""
        return f"batch {required} runs on {able} of {cards}{smallest}"
    fewest, most = (choose(sizes, key=lambda name: sizes[name], default=None) for choose in (min, max))
    fits = f": from {sizes[fewest]} ({fewest}) to {sizes[most]} ({most})" if sizes else ""
    return f"the step fits on {len(sizes)} of {cards}{fits}"


def _rows(table: ProbeTable) -> Table:
    """Return the cells of each value; omit columns that no row has."""
    if table.axis == CARDS:
        return _cards(table)
    axis, per_rank = clean(table.axis), any(result.world_size > 1 for _, result in table.fitting())
    batch = "batch per rank" if per_rank else "batch"
    heads = [axis, batch, "mixed", f"batch x {axis}", "reserved", "of budget", "samples/s"]
    cells = {value: _cells(table, value) for value in table.rows}
    used = [place for place in range(len(heads)) if place < 2 or any(one[place] != "-" for one in cells.values())]
    best = table.best()
    largest = None if best is None else table.product(best)
    rows = [
        Row(
            cells=[cells[value][place] for place in used],
            remark=clean(table.unfit.get(value, "")),
            kind="failed" if result is None else "answer" if largest and table.product(value) == largest else "passed",
        )
        for value, result in table.rows.items()
    ]
    return Table(heads=[heads[place] for place in used], rows=rows, marks=True, clips=False, foot=_foot(table))


def _cards(table: ProbeTable) -> Table:
    required, smallest = table.required, table.smallest()
    asked = [] if required is None else [f"runs {required}"]
    rows = []
    for name, result in table.rows.items():
        if result is None:
            cells = [name, *"----", *("no" for _ in asked), "-"]
        else:
            peak_bytes = last_of(result.trials, result.batch_size).peak_reserved_bytes or 0
            share = f"{100 * peak_bytes / result.available_bytes:.1f} %"
            sizes = [str(result.batch_size), format_bytes(result.available_bytes), format_bytes(peak_bytes), share]
            runs = ["yes" if result.batch_size >= (required or 0) else "no" for _ in asked]
            cells = [name, *sizes, *runs, "replay" if result.was_replayed else "ran"]
        kind = "failed" if result is None else "answer" if name == smallest else "passed"
        rows.append(Row(cells=cells, remark=clean(table.unfit.get(name, "")), kind=kind))
    heads = ["card", "batch", "memory", "reserved", "of memory", *asked, "answer"]
    foot = [] if smallest is None else [f"* the smallest card that runs batch {required}"]
    if any(result.was_replayed for _, result in table.fitting()):
        foot.append("replay: the step ran on a larger card of the kind, and its allocations were replayed on this one")
    return Table(heads=heads, rows=rows, texts={0, len(heads) - 1}, marks=True, clips=False, foot=foot)


def _cells(table: ProbeTable, value: object) -> list[str]:
    result, name = table.rows[value], clean(text_of_value(value))
    if result is None:
        return [name, *"------"]
    answer = last_of(result.trials, result.batch_size)
    peak_bytes, product = answer.peak_reserved_bytes, table.product(value)
    return [
        name,
        str(result.batch_size),
        "-" if table.mixed == table.batch_sizes() else str(table.mixed.get(value, "-")),
        "-" if product is None else f"{product:.12g}",
        "-" if peak_bytes is None else format_bytes(peak_bytes),
        "-" if peak_bytes is None or not result.budget_bytes else f"{100 * peak_bytes / result.budget_bytes:.1f} %",
        "-" if answer.samples_per_s is None else rate(answer.samples_per_s),
    ]


def _foot(table: ProbeTable) -> list[str]:
    """Name the value with the largest product, and say what ran with all values in turn."""
    best, axis = table.best(), clean(table.axis)
    marked = [] if best is None else [f"* largest batch x {axis}: {table.product(best):.12g}"]
    same = f"training that meets all values of {axis} in one process runs with these batch sizes too"
    other = "mixed: batch sizes for training that meets all values in one process"
    mixed = [same if table.mixed == table.batch_sizes() else other] if table.mixed else []
    return [*marked, *mixed]


def _time(table: ProbeTable) -> str:
    trials = [trial for _, result in table.fitting() for trial in result.trials]
    calls = count(sum(trial.steps for trial in trials), "call", "calls")
    return f"{format_seconds(table.elapsed_s)}; the rows took {count(len(trials), 'trial', 'trials')} and {calls}"


def _notes(table: ProbeTable) -> list[str]:
    """Return the notes of the table, and each of the rows' notes once, with the values of its rows unless it is all of them.

    Of cards, only warnings are told with their rows: each card has other figures.
    """
    rows_of: dict[str, list[str]] = defaultdict(list)
    rows = list(table.fitting())
    for value, result in rows:
        for note in result.notes:
            rows_of[note].append(text_of_value(value))
    shared = [note for note, values in rows_of.items() if len(values) == len(rows)]
    told = (note for note in rows_of if note not in shared and (table.axis != CARDS or is_warning(note)))
    own = (f"{table.axis}={', '.join(rows_of[note])}: {note}" for note in told)
    return [*table.notes, *shared, *own]
