import dataclasses
import math
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from oomprobe.report.fit import estimates, fit_line

GIB = 2**30
sizes = st.lists(st.integers(1, 4096), min_size=3, max_size=12, unique=True)


@given(sizes, st.integers(0, 2 * GIB), st.integers(1, 2**28), st.integers(1, 4096))
@example([1, 2, 3199], 67106730, 2, 1)  # what rounding loses of the fixed part is more than a billionth of a sample
def test_an_exact_line_meets_the_budget_at_its_size(xs, fixed, slope, largest):
    line = fit_line([(x, fixed + slope * x) for x in xs], budget_bytes=fixed + slope * largest)
    assert line is not None
    assert line.bytes_per_sample == pytest.approx(slope, rel=1e-9)
    assert line.fixed_bytes == pytest.approx(fixed, rel=1e-9, abs=1e-6 * slope + 1e-3)
    assert line.predicted_max_batch == largest
    assert line.r_squared == pytest.approx(1)
    assert line.max_relative_error < 1e-9


@given(sizes, st.integers(0, 2 * GIB), st.integers(2, 2**28), st.integers(1, 4096))
def test_one_byte_less_is_one_sample_less(xs, fixed, slope, largest):
    line = fit_line([(x, fixed + slope * x) for x in xs], budget_bytes=fixed + slope * largest - 1 - slope // 2)
    assert line is not None
    assert line.predicted_max_batch == largest - 1


@pytest.mark.parametrize("points", [[], [(1, 10)], [(1, 10), (2, 20)], [(1, 10), (2, 20), (2, 21), (1, 11)]])
def test_fewer_than_three_sizes_are_no_line(points):
    assert fit_line(points, budget_bytes=100) is None


def test_three_sizes_are_a_line():
    assert fit_line([(1, 10), (2, 20), (3, 30)], budget_bytes=100) is not None


@given(sizes, st.integers(0, 2**45))
def test_constant_peaks_meet_no_budget(xs, peak):
    line = fit_line([(x, peak) for x in xs], budget_bytes=80 * GIB)
    assert line is not None
    assert line.bytes_per_sample == 0
    assert line.predicted_max_batch is None
    assert (line.r_squared, line.max_relative_error) == (1, 0)


def test_falling_peaks_meet_no_budget():
    line = fit_line([(1, 300), (2, 200), (3, 100)], budget_bytes=1000)
    assert line is not None
    assert line.predicted_max_batch is None


def test_a_budget_under_the_fixed_part_is_zero_and_not_negative():
    line = fit_line([(1, 110), (2, 120), (3, 130)], budget_bytes=50)
    assert line is not None
    assert line.predicted_max_batch == 0


def test_noise_shows_in_the_error_and_not_in_the_line():
    noise = random.Random(7)
    points = [(x, round((GIB + x * 2**24) * noise.uniform(0.97, 1.03))) for x in range(1, 129)]
    line = fit_line(points, budget_bytes=3 * GIB)
    assert line is not None
    assert line.predicted_max_batch == pytest.approx(128, rel=0.03)
    assert 0.9 < line.r_squared < 1
    assert 0.02 < line.max_relative_error < 0.05


def test_the_error_is_a_share_of_the_measured_peak():
    line = fit_line([(1, 100), (2, 100), (3, 100), (4, 200)], budget_bytes=1000)
    assert line is not None
    # By hand: slope 30, fixed 50, so the last peak of 200 is predicted as 170 and the first of 100 as 80.
    assert (line.bytes_per_sample, line.fixed_bytes) == (pytest.approx(30), pytest.approx(50))
    assert line.max_relative_error == pytest.approx(0.4)  # 140 at size 3, where 100 was measured
    assert line.r_squared == pytest.approx(0.6)


def test_neighbouring_large_sizes_are_told_apart():
    first = 10**9
    line = fit_line([(first + x, 7 * (first + x)) for x in range(5)], budget_bytes=7 * (first + 2))
    assert line is not None
    assert line.bytes_per_sample == pytest.approx(7)


def is_finite_or_none(line):
    return line is None or all(math.isfinite(n) for n in dataclasses.astuple(line) if n is not None)


@given(
    st.lists(st.tuples(st.integers(), st.integers()), max_size=8),
    st.integers(),
)
def test_any_integers_give_finite_numbers_or_nothing(points, budget_bytes):
    line = fit_line(points, budget_bytes)
    assert is_finite_or_none(line)
    assert line is None or line.r_squared <= 1


@pytest.mark.parametrize("power", [17, 80, 160, 310, 4000])
def test_huge_integers_give_finite_numbers_or_nothing(power):
    huge = 10**power
    assert is_finite_or_none(fit_line([(1, huge), (2, 2 * huge), (4, 3 * huge)], huge))
    assert is_finite_or_none(fit_line([(huge, 1), (2 * huge, 2), (3 * huge, 3)], huge))
    assert is_finite_or_none(fit_line([(huge, huge), (huge + 1, 0), (huge + 2, 1)], 1))
    assert is_finite_or_none(fit_line([(1, 1), (2, 2), (3, 3)], huge))


def test_a_line_through_the_smallest_sizes_is_another_one():
    """A net whose peaks bend."""
    straight = [(size, 10**6 + 1000 * size) for size in (1, 2, 4, 8, 16)]
    bent = [(32, 10**6 + 64_000), (64, 10**6 + 256_000)]
    smallest, line = estimates(straight + bent, budget_bytes=2 * 10**6).values()
    assert smallest == 1000
    assert line < 500
    assert set(estimates([], budget_bytes=1).values()) == {None}
