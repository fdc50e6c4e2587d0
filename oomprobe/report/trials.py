"""The table of trials, and one trial as a line."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence

from oomprobe.ground.units import byte_unit, format_bytes, format_seconds
from oomprobe.ground.words import WIDTH, clean, clip, count, rate, shortened
from oomprobe.records.trials import SECOND_OPINIONS, Phase, Trial
from oomprobe.report.blocks import Block, Row, Table, block_lines

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
    kept = range(len(trials)) if mentioned is None else _deciding(trials, mentioned)
    sizes = [size for t in trials for size in (t.peak_allocated_bytes, t.peak_reserved_bytes, t.cap_bytes) if size]
    unit, factor = byte_unit(max(sizes, default=0))
    columns = {head: cell for head, cell in _columns(factor).items() if any(cell(t) is not None for t in trials)}
    rows, shown, failed = [], set[str](), set[int]()
    for place, trial in enumerate(trials):
        smallest = min(failed, default=trial.batch_size)
        (failed.discard if trial.passed else failed.add)(trial.batch_size)
        if place not in kept:
            continue
        failure = "" if trial.verdict in shown else _failure(trial)
        above = trial.phase is Phase.BISECT and smallest < trial.batch_size and ABOVE_FAILURE not in shown
        shown |= {trial.verdict, *([ABOVE_FAILURE] if above else [])}
        answers = trial.batch_size == answer and trial.phase is Phase.CONFIRM
        rows.append(
            Row(
                cells=[cell(trial) or "-" for cell in columns.values()],
                remark="; ".join(
                    part
                    for part in (*_remarks(trial), ABOVE_FAILURE.format(size=smallest) if above else "", failure)
                    if part
                ),
                kind="failed" if not trial.passed else "answer" if answers else "passed",
            )
        )
    texts = {place for place, head in enumerate(columns) if head in TEXT_COLUMNS}
    title = f"trials (memory in {unit}; '-': not measured, or no cap; each kind of error is shown once)"
    foot = [LEFT_OUT.format(left_out=len(trials) - len(kept), all=len(trials))] if len(kept) < len(trials) else []
    return Block(title, Table(heads=tuple(columns), rows=rows, texts=texts, foot=foot))


def _deciding(trials: Sequence[Trial], mentioned: Container[int]) -> Sequence[int]:
    """Return the places of the trials that decide, and of others as far as there is room, the last that grew first.

    The first of each verdict, second opinions and all sizes that the report mentions decide. The look is the last that grew.
    """
    places, seen, deciding = range(len(trials)), set[str](), list[int]()
    for place, trial in enumerate(trials):
        if trial.phase in SECOND_OPINIONS or trial.batch_size in mentioned or trial.verdict not in seen:
            deciding.append(place)
        seen.add(trial.verdict)
    rest = sorted(set(places) - set(deciding), key=lambda place: (trials[place].phase is not Phase.GROW, -place))
    return sorted([*deciding, *rest[: max(1, FEW - len(deciding))]])


def trial_line(trial: Trial) -> str:
    """Render one trial as one line for the progress log."""
    peaks = [b for b in (trial.peak_allocated_bytes, trial.peak_reserved_bytes) if b is not None]
    parts = (
        f"batch {trial.batch_size}",
        trial.verdict.value,
        trial.phase.value,
        None if trial.step_name is None else clean(trial.step_name),
        f"peak {format_bytes(max(peaks))}" if peaks else None,
        None if trial.cap_bytes is None else f"cap {format_bytes(trial.cap_bytes)}",
        None if trial.samples_per_s is None else f"{rate(trial.samples_per_s)} samples/s",
        "replayed" if trial.replayed else None,
        *_remarks(trial),
        _failure(trial),
    )
    return clip("  ".join(part for part in parts if part), WIDTH)


def _columns(factor: int) -> dict[str, Callable[[Trial], str | None]]:
    def memory(size_bytes: int | None) -> str | None:
        return None if size_bytes is None else f"{size_bytes / factor:.{2 if factor > 1 else 0}f}"

    return {
        "batch": lambda t: str(t.batch_size),
        "phase": lambda t: t.phase.value,
        "verdict": lambda t: t.verdict.value,
        "steps": lambda t: "replay" if t.replayed else str(t.steps),
        "allocated": lambda t: memory(t.peak_allocated_bytes),
        "reserved": lambda t: memory(t.peak_reserved_bytes),
        "cap": lambda t: memory(t.cap_bytes),
        "time/step": lambda t: None if t.step_s is None else format_seconds(t.step_s),
        "samples/s": lambda t: None if t.samples_per_s is None else rate(t.samples_per_s),
        "step name": lambda t: None if t.step_name is None else clean(t.step_name),
    }


def _remarks(trial: Trial) -> list[str]:
    remarks = []
    if trial.leaked_bytes:
        remarks.append(f"LEAKED {format_bytes(trial.leaked_bytes)}")
    if trial.accumulation_steps > 1:
        remarks.append(f"{trial.accumulation_steps} accumulation steps")
    if trial.alloc_retries and trial.passed:
        remarks.append(count(trial.alloc_retries, "allocator retry", "allocator retries"))
    return remarks


def _failure(trial: Trial) -> str:
    """Say where and why the trial failed."""
    return ": ".join(part for part in (clean(trial.where or ""), clean(shortened(trial.error))) if part)
