"""Two results side by side: before and after a change, two cards, two versions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from oomprobe.report.words import WIDTH, clean, clip, rate, wrap
from oomprobe.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from oomprobe.result import ProbeResult, Trial

NAME_WIDTH, CELL_WIDTH = 24, 30
MOST_SIZES = 8  # that ran in both, the largest ones
Row = tuple[str, ...]  # what, in the first, in the second, their ratio


def comparison(first: ProbeResult, second: ProbeResult, names: tuple[str, str] = ("first", "second")) -> str:
    """Render two results side by side.

    Args:
        first: What a probe returned, or `ProbeResult.from_dict` read.
        second: Another one.
        names: What to call them, such as the names of their files.

    Returns:
        Lines of ASCII: the answers, what they took, each size that ran in both, and what else differs.
    """
    both = first, second
    answers = [_last(result, result.batch_size) for result in both]
    rows: list[Row] = [
        ("", *_short(names), ""),
        ("device", *(result.device for result in both), ""),
        _numbers("batch size", [result.batch_size for result in both], str),
        ("limited by", *(result.limited_by for result in both), ""),
        _numbers("budget", [result.budget_bytes for result in both], format_bytes),
        _numbers("peak allocated", _each(answers, "peak_allocated_bytes"), format_bytes),
        _numbers("peak reserved", _each(answers, "peak_reserved_bytes"), format_bytes),
        _numbers("time per step", _each(answers, "step_s"), format_seconds),
        _numbers("throughput", _each(answers, "samples_per_s"), _rate),
        _numbers("memory per sample", _each([result.fit for result in both], "bytes_per_sample"), format_bytes),
    ]
    blocks = [[_line(row) for row in rows if row[1:3] != ("-", "-")]]
    if first.breakdown is not None and second.breakdown is not None:
        parts = [result.breakdown.parts for result in both if result.breakdown is not None]
        kinds = [kind for kind in parts[0] if any(part.get(kind) for part in parts)]
        blocks.append(["memory at the answer"])
        blocks[-1] += [_line(_numbers(f"  {kind}", [part.get(kind) for part in parts], format_bytes)) for kind in kinds]
    blocks += [lines for lines in (_same_sizes(*both), _different(*both)) if lines]
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _same_sizes(first: ProbeResult, second: ProbeResult) -> list[str]:
    """Peak and throughput of each size that ran in both."""
    sizes = sorted({t.batch_size for t in first.trials if t.passed} & {t.batch_size for t in second.trials if t.passed})
    lines = []
    for size in sizes[-MOST_SIZES:]:
        trials = _last(first, size), _last(second, size)
        lines.append(_line(_numbers(f"  batch {size}, peak", _each(trials, "peak_allocated_bytes"), format_bytes)))
        speed = _numbers("    throughput", _each(trials, "samples_per_s"), _rate)
        lines += [_line(speed)] if speed[1:3] != ("-", "-") else []
    return ["largest sizes that ran in both", *lines] if lines else []


def _different(first: ProbeResult, second: ProbeResult) -> list[str]:
    """Options and settings that are not the same: a difference may be theirs."""
    lines = []
    for known, other in ((first.options, second.options), (first.environment, second.environment)):
        for name in sorted(known.keys() | other.keys()):
            values = known.get(name), other.get(name)
            if values[0] != values[1]:
                lines += wrap(f"{name}: {values[0]} -> {values[1]}", first="  ", rest="    ")
    return ["other differences", *lines] if lines else []


def _last(result: ProbeResult, size: int) -> Trial | None:
    """The last trial of a size that passed."""
    passed = [t for t in result.trials if t.passed and t.batch_size == size and t.accumulation_steps == 1]
    return passed[-1] if passed else None


def _each(things: Iterable[object], name: str) -> list[Any]:
    """An attribute of each; None of what is not there."""
    return [getattr(thing, name, None) for thing in things]


def _numbers(name: str, values: list[Any], written: Callable[[Any], str]) -> Row:
    first, second = values
    told = [written(value) if value is not None else "-" for value in values]
    ratio = f"x {second / first:.3g}" if first and second else ""
    return name, told[0], told[1], ratio


def _rate(samples_per_s: float) -> str:
    return f"{rate(samples_per_s)} samples/s"


def _short(names: tuple[str, str]) -> tuple[str, str]:
    """The ends of long names, which tell files apart better than their beginnings."""
    first, second = (name if len(name) <= CELL_WIDTH else f"...{name[3 - CELL_WIDTH :]}" for name in names)
    return first, second


def _line(row: Row) -> str:
    name, first, second, ratio = (clean(cell) if n else cell for n, cell in enumerate(row))
    cells = (f"{clip(cell, CELL_WIDTH):<{CELL_WIDTH}}" for cell in (first, second))
    return clip(f"{clip(name, NAME_WIDTH):<{NAME_WIDTH}}  {'  '.join(cells)}  {ratio}".rstrip(), WIDTH)
