"""A simulated card for tests: place a model on it, run steps, measure them."""

from torch import nn

from oomprobe.devices.simulated import SimulatedDevice

EXPANDABLE = "expandable_segments:True"
ALLOCATOR_SETTINGS = [
    "",
    EXPANDABLE,
    "per_process_memory_fraction:0.8",
]  # as PYTORCH_ALLOC_CONF writes them


class Blocks(nn.Module):
    """Four MLP blocks, each called through `call`, which may recompute it in backward."""

    def __init__(self, call=lambda block, x: block(x)):
        super().__init__()
        self.call = call
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)
        )

    def forward(self, x):
        for block in self.blocks:
            x = self.call(block, x)
        return x


class Bench:
    """One card and one model; `run` simulates a step and returns its result."""

    def __init__(self, model=None, card="8GiB"):
        self.device = SimulatedDevice(card)
        self.model = model
        if model is not None:
            self.device.place([*model.parameters(), *model.buffers()])
        self.device.start_trial()

    def run(self, step, times=1):
        for _ in range(times):
            with self.device.session():
                result = step()
        return result

    @property
    def allocated_bytes(self):
        return self.device._memory.allocator.allocated_bytes

    @property
    def peak_bytes(self):
        return self.device.usage().peak_allocated_bytes

    @property
    def notes(self):
        return " ".join(self.device.notes)


def bytes_of(*tensors):
    return sum(-(-tensor.nbytes // 512) * 512 for tensor in tensors)
