"""The straight line through (batch size, peak memory): a diagnostic, never the answer."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

SMALLEST = 16  # the line through the smallest sizes uses sizes up to this


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearFit:
    """``peak = fixed_bytes + bytes_per_sample * batch_size``, by least squares.

    Attributes:
        fixed_bytes: Peak that the line predicts at batch size zero; may be negative.
        bytes_per_sample: Slope.
        r_squared: Share of the variance explained, at most 1.
        max_relative_error: Largest distance of a measured peak from the line, as a share of that peak.
        predicted_max_batch: Size at which the line reaches the budget; None if the line does not rise.

    Examples:
        >>> import oomprobe
        >>> result = oomprobe.probe_target("oomprobe.demo:wide_mlp", device="sim:1GiB", max_batch=64, progress="off")
        >>> f"{result.fit.bytes_per_sample / 2**20:.1f} MiB per sample", result.fit.max_relative_error < 0.1
        ('1.0 MiB per sample', True)
    """

    fixed_bytes: float
    bytes_per_sample: float
    r_squared: float
    max_relative_error: float
    predicted_max_batch: int | None


def fit_line(points: Iterable[tuple[int, int]], budget_bytes: int) -> LinearFit | None:
    """Fit a line through (batch size, peak in bytes); None for fewer than three sizes, because two are always on a line.

    Examples:
        >>> line = fit_line([(1, 110), (2, 120), (4, 140)], budget_bytes=1105)
        >>> line.fixed_bytes, line.bytes_per_sample, line.predicted_max_batch
        (100.0, 10.0, 100)
    """
    pairs = sorted(set(points))
    if len({size for size, _ in pairs}) < 3:
        return None
    # Exact fractions, because a rounded slope would move the size at which the line reaches the budget.
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
    """Return what straight lines would have answered, by name; Ultralytics' AutoBatch fits the first.

    Examples:
        >>> estimates([(1, 110), (2, 120), (4, 140), (32, 400)], budget_bytes=1100)
        {'straight line through the smallest sizes': 100, 'straight line through all peaks': 107}
    """
    every = list(points)
    smallest = [point for point in every if point[0] <= SMALLEST]
    lines = {"the smallest sizes": fit_line(smallest, budget_bytes), "all peaks": fit_line(every, budget_bytes)}
    return {f"straight line through {name}": line.predicted_max_batch if line else None for name, line in lines.items()}
