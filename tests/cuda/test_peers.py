"""scripts/evidence/benchmark_peers.py on the bed: its models run, and rows say what a tool did."""

import contextlib

import pytest
import torch
from peers import measuring, tools
from peers.models import WORKLOADS


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_model_trains(name):
    if name.startswith("yolo"):
        pytest.importorskip("ultralytics")
    assert measuring.lasts(name, 2, 2)
    assert not measuring.lasts(name, 10**7, 1)


def test_a_row_says_what_a_tool_did():
    row = measuring.row("oomprobe", "mlp_sgd", 38000)
    assert (row["error"], row["changed"], row["answer_was_run"], row["lasts"]) == (None, [], True, True)
    assert 10_000 < row["answer"] < 50_000
    assert row["sizes_tried"] > 3


def test_work_counts_each_call_also_one_that_fails(monkeypatch):
    def ask(call):
        for size in (4, 4, 500_000):
            with contextlib.suppress(torch.OutOfMemoryError):
                call.step(call.model, size)
        return 4

    monkeypatch.setitem(tools.TOOLS, "fake", tools.Tool(call=ask, imports="torch"))
    assert measuring.row("fake", "mlp_sgd", 100)["work"] == (4 + 4 + 500_000) / 4
