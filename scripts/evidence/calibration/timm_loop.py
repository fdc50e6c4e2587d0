"""timm's benchmark.py on a simulated card: a batch size that fails is followed by the next smaller one, in one process.

What the loop leaves behind counts: the cache is emptied while the last model and its images still exist, and they are freed
only after the next model has been built, so that the segments of the smaller size are not those of a fresh process.
"""

import gc
import json
from dataclasses import replace
from pathlib import Path

import torch

from calibration import running, torchvision_names
from calibration.rows import MIB, Bracket
from oomprobe.devices.simulated import SimulatedDevice
from oomprobe.simulation.catalogue import find_card

DATA = Path(__file__).resolve().parents[3] / "tests" / "data"
CALLS = 3
NOT_MEMORY = (
    "invalid configuration argument",
    "more than 2^31",
    "32-bit index math",
)  # failures to the benchmark, too


def rows(file, count=None, first=0, step=1):
    """Return rows whose models the installed timm still has: every `step`-th from `first`, of these `count` evenly spaced."""
    torchvision_names.declare()
    import timm

    known = set(timm.list_models())
    found = [row for row in json.loads((DATA / file).read_text())["rows"] if row["model"] in known][
        first::step
    ]
    count = len(found) if count is None else min(count, len(found))
    return [found[index * len(found) // count] for index in range(count)]


def card_of(name, capacity_mib):
    """Return the card with this memory for the allocator."""
    return replace(find_card(name), total_bytes=capacity_mib * MIB, context_bytes=0)


def bracket(row, card, start, begin):
    """Run the loop from the size `start` to the one that ran; `begin` returns the step of a model, a size and an image size."""
    tried = descend(
        card,
        build(row["model"]),
        sizes(start, row["ran"]),
        lambda *args: begin(*args, row["image_size"]),
    )
    (ran_fits, ran), (failed_fits, failed) = tried[row["ran"]], tried[row["failed"]]
    remark = ""
    if not ran_fits:
        remark = f"refused with {ran.peak_allocated_bytes / card.total_bytes:.0%} of the memory allocated"
    elif failed_fits:
        remark = f"{row['failed']} reserves {failed.peak_reserved_bytes / card.total_bytes:.0%} of the memory"
    return Bracket(
        name=f"{row['model']} {row['image_size']}",
        ran=row["ran"],
        failed=row["failed"],
        ran_fits=ran_fits,
        failed_fits=failed_fits,
        ran_bytes=(ran.peak_reserved_bytes, ran.peak_upper_bytes),
        failed_bytes=(failed.peak_reserved_bytes, failed.peak_upper_bytes),
        card=card.name,
        remark=remark,
        retries=failed.alloc_retries if failed_fits else ran.alloc_retries if ran_fits else 0,
    )


def sizes(start, last):
    """Yield 1024, 768, 512, 384, ... from `start` to `last`."""
    size = start
    while size >= last:
        yield size
        power = 1 << ((size - 1).bit_length() - 1)
        size = power * 3 // 2 if size > power * 3 // 2 else power


def descend(card, model, batch_sizes, begin):
    """Return for each size whether it fits, and its usage."""
    device, tried, last = SimulatedDevice(card), {}, []
    tensors = [*model.parameters(), *model.buffers()]
    for size in batch_sizes:
        device._memory.empty_cache()
        gc.collect()
        last += [tensor.untyped_storage() for tensor in tensors]
        last += [tensor.grad for tensor in tensors]
        for tensor in tensors:
            tensor.data, tensor.grad = torch.empty_like(tensor), None
        device.place(tensors)
        last.clear()
        step = begin(model, size)
        last.append(step)
        device.start_trial()
        tried[size] = runs(device, step), device.usage()
    return tried


def runs(device, step):
    """Whether the step runs `CALLS` times; what a failed backward pass leaves in autograd's queue is freed."""
    try:
        return running.call(device, step, CALLS) is not None
    except RuntimeError as error:
        if any(text in str(error) for text in NOT_MEMORY):
            return False
        raise
    finally:
        torch.zeros((), requires_grad=True).backward()


def build(name):
    """Build a model without values; a few need them while they are built."""
    import timm

    try:
        return running.without_values(lambda: timm.create_model(name))
    except (RuntimeError, NotImplementedError):
        return timm.create_model(name)
