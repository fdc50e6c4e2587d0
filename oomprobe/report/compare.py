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


def comparison(first: ProbeResult, second: ProbeResult, names: tuple[str, str]) -> str:
    """The answers, what they took, each size that ran in both, and what else differs; `names` are of the files."""
    both = first, second
    answers = [_last(result, result.batch_size) for result in both]
    # The ends of long names tell files apart better than their beginnings.
    shown = (name if len(name) <= CELL_WIDTH else f"...{name[3 - CELL_WIDTH :]}" for name in names)
    lines = [
        _line("", *shown),
        _line("device", *(result.device for result in both)),
        *_numbers("batch size", [result.batch_size for result in both], str),
        _line("limited by", *(result.limited_by for result in both)),
        *_numbers("budget", [result.budget_bytes for result in both], format_bytes),
        *_numbers("peak allocated", _each(answers, "peak_allocated_bytes"), format_bytes),
        *_numbers("peak reserved", _each(answers, "peak_reserved_bytes"), format_bytes),
        *_numbers("time per step", _each(answers, "step_s"), format_seconds),
        *_numbers("throughput", _each(answers, "samples_per_s"), _rate),
        *_numbers("memory per sample", _each([result.fit for result in both], "bytes_per_sample"), format_bytes),
    ]
    blocks = [lines]
    if first.breakdown is not None and second.breakdown is not None:
        parts = first.breakdown.parts, second.breakdown.parts
        kinds = [kind for kind in parts[0] if any(part.get(kind) for part in parts)]
        rows = (_numbers(f"  {kind}", [part.get(kind) for part in parts], format_bytes) for kind in kinds)
        blocks.append(["memory at the answer", *(line for row in rows for line in row)])
    blocks += [lines for lines in (_same_sizes(*both), _different(*both)) if lines]
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _same_sizes(first: ProbeResult, second: ProbeResult) -> list[str]:
    """Peak and throughput of each size that ran in both."""
    sizes = sorted({t.batch_size for t in first.trials if t.passed} & {t.batch_size for t in second.trials if t.passed})
    lines = []
    for size in sizes[-MOST_SIZES:]:
        trials = _last(first, size), _last(second, size)
        title = f"  batch {size}, peak"
        lines += _numbers(title, _each(trials, "peak_allocated_bytes"), format_bytes) or [_line(title, "-", "-")]
        lines += _numbers("    throughput", _each(trials, "samples_per_s"), _rate)
    return ["largest sizes that ran in both", *lines] if lines else []


def _different(first: ProbeResult, second: ProbeResult) -> list[str]:
    """Options and settings that are not the same: a difference may be theirs."""
    lines = []
    for known, other in ((first.options, second.options), (first.environment, second.environment)):
        for name in sorted(known.keys() | other.keys()):
            if known.get(name) != other.get(name):
                lines += wrap(f"{name}: {known.get(name)} -> {other.get(name)}", first="  ", rest="    ")
    return ["other differences", *lines] if lines else []


def _last(result: ProbeResult, size: int) -> Trial | None:
    """The last trial of a size that passed."""
    passed = (t for t in reversed(result.trials) if t.passed and t.batch_size == size and t.accumulation_steps == 1)
    return next(passed, None)


def _each(things: Iterable[object], name: str) -> list[Any]:
    """An attribute of each; None of what is not there."""
    return [getattr(thing, name, None) for thing in things]


def _numbers(name: str, values: list[Any], written: Callable[[Any], str]) -> list[str]:
    """A line with two numbers and their ratio; none where neither was measured."""
    first, second = values
    if first is None and second is None:
        return []
    told = ["-" if value is None else written(value) for value in values]
    return [_line(name, told[0], told[1], f"x {second / first:.3g}" if first and second else "")]


def _rate(samples_per_s: float) -> str:
    return f"{rate(samples_per_s)} samples/s"


def _line(name: str, first: str, second: str, ratio: str = "") -> str:
    cells = (f"{clip(clean(cell), CELL_WIDTH):<{CELL_WIDTH}}" for cell in (first, second))
    return clip(f"{clip(name, NAME_WIDTH):<{NAME_WIDTH}}  {'  '.join(cells)}  {ratio}".rstrip(), WIDTH)
