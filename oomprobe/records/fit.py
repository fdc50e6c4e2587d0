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
    sizes, peaks = [size for size, _ in pairs], [peak for _, peak in pairs]
    if len(set(sizes)) < 3:
        return None
    # Exact fractions, because a rounded slope would move the size at which the line reaches the budget.
    mean_size, mean_peak = Fraction(sum(sizes), len(pairs)), Fraction(sum(peaks), len(pairs))
    covariance = variance = spread = Fraction(0)
    for size, peak in pairs:
        covariance += size * (peak - mean_peak)
        variance += (size - mean_size) ** 2
        spread += (peak - mean_peak) ** 2
    slope = covariance / variance
    fixed = mean_peak - slope * mean_size
    unexplained = largest_error = Fraction(0)
    for size, peak in pairs:
        residual = abs(peak - fixed - slope * size)
        unexplained += residual**2
        largest_error = max(largest_error, residual / max(peak, 1))
    return LinearFit(
        fixed_bytes=float(fixed),
        bytes_per_sample=float(slope),
        r_squared=float(1 - unexplained / spread) if spread else 1.0,
        max_relative_error=float(largest_error),
        predicted_max_batch=max(0, math.floor((budget_bytes - fixed) / slope))
        if slope > 0
        else None,
    )


def estimates(points: Iterable[tuple[int, int]], *, budget_bytes: int) -> dict[str, float | None]:
    """Return what straight lines would have answered, by name; Ultralytics' AutoBatch fits the first.

    Examples:
        >>> estimates([(1, 110), (2, 120), (4, 140), (32, 400)], budget_bytes=1100)
        {'straight line through the smallest sizes': 100, 'straight line through all peaks': 107}
    """
    every = list(points)
    smallest = [(size, peak) for size, peak in every if size <= SMALLEST]
    answers: dict[str, float | None] = {}
    for name, some in (("the smallest sizes", smallest), ("all peaks", every)):
        line = fit_line(some, budget_bytes)
        answers[f"straight line through {name}"] = (
            None if line is None else line.predicted_max_batch
        )
    return answers
