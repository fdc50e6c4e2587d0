"""scripts/benchmark_peers.py on the bed: its models run, and rows say what a tool did."""

import pytest
from peers import measuring
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
