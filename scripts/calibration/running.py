"""A step, run on a simulated card."""

import torch


def place(device, model):
    """The model is on the card before anything is measured, and a measurement begins."""
    device.place([*model.parameters(), *model.buffers()])
    device.start_trial()


def call(device, step, times):
    """Run a step so many times; returns the usage, or None where it does not fit."""
    try:
        for _ in range(times):
            with device.session():
                step()
    except torch.OutOfMemoryError:
        return None
    return device.usage()


def without_values(build):
    """Build a model in host memory that nobody writes to, and so none of it is used: 7 billion parameters are fine."""
    with torch.device("meta"):
        model = build()
    return model.to_empty(device="cpu")
