"""The parts of scripts/benchmark_peers.py that need no device: the cold frontier, the evidence and its table."""

import benchmark_peers
import pytest
from peers import measuring, table


@pytest.mark.parametrize(
    ("limit", "hole", "least"),
    [(0, 0, 0), (1, 0, 1), (499, 0, 499), (100, 64, 100), (837632, 0, 835957)],
)
def test_the_cold_frontier_is_the_last_size_that_runs(limit, hole, least, monkeypatch):
    """Large ones are exact to 1/500; doubling continues past a single size that fails."""
    monkeypatch.setattr(measuring, "lasts", lambda _, size, steps: size <= limit and size != hole)
    assert least <= measuring.cold_frontier("mlp_adamw") <= limit


def row(answer=90, **changed):
    usual = {"card_gib": 1, "model": "mlp_adamw", "tool": "oomprobe", "frontier": 100, "sizes_tried": 9}
    told = {"answer_was_run": True, "lasts": True, "changed": [], "left_reserved_mib": 0.0}
    return {**usual, "answer": answer, **told, **changed}


@pytest.mark.parametrize(
    ("rows", "cells"),
    [
        ([row(90), row(80), row(100, sizes_tried=12)], ["0 / 3", "0.90 (0.80 to 1.00)", "9", "0", "-", "0.0 GiB"]),
        ([row(90), row(120, lasts=False)], ["1 / 2", "0.90 (0.90 to 0.90)", "9", "0", "-", "0.0 GiB"]),
        ([row(90, answer_was_run=False)], ["0 / 1", "0.90 (0.90 to 0.90)", "9", "1", "-", "0.0 GiB"]),
        (
            [row(None, lasts=False, changed=["weights"]), row(90, changed=["generators"], left_reserved_mib=2560.0)],
            ["0 / 2, no answer 1", "0.90 (0.90 to 0.90)", "9", "0", "generators, weights", "2.5 GiB"],
        ),
        ([{"error": "process ended with status 9"}], ["0 / 1, no answer 1", "-", "-", "0", "-", "0.0 GiB"]),
    ],
)
def test_a_line_of_the_table(rows, cells):
    assert table.line(rows) == cells


def test_a_new_row_replaces_only_its_own_case():
    others = [row(card_gib=4), row(model="gpt"), row(tool="toma")]
    rows = benchmark_peers.replaced([row(50), *others], row(90))
    assert len(rows) == 4
    assert row(90) in rows
    assert all(other in rows for other in others)
    assert benchmark_peers.replaced(rows, row(90)) == rows
