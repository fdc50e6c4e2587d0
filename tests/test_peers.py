"""The parts of scripts/evidence/benchmark_peers.py that need no device: the cold frontier and the evidence; test_pages.py has its tables."""

import benchmark_peers
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


def row(answer=90, **changed):
    return {"card_gib": 1, "model": "mlp_adamw", "tool": "oomprobe", "answer": answer, **changed}


def test_a_new_row_replaces_only_its_own_case():
    others = [row(card_gib=4), row(model="gpt"), row(tool="toma")]
    rows = benchmark_peers.replaced([row(50), *others], row(90))
    assert len(rows) == 4
    assert row(90) in rows
    assert all(other in rows for other in others)
    assert benchmark_peers.replaced(rows, row(90)) == rows
