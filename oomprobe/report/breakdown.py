"""Where the memory went, with advice on how to use less."""

from __future__ import annotations

from collections.abc import Mapping

from oomprobe.ground.units import format_bytes
from oomprobe.ground.words import clean
from oomprobe.records.breakdown import ACTIVATIONS, BACKWARD, FRAGMENTATION, STATE, STEPPING, Breakdown, ModuleMemory
from oomprobe.report.blocks import Block, Row, Table

LARGE, SMALL = 0.25, 0.1  # shares of the peak above which advice is given
MOST_ADVICE, MOST_MODULES = 5, 10


def breakdown_blocks(breakdown: Breakdown) -> list[Block]:
    """Return tables of size, share of the peak and name: of the parts, and of modules with 0.1 % or more; and the advice."""
    peak_bytes = max(1, breakdown.peak_reserved_bytes)
    step = "" if breakdown.step_name is None else f", step {breakdown.step_name!r}"

    def table(sizes: Mapping[str, int]) -> Table:
        shares = {what: f"{100 * nbytes / peak_bytes:5.1f} %" for what, nbytes in sizes.items()}
        rows = [Row(cells=[f"{format_bytes(sizes[what]):>10}", share, clean(what)]) for what, share in shares.items()]
        return Table(rows=rows, texts={2})

    parts = {kind: nbytes for kind, nbytes in breakdown.parts.items() if nbytes}
    large = [module for module in breakdown.modules if 1000 * module.activation_bytes >= peak_bytes][:MOST_MODULES]
    modules = {_name(module): module.activation_bytes for module in large}
    return [
        Block(
            f"where the memory went: batch {breakdown.batch_size}{step}, at the peak in {breakdown.peak_in}",
            table({**parts, "peak reserved": breakdown.peak_reserved_bytes}),
        ),
        *([Block("modules that hold the most activation memory:", table(modules))] if modules else []),
        Block("advice:", advice(breakdown)),
    ]


def _name(module: ModuleMemory) -> str:
    kind = f"{module.count} x {module.kind}" if module.count > 1 else module.kind
    return f"{module.name} ({kind})" if kind else module.name


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
            "model.activation_checkpointing_enable() in transformers (gradient_checkpointing_enable in older versions)",
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
            ", are reserved but in no tensor: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before the process starts",
        ),
    )  # fmt: skip
    advised = (
        f"{before}{format_bytes(nbytes)}, {100 * nbytes / peak_bytes:.0f} % of the peak{after}"
        for nbytes, share, before, after in causes
        if nbytes > share * peak_bytes
    )
    return tuple(advised)[:MOST_ADVICE]
