"""Where the memory went, with advice on how to use less."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from oomprobe.ground.units import format_bytes
from oomprobe.ground.words import clean
from oomprobe.records.breakdown import FRAGMENTATION, STATE, STEPPING, Breakdown, ModuleMemory
from oomprobe.report.blocks import Block, Row, Table

LARGE, SMALL = 0.25, 0.1  # shares of the peak above which advice is given
MOST_ADVICE, MOST_MODULES = 5, 10
CHECKPOINTING = (
    "blocks hold {size}: recompute them in backward, with torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False), or "
    "model.activation_checkpointing_enable() in transformers (gradient_checkpointing_enable in older versions)"
)
FUSED = "the peak is in the optimizer, whose temporaries take {size}: pass fused=True to it, or foreach=False"
EIGHT_BITS = (
    "optimizer state takes {size}: an 8-bit optimizer (bitsandbytes.optim.AdamW8bit) takes about a quarter; several ranks can "
    "share it (ZeroRedundancyOptimizer, FSDP)"
)
CHUNKS = "alone holds {size} of activations: compute it and the loss in chunks of the batch, under torch.utils.checkpoint.checkpoint"
EXPANDABLE = "{size}, are reserved but in no tensor: set {setting} before the process starts"


def breakdown_blocks(breakdown: Breakdown, setting: str) -> list[Block]:
    """Return tables of size, share of the peak and name: of the parts, and of modules with 0.1 % or more; and the advice."""
    peak_bytes = max(1, breakdown.peak_reserved_bytes)
    title = f"where the memory went: batch {breakdown.batch_size}"
    if breakdown.step_name is not None:
        title += f", step {breakdown.step_name!r}"
    parts = {kind: nbytes for kind, nbytes in breakdown.parts.items() if nbytes}
    parts["peak reserved"] = breakdown.peak_reserved_bytes
    blocks = [Block(f"{title}, at the peak in {breakdown.peak_in}", _shares(parts, peak_bytes))]
    modules = {}
    for module in breakdown.modules[:MOST_MODULES]:
        if 1000 * module.activation_bytes >= peak_bytes:
            modules[_name(module)] = module.activation_bytes
    if modules:
        blocks.append(Block("modules that hold the most activation memory:", _shares(modules, peak_bytes)))
    return [*blocks, Block("advice:", advice(breakdown, setting))]


def _shares(sizes: Mapping[str, int], peak_bytes: int) -> Table:
    rows = []
    for name, nbytes in sizes.items():
        rows.append(Row(cells=[f"{format_bytes(nbytes):>10}", f"{100 * nbytes / peak_bytes:5.1f} %", clean(name)]))
    return Table(rows=rows, texts={2})


def _name(module: ModuleMemory) -> str:
    if module.count > 1:
        return f"{module.name} ({module.count} x {module.kind})"
    if module.kind:
        return f"{module.name} ({module.kind})"
    return module.name


def advice(breakdown: Breakdown, setting: str) -> list[str]:
    """Return at most five suggestions, each with the number that caused it and what to type; `setting` is that of the allocator."""
    peak_bytes, suggestions = max(1, breakdown.peak_reserved_bytes), []
    for nbytes, least_share, suggestion in _suggestions(breakdown, setting):
        if nbytes > least_share * peak_bytes:
            size = f"{format_bytes(nbytes)}, {100 * nbytes / peak_bytes:.0f} % of the peak"
            suggestions.append(suggestion.replace("{size}", size))  # a name may have braces too
    return suggestions[:MOST_ADVICE]


def _suggestions(breakdown: Breakdown, setting: str) -> Iterator[tuple[int, float, str]]:
    """Yield the memory that a change could save, the share of the peak above which that is worth it, and the change."""
    parts = breakdown.parts
    if breakdown.repeated is not None:
        kind, count, nbytes = breakdown.repeated
        yield nbytes, LARGE, f"{count} {kind} {CHECKPOINTING}"
    if breakdown.peak_in == "optimizer":
        yield parts[STEPPING], SMALL, FUSED
    yield parts[STATE] + parts[STEPPING], LARGE, EIGHT_BITS
    single = [module for module in breakdown.modules if module.count == 1 and not module.name.startswith("(")]
    if single:
        largest = max(single, key=lambda module: module.activation_bytes)
        yield largest.activation_bytes, LARGE, f"{largest.name} {CHUNKS}"
    if setting:
        yield parts[FRAGMENTATION], SMALL, EXPANDABLE.replace("{setting}", setting)
