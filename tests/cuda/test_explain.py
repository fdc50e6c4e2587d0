"""`oomprobe.explain` on snapshots that torch's own allocator wrote on the bed, and its counterfactuals, run there too."""

import random
import re
from functools import partial
from unittest.mock import ANY

import pytest
import torch
from bed import forked
from torch import nn

import oomprobe
from oomprobe.ground.torch_versions import VERSION
from oomprobe.tape import orders
from oomprobe.tape.snapshot import read_snapshot

MIB, GIB = 2**20, 2**30
SEGMENT = 2 * MIB
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self, width=256, layers=4):
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def record(
    path, lengths, *, late=0, fraction=None, entries=100_000, streams=False, kept=0, **recorded
):
    """Train with batches of these lengths until memory runs out; return what torch says then, or at the end."""
    record_history = partial(
        torch.cuda.memory._record_memory_history, max_entries=entries, **recorded
    )
    if path and not late:
        record_history()
    side = torch.cuda.Stream()
    if fraction is not None:
        torch.cuda.set_per_process_memory_fraction(fraction)
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    refused, losses = "", []
    for number, length in enumerate(lengths):
        if late and number == late:
            record_history()
        served = torch.cuda.memory_stats()["allocation.all.allocated"]
        try:
            x = torch.randn(length, 256, device="cuda")
            if streams:
                with torch.cuda.stream(side):
                    x = x + 1
                x.record_stream(torch.cuda.current_stream())
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if kept:
                losses = [*losses[-kept:], loss.detach()]
            del loss
        except torch.OutOfMemoryError as error:
            refused = str(error)
            break
    if path:
        torch.cuda.memory._dump_snapshot(path)
    return {
        "refused": refused,
        "calls": number,
        "served": torch.cuda.memory_stats()["allocation.all.allocated"]
        - served,  # in the last call
        "peak": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }


@pytest.mark.parametrize(
    ("settings", "fraction"),
    [
        ("max_split_size_mb:32", None),
        ("expandable_segments:True,max_split_size_mb:32", None),
        ("max_split_size_mb:21,roundup_power2_divisions:[1:8,>:2]", None),
        ("garbage_collection_threshold:0.5", 0.9),
        ("large_segment_size_mb:64", None),
    ],
)
def test_a_recording_is_replayed_with_its_settings(settings, fraction, tmp_path):
    if VERSION < (2, 13) and "large" in settings:
        pytest.skip("this torch has no such setting")
    path, lengths = tmp_path / "snapshot.pickle", random.Random(3).sample(range(500, 9000), 16)
    run = partial(record, str(path), lengths, fraction=fraction)
    forked(run, memory="500MiB", context="0", PYTORCH_CUDA_ALLOC_CONF=settings)
    text = str(oomprobe.explain(path))
    requests, same = re.search(r"Replayed ([\d,]+) requests: after ([\d,]+) of them", text).groups()
    assert requests == same


def stated(message, pattern, abs=0):
    """Return a size that torch's message states, in bytes, and its rounding."""
    number, unit = re.search(rf"{pattern}([\d.]+) (MiB|GiB)", message).groups()
    factor = {"MiB": 2**20, "GiB": 2**30}[unit]
    return pytest.approx(float(number) * factor, abs=abs + 0.005 * factor)


def fed(path, fraction=1.0):
    """Give torch's allocator the requests of a snapshot; return whether it served them all."""
    torch.cuda.init()
    torch.cuda.set_per_process_memory_fraction(fraction)
    [snapshot] = read_snapshot(path.read_bytes())
    blocks = {}
    allocate, free = torch.cuda.caching_allocator_alloc, torch.cuda.caching_allocator_delete
    was_release = False
    try:
        for event in snapshot.events:
            is_release = event.action in ("segment_free", "segment_unmap")
            match event.action:
                case "alloc":
                    blocks[event.address] = allocate(event.size, stream=event.stream)
                case "free_completed":
                    free(blocks.pop(event.address))
                case "oom":
                    free(allocate(event.size))
            if is_release and not was_release:
                torch.cuda.empty_cache()
            was_release = is_release
    except torch.OutOfMemoryError:
        return False
    return True


# Each batch is longer than all before it, with a short one between.
RAGGED = [
    length for number in range(12) for length in (500 + 1900 * number % 6000, 5000 + 2000 * number)
]
PROGRAMS = {  # lengths, memory, other arguments, environment, cause
    "everything is live": (
        [1000, 40_000],
        "512MiB",
        {"context": None},
        {},
        "live",
    ),  # without stacks
    "lengths vary": (RAGGED, "900MiB", {}, {}, "fragmentation"),
    "lengths vary, expandable": (RAGGED, "700MiB", {}, EXPANDABLE, "fragmentation"),
    "nothing is refused": ([4000, 9000, 3000], "4GiB", {}, {}, None),
    "a cap": ([1000, 40_000], "4GiB", {"fraction": 0.125}, {}, "cap"),
    "a cap below the least card": ([24_000], "4GiB", {"fraction": 0.1}, EXPANDABLE, "cap"),
    "two streams": (
        RAGGED,
        "900MiB",
        {"streams": True},
        {},
        ANY,
    ),  # depends on the workspaces of torch's version
}


@pytest.mark.parametrize(
    "name",
    [
        *(name for name in PROGRAMS if name != "two streams"),
        pytest.param("two streams", marks=pytest.mark.slow),
    ],
)
def test_a_program(name, tmp_path):
    lengths, memory, more, variables, cause = PROGRAMS[name]
    path = tmp_path / "snapshot.pickle"
    seen = forked(partial(record, path, lengths, **more), memory=memory, context="0", **variables)
    explanation = oomprobe.explain(path)
    assert explanation.cause == cause
    requests = re.fullmatch(
        r"Replayed ([\d,]+) requests: after ([\d,]+) of them .*", explanation.notes[0]
    ).groups()
    assert requests[0] == requests[1]
    if cause is None:
        assert seen["refused"] == ""
        # torch counts what it did not split off
        assert explanation.live_bytes == pytest.approx(seen["peak"], abs=8 * MIB)
        assert explanation.reserved_bytes == seen["reserved"]
    else:  # torch states the segment that it would have made
        segment_bytes = -(-explanation.requested_bytes // SEGMENT) * SEGMENT
        assert segment_bytes == stated(seen["refused"], "Tried to allocate ")
        assert explanation.live_bytes == stated(
            seen["refused"], "Of the allocated memory ", 8 * MIB
        )
        assert explanation.free_bytes == stated(seen["refused"], "of which ")

    def runs(nbytes, setting):
        return forked(fed, path, memory=str(8 * GIB), context=str(8 * GIB - nbytes), **setting)

    if cause is not None and not variables and "fraction" not in more:  # what fragmentation means
        is_fragmented = runs(explanation.reserved_bytes + explanation.free_bytes, EXPANDABLE)
        assert explanation.cause == ("fragmentation" if is_fragmented else "live")
    # The two counterfactuals, on torch's own allocator: what a larger card leaves to it.
    for least_bytes, setting in (
        (explanation.least_bytes, variables),
        (explanation.least_bytes_expandable, EXPANDABLE),
    ):
        assert (runs(least_bytes, setting), runs(least_bytes - SEGMENT, setting)) == (True, False)
    # A cap on a larger card, and that under which it was refused.
    ran = [
        forked(fed, path, nbytes / (8 * GIB), memory="8GiB", **variables)
        for nbytes in (explanation.least_cap_bytes, explanation.least_cap_bytes - SEGMENT)
    ]
    assert ran == [True, False]
    if "fraction" in more:
        told = re.search(
            r"it had: ([\d.]+) MiB at least, .* less than ([\d.]+) MiB", str(explanation)
        )
        least, too_much = (float(number) * MIB for number in told.groups())
        assert least <= more["fraction"] * 4 * GIB < too_much


@pytest.mark.parametrize(
    ("memory", "fraction"), [("800MiB", None), ("8GiB", 800 / 8192)], ids=["card", "cap"]
)
def test_orders_of_the_calls_end_as_trainings_do(memory, fraction, tmp_path, monkeypatch):
    """The same batches in those orders, each in a process of its own: does it serve what was refused?"""
    monkeypatch.setattr(orders, "ORDERS", 6)
    path, drawn = tmp_path / "snapshot.pickle", random.Random(1)
    lengths = [round(drawn.lognormvariate(9, 0.5)) for _ in range(24)]
    options = {"memory": memory, "context": "0"}
    seen = forked(partial(record, path, lengths, fraction=fraction), **options)
    explanation = oomprobe.explain(path)
    reordered = explanation.reordered
    if fraction:  # a snapshot tells what the cap allowed at least
        fraction = explanation.available_bytes / (8 * GIB)
    first, *movable = lengths[: seen["calls"] - 1]
    last = lengths[seen["calls"] - 1 : seen["calls"] + 1]
    assert (reordered.calls, reordered.orders) == (len(movable), 6)
    counts = []
    for variables in ({}, EXPANDABLE):
        counts.append(0)
        for number in range(6):
            order = [first, *random.Random(number).sample(movable, len(movable)), *last]
            trained = forked(partial(record, "", order, fraction=fraction), **options, **variables)
            is_last = trained["calls"] == len(order) - 1
            counts[-1] += not trained["refused"] or (is_last and trained["served"] > seen["served"])
    assert [reordered.run, reordered.run_expandable] == counts
    assert 0 < reordered.run < 6
    said = f"as recorded: {reordered.run} of 6 orders of {len(movable)} calls run"
    assert said in str(explanation)


@pytest.mark.parametrize("more", [{"context": None}, {"kept": 3}])
def test_calls_that_cannot_change_places_are_not_replayed(more, tmp_path):
    """Without stacks, and where a call frees what several before it have made."""
    path, drawn = tmp_path / "snapshot.pickle", random.Random(1)
    lengths = [round(drawn.lognormvariate(9, 0.5)) for _ in range(24)]
    forked(partial(record, path, lengths, **more), memory="800MiB", context="0")
    explanation = oomprobe.explain(path)
    assert explanation.cause == "fragmentation"
    assert explanation.reordered is None
    assert "other orders" not in str(explanation)


@pytest.mark.parametrize(
    ("more", "expandable"),
    [({"late": 4}, EXPANDABLE), ({"entries": 900}, {}), ({"late": 4, "streams": True}, {})],
    ids=["begins late, expandable", "the first events are lost", "begins late, two streams"],
)
def test_a_start_that_was_not_recorded(more, expandable, tmp_path):
    """The segments at the end tell what was live: the replay holds what torch's allocator held throughout."""
    path = tmp_path / "snapshot.pickle"
    forked(partial(record, path, RAGGED[:6], **more), memory="8GiB", **expandable)
    explanation = oomprobe.explain(path)
    requests, same = (
        int(number) for number in re.findall(r"[\d]+", explanation.notes[0].replace(",", ""))
    )
    assert requests > 150
    if not expandable:
        assert same == requests
    assert "were live when recording began" in explanation.notes[1]
    whole = tmp_path / "whole.pickle"
    forked(
        partial(record, whole, RAGGED[:6], streams=more.get("streams", False)),
        memory="8GiB",
        **expandable,
    )
    complete = oomprobe.explain(whole)
    assert explanation.live_bytes == complete.live_bytes
    assert explanation.least_bytes == pytest.approx(complete.least_bytes, rel=0.05)


def test_what_holds_the_memory(tmp_path):
    """Lines, kinds and calls of equal modules, of a step whose backward asks for too much."""
    path = tmp_path / "snapshot.pickle"
    forked(record, path, [1000, 20_000], memory="512MiB")
    explanation = oomprobe.explain(path)
    assert re.fullmatch(r".*test_explain\.py:\d+ in forward", explanation.where)
    largest = next(iter(explanation.held))
    assert re.fullmatch(r".*test_explain\.py:\d+ in forward", largest)
    parameters = 4 * (2 * 4 * 256 * 256 + 5 * 256) * 4
    assert explanation.kinds["parameters and buffers"] == pytest.approx(parameters, rel=0.01)
    assert explanation.kinds["optimizer"] == pytest.approx(2 * parameters, rel=0.01)
    assert explanation.kinds["forward"] > explanation.live_bytes / 2
    [calls] = explanation.modules
    assert re.fullmatch(r".*test_explain\.py:\d+ in forward", calls.where)
    assert 2 <= calls.count <= 4
    assert calls.held_bytes == pytest.approx(explanation.kinds["forward"], rel=0.05)
    assert "what checkpointing computes again" in " ".join(str(explanation).split())


def test_two_devices_and_a_private_pool(tmp_path):
    path = tmp_path / "snapshot.pickle"

    def on_both():
        torch.cuda.memory._record_memory_history()
        with torch.cuda.device(1), torch.cuda.use_mem_pool(torch.cuda.MemPool()):
            kept = torch.zeros(MIB, device="cuda")
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(GIB, device="cuda:0")
        torch.cuda.memory._dump_snapshot(path)
        return kept.nbytes

    assert forked(on_both, memory="1GiB,1GiB") == 4 * MIB
    explanation = oomprobe.explain(path)
    assert (explanation.cause, explanation.requested_bytes, explanation.live_bytes) == (
        "live",
        4 * GIB,
        0,
    )
    assert explanation.notes[-1].startswith("Device 1 held 20.00 MiB")
    explanation = oomprobe.explain(path, device=1)
    assert (explanation.live_bytes, explanation.least_bytes) == (4 * MIB, 20 * MIB)
    assert explanation.notes[0].startswith("Replayed 1 request")


@pytest.mark.parametrize("expandable", [False, True])
def test_private_pools_are_replayed(tmp_path, expandable):
    """Pools and graphs that come and go, and a refusal; by default recorded from the middle on."""
    path = tmp_path / "snapshot.pickle"

    def some(count, scale=1):
        return [torch.zeros(scale * n * 100_000, device="cuda") for n in range(1, count)]

    def captured(graph, pool=None):
        with torch.cuda.graph(graph, pool=pool):
            return some(5)

    def in_pools():
        new = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        (new or torch.cuda.memory._set_allocator_settings)(f"expandable_segments:{expandable}")
        if expandable:
            torch.cuda.memory._record_memory_history()
        pool, graph = torch.cuda.MemPool(), torch.cuda.CUDAGraph()
        with torch.cuda.use_mem_pool(pool):
            kept = some(12)
        captured(graph)
        torch.cuda.memory._record_memory_history()
        del kept[::2]
        outside = some(9, 3)
        with torch.cuda.use_mem_pool(pool):
            kept += some(14)
        other = torch.cuda.CUDAGraph()
        outputs = captured(other, graph.pool())
        del outside[::2], outputs
        other.reset()
        graph.reset()
        torch.cuda.empty_cache()
        outside += some(9, 2)
        del kept, pool
        with pytest.raises(torch.OutOfMemoryError):
            some(400, 9)
        torch.cuda.memory._dump_snapshot(path)

    forked(in_pools, memory="1GiB")
    explanation = oomprobe.explain(path)
    found = re.match(r"Replayed (\d+) requests: after (\d+) of them", explanation.notes[0])
    assert found, explanation.notes[0]
    assert found[1] == found[2]
    assert explanation.least_bytes > explanation.reserved_bytes
