"""The parts of scripts/evidence/benchmark_peers.py that need no device: the cold frontier, the evidence and its table."""

import benchmark_peers
import pytest
from peers import measuring, ranks, table


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
    told = {"work": 20.4, "answer_was_run": True, "lasts": True, "changed": []}
    return {**usual, "answer": answer, **told, **changed}


@pytest.mark.parametrize(
    ("rows", "cells"),
    [
        (
            [row(90, work=17.0), row(80), row(100, sizes_tried=12, work=24.6)],
            ["0 / 3", "0.90 (0.80 to 1.00)", "20 (17 to 25)", "9", "0", "-"],
        ),
        ([row(90), row(120, lasts=False)], ["1 / 2", "0.90 (0.90 to 0.90)", "20 (20 to 20)", "9", "0", "-"]),
        ([row(90, answer_was_run=False)], ["0 / 1", "0.90 (0.90 to 0.90)", "20 (20 to 20)", "9", "1", "-"]),
        (
            [row(None, work=None, lasts=False, changed=["weights"]), row(90, changed=["generators"])],
            ["0 / 2, no answer 1", "0.90 (0.90 to 0.90)", "20 (20 to 20)", "9", "0", "generators, weights"],
        ),
        ([{"error": "process ended with status 9"}], ["0 / 1, no answer 1", "-", "-", "-", "0", "-"]),
    ],
)
def test_a_line_of_the_table(rows, cells):
    assert table.line(rows) == cells


def test_a_card_of_ones_own_shows_seconds():
    results = {
        "versions": {"torch": "2.14.1"},
        "rows": [row(wall_s=1.25), row(card_gib=4, wall_s=3.0), row(error="died")],
    }
    assert "| seconds: median (range) |" in table.tools_table(results, "a CUDA card", True)[1]
    assert table.tools_table(results, "a CUDA card", True)[1].endswith("| 2.1 (1.2 to 3.0) |")
    assert "seconds" not in table.tools_table(results, "the bed", False)[1]


def test_a_peak_is_compared_with_the_figure_that_a_tool_claims():
    def case(measured, **told):
        return {"measured": {"where": "H200", **measured}, **told}

    gib = {"allocated": 2**30, "reserved": 2 * 2**30}
    cases = {
        "a": case(gib, exact={**gib, "seconds": 1.0}, high={"reserved": 3 * 2**30, "seconds": 0.1}),
        "b": case(gib, exact={"error": "KeyError: 'b'", "seconds": 9.0}, high={"reserved": 2**30, "seconds": 0.4}),
    }
    drawn, said, versions = table.peaks_table({"cases": cases, "versions": {"torch": "2.11.0"}})
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in drawn.splitlines()]
    assert lines[0][4:] == ["exact: allocated", "exact: reserved", "high: reserved"]
    assert lines[2:] == [
        ["a", "H200", "1.00", "2.00", "+0.0 %", "+0.0 %", "+50.0 %"],
        ["b", "H200", "1.00", "2.00", "no figure", "no figure", "-50.0 %"],
        ["median, without sign", "", "", "", "0.0 %", "0.0 %", "50.0 %"],
        ["worst", "", "", "", "+0.0 %", "+0.0 %", "+50.0 %"],
        ["seconds: median (range)", "", "", "", "5.0 (1.0 to 9.0)", "5.0 (1.0 to 9.0)", "0.2 (0.1 to 0.4)"],
    ]
    assert (said, versions) == ("- exact: KeyError: 'b' (b)", "torch 2.11.0.")


@pytest.mark.parametrize(
    ("rows", "cell"),
    [
        ([([8, 8], "answered", True), ([9, 9], "answered", False)], "gpt 8, gpt 9: 1 of 2 last"),
        ([([8, 6], "answered", True), ([9], "not done in 120 s", False)], "gpt 8 and 6, gpt 9 and -: 1 of 2 last"),
        ([([], "status 1; ValueError: of 8, 6", False), ([8, 8], "answered", True)], "gpt - and -, gpt 8: 1 of 2 last"),
        ([([], "status 1; ValueError: of 8, 6", False), ([], "status 1; ValueError: of 8, 7", False)], "status 1; ValueError: of 8"),
    ],
)  # fmt: skip
def test_a_cell_of_two_ranks(rows, cell):
    rows = [{"model": "gpt", "answers": answers, "ended": ended, "lasts": lasts} for answers, ended, lasts in rows]
    assert table.ranks_cell(rows) == cell


@pytest.mark.parametrize(
    ("answers", "lasting", "lasts"),
    [([8, 6], [8, 6], True), ([8, 6], [8], False), ([8], [8, 8], False), ([], [], False)],
)
def test_an_answer_lasts_if_both_ranks_run_their_own(monkeypatch, answers, lasting, lasts):
    def group(tool, name, cards, *sizes):
        assert tool == "accelerate" or sizes == tuple(answers)
        return "answered", answers if tool == "accelerate" else lasting

    monkeypatch.setattr(ranks, "group", group)
    assert ranks.row("accelerate", "conv", "ranks alike") == {"answers": answers, "ended": "answered", "lasts": lasts}


def test_a_new_row_replaces_only_its_own_case():
    others = [row(card_gib=4), row(model="gpt"), row(tool="toma")]
    rows = benchmark_peers.replaced([row(50), *others], row(90))
    assert len(rows) == 4
    assert row(90) in rows
    assert all(other in rows for other in others)
    assert benchmark_peers.replaced(rows, row(90)) == rows
