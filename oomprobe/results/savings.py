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

if TYPE_CHECKING:
    from oomprobe.results.result import ProbeResult

Results = Mapping[str, "ProbeResult | None"]

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


def cheapest(rows: Results, batch_size: int, *, same_numbers: bool) -> str | None:
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


def verdict_of_savings(rows: Results, compared: Comparison) -> str:
    """Name the cheapest saving that runs the required size; of an open table, the one with the largest size."""
    size = compared.batch_size
    if compared.required:
        return _cheapest(rows, size, same_numbers=False)
    answers = {name: result.batch_size for name, result in rows.items() if result is not None}
    if not answers:
        return "nothing fits, with any saving"
    best = max(answers, key=answers.__getitem__)
    if best == AS_IS:
        return f"batch {size} as is, and no saving runs more"
    return f"batch {answers.get(AS_IS, 'none')} as is, and {answers[best]} with {best}"


def _cheapest(rows: Results, size: int, *, same_numbers: bool) -> str:
    name = cheapest(rows, size, same_numbers=same_numbers)
    same = ""
    if same_numbers:
        same = WITH_SAME
    if name is None:
        return NONE_RUNS.format(size=size, same=same)
    return CHEAPEST.format(size=size, same=same, name=clean(name))


def blocks_of_savings(rows: Results, compared: Comparison) -> Iterator[Block]:
    """Yield the table, what to type for each saving, and where each acts if that was recorded."""
    yield Block(
        f"peaks at batch {compared.batch_size}, and the largest batch",
        _rows_of_savings(rows, compared),
        RULE,
    )
    yield Block(
        "what to type:",
        [
            f"{name} ({numbers_of((name,))}): {', then '.join(text.splitlines())}"
            for name, text in compared.typed.items()
        ],
    )
    yield Block("not run:", [f"{name}: {reason}" for name, reason in compared.not_run.items()])
    parts = {}
    for name, result in rows.items():
        breakdown = getattr(result, "breakdown", None)
        if breakdown is not None and breakdown.batch_size == compared.batch_size:
            parts[name] = breakdown.parts
    if len(parts) > 1:
        yield Block(f"where they act, at batch {compared.batch_size}:", _parts_of_rows(parts))


def _rows_of_savings(rows: Results, compared: Comparison) -> Table:
    size, marked = compared.batch_size, cheapest(rows, compared.batch_size, same_numbers=False)
    heads, cells = measured_columns(
        HEADS, [_cells_of_saving(rows, name, compared) for name in rows], always=3
    )
    lines = []
    for name, line in zip(rows, cells, strict=True):
        kind, remark = "passed", ""
        if rows[name] is None:
            kind = "failed"
        elif name == marked:
            kind = "answer"
        if raises_the_peak(rows, name, size):
            remark = RAISES
        lines.append(Row(cells=line, kind=kind, remark=remark))
    foot = [_cheapest(rows, size, same_numbers=False), _cheapest(rows, size, same_numbers=True)]
    if marked is None:
        foot.append(ACCUMULATE.format(size=size))
    return Table(heads=heads, rows=lines, texts={0}, marks=True, clips=False, foot=foot)


def _cells_of_saving(rows: Results, name: str, compared: Comparison) -> list[str]:
    result, trial = rows[name], trial_at(rows[name], compared.batch_size)
    largest = cell(getattr(result, "batch_size", None))
    if PART.fullmatch(name):  # which has run this size alone
        largest = f">= {largest}"
    recomputed = cell(compared.recomputed.get(name) or None, "{:.0%}".format)
    if trial is None or not trial.passed:
        failed = getattr(trial, "verdict", compared.failed.get(name, Verdict.OOM))
        return [name, failed, UNKNOWN, UNKNOWN, largest, UNKNOWN, UNKNOWN, recomputed, UNKNOWN]
    difference = UNKNOWN
    before_bytes = _peak_at(rows.get(AS_IS), compared.batch_size)
    now_bytes = _peak_at(result, compared.batch_size)
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
