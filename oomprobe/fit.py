"""The straight line through (batch size, peak memory): a diagnostic, never the answer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


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
        The fit, or None with fewer than three different sizes: two points are always on a line.

    Example:
        >>> line = fit_line([(1, 110), (2, 120), (4, 140)], budget_bytes=1105)
        >>> round(line.fixed_bytes), round(line.bytes_per_sample), line.predicted_max_batch
        (100, 10, 100)
    """
    pairs = sorted(set(points))
    if len({size for size, _ in pairs}) < 3:
        return None
    sizes, peaks = (np.asarray(column, dtype=np.float64) for column in zip(*pairs, strict=True))
    slope, fixed = (float(x) for x in np.polyfit(sizes, peaks, 1))
    residuals = peaks - (fixed + slope * sizes)
    spread = float(((peaks - peaks.mean()) ** 2).sum())
    return LinearFit(
        fixed_bytes=fixed,
        bytes_per_sample=slope,
        r_squared=1.0 - float((residuals**2).sum()) / spread if spread > 0 else 1.0,
        max_relative_error=float(np.max(np.abs(residuals) / np.maximum(peaks, 1.0))),
        predicted_max_batch=_crossing(fixed, slope, budget_bytes),
    )


def _crossing(fixed: float, slope: float, budget_bytes: int) -> int | None:
    if slope <= 0:
        return None
    return max(0, int((budget_bytes - fixed) // slope + 1e-9))
