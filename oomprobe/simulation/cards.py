"""A GPU as a simulation knows it: what a card that is not here would leave to PyTorch's allocator."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version

from oomprobe.errors import InvalidArgumentError
from oomprobe.simulation.reductions import Processors
from oomprobe.units import byte_unit

_SMALL_WORKSPACE_BYTES = 4096 * 1024 * 2 + 16 * 1024 * 8  # ":4096:2:16:8"
_LARGE_WORKSPACE_BYTES = 4096 * 8 * 1024
_LARGE_SINCE = {9: (0, 0), 10: (2, 12), 11: (2, 14), 12: (2, 12)}  # compute capability's major: torch
_WORKSPACE = re.compile(r":(\d+):(\d+)")

# Resident threads of a multiprocessor: "Technical Specifications per Compute Capability" in NVIDIA's CUDA programming guide.
_MAX_THREADS: dict[tuple[int, int], int] = {
    (6, 0): 2048, (7, 0): 2048, (7, 5): 1024, (8, 0): 2048, (8, 6): 1536, (8, 9): 1536, (9, 0): 2048, (10, 0): 2048,
    (11, 0): 1536, (12, 0): 1536,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A GPU as CUDA describes it, with what of its memory PyTorch's allocator cannot have.

    Args:
        name: What follows ``sim:``, such as ``"H100-80GB"``.
        full_name: As ``torch.cuda.get_device_properties`` names it.
        total_bytes: As the same reports it, which is less than the size on the box.
        context_bytes: What the CUDA context and lazily loaded kernels take of it.
        compute_capability: Major and minor.
        multi_processor_count: Streaming multiprocessors.
        max_threads_per_multi_processor: Resident threads of each; None: as its compute capability has them,
            and one that is not known as the newest known below it.
        source: Where ``total_bytes`` comes from, and how exact it is.
        context_source: The same for ``context_bytes``.

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
    source: str
    context_source: str
    max_threads_per_multi_processor: int | None = None

    @property
    def processors(self) -> Processors:
        """What the sizes of temporary buffers are computed from."""
        known = [capability for capability in _MAX_THREADS if capability <= self.compute_capability]
        threads = self.max_threads_per_multi_processor or _MAX_THREADS[max(known, default=(6, 0))]
        return Processors(self.compute_capability, self.multi_processor_count, threads)

    @property
    def available_bytes(self) -> int:
        """What the allocator may reserve when nothing else uses the card."""
        return self.total_bytes - self.context_bytes

    @property
    def cublas_workspace_bytes(self) -> int:
        """What cuBLAS takes for each thread and stream under the installed torch and this process's environment."""
        return cublas_workspace_bytes(self.compute_capability, version("torch"), os.environ)


def cublas_workspace_bytes(compute_capability: tuple[int, int], torch_version: str, environ: Mapping[str, str]) -> int:
    """Bytes that torch sets aside for cuBLAS, for each thread and stream, through its caching allocator.

    ``CUBLAS_WORKSPACE_CONFIG`` states them as pairs ``:SIZE:COUNT`` in KiB, which are summed; a text without a pair is not
    understood, as in torch, and the default stays.

    Source: ``parseChosenWorkspaceSize`` in torch's aten/src/ATen/cuda/CublasHandlePool.cpp. 32 MiB on Hopper since
    pytorch/pytorch#91564; on majors 10 and 12 since #175344, which was opened on 2026-02-19, two days after the first
    candidate of 2.11 (#175426), so from 2.12; on 11 since #189312 of July 2026, so from 2.14 (cut in August, #193034).
    That neither was picked into the release before it is an inference from these dates.
    """
    pairs = _WORKSPACE.findall(environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if pairs:
        return sum(int(size) * 1024 * int(count) for size, count in pairs)
    major, minor = torch_version.split(".")[:2]
    since = _LARGE_SINCE.get(compute_capability[0])
    large = since is not None and (int(major), int(minor)) >= since
    return _LARGE_WORKSPACE_BYTES if large else _SMALL_WORKSPACE_BYTES


def generic_card(total: int) -> Card:
    """Make a card of which nothing is known but its memory, all of which the allocator may use.

    Raises:
        InvalidArgumentError: The size is not positive.
    """
    if total < 1:
        raise InvalidArgumentError(f"a card of {total} bytes is not possible: state a size such as 'sim:24GiB'")
    unit, factor = byte_unit(total)
    name = f"{total / factor:.1f} {unit}"
    return Card(
        name=name,
        full_name=f"GPU, {name}",
        total_bytes=total,
        context_bytes=0,
        compute_capability=(8, 6),  # the commonest kind: everything but fp8 is there
        multi_processor_count=82,  # of an RTX 3090
        source="stated by the caller",
        context_source="none: the memory stated is what the allocator may use",
    )
