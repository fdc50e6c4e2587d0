"""Run steps on a simulated card."""

import torch


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
