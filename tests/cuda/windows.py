"""Verdicts and peaks at sizes around a limit, on a simulated card and on torch's allocator: three iterations of a loop in a fresh state."""

import os
import warnings

import torch
from bed import forked
from sequences import A100, simulated
from zoo import run_loop

import oomprobe
from oomprobe.runners.loop_variables import LoopVariables

CALLS = 3
EXPANDABLE = "expandable_segments:True"


def device_of(memory, settings):
    """Return a simulated card; for the process of the caller alone, as it sets a variable."""
    warnings.simplefilter("ignore")
    os.environ["PYTORCH_ALLOC_CONF"] = settings
    return simulated(A100, memory)


def simulated_answer(build, memory, settings=""):
    device = device_of(memory, settings)
    with device.building():
        model, step = build()
    return found(model, step, device=device)


def answer(build, settings=""):
    prepare(settings)
    return found(*build())


def found(model, step, **options):
    """Return the batch size and the budget of a search, of sizes that a batch norm can train on."""
    result = oomprobe.find_max_batch(
        model, step, progress="off", resolution=0, steps=2, min_batch=2, **options
    )
    return result.batch_size, result.budget_bytes


def simulated_cells(build, sizes, cap_bytes, memory, settings=""):
    return [simulated_cell(build, size, cap_bytes, device_of(memory, settings)) for size in sizes]


def simulated_cell(build, size, cap_bytes, device):
    with device.building():
        model, step = build()
    device.start_trial()
    fits, loop = True, LoopVariables(oomprobe.Step(step))
    with device.cap(cap_bytes):
        try:
            for _ in range(CALLS):
                with device.session(), loop.keeping():
                    step(model, size)
        except torch.OutOfMemoryError:
            fits = False
    usage = device.usage()
    return fits, usage.peak_allocated_bytes, usage.peak_reserved_bytes


def prepare(settings):
    """Prepare a process on the bed."""
    warnings.simplefilter("ignore")
    if settings:
        torch._C._accelerator_setAllocatorSettings(settings)


def cell(build, size, cap_bytes, settings=""):
    prepare(settings)
    torch.cuda.init()
    torch.cuda.set_per_process_memory_fraction(
        cap_bytes / torch.cuda.get_device_properties(0).total_memory
    )
    model, step = build()
    torch.cuda.reset_peak_memory_stats()
    fits = True
    try:
        run_loop(step, CALLS, model, size)
    except torch.OutOfMemoryError:
        fits = False
    return fits, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def window(build, limit, cap_bytes, *, each_side, memory, settings=""):
    """Return the sizes around a limit, and what each does on a simulated card and on torch's allocator."""
    stride = max(1, limit // 400)
    sizes = [limit + number * stride for number in range(1 - each_side, each_side + 1)]
    in_simulation = forked(simulated_cells, build, sizes, cap_bytes, memory, settings, limit_s=600)
    on_torchs = [
        forked(cell, build, size, cap_bytes, settings, memory=memory, card=A100) for size in sizes
    ]
    return sizes, in_simulation, on_torchs
