"""The table over an axis: as text for a job log, and as a plot."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from oomprobe.ground.units import format_bytes, format_seconds
from oomprobe.ground.words import WIDTH, bullets, clean, clip, count, rate, wrap
from oomprobe.records.axis import text_of_value
from oomprobe.records.table import ProbeTable
from oomprobe.records.trials import last_of
from oomprobe.report.plot import DARK, PADDING, SMALL, new_figure
from oomprobe.report.text import facts, not_covered_lines, report, warning_lines, within

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FEW = 8  # values whose names fit beside each other below a plot
MILLION = 1e6  # numbers from here on are too long for a bar
_SHARED = ("ranks", "holds for", "state")  # facts that are the same for all rows


def table_report(table: ProbeTable, *, verbose: bool = False) -> str:
    """Render a table; only the first line begins with ``verdict:``. The verbose report adds that of each row."""
    results = [result for _, result in table.fitting()]
    shown = [line for result in results[-1:] for line in _fact_lines(facts(result, verbose=False))]
    blocks = [
        [table_verdict(table), *dict.fromkeys(line for result in results for line in warning_lines(result))],
        [*_aligned(table), *foot_lines(table)],
        [*shown, *wrap(_time(table), first="  time          ", rest=" " * 16)],
        bullets("notes:", table_notes(table)),
        [] if verbose or not results else not_covered_lines(results[-1].not_covered),
    ]
    text = "\n\n".join("\n".join(block) for block in blocks if block) + "\n"
    if not verbose:
        return text
    each = (
        f"\n--- {table.axis}={text_of_value(value)} ---\n{report(one, verbose=True)}" for value, one in table.fitting()
    )
    return text + "".join(each)


def table_verdict(table: ProbeTable) -> str:
    """Return in one line how many values fit, and in what."""
    results = [result for _, result in table.fitting()]
    start = f"verdict: {len(results)} of {count(len(table.rows), 'value', 'values')} of {clean(table.axis)}"
    return clip(within(results[-1], f"{start} fit") if results else f"{start} fit", WIDTH)


def table_rows(table: ProbeTable) -> tuple[list[str], list[tuple[Any, list[str], str]]]:
    """Return the heads, and each value with its cells and a remark; omit columns that no row has."""
    axis, per_rank = clean(table.axis), any(result.world_size > 1 for _, result in table.fitting())
    heads = [
        axis,
        "batch per rank" if per_rank else "batch",
        "mixed",
        f"batch x {axis}",
        "reserved",
        "of budget",
        "samples/s",
    ]
    rows = [(value, _cells(table, value), clean(table.unfit.get(value, ""))) for value in table.rows]
    used = [place for place in range(len(heads)) if place < 2 or any(cells[place] != "-" for _, cells, _ in rows)]
    kept = [(value, [cells[place] for place in used], remark) for value, cells, remark in rows]
    return [heads[place] for place in used], kept


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


def foot_lines(table: ProbeTable) -> list[str]:
    """Say which value has the largest product, if values are numbers, and what ran with all values in turn."""
    best, axis = table.best(), clean(table.axis)
    marked = [] if best is None else [f"* largest batch x {axis}: {table.product(best):.12g}"]
    same = f"training that meets all values of {axis} in one process runs with these batch sizes too"
    other = "mixed: batch sizes with which training that meets all values in one process runs"
    mixed = [same if table.mixed == table.batch_sizes() else other] if table.mixed else []
    return [clip(line, WIDTH) for line in (*marked, *mixed)]


def _aligned(table: ProbeTable) -> Iterator[str]:
    heads, rows = table_rows(table)
    widths = [max(map(len, column)) for column in zip(heads, *(cells for _, cells, _ in rows), strict=True)]

    def line(cells: Iterable[str], mark: str = " ") -> str:
        aligned = "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        return clip(f"{mark} {aligned}".rstrip(), WIDTH)

    yield line(heads)
    best = table.best()
    for value, cells, remark in rows:
        yield line(cells, "*" if value == best else " ")
        if remark:
            yield from wrap(remark, first=f"{' ' * (widths[0] + 4)}^ ", rest=" " * (widths[0] + 6))


def _fact_lines(told: dict[str, list[str]]) -> Iterator[str]:
    for label in _SHARED:
        for sentence in told[label][:1]:
            yield from wrap(sentence, first=f"  {label}".ljust(16), rest=" " * 16)


def _time(table: ProbeTable) -> str:
    trials = [trial for _, result in table.fitting() for trial in result.trials]
    steps = sum(trial.steps for trial in trials)
    rows = f"{count(len(trials), 'trial', 'trials')} of {count(steps, 'call', 'calls')}"
    return f"{format_seconds(table.elapsed_s)}; the rows took {rows}"


def table_notes(table: ProbeTable) -> list[str]:
    """Return the notes of the table, and each of the rows' notes once, with the values of its rows unless it is all of them."""
    rows_of: dict[str, list[str]] = defaultdict(list)
    rows = list(table.fitting())
    for value, result in rows:
        for note in result.notes:
            rows_of[note].append(text_of_value(value))
    shared = [note for note, values in rows_of.items() if len(values) == len(rows)]
    own = (f"{table.axis}={', '.join(values)}: {note}" for note, values in rows_of.items() if note not in shared)
    return [*table.notes, *shared, *own]


def table_figure(table: ProbeTable) -> Figure:
    """Plot the batch size of each value, and below it its product with the value if that is a number."""
    products = [table.product(value) for value in table.rows]
    is_double = any(product is not None for product in products)
    figure = new_figure(3.4 if is_double else 2.2)
    axes = figure.subplots(2 if is_double else 1, 1, sharex=True, squeeze=False)[:, 0]
    _bars(axes[0], [None if one is None else one.batch_size for one in table.rows.values()], "batch size")
    if is_double:
        _bars(axes[1], products, f"batch x {table.axis}")
    names = [text_of_value(value) for value in table.rows]
    axes[-1].set_xticks(range(len(names)), names, rotation=0 if len(names) <= FEW else 90)
    axes[-1].set_xlabel(table.axis, fontsize=SMALL)
    return figure


def _bars(axes: Any, heights: list[float | None] | list[int | None], name: str) -> None:
    bars = axes.bar(range(len(heights)), [height or 0 for height in heights], color=DARK, width=0.6)
    labels = [
        "-" if height is None else f"{height:.12g}" if height < MILLION else f"{height:.3g}" for height in heights
    ]
    axes.bar_label(bars, labels, fontsize=SMALL - 1, rotation=0 if len(heights) <= FEW else 90)
    axes.set_ylim(
        0, max((height or 0 for height in heights), default=1) * (PADDING if len(heights) <= FEW else 1.3) or 1
    )
    axes.set_ylabel(name, fontsize=SMALL)
    axes.tick_params(labelsize=SMALL)
    axes.spines[["top", "right"]].set_visible(False)
