"""Run steps on a simulated card."""

from contextlib import contextmanager
from unittest import mock

import torch

from oomprobe.simulation.card_mode import CardMode
from oomprobe.simulation.kernels.convolutions import winograd_workspace


def place(device, model):
    """Put the model on the card, then begin to measure."""
    device.place([*model.parameters(), *model.buffers()])
    device.start_trial()


def call(device, step, times):
    """Run a step `times` times; return the usage, or None if it does not fit."""
    try:
        for _ in range(times):
            with device.session():
                step()
    except torch.OutOfMemoryError:
        return None
    return device.usage()


def without_values(build):
    """Build a model whose memory is never written, and so takes no host memory, even at 7 billion parameters."""
    with torch.device("meta"):
        model = build()
    return model.to_empty(device="cpu")


@contextmanager
def winograd_peak():
    """Yield a list; its only number grows to the largest memory in use while a convolution has Winograd's workspace."""
    largest, track = [0], CardMode._track

    def tracked(mode, func, result, args, *others, **named):
        track(mode, func, result, args, *others, **named)
        nbytes = winograd_workspace(func, args)
        if nbytes:
            largest[0] = max(largest[0], mode.memory.allocator.allocated_bytes + nbytes)

    with mock.patch.object(CardMode, "_track", tracked):
        yield largest
