"""What the fitted line says, what it would have answered, and how that compares with what ran."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oomprobe.units import format_bytes

if TYPE_CHECKING:
    from oomprobe.result import ProbeResult, Trial


def fitted(result: ProbeResult) -> list[str]:
    """The line, how well it fits, and its answer, which is never used."""
    fit = result.fit
    if fit is None:
        return ["none: a line through fewer than three sizes says nothing"]
    line = f"{format_bytes(fit.fixed_bytes)} fixed + {format_bytes(fit.bytes_per_sample)} per sample"
    quality = f"{line}, r2 {fit.r_squared:.4f}, {_off(fit.max_relative_error)}"
    if fit.predicted_max_batch is None:
        return [quality, "the line does not rise and would have answered nothing (not used)"]
    predicted = fit.predicted_max_batch - fit.predicted_max_batch % _multiple_of(result)
    return [quality, f"the line would have answered {predicted} (not used): {_judgement(result, predicted)}"]


def _off(share: float) -> str:
    """Where small sizes need next to nothing, the share says no more than that."""
    if share > 10:
        return "off by more than 1000 %"
    return f"off by at most {100 * share:.1f} %"


def _judgement(result: ProbeResult, predicted: int) -> str:
    """Call a prediction too high only where a failure shows it: max_batch, say, leaves sizes untried."""
    larger = {t.batch_size for t in result.trials if result.batch_size < t.batch_size <= predicted}
    failed = [size for size in larger if not _witness(result, size).passed]
    if predicted == result.batch_size:
        return "the same as the answer"
    if predicted < result.batch_size:
        return f"too low, {_tried(result, predicted)}"
    if not failed:
        return f"higher than the answer, {_tried(result, predicted)}"
    smaller = "" if predicted in failed else f", batch {min(failed)} failed"
    return f"too high, {_tried(result, predicted)}{smaller}"


def _tried(result: ProbeResult, size: int) -> str:
    if all(t.batch_size != size for t in result.trials):
        return "not run"
    trial = _witness(result, size)
    held = "under the budget" if _is_held(trial, result) else "with all the memory"
    return f"{'ran' if trial.passed else 'failed'} {held}"


def _witness(result: ProbeResult, size: int) -> Trial:
    """The last trial of a size, of those under the budget if any was: the line is asked about that."""
    trials = [t for t in result.trials if t.batch_size == size]
    return ([t for t in trials if _is_held(t, result)] or trials)[-1]


def _is_held(trial: Trial, result: ProbeResult) -> bool:
    return trial.cap_bytes is not None and trial.cap_bytes <= result.budget_bytes


def _multiple_of(result: ProbeResult) -> int:
    given = result.options.get("multiple_of")
    return given if isinstance(given, int) and given > 0 else 1
