"""Properties of a simulated GPU, and the memory it leaves to PyTorch's allocator."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace

from oomprobe.errors import InvalidArgumentError
from oomprobe.ground.torch_versions import has_large_workspace
from oomprobe.ground.units import byte_unit
from oomprobe.tape.reductions import Processors

_SMALL_WORKSPACE_BYTES = 4096 * 1024 * 2 + 16 * 1024 * 8  # ":4096:2:16:8"
_LARGE_WORKSPACE_BYTES = 4096 * 8 * 1024
_WORKSPACE = re.compile(r":(\d+):(\d+)")

# Resident threads per multiprocessor: "Technical Specifications per Compute Capability" in NVIDIA's CUDA programming guide.
_MAX_THREADS: dict[tuple[int, int], int] = {
    (6, 0): 2048, (7, 0): 2048, (7, 5): 1024, (8, 0): 2048, (8, 6): 1536, (8, 9): 1536, (9, 0): 2048, (10, 0): 2048,
    (11, 0): 1536, (12, 0): 1536,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A GPU as CUDA describes it, and the memory that PyTorch's allocator cannot use.

    Args:
        name: Name after ``sim:``, such as ``"H100-80GB"``.
        full_name: Name reported by ``torch.cuda.get_device_properties``.
        total_bytes: Total memory reported by the same function; less than the advertised size.
        context_bytes: Part of it taken by the CUDA context and lazily loaded kernels.
        compute_capability: Major and minor.
        multi_processor_count: Streaming multiprocessors.

    Example:
        >>> generic_card(2**30).available_bytes
        1073741824
    """

    name: str
    full_name: str
    total_bytes: int
    context_bytes: int
    compute_capability: tuple[int, int]
    multi_processor_count: int

    @property
    def processors(self) -> Processors:
        """Processor data that determine scratch sizes; an unlisted capability uses the next lower one listed."""
        known = [capability for capability in _MAX_THREADS if capability <= self.compute_capability]
        return Processors(
            self.compute_capability,
            self.multi_processor_count,
            _MAX_THREADS[max(known, default=(6, 0))],
        )

    @property
    def available_bytes(self) -> int:
        """Memory that the allocator may reserve if nothing else uses the card."""
        return self.total_bytes - self.context_bytes

    @property
    def cublas_workspace_bytes(self) -> int:
        """Size of the cuBLAS workspace that torch allocates for each thread through its caching allocator.

        ``CUBLAS_WORKSPACE_CONFIG`` gives it as pairs ``:SIZE:COUNT`` in KiB, which are summed. As in torch, a value without
        such a pair is ignored.

        Source: ``parseChosenWorkspaceSize`` in torch's aten/src/ATen/cuda/CublasHandlePool.cpp.
        """
        pairs = _WORKSPACE.findall(os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
        if pairs:
            return sum(int(size) * 1024 * int(count) for size, count in pairs)
        return (
            _LARGE_WORKSPACE_BYTES
            if has_large_workspace(self.compute_capability)
            else _SMALL_WORKSPACE_BYTES
        )


def leave(card: Card, available_bytes: int) -> Card:
    """Return the card with this much memory for the allocator; something else takes the rest.

    Raises:
        InvalidArgumentError: it has no such memory.

    Example:
        >>> leave(generic_card(2**30), 2**29).context_bytes == 2**29
        True
    """
    if not 0 < available_bytes <= card.total_bytes:
        raise InvalidArgumentError(
            f"available_bytes={available_bytes:,} is not between 1 and the {card.total_bytes:,} "
            f"bytes of {card.full_name}"
        )
    return replace(card, context_bytes=card.total_bytes - available_bytes)


def generic_card(total: int) -> Card:
    """Return a card known only by its memory, all of which the allocator may use.

    Raises:
        InvalidArgumentError: The size is not positive.
    """
    if total < 1:
        raise InvalidArgumentError(
            f"a card of {total} bytes is not possible: give a size such as 'sim:24GiB'"
        )
    unit, factor = byte_unit(total)
    name = f"{total / factor:.1f} {unit}"
    return Card(
        name=name,
        full_name=f"GPU, {name}",
        total_bytes=total,
        context_bytes=0,
        compute_capability=(8, 6),  # the most common one: supports everything except fp8
        multi_processor_count=82,  # of an RTX 3090
    )
