"""Plots of a result with matplotlib: memory and throughput against batch size, and the search."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oomprobe.errors import InvalidArgumentError
from oomprobe.ground.units import byte_unit, format_bytes
from oomprobe.records.axis import CARDS, text_of_value
from oomprobe.records.result import ProbeResult
from oomprobe.records.table import ProbeTable
from oomprobe.records.trials import Trial

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMN_INCHES = 3.5  # one column of a paper, or a phone
DARK, LIGHT, GREY = "#1b4f8a", "#e08a2e", "0.45"  # distinct in greyscale too
KNEE_SHARE = 0.95  # the knee is the smallest batch with this share of the best rate
SMALL = 7  # font size in points
PADDING = 1.08
FEW = 8  # bars whose names fit beside each other
MILLION = 1e6  # numbers from here on are too long for a bar


def new_figure(height_inches: float) -> Figure:
    """Make an empty figure without pyplot, whose state is global."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidArgumentError("plots need matplotlib: pip install 'oomprobe[plot]'") from None

    class ProbeFigure(Figure):
        """A figure that a notebook shows, also without ``%matplotlib inline``."""

        def _repr_png_(self) -> bytes:
            stream = io.BytesIO()
            self.savefig(stream, format="png")
            return stream.getvalue()

    return ProbeFigure(figsize=(COLUMN_INCHES, height_inches), layout="constrained", dpi=200)


def saved(figure: Figure, path: str | Path | None) -> Figure:
    """Return a figure, and save it if there is a path."""
    if path is not None:
        figure.savefig(path)
    return figure


def result_figure(result: ProbeResult) -> Figure:
    """Plot peaks against batch size with budget and available memory, and throughput below if it was measured."""
    timed = [t for t in _plain(result) if t.passed and t.samples_per_s]
    figure = new_figure(4.4 if timed else 3.2)
    parts = figure.subplots(1 + bool(timed), 1, sharex=True, squeeze=False, height_ratios=(5, 2) if timed else (1,))[
        :, 0
    ]
    _draw_memory(parts[0], result)
    if timed:
        _draw_throughput(parts[1], timed)
    parts[-1].set_xlabel("batch size", fontsize=SMALL)
    return figure


def bracket_figure(result: ProbeResult) -> Figure:
    """Plot the batch size of each trial in order, with the answer as a line."""
    figure = new_figure(2.2)
    from matplotlib.ticker import MaxNLocator

    axes = figure.subplots()
    trials = _plain(result)
    _scatter(axes, [(n, t.batch_size) for n, t in enumerate(trials, 1) if t.passed], "o", DARK, "ran")
    _scatter(axes, [(n, t.batch_size) for n, t in enumerate(trials, 1) if not t.passed], "x", "black", "failed")
    axes.axhline(result.batch_size, color=GREY, linewidth=0.8, linestyle="--")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:.0f}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlim(0.5, len(trials) + 0.5)
    _label(axes, "batch size")
    axes.legend(loc="lower right", fontsize=SMALL - 1, frameon=False)
    axes.set_xlabel("trial", fontsize=SMALL)
    return figure


def table_figure(table: ProbeTable) -> Figure:
    """Plot the batch size of each value, and below it its product with the value if that is a number; cards below one another."""
    if table.axis == CARDS:
        return _cards_figure(table)
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


def _cards_figure(table: ProbeTable) -> Figure:
    sizes = {str(name).removeprefix("sim:"): 0 if one is None else one.batch_size for name, one in table.rows.items()}
    figure = new_figure(0.8 + 0.16 * len(sizes))
    axes = figure.subplots()
    smallest = table.smallest()
    colours = [DARK if name == smallest else LIGHT for name in table.rows] if smallest else DARK
    axes.bar_label(axes.barh(list(sizes), list(sizes.values()), color=colours), fontsize=SMALL - 1, padding=2)
    if table.required is not None:
        axes.axvline(table.required, color="black", linewidth=0.8, linestyle=":")
    axes.set_xlim(0, 1.15 * max(1, *sizes.values()))
    axes.set_ylim(len(sizes) - 0.5, -0.5)
    axes.tick_params(labelsize=SMALL)
    axes.set_xlabel("batch size" if table.required is None else f"batch size; dotted: {table.required}", fontsize=SMALL)
    return figure


def _plain(result: ProbeResult) -> list[Trial]:
    return [trial for trial in result.trials if trial.accumulation_steps == 1]


def _draw_memory(axes: Any, result: ProbeResult) -> None:
    trials = _plain(result)
    capacity_bytes = max(result.available_bytes, result.budget_bytes)
    unit, factor = byte_unit(capacity_bytes)

    def points(name: str) -> list[tuple[float, float]]:
        peaks = ((t.batch_size, getattr(t, name)) for t in trials if t.passed)
        return sorted((size, peak / factor) for size, peak in peaks if peak is not None)

    _scatter(axes, points("peak_reserved_bytes"), "s", LIGHT, "peak reserved")
    _scatter(axes, points("peak_allocated_bytes"), "o", DARK, "peak allocated")
    # What a failed size needed is unknown; it was more than its cap.
    failed = [(t.batch_size, (t.cap_bytes or capacity_bytes) / factor) for t in trials if not t.passed]
    _scatter(axes, failed, "x", "black", "failed, at its limit")
    for nbytes, style, name in ((capacity_bytes, "-", "available"), (result.budget_bytes, ":", "budget")):
        if name == "available" or nbytes < capacity_bytes:
            label = f"{name} {format_bytes(nbytes)}"
            axes.axhline(nbytes / factor, color="black", linewidth=0.8, linestyle=style, label=label)
    largest = max(trial.batch_size for trial in trials)
    if result.fit is not None:
        ends = [0, largest]
        peaks = [(result.fit.fixed_bytes + result.fit.bytes_per_sample * size) / factor for size in ends]
        label = f"line, not used (off by {100 * min(result.fit.max_relative_error, 10):.1f} %)"
        axes.plot(ends, peaks, "--", color=GREY, linewidth=0.8, label=label)
    axes.axvline(result.batch_size, color=GREY, linewidth=0.6)
    axes.annotate(
        f"batch {result.batch_size}", (result.batch_size, 0), xytext=(-2, 3), textcoords="offset points",
        fontsize=SMALL, rotation=90, ha="right", va="bottom",
    )  # fmt: skip
    axes.set_xlim(0, largest * PADDING)
    axes.set_ylim(0, capacity_bytes / factor * PADDING)
    _label(axes, f"memory ({unit})")
    axes.figure.legend(
        *axes.get_legend_handles_labels(), loc="outside upper center", ncols=2, fontsize=SMALL - 1, frameon=False
    )


def _draw_throughput(axes: Any, timed: Sequence[Trial]) -> None:
    rates = {t.batch_size: t.samples_per_s or 0.0 for t in timed}  # the last trial of a size has the most steps
    axes.plot(*zip(*sorted(rates.items()), strict=True), "o-", color=DARK, markersize=3, linewidth=0.8)
    knee = min(size for size, speed in rates.items() if speed >= KNEE_SHARE * max(rates.values()))
    axes.axvline(knee, color=GREY, linewidth=0.8, linestyle="--")
    is_left = 2 * knee < axes.get_xlim()[1]  # otherwise the text would leave the figure
    axes.annotate(
        f"knee: batch {knee}, {100 * KNEE_SHARE:.0f} % of the best", (knee, 0), xytext=(3 if is_left else -3, 3),
        textcoords="offset points", fontsize=SMALL - 1, va="bottom", ha="left" if is_left else "right",
    )  # fmt: skip
    axes.set_ylim(0, max(rates.values()) * PADDING)
    _label(axes, "samples/s")


def _bars(axes: Any, heights: Sequence[float | None], name: str) -> None:
    known, is_crowded = [height or 0 for height in heights], len(heights) > FEW
    bars = axes.bar(range(len(known)), known, color=DARK, width=0.6)
    texts = ["-" if height is None else f"{height:.{12 if height < MILLION else 3}g}" for height in heights]
    axes.bar_label(bars, texts, fontsize=SMALL - 1, rotation=90 if is_crowded else 0)
    axes.set_ylim(0, max(known, default=1) * (1.3 if is_crowded else PADDING) or 1)
    _label(axes, name)


def _scatter(axes: Any, points: Sequence[tuple[float, float]], marker: str, colour: str, name: str) -> None:
    if points:
        filled = {} if marker == "x" else {"markerfacecolor": "none" if marker == "s" else colour}
        axes.plot(*zip(*points, strict=True), marker, color=colour, markersize=4, label=name, **filled)


def _label(axes: Any, name: str) -> None:
    axes.set_ylabel(name, fontsize=SMALL)
    axes.tick_params(labelsize=SMALL)
    axes.spines[["top", "right"]].set_visible(False)
