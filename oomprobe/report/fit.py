"""The straight line through (batch size, peak memory): a diagnostic, never the answer."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

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
    """Fit the line through batch sizes and peaks in bytes; None for fewer than three sizes: two are always on a line.

    Example:
        >>> line = fit_line([(1, 110), (2, 120), (4, 140)], budget_bytes=1105)
        >>> line.fixed_bytes, line.bytes_per_sample, line.predicted_max_batch
        (100.0, 10.0, 100)
    """
    pairs = sorted(set(points))
    if len({size for size, _ in pairs}) < 3:
        return None
    # In exact fractions, since a rounded slope moves the size at which the line meets the budget.
    mean_size = Fraction(sum(size for size, _ in pairs), len(pairs))
    mean_peak = Fraction(sum(peak for _, peak in pairs), len(pairs))
    covariance = sum((size - mean_size) * (peak - mean_peak) for size, peak in pairs)
    slope = covariance / sum((size - mean_size) ** 2 for size, _ in pairs)
    fixed = mean_peak - slope * mean_size
    residuals = [peak - fixed - slope * size for size, peak in pairs]
    spread = sum((peak - mean_peak) ** 2 for _, peak in pairs)
    return LinearFit(
        fixed_bytes=float(fixed),
        bytes_per_sample=float(slope),
        r_squared=float(1 - sum(r**2 for r in residuals) / spread) if spread else 1.0,
        max_relative_error=float(max(abs(r) / max(peak, 1) for r, (_, peak) in zip(residuals, pairs, strict=True))),
        predicted_max_batch=max(0, math.floor((budget_bytes - fixed) / slope)) if slope > 0 else None,
    )


def estimates(points: Iterable[tuple[int, int]], *, budget_bytes: int) -> dict[str, float | None]:
    """What straight lines would have answered, by name; the first is what Ultralytics' AutoBatch fits.

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
