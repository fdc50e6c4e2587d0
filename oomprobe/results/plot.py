"""Plots of a result with matplotlib: memory and throughput against batch size, and the search."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oomprobe.errors import InvalidArgumentError
from oomprobe.ground.units import byte_unit, format_bytes
from oomprobe.ground.words import clean, clip
from oomprobe.records.axis import text_of_value
from oomprobe.records.epoch import EpochRecord
from oomprobe.records.files import write_file
from oomprobe.records.fit import LinearFit
from oomprobe.records.timeline import SegmentGaps, Timeline
from oomprobe.records.trials import Trial
from oomprobe.results.blocks import cell

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMN_INCHES = 3.5  # one column of a paper, or a phone
DARK, LIGHT, GREY = "#1b4f8a", "#e08a2e", "0.45"  # distinct in greyscale too
# What holds memory: colours for a light page and for a dark one.
HOLDERS = (
    "#3f6fb0", "#d07f2f", "#4b9a68", "#b6557c",
    "#8672c2", "#3b9fa6", "#bfa23c", "#8a8a8a",
)  # fmt: skip
KNEE_SHARE = 0.95  # the knee is the smallest batch with this share of the best rate
SMALL = 7  # font size in points
PADDING = 1.08
TITLE_WIDTH = 62  # characters of that size in a line
MOST_TITLE, MOST_NAME = 310, 40  # characters of a title, and of the name of an axis or a value
FEW = 8  # bars whose names fit beside each other
MILLION = 1e6  # numbers from here on are too long for a bar
# Of a trial: whether it passed, whether it was replayed, its marker and colour, and what they mean.
ENDS = (
    (True, False, "o", DARK, "ran"),
    (True, True, "o", DARK, "passed a replay"),
    (False, False, "x", "black", "failed"),
    (False, True, "x", GREY, "failed a replay"),
)
NO_FORMAT = "the plot {name}: let the name end in .png, .svg or .pdf"


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


def titled(figure: Figure, title: str, path: str | Path | None) -> Figure:
    """Return a figure with its title, and save it if there is a path."""
    figure.suptitle(textwrap.fill(_drawn(title, MOST_TITLE), TITLE_WIDTH), fontsize=SMALL)
    if path is not None:
        write_file(path, _rendered(figure, Path(path)))
    return figure


def _rendered(figure: Figure, path: Path) -> bytes:
    """Return the file of a figure, in the format of its suffix."""
    stream, kind = io.BytesIO(), path.suffix[1:].lower()
    if kind not in figure.canvas.get_supported_filetypes():
        raise InvalidArgumentError(NO_FORMAT.format(name=path.name))
    figure.savefig(stream, format=kind)
    return stream.getvalue()


def _drawn(text: str, most: int = MOST_NAME) -> str:
    """Return a text that can be drawn: the font has its letters, and dollars begin no formula."""
    return clip(clean(text), most).replace("$", r"\$")


def memory_figure(
    trials: Iterable[Trial],
    answer: int,
    fit: LinearFit | None,
    budget_bytes: int,
    available_bytes: int,
) -> Figure:
    """Plot peaks against batch size with budget and available memory, and throughput below if it was measured."""
    single = _without_accumulation(trials)
    timed = [trial for trial in single if trial.passed and trial.samples_per_s]
    if timed:
        figure = new_figure(4.4)
        memory, throughput = figure.subplots(2, 1, sharex=True, height_ratios=(5, 2))
        lowest = throughput
    else:
        figure = new_figure(3.2)
        memory = lowest = figure.subplots()
    capacity_bytes = max(available_bytes, budget_bytes)
    unit, factor = byte_unit(capacity_bytes)
    _draw_peaks(memory, single, capacity_bytes, factor)
    _draw_limit(memory, capacity_bytes, factor, "available", "-")
    if budget_bytes < capacity_bytes:
        _draw_limit(memory, budget_bytes, factor, "budget", ":")
    largest = max([answer, *(trial.batch_size for trial in single)])
    if fit is not None:
        ends = [fit.fixed_bytes, fit.fixed_bytes + fit.bytes_per_sample * largest]
        line = [end / factor for end in ends]
        memory.plot([0, largest], line, "--", color=GREY, linewidth=0.8, label="linear fit")
    memory.axvline(answer, color=GREY, linewidth=0.6)
    memory.annotate(
        f"batch {answer}", (answer, 0), xytext=(-2, 3), textcoords="offset points",
        fontsize=SMALL, rotation=90, ha="right", va="bottom",
    )  # fmt: skip
    memory.set_xlim(0, largest * PADDING)
    memory.set_ylim(0, capacity_bytes / factor * PADDING)
    _label(memory, f"memory ({unit})")
    if timed:
        _draw_throughput(throughput, timed)
    lowest.set_xlabel("batch size", fontsize=SMALL)
    _legend_below(figure, memory, columns=2)
    return figure


def epoch_figure(record: EpochRecord, cap_bytes: int) -> Figure:
    """Plot what all orders reserve over their calls: at the size of the largest batch, and at the answer.

    The order that dies first, or reserves the most, is thick; a cross is where an order dies.
    """
    sizes = {record.batch_size: (record.reserved, record.ends)}
    if record.longest_only_reserved:
        alone = record.longest_only_reserved, record.longest_only_ends
        sizes = {record.lowered_from: alone, **sizes}
    unit, factor = byte_unit(cap_bytes)
    figure = new_figure(0.7 + 1.7 * len(sizes))
    panels = [*figure.subplots(len(sizes), sharex=True, squeeze=False).flat]
    for axes, (size, (curves, ends)) in zip(panels, sizes.items(), strict=True):
        orders = sorted(
            zip(curves, ends, strict=False),
            key=lambda order: (-(order[1] or math.inf), max(order[0].reserved_bytes, default=0)),
        )
        style: dict[str, Any] = {"color": LIGHT, "linewidth": 0.4, "drawstyle": "steps-post"}
        deaths = []
        for number, (curve, end) in enumerate(orders, start=1):
            if number == len(orders):  # the hardest is the last, above all others
                style |= {"color": DARK, "linewidth": 1.2, "label": "the hardest order"}
            reserved = _divided(curve.reserved_bytes, factor)
            axes.plot(curve.calls, reserved, **style)
            if end is not None:
                deaths.append((end, reserved[-1]))
        _scatter(axes, deaths, "x", "black", "out of memory")
        _draw_limit(axes, cap_bytes, factor, "cap", "-")
        of_all = f"{len(deaths)} of {len(ends)} orders run out of memory"
        axes.set_title(f"batch {size}: {of_all}", fontsize=SMALL)
        axes.set_ylim(0, cap_bytes / factor * PADDING)
        _label(axes, f"reserved ({unit})")
    axes.set_xlabel("call", fontsize=SMALL)
    _legend_below(figure, panels[0], columns=2)
    return figure


def timeline_figure(timeline: Timeline, peak_bytes: int = 0) -> Figure:
    """Plot live memory over time, stacked by what held it, with reserved memory and the refusal."""
    live_bytes = map(sum, zip(*timeline.live_bytes.values(), strict=True))
    unit, factor = byte_unit(max([1, peak_bytes, *live_bytes, *timeline.reserved_bytes]))
    figure = new_figure(2.6 + 0.12 * len(timeline.live_bytes))
    axes = figure.subplots()
    events = _divided(timeline.events, 1)
    stacked = [_divided(sizes, factor) for sizes in timeline.live_bytes.values()]
    names = [_drawn(name[::-1])[::-1] for name in timeline.live_bytes]
    axes.stackplot(events, *stacked, labels=names, colors=HOLDERS)
    if timeline.reserved_bytes:
        reserved = _divided(timeline.reserved_bytes, factor)
        axes.plot(events, reserved, color="black", linewidth=0.8, label="reserved")
    if peak_bytes:
        _draw_limit(axes, peak_bytes, factor, "peak reserved", ":")
    if timeline.refused is not None:
        axes.axvline(
            timeline.refused, color="black", linewidth=0.8, linestyle="--", label="refused"
        )
    axes.set_xlabel("requests and frees", fontsize=SMALL)
    axes.margins(x=0)
    _label(axes, f"memory ({unit})")
    _legend_below(figure, axes, columns=1)
    return figure


def segments_figure(segments: Sequence[SegmentGaps]) -> Figure:
    """Plot segments as bars, and the gaps between their live blocks light."""
    sizes = [segment.size_bytes for segment in segments]
    unit, factor = byte_unit(max(sizes))
    figure = new_figure(0.8 + 0.12 * len(segments))
    axes = figure.subplots()
    axes.barh(range(len(sizes)), _divided(sizes, factor), color=DARK, label="live")
    rows, starts, widths = list[int](), list[float](), list[float]()
    for place, segment in enumerate(segments):
        for start, nbytes in zip(segment.starts, segment.gap_bytes, strict=False):
            rows.append(place)
            starts.append(start / factor)
            widths.append(nbytes / factor)
    axes.barh(rows, widths, left=starts, color=LIGHT, label="gaps")
    axes.set_yticks([])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel(f"segment ({unit})", fontsize=SMALL)
    _label(axes, "")
    _legend_below(figure, axes, columns=2)
    return figure


def _divided(numbers: Iterable[int], unit: int) -> list[float]:
    return [number / unit for number in numbers]


def _legend_below(figure: Figure, axes: Any, columns: int) -> None:
    figure.legend(
        *axes.get_legend_handles_labels(),
        loc="outside lower center", ncols=columns, fontsize=SMALL - 1, frameon=False,
    )  # fmt: skip


def bracket_figure(trials: Iterable[Trial], answer: int) -> Figure:
    """Plot the batch size of each trial in order, with the answer as a line."""
    figure = new_figure(2.2)
    from matplotlib.ticker import MaxNLocator

    axes = figure.subplots()
    single = _without_accumulation(trials)
    for passed, replayed, marker, colour, name in ENDS:
        points = []
        for number, trial in enumerate(single, 1):
            if (trial.passed, trial.replayed) == (passed, replayed):
                points.append((number, trial.batch_size))
        _scatter(axes, points, marker, colour, name, markerfacecolor="none" if replayed else colour)
    axes.axhline(answer, color=GREY, linewidth=0.8, linestyle="--")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:.0f}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlim(0.5, max(1, len(single)) + 0.5)
    _label(axes, "batch size")
    if single:
        axes.legend(loc="lower right", fontsize=SMALL - 1, frameon=False)
    axes.set_xlabel("trial", fontsize=SMALL)
    return figure


def values_figure(
    axis: str, sizes: Mapping[Any, int | None], products: Sequence[float | None]
) -> Figure:
    """Plot the batch size of each value of an axis, and below it its product with the value if any value is a number."""
    if set(products) <= {None}:
        figure = new_figure(2.2)
        lowest = figure.subplots()
        _bars(lowest, [*sizes.values()], "batch size")
    else:
        figure = new_figure(3.4)
        highest, lowest = figure.subplots(2, 1, sharex=True)
        _bars(highest, [*sizes.values()], "batch size")
        _bars(lowest, products, f"batch x {_drawn(axis)}")
    rotation = 0 if len(sizes) <= FEW else 90
    names = [_drawn(text_of_value(value)) for value in sizes]
    lowest.set_xticks(range(len(sizes)), names, rotation=rotation)
    lowest.set_xlabel(_drawn(axis), fontsize=SMALL)
    return figure


def bars_figure(
    sizes: Mapping[str, int | None], *, required: int | None, marked: str | None
) -> Figure:
    """Plot the batch size on each simulated card or with each saving, below one another.

    Those that run the required size are dark; a star is at the smallest or cheapest of them.
    """
    known = [size or 0 for size in sizes.values()]
    colours = [DARK if size >= (required or 0) else LIGHT for size in known]
    names = {name: _drawn(name.removeprefix("sim:")) for name in sizes}
    if marked is not None:
        names[marked] = f"* {names[marked]}"
    figure = new_figure(0.8 + 0.16 * len(sizes))
    axes = figure.subplots()
    bars = axes.barh([*names.values()], known, color=colours)
    label = "batch size"
    if required is not None:
        label += f" (light: less than {required})"
        axes.axvline(required, color="black", linewidth=0.8, linestyle=":")
    for text in axes.bar_label(bars, fontsize=SMALL - 1, padding=2):
        # Above the dotted line, so that both can be read.
        text.set(zorder=3, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6})
    axes.set_xlim(0, 1.15 * max(1, *known))
    axes.set_ylim(len(sizes) - 0.5, -0.5)
    axes.set_xlabel(label, fontsize=SMALL)
    _label(axes, "")
    return figure


def _without_accumulation(trials: Iterable[Trial]) -> list[Trial]:
    return [trial for trial in trials if trial.accumulation_steps == 1]


def _draw_peaks(axes: Any, trials: Iterable[Trial], capacity_bytes: int, factor: int) -> None:
    reserved, failed = [], []
    allocated: dict[bool, list[tuple[int, float]]] = {False: [], True: []}  # by `replayed`
    for trial in trials:
        size = trial.batch_size
        if not trial.passed:
            # What a failed size needed is unknown; it was more than its cap.
            failed.append((size, (trial.cap_bytes or capacity_bytes) / factor))
            continue
        if trial.peak_reserved_bytes is not None:
            reserved.append((size, trial.peak_reserved_bytes / factor))
        if trial.peak_allocated_bytes is not None:
            allocated[trial.replayed].append((size, trial.peak_allocated_bytes / factor))
    _scatter(axes, sorted(reserved), "s", LIGHT, "peak reserved", markerfacecolor="none")
    ran, replayed = map(sorted, allocated.values())
    _scatter(axes, ran, "o", DARK, "peak allocated")
    _scatter(axes, replayed, "o", DARK, "the same, replayed", markerfacecolor="none")
    _scatter(axes, failed, "x", "black", "failed, at its limit")


def _draw_limit(axes: Any, nbytes: int, factor: int, name: str, style: str) -> None:
    axes.axhline(
        nbytes / factor,
        color="black",
        linewidth=0.8,
        linestyle=style,
        label=f"{name} {format_bytes(nbytes)}",
    )


def _draw_throughput(axes: Any, timed: Sequence[Trial]) -> None:
    rates = {}
    for trial in timed:
        # The last trial of a size has the most steps.
        rates[trial.batch_size] = trial.samples_per_s or 0.0
    best = max(rates.values())
    axes.plot(
        *zip(*sorted(rates.items()), strict=True), "o-", color=DARK, markersize=3, linewidth=0.8
    )
    knee = min(size for size, speed in rates.items() if speed >= KNEE_SHARE * best)
    axes.axvline(knee, color=GREY, linewidth=0.8, linestyle="--")
    offset, side = 3, "left"
    if 2 * knee >= axes.get_xlim()[1]:  # to the right of the line, the text would leave the figure
        offset, side = -3, "right"
    axes.annotate(
        f"knee: batch {knee}, {100 * KNEE_SHARE:.0f} % of the best", (knee, 0), xytext=(offset, 3),
        textcoords="offset points", fontsize=SMALL - 1, va="bottom", ha=side,
    )  # fmt: skip
    axes.set_ylim(0, best * PADDING)
    _label(axes, "samples/s")


def _bars(axes: Any, heights: Sequence[float | None], name: str) -> None:
    known = [height or 0 for height in heights]
    bars = axes.bar(range(len(known)), known, color=DARK, width=0.6)
    rotation, padding = 0, PADDING
    if len(heights) > FEW:
        rotation, padding = 90, 1.3  # room for numbers that stand on end
    texts = [cell(height, lambda h: f"{h:.{12 if h < MILLION else 3}g}") for height in heights]
    axes.bar_label(bars, texts, fontsize=SMALL - 1, rotation=rotation)
    axes.set_ylim(0, max(known) * padding or 1)
    _label(axes, name)


def _scatter(
    axes: Any,
    points: Sequence[tuple[float, float]],
    marker: str,
    colour: str,
    name: str,
    **style: str,
) -> None:
    if not points:
        return
    axes.plot(*zip(*points, strict=True), marker, color=colour, markersize=4, label=name, **style)


def _label(axes: Any, name: str) -> None:
    axes.set_ylabel(name, fontsize=SMALL)
    axes.tick_params(labelsize=SMALL)
    axes.spines[["top", "right"]].set_visible(False)
