"""Requests of an operator to torch's own allocator and to a simulated card's, as sequences that can be compared."""

import itertools

import torch

from oomprobe.devices.simulated import SimulatedDevice
from oomprobe.ground.units import parse_bytes
from oomprobe.simulation.cards import Card

A100 = "8.0,108,2048"
KINDS = {"alloc": 1, "free_completed": -1}


def of_torch(run):
    """Return the events (block, bytes) of torch's allocator while `run` runs, frees with negative bytes."""
    torch.cuda.memory._record_memory_history(context=None)
    try:
        run()
        [trace] = torch.cuda.memory._snapshot()["device_traces"]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)  # forgets what it has recorded
    return [(e["addr"], KINDS[e["action"]] * e["size"]) for e in trace if e["action"] in KINDS]


def simulated(card, memory):
    """Return a simulated card with a compute capability and a number of multiprocessors, as the bed's option `card` says them."""
    capability, multiprocessors, _ = card.split(",")
    return SimulatedDevice(
        Card(
            name="bed", full_name="bed", total_bytes=parse_bytes(memory), context_bytes=0,
            compute_capability=tuple(map(int, capability.split("."))), multi_processor_count=int(multiprocessors),
        )
    )  # fmt: skip


def of_a_simulated_card(device, run):
    with device.history() as history, device.session():
        run()
    return history.events


def in_order(events):
    """Name blocks by the order of their requests, and sort what is freed between two requests: that order decides nothing."""
    names, sequence = {}, []
    for is_free, group in itertools.groupby(events, lambda event: event[1] < 0):
        if is_free:
            sequence.append(tuple(sorted(names.pop(block, -1) for block, _ in group)))
            continue
        for block, nbytes in group:
            names[block] = len(sequence)
            sequence.append(nbytes)
    return sequence


class Tensors:
    """Makes the tensors of a case, in a dtype and a layout."""

    def __init__(self, dtype=torch.float32, layout=""):
        self.dtype, self.layout = dtype, layout

    def __call__(self, *shape, grad=True, dtype=None):
        dtype = dtype or self.dtype
        if self.layout == "gaps" and len(shape) > 1:
            tensor = torch.zeros(
                *shape[:-2], shape[-1], shape[-2], device="cuda", dtype=dtype
            ).transpose(-1, -2)
        elif self.layout == "last" and len(shape) == 4:
            tensor = torch.zeros(*shape, device="cuda", dtype=dtype).to(
                memory_format=torch.channels_last
            )
        else:
            tensor = torch.zeros(*shape, device="cuda", dtype=dtype)
        return tensor.requires_grad_(grad and dtype.is_floating_point)

    def weight(self, *shape, dtype=None):
        """Make a weight, which has no gaps."""
        layout, self.layout = self.layout, "last" if self.layout == "last" else ""
        try:
            return self(*shape, dtype=dtype)
        finally:
            self.layout = layout

    def indices(self, *shape, dtype=torch.long):
        return torch.zeros(*shape, device="cuda", dtype=dtype)


def gradient_of(result, layout):
    if layout == "gaps" and result.dim() > 1:
        return torch.ones_like(result.transpose(-1, -2).contiguous()).transpose(-1, -2)
    if layout == "last" and result.dim() == 4:
        return torch.ones_like(result).to(memory_format=torch.channels_last)
    return torch.ones_like(result, memory_format=torch.contiguous_format)


VARIANTS = {
    "fp32": (torch.float32, "", None),
    "fp32 gaps": (torch.float32, "gaps", None),
    "fp32 last": (torch.float32, "last", None),
    "fp32 sum": (torch.float32, "sum", None),
    "bf16": (torch.bfloat16, "", None),
    "bf16 gaps": (torch.bfloat16, "gaps", None),
    "bf16 last": (torch.bfloat16, "last", None),
    "fp16": (torch.float16, "", None),
    "fp16 sum": (torch.float16, "sum", None),
    "amp bf16": (torch.float32, "", torch.bfloat16),
    "amp fp16 gaps": (torch.float32, "gaps", torch.float16),
}


def tensors(variant):
    dtype, layout, _ = VARIANTS[variant]
    return Tensors(dtype, layout)


def runner(case, variant):
    """Return what runs a case forward and backward."""
    _, layout, autocast = VARIANTS[variant]
    make = tensors(variant)

    def run():
        with torch.autocast("cuda", autocast or torch.float16, enabled=autocast is not None):
            results = case(make)
        if not isinstance(results, tuple):
            results = (results,)
        results = [
            result
            for result in results
            if isinstance(result, torch.Tensor) and result.requires_grad
        ]
        if layout == "sum" and results:
            sum(result.sum() for result in results).backward()
        elif results:
            torch.autograd.backward(results, [gradient_of(result, layout) for result in results])

    return run
