"""The parts of scripts/evidence/benchmark_peers.py that need no device: the cold frontier and the evidence; test_pages.py has its tables."""

import pytest
from peers import measuring


@pytest.mark.parametrize(
    ("limit", "hole", "least"),
    [(0, 0, 0), (1, 0, 1), (499, 0, 499), (100, 64, 100), (837632, 0, 835957)],
)
def test_the_cold_frontier_is_the_last_size_that_runs(limit, hole, least, monkeypatch):
    """Large ones are exact to 1/500; doubling continues past a single size that fails."""
    monkeypatch.setattr(measuring, "lasts", lambda _, size, steps: size <= limit and size != hole)
    assert least <= measuring.cold_frontier("mlp_adamw") <= limit
