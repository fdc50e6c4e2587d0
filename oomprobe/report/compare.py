"""Two results side by side, such as before and after a change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from oomprobe.ground.units import format_bytes, format_seconds
from oomprobe.ground.words import WIDTH, clean, clip, rate, wrap
from oomprobe.records.result import ProbeResult

NAME_WIDTH, CELL_WIDTH = 24, 30


def comparison(first: ProbeResult, second: ProbeResult, names: tuple[str, str]) -> str:
    """Compare answers, memory, times, breakdowns, options and environments; `names` are the file names."""
    both = first, second
    confirmed = [one.confirmation for one in both]
    compared: tuple[tuple[str, Sequence[object], str, Callable[[Any], str]], ...] = (
        ("device", both, "device", str),
        ("batch size", both, "batch_size", str),
        ("limited by", both, "limited_by", str),
        ("budget", both, "budget_bytes", format_bytes),
        ("peak allocated", confirmed, "peak_allocated_bytes", format_bytes),
        ("peak reserved", confirmed, "peak_reserved_bytes", format_bytes),
        ("time per step", confirmed, "step_s", format_seconds),
        ("samples per second", confirmed, "samples_per_s", rate),
        ("memory per sample", [one.fit for one in both], "bytes_per_sample", format_bytes),
    )
    lines = [_line("", [name[-CELL_WIDTH:] for name in names])]  # long paths differ at their ends
    lines += [_line(label, [getattr(one, name, None) for one in of], write) for label, of, name, write in compared]
    if first.breakdown is not None and second.breakdown is not None:
        parts = first.breakdown.parts, second.breakdown.parts
        kinds = [kind for kind in parts[0] if any(part.get(kind) for part in parts)]
        lines += ["", "memory at the answer"]
        lines += [_line(f"  {kind}", [part.get(kind) for part in parts], format_bytes) for kind in kinds]
    changes = []
    for old, new in ((first.options, second.options), (first.environment, second.environment)):
        differing = (name for name in sorted({*old, *new}) if old.get(name) != new.get(name))
        changes += [f"{name}: {old.get(name)} -> {new.get(name)}" for name in differing]
    if changes:
        lines += ["", "other differences"]
        lines += [line for change in changes for line in wrap(change, first="  ", rest="    ")]
    return "\n".join(lines) + "\n"


def _line(name: str, values: Sequence[Any], write: Callable[[Any], str] = str) -> str:
    """Render two values, and their ratio if they are numbers."""
    cells = (clip(clean("-" if value is None else write(value)), CELL_WIDTH) for value in values)
    is_ratio = all(isinstance(value, int | float) and value for value in values)
    ratio = f"x {values[1] / values[0]:.3g}" if is_ratio else ""
    line = "  ".join([f"{name:<{NAME_WIDTH}}", *(f"{cell:<{CELL_WIDTH}}" for cell in cells), ratio])
    return clip(line.rstrip(), WIDTH)
