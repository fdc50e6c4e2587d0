"""What cuBLAS keeps: Linear(1, 1) on an A10G leaves 8,519,680 bytes after everything is freed.

Source: pytorch/pytorch#95668 (2.0.0.dev20230227), whose script runs a forward only, in one thread: one workspace.
Beside it the same with a backward, which another thread runs with a workspace of its own: twice as much. Nobody
published that second figure; it is what the rule (one for each thread and stream) says.
"""

import torch

from calibration.rows import Figure
from oomprobe.devices.simulated import SimulatedDevice

ONE_BYTES = 8_519_680


def compare():
    """Yield a row for the forward, and one for forward and backward."""
    yield Figure(name="forward", published_bytes=ONE_BYTES, simulated_bytes=left(backward=False))
    both = left(backward=True)
    remark = f"rule, not published, not counted: {both / ONE_BYTES:g} workspaces"
    yield Figure(
        name="forward and backward", published_bytes=2 * ONE_BYTES, simulated_bytes=both, remark=remark, counted=False
    )


def left(*, backward):
    """Bytes allocated when all tensors are gone."""
    device = SimulatedDevice("A10G")
    device.start_trial()
    with device.session():
        run(backward=backward)
    return device.live_bytes()


def run(*, backward):
    """The script of the issue."""
    model = torch.nn.Linear(1, 1, device="cuda")
    result = model(torch.randn(1, 1, device="cuda"))
    if backward:
        result.sum().backward()
