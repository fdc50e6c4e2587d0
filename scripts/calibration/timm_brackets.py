"""The timm training benchmark on an RTX 3090: the largest batch size that ran, and the next one, which failed.

Source: huggingface/pytorch-image-models, results/benchmark-train-amp-nchw-pt112-cu113-rtx3090.csv (Apache-2.0), kept in
tests/data. Recipe: torch 1.12, CUDA 11.3, channels first, fp16 autocast around the loss, no scaler, SGD with Nesterov
momentum as a loop over parameters, random images, cross-entropy. Attention is not fused, as in timm then.

Two calls of each size are recorded without a limit. Replaying the recording on the allocator alone then tells whether
it fits a capacity.
"""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from calibration import running, torchvision_names
from calibration.rows import MIB, Bracket
from oomprobe.devices.simulated import SimulatedDevice
from oomprobe.simulation.allocator import AllocatorOutOfMemory, CachingAllocator
from oomprobe.simulation.tape import RecordedCall, replay_call

DATA = Path(__file__).resolve().parents[2] / "tests" / "data" / "timm_rtx3090_train_amp_nchw.json"
CAPACITY_MIB = 22_000  # chosen on rows of this file
SWEEP_MIB = range(21_000, 23_001, 250)
UNLIMITED = 2**44  # bytes
CALLS = 2


@dataclass(frozen=True, slots=True)
class Recorded:
    """A batch size, run without a limit: its allocations in order, and its peak."""

    placed_bytes: tuple[int, ...]
    calls: tuple[RecordedCall, ...]
    peak_bytes: tuple[int, int]


def rows(count):
    """Return `count` rows, evenly spaced over those whose models the installed timm still has; None: all."""
    torchvision_names.declare()
    import timm

    known = set(timm.list_models())
    found = [row for row in json.loads(DATA.read_text())["rows"] if row["model"] in known]
    count = len(found) if count is None else min(count, len(found))
    return [found[index * len(found) // count] for index in range(count)]


def record(row):
    """Record both sizes of a row."""
    import timm

    timm.layers.set_fused_attn(False)
    model = timm.create_model(row["model"], num_classes=1000).train()
    return {size: record_size(model, row["image_size"], size) for size in (row["ran"], row["failed"])}


def record_size(model, image_size, size):
    """Record one batch size on a card without a limit."""
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True, foreach=False)
    device = SimulatedDevice(UNLIMITED)
    running.place(device, model)
    placed = tuple(device._memory.tape.finish().sizes)
    usage = running.call(device, partial(step, model, optimizer, image_size, size), CALLS)
    return Recorded(placed, tuple(device._calls), (usage.peak_reserved_bytes, usage.peak_upper_bytes))


def step(model, optimizer, image_size, size):
    """Take one step as timm's benchmark.py does."""
    images = torch.randn(size, 3, image_size, image_size, device="cuda")
    target = torch.randint(0, 1000, (size,), device="cuda")
    optimizer.zero_grad()
    with torch.autocast("cuda"):
        loss = torch.nn.functional.cross_entropy(model(images), target)
    loss.backward()
    optimizer.step()


def fits(recorded, capacity_mib):
    """Return whether a recorded size fits, and how often the allocator freed its cache."""
    allocator = CachingAllocator(capacity_mib * MIB)
    try:
        alive = {(1, index): allocator.malloc(nbytes) for index, nbytes in enumerate(recorded.placed_bytes)}
        for call in recorded.calls:
            alive = replay_call(allocator, call, alive)
    except AllocatorOutOfMemory:
        return False, allocator.alloc_retries
    return True, allocator.alloc_retries


def bracket(row, sizes, capacity_mib):
    """Simulate a row at a capacity."""
    ran, failed = sizes[row["ran"]], sizes[row["failed"]]
    (ran_fits, ran_retries), (failed_fits, failed_retries) = (fits(size, capacity_mib) for size in (ran, failed))
    return Bracket(
        name=f"{row['model']} {row['image_size']}",
        ran=row["ran"],
        failed=row["failed"],
        ran_fits=ran_fits,
        failed_fits=failed_fits,
        ran_bytes=ran.peak_bytes,
        failed_bytes=failed.peak_bytes,
        retries=failed_retries if failed_fits else ran_retries if ran_fits else 0,
    )
