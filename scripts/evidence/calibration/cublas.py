"""The cuBLAS workspace: Linear(1, 1) on an A10G leaves 8,519,680 bytes after everything is freed.

Source: pytorch/pytorch#95668 (2.0.0.dev20230227), whose script runs only a forward, in one thread: one workspace. A
second row adds a backward, which runs in another thread with its own workspace: twice as much. That figure was not
published; it follows from the rule (one workspace for each thread and stream).
"""

import torch

from calibration.rows import Figure
from oomprobe.devices.simulated import SimulatedDevice

ABOUT = {
    "source": "pytorch/pytorch#95668",
    "card": "A10G",
    "torch": "2.0 nightly",
    "how": "bytes still allocated after Linear(1, 1): the workspace of cuBLAS",
}
ONE_BYTES = 8_519_680


def compare(names=None):
    """Yield a row for the forward, and one with the backward."""
    yield Figure(name="forward", published_bytes=ONE_BYTES, simulated_bytes=left(backward=False))
    both = left(backward=True)
    remark = f"rule, not published, not counted: {both / ONE_BYTES:g} workspaces"
    yield Figure(
        name="forward and backward",
        published_bytes=2 * ONE_BYTES,
        simulated_bytes=both,
        remark=remark,
        counted=False,
    )


def left(*, backward):
    """Return the bytes allocated once all tensors are freed."""
    device = SimulatedDevice("A10G")
    device.start_trial()
    with device.session():
        run(backward=backward)
    return device.live_bytes()


def run(*, backward):
    """Run the script of the issue."""
    model = torch.nn.Linear(1, 1, device="cuda")
    result = model(torch.randn(1, 1, device="cuda"))
    if backward:
        result.sum().backward()
