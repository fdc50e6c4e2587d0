"""The report an engineer reads in a job log: plain ASCII, at most 100 columns, returned and never printed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oomprobe.report.facts import facts
from oomprobe.report.table import trials_table
from oomprobe.report.words import WIDTH, bullets, clean, clip, wrap
from oomprobe.units import format_bytes

if TYPE_CHECKING:
    from oomprobe.result import ProbeResult


def text(result: ProbeResult) -> str:
    """Render a result as plain text.

    Args:
        result: What a probe returned, or `ProbeResult.from_dict` read.

    Returns:
        Lines of ASCII; the last one, and only that, is the verdict: ``verdict: batch 96 fits in ...``.
    """
    blocks = (
        _heading(result),
        [trials_table(result.trials)],
        facts(result),
        bullets("notes:", result.notes),
        bullets("not covered by the trials:", result.not_covered),
        [*_warning(result), _verdict(result)],
    )
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def _warning(result: ProbeResult) -> list[str]:
    if not result.contaminated:
        return []
    return wrap(
        "WARNING: memory outside this process's allocator moved while probing. Another process, or a library "
        "of this one, took or gave back memory: the number holds for that moment only. "
        "Probe again on an idle device.",
        first="!! ",
        rest="!! ",
    )


def _verdict(result: ProbeResult) -> str:
    share = f"{100 * _fraction(result):.3g} % of {format_bytes(result.available_bytes)} on "
    line = f"verdict: batch {result.batch_size} fits in {format_bytes(result.budget_bytes)} ({share}"
    return f"{line}{clip(clean(result.device), max(8, WIDTH - 1 - len(line)))})"


def _heading(result: ProbeResult) -> list[str]:
    device = f"oomprobe: {clean(result.device)}"
    memory = (
        f"available {format_bytes(result.available_bytes)}, memory_fraction {_fraction(result):.4g}, "
        f"budget {format_bytes(result.budget_bytes)}"
    )
    one_line = f"{device}, {memory}"
    return [one_line] if len(one_line) <= WIDTH else [clip(device, WIDTH), *wrap(memory, first="  ")]


def _fraction(result: ProbeResult) -> float:
    given = result.options.get("memory_fraction")
    if isinstance(given, int | float):
        return float(given)
    return result.budget_bytes / result.available_bytes if result.available_bytes else 0.0
