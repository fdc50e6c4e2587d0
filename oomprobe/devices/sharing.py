"""With whom a card shares its memory: the host, where its driver spills; other processes, whom a fault may kill."""

from __future__ import annotations

import os
import platform
import re
import sys
from contextlib import suppress
from pathlib import Path

import torch

# https://docs.nvidia.com/deploy/mps/: where clients look for the control daemon when nothing else was said
MPS_PIPES = Path("/tmp/nvidia-mps")
MPS_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
LISTED = re.compile(r"process\s+(\d+) uses\s+([\d.]+) MB")


def cap_reasons(device_type: str) -> tuple[str, ...]:
    """Every reason, a sentence each, why no trial may run without a cap on a device of this type."""
    found = (why_spills(), why_neighbours() if device_type == "cuda" else None)
    return tuple(reason for reason in found if reason is not None)


def why_spills() -> str | None:
    """Why memory may spill to the host here instead of running out; None where it runs out.

    Source: NVIDIA's "CUDA - Sysmem Fallback Policy", and microsoft/WSL#11050, by which WSL ignores that switch.
    """
    where = "Windows" if sys.platform == "win32" else "WSL"
    if where == "WSL" and "microsoft" not in platform.release().lower():
        return None
    return (
        f"no trial ran without a cap: on {where} the driver lends system memory, many times as slow, where a card "
        "would be out of memory, so the allocator is held to the card's own memory that was available"
    )


def why_neighbours() -> str | None:
    """That other processes share a CUDA context with this one; None where NVIDIA MPS does not run.

    Source: https://docs.nvidia.com/deploy/mps/ ("a fatal exception ... will be reported to all the clients").
    """
    named = os.environ.get(MPS_VARIABLE)
    if named == os.devnull:  # the customary way to stay out of MPS
        return None
    if not named and not (MPS_PIPES / "control").exists():
        return None
    return (
        f"NVIDIA MPS runs here ({named or MPS_PIPES}): a fatal fault in a trial of this process may kill its "
        "neighbours on the card, so no trial ran without a cap; a card of one's own is the safer place for a probe"
    )


def processes_on(device: torch.device) -> str:
    """Name the other processes on an NVIDIA card and what each holds; empty where the driver does not say.

    The listing is torch's own, which reads it through ``pynvml`` (``pip install "oomprobe[nvml]"``) and needs no CUDA context.
    """
    with suppress(Exception):  # for a message only
        listed = {int(pid): float(mib) for pid, mib in LISTED.findall(torch.cuda.list_gpu_processes(device))}
        others = {pid: mib for pid, mib in listed.items() if not _is_ours(pid)}
        if len(others) < len(listed):  # otherwise the driver's process numbers are not those of this container
            return "; ".join(f"pid {pid}{_program(pid)} holds {mib:.0f} MiB" for pid, mib in others.items())
    return ""


def _is_ours(pid: int) -> bool:
    """Whether it is this process, or descends from it."""
    while pid > 1 and pid != os.getpid():
        # "4711 (a name) S 1 ...": the name may hold anything, the parent is the second after it
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid == os.getpid()


def _program(pid: int) -> str:
    return f" ({Path(f'/proc/{pid}/comm').read_text().strip()})"
