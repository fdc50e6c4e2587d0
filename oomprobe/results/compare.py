"""Two results side by side, such as before and after a change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from oomprobe.ground.units import format_bytes, format_seconds
from oomprobe.ground.words import WIDTH, clean, clip, rate, wrap
from oomprobe.results.blocks import cell
from oomprobe.results.result import ProbeResult

NAME_WIDTH, CELL_WIDTH = 24, 30


def comparison(first: ProbeResult, second: ProbeResult, names: tuple[str, str]) -> str:
    """Compare answers, memory, times, breakdowns, options and environments; `names` are the file names."""
    both = first, second
    confirmed = first.confirmation, second.confirmation
    lines = [
        _line("", [name[-CELL_WIDTH:] for name in names]),  # long paths differ at their ends
        _line("device", _values("device", both)),
        _line("batch size", _values("batch_size", both)),
        _line("limited by", _values("limited_by", both)),
        _line("budget", _values("budget_bytes", both), format_bytes),
        _line("peak allocated", _values("peak_allocated_bytes", confirmed), format_bytes),
        _line("peak reserved", _values("peak_reserved_bytes", confirmed), format_bytes),
        _line("time per step", _values("step_s", confirmed), format_seconds),
        _line("samples per second", _values("samples_per_s", confirmed), rate),
        _line(
            "memory per sample", _values("bytes_per_sample", (first.fit, second.fit)), format_bytes
        ),
    ]
    if first.breakdown is not None and second.breakdown is not None:
        lines += ["", "memory at the answer"]
        for kind in first.breakdown.parts:
            sizes = [first.breakdown.parts[kind], second.breakdown.parts.get(kind)]
            if any(sizes):
                lines.append(_line(f"  {kind}", sizes, format_bytes))
    changes = [
        *_changes(first.options, second.options),
        *_changes(first.environment, second.environment),
    ]
    if changes:
        lines += ["", "other differences"]
    for change in changes:
        lines += wrap(change, first="  ", rest="    ")
    return "\n".join(lines) + "\n"


def _values(name: str, records: Sequence[object]) -> list[Any]:
    """Return a field of two records; None where there is no record."""
    return [getattr(record, name, None) for record in records]


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted({*old, *new} - {"date"}):
        if old.get(name) != new.get(name):
            yield f"{name}: {old.get(name)} -> {new.get(name)}"


def _line(name: str, values: Sequence[Any], write: Callable[[Any], str] = str) -> str:
    """Render two values, and their ratio if they are numbers."""
    line = f"{clip(clean(name), NAME_WIDTH):<{NAME_WIDTH}}"
    for value in values:
        line += f"  {clip(clean(cell(value, write)), CELL_WIDTH):<{CELL_WIDTH}}"
    if all(isinstance(value, int | float) and value for value in values):
        line += f"  x {values[1] / values[0]:.3g}"
    return clip(line.rstrip(), WIDTH)
