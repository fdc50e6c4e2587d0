"""Where the memory went: what held it at the peak of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from oomprobe.records.kinds import Bytes, Samples
from oomprobe.records.timeline import Timeline

PARAMETERS, GRADIENTS, STATE, ACTIVATIONS = (
    "parameters",
    "gradients",
    "optimizer state",
    "activations",
)
BACKWARD, STEPPING, WORKSPACES = "backward temporaries", "optimizer temporaries", "workspaces"
FRAGMENTATION = "fragmentation"
KINDS = (PARAMETERS, GRADIENTS, STATE, ACTIVATIONS, BACKWARD, STEPPING, WORKSPACES, FRAGMENTATION)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleMemory:
    """Memory that the modules at one place in the model hold at the peak.

    Attributes:
        name: Place in the model, with ``*`` for an index: ``"layers.*.linear1"``.
        kind: Class of the modules.
        count: How many of them hold memory.
        activation_bytes: Allocated in their forward and still held at the peak, without that of their submodules.
        parameter_bytes: Of their own parameters and buffers, without those of their submodules.
    """

    name: str
    kind: str
    count: int
    activation_bytes: int
    parameter_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """What held the memory of a steady step at its peak.

    Attributes:
        batch_size: Batch size of the step.
        peak_allocated_bytes: Peak of the trial in live tensors, from the allocator's statistics.
        peak_reserved_bytes: Peak of the memory that the allocator held: the sum of `parts`.
        parts: Bytes by kind: "parameters" (and buffers), "gradients", "optimizer state", "activations" (allocated
            outside backward and the optimizer, including the batch), "backward temporaries", "optimizer temporaries",
            "workspaces" (of libraries, and everything else that existed before the step), "fragmentation" (reserved by
            the allocator but in no tensor: rounding and cache).
        peak_in: The phase at the peak: "forward", "backward" or "optimizer".
        step_name: Which of several named steps; None for a single one.
        modules: At most a hundred places in the model, the one with the most activation memory first.
        timeline: Memory over the step, by the same kinds.
    """

    batch_size: Samples
    peak_allocated_bytes: Bytes
    peak_reserved_bytes: Bytes
    parts: Mapping[str, int]
    peak_in: str
    step_name: str | None = None
    modules: tuple[ModuleMemory, ...] = ()
    timeline: Timeline | None = None

    @property
    def live_bytes(self) -> int:
        """Bytes in tensors at the peak."""
        return sum(self.parts.values()) - self.parts[FRAGMENTATION]
