"""Two results side by side, such as before and after a change, and whether memory grew between them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from oomprobe.errors import InvalidArgumentError
from oomprobe.ground.units import format_bytes, format_seconds
from oomprobe.ground.words import WIDTH, clean, rate
from oomprobe.records.breakdown import Breakdown
from oomprobe.results.blocks import Block, Row, Table, block_lines, cell
from oomprobe.results.result import ProbeResult

HEADS = ("", "before", "after", "change")
# Options that decide about the answer.
SEARCH = ("memory_fraction", "min_batch", "max_batch", "multiple_of", "global_batch")
MOST_NAMED = 5
NO_COMMON_SIZE = (
    "no batch size was traced in both results ({before}; {after}): make both with the same size, "
    "oomprobe run TARGET --require {size} --breakdown --json FILE"
)
ANOTHER = (
    "the results are of two {kind}s, {before} and {after}, so their memory cannot be compared: make "
    "the first one anew"
)


def comparison(
    first: ProbeResult, second: ProbeResult, names: tuple[str, str], width: int = WIDTH
) -> str:
    """Compare answers, memory, times, breakdowns, options and environments; `names` are the file names."""
    both = first, second
    confirmed = first.confirmation, second.confirmation
    fits = first.fit, second.fit
    rows = [
        _contrast("batch size", _fields("batch_size", both)),
        _contrast("limited by", _fields("limited_by", both)),
        _contrast("budget", _fields("budget_bytes", both), format_bytes),
        _contrast("peak allocated", _fields("peak_allocated_bytes", confirmed), format_bytes),
        _contrast("peak reserved", _fields("peak_reserved_bytes", confirmed), format_bytes),
        _contrast("time per step", _fields("step_s", confirmed), format_seconds),
        _contrast("samples per second", _fields("samples_per_s", confirmed), rate),
        _contrast("memory per sample", _fields("bytes_per_sample", fits), format_bytes),
    ]
    parts = []
    if first.breakdown is not None and second.breakdown is not None:
        for kind in first.breakdown.parts:
            sizes = [first.breakdown.parts[kind], second.breakdown.parts.get(kind)]
            if any(sizes):
                parts.append(_contrast(kind, sizes, format_bytes))
    changes = [
        *_changes(first.options, second.options),
        *_changes(first.environment, second.environment),
    ]
    compared = zip(HEADS[1:], names, both, strict=False)
    blocks = [
        Block("", [f"{head}: {name}, {result.device}" for head, name, result in compared]),
        Block("", Table(heads=HEADS, rows=rows, texts={0})),
    ]
    if parts:
        blocks.append(Block("memory at the answer", Table(heads=HEADS, rows=parts, texts={0})))
    if changes:
        blocks.append(Block("other differences", changes))
    return "\n\n".join("\n".join(block_lines(block, width)) for block in blocks) + "\n"


def _fields(name: str, records: Sequence[object]) -> list[Any]:
    """Return a field of two records; None where there is no record."""
    return [getattr(record, name, None) for record in records]


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted({*old, *new} - {"date"}):
        if old.get(name) != new.get(name):
            yield f"{name}: {old.get(name)} -> {new.get(name)}"


def _contrast(name: str, values: Sequence[Any], write: Callable[[Any], str] = str) -> Row:
    """Return the row of two values, and of their change if they are numbers."""
    change = ""
    if all(isinstance(value, int | float) and value for value in values):
        change = f"{100 * (values[1] / values[0] - 1):+.1f} %"
    return Row(cells=[name, *(cell(value, write) for value in values), change])


# --- growth ---


def stated_tolerance(text: str) -> float:
    """Return the fraction that a text states.

    Raises:
        InvalidArgumentError: it states none, or one that is not at least 0 and less than 1.

    Examples:
        >>> stated_tolerance("2%"), stated_tolerance("0.02"), stated_tolerance("0")
        (0.02, 0.02, 0.0)
    """
    number, percent, rest = text.strip().partition("%")
    try:
        fraction = float(number) / (100 if percent else 1)
    except ValueError:
        fraction = -1.0
    if rest or not 0 <= fraction < 1:
        raise InvalidArgumentError(
            f"a tolerance is a share of the memory, such as 2% or 0.02, not {text!r}"
        )
    return fraction


def grown(before: ProbeResult, after: ProbeResult, tolerance: float) -> list[str]:
    """Return what grew by more than the tolerance: the memory allocated at the same batch size, or the answer, which fell.

    Reserved memory depends on what the allocator cached, so it is not compared; nor are trials that were replayed.

    Raises:
        InvalidArgumentError: the results cannot be compared.
    """
    _refuse_others("device", before.device, after.device)
    _refuse_others("model", before.environment.get("model"), after.environment.get("model"))
    peaks_before, peaks_after = _traced(before), _traced(after)
    common = peaks_before.keys() & peaks_after.keys()
    if not common:
        texts = {"before": _listed(peaks_before), "after": _listed(peaks_after)}
        raise InvalidArgumentError(NO_COMMON_SIZE.format(**texts, size=before.batch_size))
    size = max(common)
    peak_before, peak_after = peaks_before[size], peaks_after[size]
    sentences = []
    if peak_after > (1 + tolerance) * peak_before:
        sentences.append(
            f"memory grew: batch {size} allocates {format_bytes(peak_after)}, "
            f"{100 * (peak_after / max(1, peak_before) - 1):.1f} % more than "
            f"{format_bytes(peak_before)} (tolerance {100 * tolerance:g} %)"
        )
        if before.breakdown is not None and after.breakdown is not None:
            sentences += _grown_parts(before.breakdown, after.breakdown)
    same_search = all(before.options.get(name) == after.options.get(name) for name in SEARCH)
    if same_search and after.batch_size < (1 - tolerance) * before.batch_size:
        fell = f"{100 * (1 - after.batch_size / before.batch_size):.1f} %"
        sentences.append(
            f"the answer fell: {after.batch_size}, {fell} less than {before.batch_size}"
        )
    return sentences


def _refuse_others(kind: str, before: str | None, after: str | None) -> None:
    """Raise InvalidArgumentError for results of two devices, or models, where both are known."""
    if before and after and before != after:
        raise InvalidArgumentError(
            ANOTHER.format(kind=kind, before=clean(before), after=clean(after))
        )


def _listed(peaks: Mapping[int, int]) -> str:
    return ", ".join(map(str, sorted(peaks))) or "none"


def _traced(result: ProbeResult) -> dict[int, int]:
    """Return the peak of allocated memory by batch size, of trials that passed and really ran."""
    peaks = {}
    for trial in result.trials:
        has_run = trial.passed and not trial.replayed and trial.accumulation_steps == 1
        if has_run and trial.peak_allocated_bytes is not None:
            peaks[trial.batch_size] = trial.peak_allocated_bytes
    return peaks


def _grown_parts(before: Breakdown, after: Breakdown) -> list[str]:
    """Name the kinds of memory and the modules that grew most."""
    sentences = []
    by_kind = _growth(before.parts, after.parts)
    if by_kind:
        sentences.append(f"  by kind: {', '.join(by_kind)}")
    by_module = _growth(_by_module(before), _by_module(after))
    if by_module:
        sentences.append(f"  by module: {', '.join(by_module)}")
    return sentences


def _by_module(breakdown: Breakdown) -> dict[str, int]:
    sizes = {}
    for module in breakdown.modules:
        name = f"{module.name} ({module.kind})" if module.kind else module.name
        sizes[name] = module.activation_bytes + module.parameter_bytes
    return sizes


def _growth(before: Mapping[str, int], after: Mapping[str, int]) -> list[str]:
    """Return what grew, the most first, each with by how much."""
    grown_bytes = {}
    for name, nbytes in after.items():
        more_bytes = nbytes - before.get(name, 0)
        if more_bytes > 0:
            grown_bytes[name] = more_bytes
    largest = sorted(grown_bytes, key=lambda name: -grown_bytes[name])
    return [f"{clean(name)} +{format_bytes(grown_bytes[name])}" for name in largest[:MOST_NAMED]]
