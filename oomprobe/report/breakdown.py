"""Where the memory went: what held it at the peak of a step, and advice on how to use less."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oomprobe.report.words import WIDTH, bullets, clean, clip
from oomprobe.units import format_bytes

PARAMETERS, GRADIENTS, STATE, ACTIVATIONS = "parameters", "gradients", "optimizer state", "activations"
BACKWARD, STEPPING, WORKSPACES = "backward temporaries", "optimizer temporaries", "workspaces"
FRAGMENTATION = "fragmentation"
KINDS = (PARAMETERS, GRADIENTS, STATE, ACTIVATIONS, BACKWARD, STEPPING, WORKSPACES, FRAGMENTATION)
LARGE, SMALL = 0.25, 0.1  # shares of the peak above which advice is given
MOST_ADVICE = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleMemory:
    """Activation memory that the modules at one place in the model hold at the peak.

    Attributes:
        name: Place in the model, with ``*`` for an index: ``"layers.*.linear1"``.
        kind: Class of the modules.
        count: How many of them hold memory.
        activation_bytes: Allocated in their forward and still held at the peak, without that of their submodules.
    """

    name: str
    kind: str
    count: int
    activation_bytes: int


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
        modules: At most ten places in the model, the one with the most activation memory first.
        repeated: Class of the model's repeated blocks, their number, and the activation memory they hold including
            submodules; None if the model has no such list, or already recomputes modules in backward.
        autocast: Whether autocast was on in the forward pass.
        parameter_dtype: That of most parameters, such as ``"float32"``.
    """

    batch_size: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    parts: Mapping[str, int]
    peak_in: str
    step_name: str | None = None
    modules: tuple[ModuleMemory, ...] = ()
    repeated: tuple[str, int, int] | None = None
    autocast: bool = False
    parameter_dtype: str = "float32"

    @property
    def live_bytes(self) -> int:
        """Bytes in tensors at the peak."""
        return sum(self.parts.values()) - self.parts[FRAGMENTATION]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Breakdown:
        """Read what `dataclasses.asdict` wrote."""
        modules = tuple(ModuleMemory(**module) for module in data["modules"])
        repeated = None if data["repeated"] is None else tuple(data["repeated"])
        return cls(**{**data, "modules": modules, "repeated": repeated})


def breakdown_lines(breakdown: Breakdown) -> list[str]:
    """Render a breakdown for the report."""
    step = "" if breakdown.step_name is None else f", step {breakdown.step_name!r}"
    tables = breakdown_rows(breakdown)
    parts, modules = ([f"  {size:>10}  {share:>7}  {what}" for size, share, what in rows] for rows in tables)
    lines = [f"where the memory went: batch {breakdown.batch_size}{step}, at the peak in {breakdown.peak_in}", *parts]
    if modules:
        lines += ["", "modules that hold the most activation memory:", *modules]
    advised = bullets("advice:", advice(breakdown))
    return [*lines, "", *advised] if advised else lines


def breakdown_rows(breakdown: Breakdown) -> tuple[list[tuple[str, str, str]], list[tuple[str, str, str]]]:
    """Return rows of size, share of the peak and name: of the parts and their sum, and of modules with 0.1 % or more."""
    peak_bytes = max(1, breakdown.peak_reserved_bytes)

    def row(nbytes: int, what: str) -> tuple[str, str, str]:
        return format_bytes(nbytes), f"{100 * nbytes / peak_bytes:.1f} %", clip(clean(what), WIDTH - 24)

    parts = [row(nbytes, kind) for kind, nbytes in breakdown.parts.items() if nbytes]
    modules = []
    for module in breakdown.modules:
        if 1000 * module.activation_bytes >= peak_bytes:
            kind = f"{module.count} x {module.kind}" if module.count > 1 else module.kind
            modules.append(row(module.activation_bytes, f"{module.name} ({kind})" if kind else module.name))
    return [*parts, row(breakdown.peak_reserved_bytes, "peak reserved")], modules


def advice(breakdown: Breakdown) -> tuple[str, ...]:
    """Return at most five suggestions, each with the number that caused it and what to type."""
    parts, peak_bytes = breakdown.parts, max(1, breakdown.peak_reserved_bytes)
    kind, count, repeated_bytes = breakdown.repeated or ("", 0, 0)
    in_full_precision = breakdown.parameter_dtype == "float32" and not breakdown.autocast
    single = [m for m in breakdown.modules if m.count == 1 and not m.name.startswith("(")]
    largest = max(single, key=lambda m: m.activation_bytes, default=None)
    # Bytes, the share of the peak above which to mention them, and the text around them.
    causes = (
        (
            repeated_bytes, LARGE, f"{count} {kind} blocks hold ",
            ": recompute them in backward, with torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False), or "
            "model.gradient_checkpointing_enable() in transformers",
        ),
        (
            parts[ACTIVATIONS] + parts[BACKWARD] if in_full_precision else 0, LARGE, "activations and their gradients take ",
            ', without autocast: run the forward pass under torch.autocast("cuda", torch.bfloat16) for about half of that',
        ),
        (
            parts[STEPPING] if breakdown.peak_in == "optimizer" else 0, SMALL,
            "the peak is in the optimizer, whose temporaries take ", ": pass fused=True to it, or foreach=False",
        ),
        (
            parts[STATE] + parts[STEPPING], LARGE, "optimizer state takes ",
            ": an 8-bit optimizer (bitsandbytes.optim.AdamW8bit) takes about a quarter; several ranks can share it "
            "(ZeroRedundancyOptimizer, FSDP)",
        ),
        (
            largest.activation_bytes if largest else 0, LARGE, f"{largest.name if largest else ''} alone holds ",
            " of activations: compute it and the loss in chunks of the batch, under torch.utils.checkpoint.checkpoint",
        ),
        (
            parts[FRAGMENTATION], SMALL, "",
            ", are reserved but in no tensor: set PYTORCH_ALLOC_CONF=expandable_segments:True before the process starts",
        ),
    )  # fmt: skip
    advised = (
        f"{before}{format_bytes(nbytes)}, {100 * nbytes / peak_bytes:.0f} % of the peak{after}"
        for nbytes, share, before, after in causes
        if nbytes > share * peak_bytes
    )
    return tuple(advised)[:MOST_ADVICE]
