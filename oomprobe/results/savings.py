"""What a table of savings shows: peaks at one size, the largest size, what each costs, and the cheapest that runs the size."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from oomprobe.ground.units import format_bytes, format_seconds
from oomprobe.ground.words import clean, rate
from oomprobe.records.breakdown import KINDS
from oomprobe.records.savings import (
    AS_IS,
    AXIS,
    OFFLOAD,
    PART,
    SAME,
    Comparison,
    cost,
    names_in,
    numbers_of,
    saving_of,
)
from oomprobe.records.trials import Trial, Verdict
from oomprobe.results.blocks import UNKNOWN, Block, Row, Table, cell, measured_columns
from oomprobe.results.kinds import OfValues, Results
from oomprobe.results.plot import bars_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from oomprobe.results.result import ProbeResult

HEADS = (
    "saving",
    "allocated",
    "reserved",
    "difference",
    "largest",
    "step",
    "samples/s",
    "recomputed",
    "pinned",
)
RAISES = "raises the peak, so it saves nothing here"
RULE = (
    "the cheapest first: on a card by the time of a step; else settings and kernels, then what "
    "computes less again, then what takes less pinned memory for copies"
)
CHEAPEST = "the cheapest that runs batch {size}{same}: {name}"
NONE_RUNS = "none that was run runs batch {size}{same}"
ACCUMULATE = "global_batch={size} (--global-batch {size}) plans and runs it as smaller batches that accumulate"

WITH_SAME = " with the same numbers"


def last_run(trials: Sequence[Trial], batch_size: int) -> Trial | None:
    """Return the last trial that ran a size, and did not only replay it; None if there is none."""
    ran = None
    for trial in trials:
        if trial.batch_size == batch_size and trial.accumulation_steps == 1 and not trial.replayed:
            ran = trial
    return ran


def trial_at(result: ProbeResult | None, batch_size: int) -> Trial | None:
    """Return the last trial of a result that ran a size; None if it was not run."""
    if result is None:
        return None
    return last_run(result.trials, batch_size)


def _peak_at(result: ProbeResult | None, batch_size: int) -> int | None:
    """Return the memory that a size took; None if it was not run, or did not run."""
    trial = trial_at(result, batch_size)
    if trial is None or not trial.passed:
        return None
    return trial.peak_reserved_bytes or trial.peak_allocated_bytes


def runs(result: ProbeResult | None, batch_size: int) -> bool:
    """Return whether a size ran, or at least a larger one."""
    trial = trial_at(result, batch_size)
    if trial is not None:
        return trial.passed
    return result is not None and result.batch_size >= batch_size


def from_the_cheapest(rows: Results, compared: Comparison) -> list[str]:
    """Return the rows in the order of what they cost, as RULE says it."""

    def cost_of(name: str) -> tuple[Any, ...]:
        saving, trial = names_in(name), trial_at(rows[name], compared.batch_size)
        copies = OFFLOAD in map(saving_of, saving)
        step_s = getattr(trial, "step_s", None) or math.inf
        copied_bytes = getattr(trial, "pinned_bytes", None) or 0
        recomputed = compared.recomputed.get(name, 0.0)
        return (name != AS_IS, step_s, copies, copied_bytes, recomputed, cost(saving))

    return sorted(rows, key=cost_of)


def cheapest(rows: Results, batch_size: int, *, same_numbers: bool) -> Any:
    """Return the first row that runs a size; `same_numbers`: of those that do not change what training computes."""
    for name, result in rows.items():
        if same_numbers and numbers_of(names_in(name)) != SAME:
            continue
        if runs(result, batch_size):
            return name
    return None


def raises_the_peak(rows: Results, name: str, batch_size: int) -> bool:
    """Return whether a saving takes more memory than the step does without it: at one size or, where that does not run, in the answer."""
    without, with_it = rows.get(AS_IS), rows[name]
    if without is None or with_it is None:
        return False
    least_bytes, bytes_with_it = _peak_at(without, batch_size), _peak_at(with_it, batch_size)
    if least_bytes is None:
        return with_it.batch_size < without.batch_size
    return bytes_with_it is None or bytes_with_it > least_bytes


class OfSavings(OfValues):
    """A table with a row for each saving of memory; see `OfValues`."""

    has_names = True

    def __init__(self, rows: Results, compared: Comparison) -> None:
        super().__init__(AXIS, rows, {})
        self._compared, self._at = compared, compared.batch_size
        self._cheapest = cheapest(rows, self._at, same_numbers=False)
        if compared.required:
            self.size, self.chosen = self._at, self._cheapest

    def verdict(self) -> str:
        """Name the cheapest saving that runs the required size, or the one with the largest."""
        if self._compared.required:
            return self._named(self._cheapest)
        sizes = self._sizes
        if not sizes:
            return "nothing fits, with any saving"
        best = max(sizes, key=sizes.__getitem__)
        if best == AS_IS:
            return f"batch {self._at} as is, and no saving runs more"
        return f"batch {sizes.get(AS_IS, 'none')} as is, and {sizes[best]} with {best}"

    def blocks(self) -> Iterator[Block]:
        """Yield the rows, what to type for each saving, and where each acts if recorded."""
        compared = self._compared
        title = f"peaks at batch {self._at}, and the largest batch"
        yield Block(title, self._table(), RULE)
        typed = []
        for name, text in compared.typed.items():
            typed.append(f"{name} ({numbers_of((name,))}): {', then '.join(text.splitlines())}")
        yield Block("what to type:", typed)
        yield Block("not run:", [f"{name}: {reason}" for name, reason in compared.not_run.items()])
        parts = {}
        for name, result in self._fitting:
            if result.breakdown is not None and result.breakdown.batch_size == self._at:
                parts[name] = result.breakdown.parts
        if len(parts) > 1:
            yield Block(f"where they act, at batch {self._at}:", _parts_of_rows(parts))

    def draw(self) -> Figure:
        """Return a figure of the batch sizes."""
        sizes = dict.fromkeys(self._rows) | self._sizes
        return bars_figure(sizes, required=self._at, marked=self._cheapest)

    def to_paste(self) -> list[str]:
        """Return the lines that turn the cheapest saving on."""
        return [*filter(None, map(self._compared.typed.get, names_in(self._cheapest or AS_IS)))]

    def _named(self, name: str | None, same: str = "") -> str:
        if name is None:
            return NONE_RUNS.format(size=self._at, same=same)
        return CHEAPEST.format(size=self._at, same=same, name=clean(name))

    def _table(self) -> Table:
        rows = self._rows
        heads, cells = measured_columns(HEADS, [self._cells_of(name) for name in rows], always=3)
        lines = []
        for name, line in zip(rows, cells, strict=True):
            kind, remark = "passed", ""
            if rows[name] is None:
                kind = "failed"
            elif name == self._cheapest:
                kind = "answer"
            if raises_the_peak(rows, name, self._at):
                remark = RAISES
            lines.append(Row(cells=line, kind=kind, remark=remark))
        same = cheapest(rows, self._at, same_numbers=True)
        foot = [self._named(self._cheapest), self._named(same, WITH_SAME)]
        if self._cheapest is None:
            foot.append(ACCUMULATE.format(size=self._at))
        return Table(heads=heads, rows=lines, texts={0}, marks=True, clips=False, foot=foot)

    def _cells_of(self, name: str) -> list[str]:
        rows, compared = self._rows, self._compared
        result, trial = rows[name], trial_at(rows[name], self._at)
        largest = cell(getattr(result, "batch_size", None))
        if PART.fullmatch(name):  # which has run this size alone
            largest = f">= {largest}"
        recomputed = cell(compared.recomputed.get(name) or None, "{:.0%}".format)
        if trial is None or not trial.passed:
            failed = getattr(trial, "verdict", compared.failed.get(name, Verdict.OOM))
            return [name, failed, UNKNOWN, UNKNOWN, largest, UNKNOWN, UNKNOWN, recomputed, UNKNOWN]
        difference = UNKNOWN
        before_bytes, now_bytes = _peak_at(rows.get(AS_IS), self._at), _peak_at(result, self._at)
        if name != AS_IS and before_bytes and now_bytes:
            sign = "" if now_bytes < before_bytes else "+"
            difference = f"{sign}{format_bytes(now_bytes - before_bytes)}"
        return [
            name,
            cell(trial.peak_allocated_bytes, format_bytes),
            cell(trial.peak_reserved_bytes, format_bytes),
            difference,
            largest,
            cell(trial.step_s, format_seconds),
            cell(trial.samples_per_s, rate),
            recomputed,
            cell(trial.pinned_bytes or None, format_bytes),
        ]


def _parts_of_rows(parts: Mapping[str, Mapping[str, int]]) -> Table:
    """Return the memory by kind in each row, of the kinds that are not the same in all."""
    kinds = []
    for kind in KINDS:
        if len({by_kind.get(kind, 0) for by_kind in parts.values()}) > 1:
            kinds.append(kind)
    heads = ["saving", *(kind.removesuffix(" temporaries") for kind in kinds)]
    lines = []
    for name, by_kind in parts.items():
        lines.append(Row(cells=[name, *(format_bytes(by_kind.get(kind, 0)) for kind in kinds)]))
    return Table(heads=heads, rows=lines, texts={0}, clips=False)
