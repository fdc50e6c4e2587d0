"""Kinds of tables and what their reports show: rows for values of an argument, or for cards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from oomprobe.ground.units import format_bytes
from oomprobe.ground.words import clean, count, rate
from oomprobe.records.axis import CARDS, magnitude, text_of_value
from oomprobe.records.trials import last_of
from oomprobe.results.blocks import UNKNOWN, Block, Row, Table, cell, measured_columns
from oomprobe.results.plot import bars_figure, values_figure
from oomprobe.results.result import ProbeResult, within

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Results = Mapping[Any, ProbeResult | None]

REPLAYED = "replay: the step ran on a larger card of the kind, and its allocations were replayed on this one"


class OfValues:
    """A table with a row for each value of an argument of the step.

    Attributes:
        has_names: Whether texts name the rows, each of which has notes with figures of its own.
        size: The batch size that must run; None if none is required.
        chosen: The smallest card or the cheapest saving that runs this size; None without any.
    """

    has_names = False
    size: int | None = None
    chosen: Any = None

    def __init__(self, axis: str, rows: Results, unfit: Mapping[Any, str]) -> None:
        self._axis, self._rows, self._unfit = axis, rows, unfit
        self._fitting = [(value, result) for value, result in rows.items() if result is not None]
        self._sizes = {value: result.batch_size for value, result in self._fitting}

    def verdict(self) -> str:
        """Return how many values fit."""
        values = count(len(self._rows), "value", "values")
        verdict = f"{len(self._fitting)} of {values} of {self._axis} fit"
        if not self._fitting:
            return verdict
        return within(self._fitting[-1][1], verdict)

    def blocks(self) -> Iterable[Block]:
        """Yield the rows, and what explains them."""
        yield Block("", self._table())

    def draw(self) -> Figure:
        """Return a figure of the batch sizes."""
        return values_figure(self._axis, dict.fromkeys(self._rows) | self._sizes, self._products())

    def to_paste(self) -> list[str]:
        """Return what a user pastes."""
        return [f"batch_sizes = {self._sizes}"]

    def _products(self) -> list[float | None]:
        return [product(value, result) for value, result in self._rows.items()]

    def _table(self) -> Table:
        axis, products = clean(self._axis), self._products()
        largest = max(filter(None, products), default=0)
        is_of_ranks = any(result.world_size > 1 for _, result in self._fitting)
        batch = "batch per rank" if is_of_ranks else "batch"
        heads, cells = measured_columns(
            [axis, batch, "alone", f"batch x {axis}", "reserved", "of budget", "samples/s"],
            [self._cells_of(value) for value in self._rows],
            always=2,
        )
        rows = []
        for value, row, of_row in zip(self._rows, cells, products, strict=True):
            rows.append(self._row_of(value, row, is_answer=of_row == largest))
        foot = []
        if largest:
            foot.append(f"* largest batch x {axis}: {largest:.12g}")
        foot += self._of_epoch()
        return Table(heads=heads, rows=rows, marks=True, clips=False, foot=foot)

    def _of_epoch(self) -> list[str]:
        """Say how the batch sizes train with all values in turn; nothing without an epoch."""
        records = [result.epoch for _, result in self._fitting if result.epoch is not None]
        if not records:
            return []
        (first, *_), axis = records, clean(self._axis)
        if first.deaths is None:
            return [f"alone: no epoch could be replayed: {first.reason}"]
        orders = f"{first.deaths} of {len(first.ends)} orders that mix all values of {axis}"
        foot = [f"with these batch sizes {orders} run out of memory"]
        if any(record.longest_only_batch_size != record.batch_size for record in records):
            foot.append(f"alone: the largest for training with one {axis} only")
        return foot

    def _row_of(self, value: Any, cells: Sequence[str], *, is_answer: bool) -> Row:
        kind = "answer" if is_answer else "passed"
        if self._rows[value] is None:
            kind = "failed"
        return Row(cells=cells, remark=self._unfit.get(value, ""), kind=kind)

    def _cells_of(self, value: Any) -> list[str]:
        name, result = text_of_value(value), self._rows[value]
        if result is None:
            return [name, *[UNKNOWN] * 6]
        answer = last_of(result.trials, result.batch_size)
        alone, share = None, None
        if result.epoch is not None and result.epoch.longest_only_batch_size != result.batch_size:
            alone = result.epoch.longest_only_batch_size
        if answer.peak_reserved_bytes is not None and result.budget_bytes:
            share = answer.peak_reserved_bytes / result.budget_bytes
        return [
            name,
            str(result.batch_size),
            cell(alone),
            cell(product(value, result), "{:.12g}".format),
            cell(answer.peak_reserved_bytes, format_bytes),
            cell(share, _percent),
            cell(answer.samples_per_s, rate),
        ]


class OfCards(OfValues):
    """A table with a row for each simulated card; see `OfValues`."""

    has_names = True

    def __init__(self, rows: Results, unfit: Mapping[Any, str], required: int | None) -> None:
        super().__init__(CARDS, rows, unfit)
        self.size, self.chosen = required, None
        if required is not None:
            able = [name for name in self._by_memory() if self._sizes.get(name, 0) >= required]
            self.chosen = next(iter(able), None)

    def verdict(self) -> str:
        """Name the smallest card that runs the required size; without one, the range of answers."""
        sizes, cards = self._sizes, count(len(self._rows), "card", "cards")
        if self.size is not None:
            able = [size for size in sizes.values() if size >= self.size]
            verdict = f"batch {self.size} runs on {len(able)} of {cards}"
            if not able:
                return verdict
            return f"{verdict}; the smallest is {self.chosen}"
        verdict = f"the step fits on {len(sizes)} of {cards}"
        if not sizes:
            return verdict
        least, most = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
        return f"{verdict}: from {sizes[least]} ({least}) to {sizes[most]} ({most})"

    def draw(self) -> Figure:
        """Return a figure of the batch sizes."""
        sizes = dict.fromkeys(self._by_memory()) | self._sizes
        return bars_figure(sizes, required=self.size, marked=self.chosen)

    def to_paste(self) -> list[str]:
        """Return the command that probes on the chosen card."""
        card = self._rows.get(self.chosen)
        if card is None:
            return []
        target = card.environment.get("target") or "train.py:build"
        return [f"oomprobe run {target} --device {self.chosen}"]

    def _by_memory(self) -> list[Any]:
        """Return the cards, the smallest first; before them those on which nothing fits."""
        rows = self._rows
        return sorted(rows, key=lambda name: getattr(rows[name], "available_bytes", 0))

    def _table(self) -> Table:
        heads = ["card", "batch", "memory", "reserved", "of memory", "answer"]
        rows, has_replays = [], False
        for name in self._by_memory():
            result, cells = self._rows[name], [name, *[UNKNOWN] * 5]
            if result is not None:
                has_replays |= result.was_replayed
                _, peak_bytes = last_of(result.trials, result.batch_size).peaks
                share = peak_bytes / max(1, result.available_bytes)
                cells = [
                    *(name, str(result.batch_size), format_bytes(result.available_bytes)),
                    *(format_bytes(peak_bytes), _percent(share)),
                    "replay" if result.was_replayed else "ran",
                ]
            if self.size is not None:
                cells.insert(-1, "yes" if self._sizes.get(name, 0) >= self.size else "no")
            rows.append(self._row_of(name, cells, is_answer=name == self.chosen))
        if self.size is not None:
            heads.insert(-1, f"runs {self.size}")
        foot = []
        if self.chosen is not None:
            foot.append(f"* the smallest card that runs batch {self.size}")
        if has_replays:
            foot.append(REPLAYED)
        return Table(
            heads=heads, rows=rows, texts={0, len(heads) - 1}, marks=True, clips=False, foot=foot
        )


def product(value: object, result: ProbeResult | None) -> float | None:
    """Return a value times its batch size; None if it does not fit or is no number."""
    size = magnitude(value)
    if result is None or size is None:
        return None
    return size * result.batch_size


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
