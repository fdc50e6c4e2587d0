import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomprobe.records.fit import estimates, fit_line

sizes = st.lists(st.integers(1, 2**40), min_size=3, max_size=12, unique=True)
peaks = st.integers(0, 2**45)


@given(sizes, peaks, st.integers(1, 2**28), st.integers(1, 2**40))
def test_an_exact_line_predicts_the_size_at_the_budget(xs, fixed, slope, largest):
    points = [(x, fixed + slope * x) for x in xs]
    line = fit_line(points, budget_bytes=fixed + slope * largest)
    assert (line.fixed_bytes, line.bytes_per_sample, line.predicted_max_batch) == (
        fixed,
        slope,
        largest,
    )
    assert (line.r_squared, line.max_relative_error) == (1, 0)
    assert (
        fit_line(points, budget_bytes=fixed + slope * largest - 1).predicted_max_batch
        == largest - 1
    )


@pytest.mark.parametrize("points", [[], [(1, 10), (2, 20)], [(1, 10), (2, 20), (2, 21), (1, 11)]])
def test_fewer_than_three_sizes_have_no_fit(points):
    assert fit_line(points, budget_bytes=100) is None


def test_estimates_differ_if_the_peaks_are_not_on_a_line():
    straight = [(size, 10**6 + 1000 * size) for size in (1, 2, 4, 8, 16)]
    bent = [(17, 10**6 + 34_000), (64, 10**6 + 256_000)]
    smallest, line = estimates(straight + bent, budget_bytes=2 * 10**6).values()
    assert smallest == 1000
    assert line < 500
    assert set(estimates([], budget_bytes=1).values()) == {None}
