"""What torch says when its allocator has no memory to give."""

from __future__ import annotations

from typing import Protocol


class AllocatorOutOfMemory(MemoryError):
    """The memory could not be had; the text is that of ``torch.OutOfMemoryError``.

    ``requested_bytes`` is what the caller asked for; the text names the segment that was tried.
    """

    def __init__(self, message: str, *, requested_bytes: int) -> None:
        super().__init__(message)
        self.requested_bytes = requested_bytes


class Figures(Protocol):
    """What the text tells of an allocator."""

    capacity_bytes: int
    total_bytes: int
    limit_bytes: int | None
    reserved_bytes: int
    allocated_bytes: int
    device_index: int


def refusal(figures: Figures, segment: int) -> str:
    """Write the text of ``torch.OutOfMemoryError``; everything outside the allocator counts as this process's.

    Source: strings of libc10_cuda.so of torch 2.13.0; their order is in CUDACachingAllocator.cpp.
    """
    free = figures.capacity_bytes - figures.reserved_bytes
    allowed = "" if figures.limit_bytes is None else f"{size_text(figures.limit_bytes)} allowed; "
    return (
        f"CUDA out of memory. Tried to allocate {size_text(segment)}. GPU {figures.device_index} has a total capacity "
        f"of {size_text(figures.total_bytes)} of which {size_text(free)} is free. Including non-PyTorch memory, this "
        f"process has {size_text(figures.total_bytes - free)} memory in use. {allowed}Of the allocated memory "
        f"{size_text(figures.allocated_bytes)} is allocated by PyTorch, and "
        f"{size_text(figures.reserved_bytes - figures.allocated_bytes)} is reserved by PyTorch but unallocated. If "
        "reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid "
        "fragmentation.  See documentation for Memory Management  (https://docs.pytorch.org/docs/stable/notes/"
        "cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
    )


def size_text(nbytes: int) -> str:
    """format_size of c10."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes > factor:
            return f"{nbytes / factor:.2f} {unit}"
    return f"{nbytes} bytes"
