"""The straight line through (batch size, peak memory): a diagnostic, never the answer."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

SMALLEST = 16  # sizes up to this make the line through the smallest: 1, 2, 4, 8, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearFit:
    """``peak = fixed_bytes + bytes_per_sample * batch_size``, by least squares.

    Attributes:
        fixed_bytes: Peak at batch size zero, as the line has it (may be negative).
        bytes_per_sample: Slope.
        r_squared: Share of the variance explained, at most 1.
        max_relative_error: Largest distance of a measured peak from the line, as a share of that peak.
        predicted_max_batch: Where the line meets the budget; None when it never does.
    """

    fixed_bytes: float
    bytes_per_sample: float
    r_squared: float
    max_relative_error: float
    predicted_max_batch: int | None


def fit_line(points: Iterable[tuple[int, int]], budget_bytes: int) -> LinearFit | None:
    """Fit the line through measured peaks.

    Args:
        points: Pairs of batch size and peak in bytes, of passing trials.
        budget_bytes: Memory the line is asked to stay within.

    Returns:
        The fit, or None with fewer than three different sizes: two points are always on a line. Also None for
        numbers beyond what floats can square.

    Example:
        >>> line = fit_line([(1, 110), (2, 120), (4, 140)], budget_bytes=1105)
        >>> round(line.fixed_bytes), round(line.bytes_per_sample), line.predicted_max_batch
        (100, 10, 100)
    """
    try:
        pairs = sorted({(float(size), float(peak)) for size, peak in points})
    except OverflowError:
        return None
    if len({size for size, _ in pairs}) < 3:
        return None
    with np.errstate(all="ignore"):
        line = _least_squares(np.asarray(pairs, dtype=np.float64), budget_bytes)
    numbers = (line.fixed_bytes, line.bytes_per_sample, line.r_squared, line.max_relative_error)
    return line if all(map(math.isfinite, numbers)) else None


def _least_squares(pairs: np.ndarray[tuple[int, int], np.dtype[np.float64]], budget_bytes: int) -> LinearFit:
    sizes, peaks = pairs.T
    # Differences first: neighbouring large sizes stay apart, and equal peaks give a slope of exactly zero.
    from_first = peaks - peaks[0]
    run, rise = sizes - sizes.mean(), from_first - from_first.mean()
    slope = float((run @ rise) / (run @ run))
    fixed = float(peaks[0] + from_first.mean() - slope * sizes.mean())
    residuals, spread = rise - slope * run, float(rise @ rise)
    return LinearFit(
        fixed_bytes=fixed,
        bytes_per_sample=slope,
        r_squared=1.0 - float(residuals @ residuals) / spread if spread > 0 else 1.0,
        max_relative_error=float(np.max(np.abs(residuals) / np.maximum(peaks, 1.0))),
        predicted_max_batch=_crossing(fixed, slope, budget_bytes),
    )


def _crossing(fixed: float, slope: float, budget_bytes: int) -> int | None:
    if not slope > 0:
        return None
    try:
        size = (budget_bytes - fixed) / slope
        lost = 4 * np.finfo(np.float64).eps * (abs(fixed) + budget_bytes) / slope  # in their difference
        return max(0, math.floor(size + 1e-9 * max(1.0, size) + lost))  # 99.9999999999 is 100, rounded
    except (OverflowError, ValueError):  # infinite, or not a number
        return None


def estimates(points: Iterable[tuple[int, int]], *, budget_bytes: int) -> dict[str, float | None]:
    """What straight lines would have answered: a diagnostic beside what was measured, never the answer.

    Args:
        points: Pairs of batch size and peak in bytes, of passing trials.
        budget_bytes: What the lines are asked to stay within.

    Returns:
        By name; None where a line gives no answer. The first is what Ultralytics' AutoBatch fits.

    Example:
        >>> estimates([(1, 110), (2, 120), (4, 140), (32, 400)], budget_bytes=1100)
        {'straight line through the smallest sizes': 100, 'straight line through all peaks': 107}
    """
    points = list(points)
    small, line = (fit_line(some, budget_bytes) for some in ([p for p in points if p[0] <= SMALLEST], points))
    return {
        "straight line through the smallest sizes": small.predicted_max_batch if small else None,
        "straight line through all peaks": line.predicted_max_batch if line else None,
    }
