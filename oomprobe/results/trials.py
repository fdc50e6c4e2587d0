"""The table of trials, and one trial as a line."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

from oomprobe.ground.units import byte_unit, format_bytes, format_seconds
from oomprobe.ground.words import WIDTH, clean, clip, count, rate, shortened
from oomprobe.records.trials import SECOND_OPINIONS, Phase, Trial
from oomprobe.results.blocks import Block, Row, Table, block_lines, cell, measured_columns

TEXT_COLUMNS = ("phase", "verdict", "step name")  # all others hold numbers
FEW = 12  # trials that a brief table has room for
LEFT_OUT = "  ... {left_out} of {all} trials left out; all are in result.trials, the JSON, the page, and with --verbose"
ABOVE_FAILURE = "tried although {size} failed: fragmentation can fail a size and spare a larger one"


def trials_table(trials: Iterable[Trial]) -> str:
    """Render trials as a table, each followed by a line with its remarks, if any; no final newline."""
    return "\n".join(block_lines(trials_block(trials)))


def trials_block(
    trials: Iterable[Trial], answer: int | None = None, *, mentioned: Container[int] | None = None
) -> Block:
    """Return the table of trials; it omits columns that no trial measured.

    With `mentioned`, sizes that other parts of the report mention, a long table has only the trials that decide.
    """
    trials = tuple(trials)
    if not trials:
        return Block("", "no trial was run")
    kept: Sequence[int] = range(len(trials))
    if mentioned is not None:
        kept = _deciding(trials, mentioned)
    unit, heads, cells = _cells_of_trials(trials)
    rows = []
    for place, remark in zip(kept, _remarks_once(trials, kept), strict=True):
        rows.append(Row(cells=cells[place], remark=remark, kind=_kind(trials[place], answer)))
    foot = []
    if len(kept) < len(trials):
        foot.append(LEFT_OUT.format(left_out=len(trials) - len(kept), all=len(trials)))
    texts = {place for place, head in enumerate(heads) if head in TEXT_COLUMNS}
    caption = f"memory in {unit}; '-': not measured, or no cap; each kind of error is shown once"
    return Block("trials", Table(heads=heads, rows=rows, texts=texts, foot=foot), caption)


def _kind(trial: Trial, answer: int | None) -> str:
    if not trial.passed:
        return "failed"
    if trial.batch_size == answer and trial.phase is Phase.CONFIRM:
        return "answer"
    return "passed"


def _deciding(trials: Sequence[Trial], mentioned: Container[int]) -> list[int]:
    """Return the places of the trials that decide, and of others as far as there is room, the last that grew first.

    The first of each verdict, second opinions and all sizes that the report mentions decide. The look is the last that grew.
    """
    seen = set[str]()
    deciding, grown, rest = list[int](), list[int](), list[int]()
    for place, trial in enumerate(trials):
        is_first = trial.verdict not in seen
        seen.add(trial.verdict)
        if is_first or trial.phase in SECOND_OPINIONS or trial.batch_size in mentioned:
            deciding.append(place)
        elif trial.phase is Phase.GROW:
            grown.append(place)
        else:
            rest.append(place)
    room = max(1, FEW - len(deciding))
    return sorted([*deciding, *[*reversed(grown), *reversed(rest)][:room]])


def _cells_of_trials(trials: Sequence[Trial]) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
    """Return the unit of memory, the heads of the columns that a trial measured, and the cells of each trial."""
    figures = ("peak_allocated_bytes", "peak_reserved_bytes", "cap_bytes")
    largest = max(getattr(trial, name) or 0 for trial in trials for name in figures)
    unit, factor = byte_unit(largest)
    digits = 2 if factor > 1 else 0

    def memory(nbytes: int) -> str:
        return f"{nbytes / factor:.{digits}f}"

    columns: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
        ("batch", "batch_size", str),
        ("phase", "phase", str),
        ("verdict", "verdict", str),
        ("steps", "steps", str),
        ("allocated", "peak_allocated_bytes", memory),
        ("reserved", "peak_reserved_bytes", memory),
        ("cap", "cap_bytes", memory),
        ("time/step", "step_s", format_seconds),
        ("samples/s", "samples_per_s", rate),
        ("step name", "step_name", clean),
    )
    rows = []
    for trial in trials:
        cells = {head: cell(getattr(trial, name), write) for head, name, write in columns}
        if trial.replayed:
            cells["steps"] = "replay"
        rows.append([*cells.values()])
    return unit, *measured_columns([head for head, _, _ in columns], rows, always=4)


def _remarks_once(trials: Sequence[Trial], kept: Sequence[int]) -> list[str]:
    """Return the remarks on each trial that is kept; what explains several trials stands at the first of them."""
    remarks, said, failed = [], set[str](), set[int]()
    for place, trial in enumerate(trials):
        smallest = min(failed, default=trial.batch_size)
        if trial.passed:
            failed.discard(trial.batch_size)
        else:
            failed.add(trial.batch_size)
        if place not in kept:
            continue
        parts = _remarks(trial)
        is_above = trial.phase is Phase.BISECT and smallest < trial.batch_size
        if is_above and ABOVE_FAILURE not in said:
            parts.append(ABOVE_FAILURE.format(size=smallest))
            said.add(ABOVE_FAILURE)
        if trial.verdict not in said:
            parts.append(_why_it_failed(trial))
            said.add(trial.verdict)
        remarks.append("; ".join(filter(None, parts)))
    return remarks


def trial_line(trial: Trial) -> str:
    """Render one trial as one line for the progress log."""
    parts = [f"batch {trial.batch_size}", trial.verdict.value, trial.phase.value]
    if trial.step_name:
        parts.append(clean(trial.step_name))
    peaks = [
        nbytes
        for nbytes in (trial.peak_allocated_bytes, trial.peak_reserved_bytes)
        if nbytes is not None
    ]
    if peaks:
        parts.append(f"peak {format_bytes(max(peaks))}")
    if trial.cap_bytes is not None:
        parts.append(f"cap {format_bytes(trial.cap_bytes)}")
    if trial.samples_per_s is not None:
        parts.append(f"{rate(trial.samples_per_s)} samples/s")
    if trial.replayed:
        parts.append("replayed")
    parts += [*_remarks(trial), _why_it_failed(trial)]
    return clip("  ".join(filter(None, parts)), WIDTH)


def _remarks(trial: Trial) -> list[str]:
    remarks = []
    if trial.leaked_bytes:
        remarks.append(f"LEAKED {format_bytes(trial.leaked_bytes)}")
    if trial.accumulation_steps > 1:
        remarks.append(f"{trial.accumulation_steps} accumulation steps")
    if trial.alloc_retries and trial.passed:
        remarks.append(count(trial.alloc_retries, "allocator retry", "allocator retries"))
    return remarks


def _why_it_failed(trial: Trial) -> str:
    """Say where and why the trial failed, if that is known."""
    return ": ".join(filter(None, (clean(trial.where or ""), clean(shortened(trial.error)))))
