"""The model of torch's allocator of pinned memory compared with torch's own, operation by operation."""

import contextlib
import random

import pytest
import torch
import torch.distributed as dist
from bed import start
from processes import ChildDiedError

from oomprobe.allocator import AllocatorSettings, PinnedAllocator
from oomprobe.ground.torch_versions import VERSION

MIB = 2**20
STREAMS = 3  # two of which can be kept busy
SETTINGS = (
    "", "pinned_max_round_threshold_mb:1", "pinned_max_cached_size_mb:2",
    "pinned_max_round_threshold_mb:4,pinned_max_cached_size_mb:1", "pinned_max_cached_size_mb:0",
)  # fmt: skip
pytestmark = pytest.mark.skipif(VERSION < (2, 10), reason="statistics that count the cache")


def operations(count, text):
    """Yield random operations: pin, copy on a stream, free, keep a stream busy, let it go, empty the cache."""
    draw = random.Random(f"{count} {text}").random
    sizes = [1, 512, 4097, MIB, MIB + 1, 3 * MIB, 4 * MIB, 5 * MIB + 3]
    sizes += [int(2 ** (draw() * 23)) for _ in range(20)]
    live, busy = [], set()
    for number in range(count):
        kind, stream = draw(), 1 + int(draw() * (STREAMS - 1))
        if kind < 0.02:
            yield "empty", None, None
        elif kind < 0.06 and stream not in busy:
            busy.add(stream)
            yield "hold", stream, None
        elif kind < 0.14 and stream in busy:
            busy.remove(stream)
            yield "let go", stream, None
        elif kind < 0.4 and live:
            yield "copy", live[int(draw() * len(live))], int(draw() * STREAMS)
        elif kind < 0.7 or not live:
            live.append(number)
            yield "pin", number, sizes[int(draw() * len(sizes))]
        else:
            yield "free", live.pop(int(draw() * len(live))), None
    for stream in busy:
        yield "let go", stream, None


def outcomes_of_torch(count, text, folder):
    """Return torch's statistics after each operation; a stream is busy while a collective waits for the other rank."""
    if text:
        torch._C._accelerator_setAllocatorSettings(text)
    store, groups = joined(0, folder)
    streams = [torch.cuda.default_stream(), *(torch.cuda.Stream() for _ in groups)]
    on_card, pinned, results = torch.empty(1, dtype=torch.uint8, device="cuda"), {}, []
    before = torch.cuda.host_memory_stats()
    assert not before["allocated_bytes.current"]
    for number, (kind, which, detail) in enumerate(operations(count, text)):
        if kind == "pin":
            pinned[which] = torch.empty(detail, dtype=torch.uint8, pin_memory=True)
        elif kind == "free":
            del pinned[which]
        elif kind == "copy":
            with torch.cuda.stream(streams[detail]):
                on_card.copy_(pinned[which][:1], non_blocking=True)
        elif kind == "hold":
            with torch.cuda.stream(streams[which]):
                dist.all_reduce(torch.ones(1, device="cuda"), group=groups[which - 1])
        elif kind == "let go":
            store.set(f"next {number}", str(which))
            streams[which].synchronize()
        else:
            torch._C._host_emptyCache()
        stats = torch.cuda.host_memory_stats()
        results.append([
            *(stats[f"allocated_bytes.{name}"] for name in ("current", "peak")),
            stats["active_bytes.current"], stats["num_host_alloc"], stats["num_host_free"],
        ])  # fmt: skip
    return results


def follow(count, text, folder):
    """Do as the other rank's collectives wait for."""
    store, groups = joined(1, folder)
    for number, (kind, which, _) in enumerate(operations(count, text)):
        if kind == "let go":
            store.wait([f"next {number}"])
            dist.all_reduce(torch.ones(1, device="cuda"), group=groups[which - 1])


def joined(rank, folder):
    torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/meeting", 2)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=2)
    groups = [dist.new_group() for _ in range(STREAMS - 1)]
    for group in groups:
        dist.all_reduce(torch.ones(1, device="cuda"), group=group)
    torch.cuda.synchronize()
    return store, groups


def outcomes_of_the_model(count, text):
    allocator, handles, busy, results = (
        PinnedAllocator(settings=AllocatorSettings.from_text(text)),
        {},
        set(),
        [],
    )
    for kind, which, detail in operations(count, text):
        for stream in {*range(STREAMS)} - busy:
            allocator.synchronize(stream)
        if kind == "pin":
            handles[which] = allocator.malloc(detail)
        elif kind == "free":
            allocator.free(handles.pop(which))
        elif kind == "copy":
            allocator.record_stream(handles[which], detail)
        elif kind == "hold":
            busy.add(which)
        elif kind == "let go":
            busy.remove(which)
        else:
            allocator.empty_cache()
        results.append([
            allocator.reserved_bytes, allocator.peak_reserved_bytes, allocator.active_bytes,
            allocator.pins, allocator.unpins,
        ])  # fmt: skip
    return results


@pytest.mark.parametrize("count", [1500, pytest.param(20_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("text", SETTINGS)
def test_pinned_memory_is_that_of_torch(text, count, tmp_path):
    bed = {"memory": "1GiB,1GiB", "shared": tmp_path / "cards"}
    other = start(follow, count, text, tmp_path, **bed)
    try:
        expected = start(outcomes_of_torch, count, text, tmp_path, **bed).result(limit_s=300)
    finally:
        other.kill()
        with contextlib.suppress(ChildDiedError):
            other.result()
    found = outcomes_of_the_model(count, text)
    for number, (here, there) in enumerate(zip(found, expected, strict=True)):
        assert here == there, number
