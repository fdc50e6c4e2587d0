"""Whether memory grew between two results, such as those before and after a change of the code. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from oomprobe.errors import InvalidArgumentError
from oomprobe.ground.units import format_bytes
from oomprobe.records.breakdown import Breakdown
from oomprobe.records.result import ProbeResult

# Options that decide about the answer.
SEARCH = ("memory_fraction", "min_batch", "max_batch", "multiple_of", "global_batch")
MOST_NAMED = 5
NO_COMMON_SIZE = (
    "no batch size was traced in both results ({before}; {after}): make both with the same size, "
    "oomprobe run TARGET --require {size} --breakdown --json FILE"
)
ANOTHER = (
    "the results are of two {kind}s, {before} and {after}, so their memory cannot be compared: make the first one anew"
)


def tolerance_of(text: str) -> float:
    """Return the fraction that a text states.

    Raises:
        InvalidArgumentError: it states none, or one that is not at least 0 and less than 1.

    Examples:
        >>> tolerance_of("2%"), tolerance_of("0.02"), tolerance_of("0")
        (0.02, 0.02, 0.0)
    """
    number, percent, rest = text.strip().partition("%")
    try:
        fraction = float(number) / (100 if percent else 1)
    except ValueError:
        fraction = -1.0
    if rest or not 0 <= fraction < 1:
        raise InvalidArgumentError(f"a tolerance is a share of the memory, such as 2% or 0.02, not {text!r}")
    return fraction


def grown(before: ProbeResult, after: ProbeResult, tolerance: float) -> list[str]:
    """Return what grew by more than the tolerance: the memory allocated at the same batch size, or the answer, which fell.

    Reserved memory depends on what the allocator cached, so it is not compared; nor are trials that were replayed.

    Raises:
        InvalidArgumentError: the results cannot be compared.
    """
    for kind, one, other in (
        ("device", before.device, after.device),
        ("model", *(result.environment.get("model") for result in (before, after))),
    ):
        if one and other and one != other:
            raise InvalidArgumentError(ANOTHER.format(kind=kind, before=one, after=other))
    peaks, later = _traced(before), _traced(after)
    if not (common := peaks.keys() & later.keys()):
        sizes = [", ".join(map(str, sorted(found))) or "none" for found in (peaks, later)]
        raise InvalidArgumentError(NO_COMMON_SIZE.format(before=sizes[0], after=sizes[1], size=before.batch_size))
    size, said = max(common), list[str]()
    if later[size] > (1 + tolerance) * peaks[size]:
        said.append(
            f"memory grew: batch {size} allocates {format_bytes(later[size])}, {_more(peaks[size], later[size])} more than "
            f"{format_bytes(peaks[size])} (tolerance {100 * tolerance:g} %)"
        )
        if before.breakdown is not None and after.breakdown is not None:
            said += _where(before.breakdown, after.breakdown)
    same_search = all(before.options.get(name) == after.options.get(name) for name in SEARCH)
    if same_search and after.batch_size < (1 - tolerance) * before.batch_size:
        fell = f"{100 * (1 - after.batch_size / before.batch_size):.1f} %"
        said.append(f"the answer fell: {after.batch_size}, {fell} less than {before.batch_size}")
    return said


def _traced(result: ProbeResult) -> dict[int, int]:
    """Return the peak of allocated memory by batch size, of trials that passed and really ran."""
    ran = (trial for trial in result.trials if trial.passed and not trial.replayed and trial.accumulation_steps == 1)
    return {trial.batch_size: trial.peak_allocated_bytes for trial in ran if trial.peak_allocated_bytes is not None}


def _more(before: int, after: int) -> str:
    return f"{100 * (after / max(1, before) - 1):.1f} %"


def _where(before: Breakdown, after: Breakdown) -> list[str]:
    """Name the kinds of memory and the modules that grew most."""
    modules = [
        {
            f"{one.name} ({one.kind})" if one.kind else one.name: one.activation_bytes + one.parameter_bytes
            for one in found.modules
        }
        for found in (before, after)
    ]
    told = {"by kind": _growth(before.parts, after.parts), "by module": _growth(*modules)}
    return [f"  {how}: {', '.join(named)}" for how, named in told.items() if named]


def _growth(before: Mapping[str, int], after: Mapping[str, int]) -> list[str]:
    more = {name: nbytes - before.get(name, 0) for name, nbytes in after.items()}
    largest = sorted((name for name in more if more[name] > 0), key=lambda name: -more[name])
    return [f"{name} +{format_bytes(more[name])}" for name in largest[:MOST_NAMED]]
