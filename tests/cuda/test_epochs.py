"""Epochs on torch's own CUDA allocator: each order is trained in a process of its own, and ends where its replay does."""

import os
import random
import signal
import socket
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from bed import forked
from torch import nn
from torch.nn import functional as F

import oomprobe

from .ranks import BRIEF, cards, forking, on_ranks
from .tabled import Attention, build_attention, language_model

TARGET = f"{Path(__file__).with_name('tabled.py')}:build"
LENGTHS = [
    min(512, max(8, round(90 * random.Random(n).lognormvariate(0, 0.6)))) for n in range(3000)
]
NODES = [
    min(300, max(4, round(24 * random.Random(n).lognormvariate(0, 0.55)))) for n in range(3000)
]
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


class Messages(nn.Module):
    """A layer that sums over neighbours: its memory grows with nodes and with edges."""

    def __init__(self, width):
        super().__init__()
        self.message, self.update = nn.Linear(2 * width, width), nn.Linear(2 * width, width)

    def forward(self, nodes, ends):
        messages = F.silu(self.message(torch.cat([nodes[ends], nodes[ends.flip(0)]], -1)))
        sums = torch.zeros_like(nodes).index_add(0, ends, messages)
        return nodes + self.update(torch.cat([nodes, sums], -1))


def graphs():
    layers = nn.ModuleList(Messages(256) for _ in range(4)).cuda()
    optimizer = torch.optim.AdamW(layers.parameters())

    def step(model, batch_size, nodes, edges):
        state = torch.randn(nodes, 256, device="cuda")
        ends = torch.zeros(edges, dtype=torch.long, device="cuda")
        for layer in model:
            state = layer(state, ends)
        optimizer.zero_grad()
        state.square().mean().backward()
        optimizer.step()

    return layers, step


def accumulating():
    model, _ = language_model(Attention)
    optimizer = torch.optim.AdamW(model.parameters())
    made = 0

    def step(model, batch_size, length):
        nonlocal made
        made += 1
        tokens = torch.randint(500, (batch_size, length), device="cuda")
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        if made % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()

    return model, step


def images():
    parts = [nn.Conv2d(3, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.SiLU(), nn.Conv2d(32, 64, 3, 2, 1)]
    model = nn.Sequential(*parts, nn.BatchNorm2d(64), nn.SiLU(), nn.AdaptiveAvgPool2d(1)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(model, batch_size, side):
        loss = model(torch.randn(batch_size, 3, side, side, device="cuda")).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return model, step


def sides(drawn, batch_size):
    while True:
        yield {"side": drawn.randrange(96, 384, 32)}


SHORT = {"calls": 25, "orders": 4}
LOOPS = {
    "padded lengths": (lambda: language_model(Attention), {"values": {"length": LENGTHS}}),
    "graphs that add up": (
        graphs,
        {"values": {"nodes": NODES, "edges": [3 * n for n in NODES]}, "draw": "sum"},
    ),
    "gradients of four calls": (accumulating, {"values": {"length": LENGTHS}}),
    "images of several scales": (images, {"draw": sides}),
}


def find(make, epoch):
    model, step = make()
    step = oomprobe.Step(step, is_loop=False)  # as `dies` calls it
    return oomprobe.find_max_batch(model, step, epoch=epoch, progress="off").to_dict()


def dies(make, batches, cap_bytes):
    """Return the call in which a fresh process runs out of memory; None if it runs all."""
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(cap_bytes / total_bytes)
    model, step = make()
    for number, batch in enumerate(batches, start=1):
        try:
            step(model, **batch)
            torch.cuda.synchronize()
        except torch.OutOfMemoryError:
            return number
    return None


@pytest.mark.parametrize(
    ("name", "settings"), [*((name, {}) for name in LOOPS), ("graphs that add up", EXPANDABLE)]
)
def test_each_order_ends_where_its_replay_does(name, settings):
    make, given = LOOPS[name]
    epoch = oomprobe.Epoch(**given, **SHORT)
    found = forked(find, make, epoch, memory="1GiB", limit_s=240, **settings)
    record = found["epoch"]
    assert (record["deaths"], record["reason"]) == (0, "")
    assert record["settings"] == {f"expandable_segments:{bool(settings)}": 0}
    assert record["matched_fraction"] > 0.94
    bound = record["longest_only_batch_size"]
    assert 0.5 * bound < found["batch_size"] <= bound
    for size, ends in ((bound, record["longest_only_ends"]), (found["batch_size"], record["ends"])):
        for order in range(3):
            batches = [*epoch.batches(order, size)]
            died = forked(dies, make, batches, found["budget_bytes"], memory="1GiB", **settings)
            assert died == ends[order], (size, order)
    assert any(record["longest_only_ends"])


def test_an_isolated_target_is_recorded_in_its_process():
    epoch = oomprobe.Epoch({"length": LENGTHS}, **SHORT)

    def probe():
        options = {"epoch": epoch, "patience": BRIEF, "progress": "off"}
        return oomprobe.probe_target(TARGET, **options).to_dict()

    found = forked(forking, probe, memory="1GiB", limit_s=240)
    assert (found["epoch"]["deaths"], found["epoch"]["reason"]) == (0, "")
    assert found["environment"]["isolated"]
    batches = [*epoch.batches(0, found["batch_size"])]
    assert forked(dies, language_model, batches, found["budget_bytes"], memory="1GiB") is None


def end_on_ranks(epoch, order, size, cap_bytes):
    """Train on two ranks; return the call of the first death of any, or None."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ended, said = os.pipe()
    children = []
    for rank in range(2):
        child = os.fork()
        if child:
            children.append(child)
            continue
        group = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in (group | address).items()})
        torch.set_num_threads(1)  # the parent's thread pool does not exist here
        torch.cuda.set_device(rank)
        os.write(
            said,
            f"{dies(build_attention, epoch.batches(order, size, rank, 2), cap_bytes)}\n".encode(),
        )
        os._exit(0)
    os.close(said)
    with os.fdopen(ended) as lines:
        first = lines.readline()
        if first != "None\n":  # the other waits for it
            for child in children:
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
        ends = {line.strip() for line in (first, *lines)}
    for child in children:
        os.waitpid(child, 0)
    (end,) = ends
    return None if end == "None" else int(end)


def test_ranks_draw_their_own_batches_and_end_with_the_first_that_dies(tmp_path):
    epoch = oomprobe.Epoch({"length": LENGTHS}, **SHORT)

    def probe():
        options = {"epoch": epoch, "nproc_per_node": 2, "patience": BRIEF, "progress": "off"}
        return oomprobe.probe_target(f"{TARGET}_attention", **options)

    result = on_ranks(tmp_path, probe, limit_s=240)
    record = result.epoch
    assert (record.deaths, record.reason) == (0, "")
    assert any(record.longest_only_ends)
    of_sizes = {
        record.longest_only_batch_size: record.longest_only_ends,
        record.batch_size: record.ends,
    }
    for size, ends in of_sizes.items():
        for order in range(2):
            given = (epoch, order, size, result.budget_bytes)
            end = forked(end_on_ranks, *given, **cards(tmp_path))
            assert end == ends[order], (size, order)
