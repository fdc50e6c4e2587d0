"""Where the memory went, at the peak of a step."""

from __future__ import annotations

from collections.abc import Mapping

from oomprobe.ground.units import format_bytes
from oomprobe.records.breakdown import Breakdown, ModuleMemory
from oomprobe.results.blocks import Block, Row, Table

MOST_MODULES = 10
WHAT_FITS = (
    "what would take less: --savings all (find_savings) runs the step with each saving of memory"
)


def breakdown_blocks(breakdown: Breakdown) -> list[Block]:
    """Return tables of size, share of the peak and name: of the parts, and of modules with 0.1 % or more."""
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
        blocks.append(
            Block("modules that hold the most activation memory:", _shares(modules, peak_bytes))
        )
    return [*blocks, Block("", WHAT_FITS)]


def _shares(sizes: Mapping[str, int], peak_bytes: int) -> Table:
    rows = []
    for name, nbytes in sizes.items():
        rows.append(Row(cells=[format_bytes(nbytes), f"{100 * nbytes / peak_bytes:.1f} %", name]))
    return Table(rows=rows, texts={2})


def _name(module: ModuleMemory) -> str:
    if module.count > 1:
        return f"{module.name} ({module.count} x {module.kind})"
    if module.kind:
        return f"{module.name} ({module.kind})"
    return module.name
