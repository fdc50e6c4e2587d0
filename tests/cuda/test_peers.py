"""scripts/benchmark_peers.py on the bed: its models run, rows say what a tool did, and changes of state are seen."""

import pytest
import torch
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


def set_gradients(model, optimizer):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


def take_a_step(model, optimizer):
    set_gradients(model, optimizer)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("parts", "change"),
    [
        ([], lambda model, optimizer: None),
        (["generators"], lambda model, optimizer: torch.rand(1)),
        (["generators"], lambda model, optimizer: torch.rand(1, device="cuda")),
        (["gradients"], set_gradients),
        (["weights", "optimizer"], take_a_step),
        (["buffers"], lambda model, optimizer: next(model.buffers()).add_(1)),
        (["device"], lambda model, optimizer: model.cpu()),
    ],
)
def test_a_change_is_seen(parts, change):
    def changed():
        model, optimizer = WORKLOADS["conv"].build()
        before = measuring.state(model, optimizer)
        change(model, optimizer)
        after = measuring.state(model, optimizer)
        return [part for part in before if before[part] != after[part]]

    assert measuring.forked(changed) == parts
