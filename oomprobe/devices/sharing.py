"""With whom a card shares its memory: the host, where its driver spills, and other processes."""

from __future__ import annotations

import os
import platform
import re
import sys
from contextlib import suppress
from pathlib import Path

import torch

LISTED = re.compile(r"process\s+(\d+) uses\s+([\d.]+) MB")


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


def processes_on(device: torch.device) -> str:
    """Name the other processes on an NVIDIA card and what each holds; empty where the driver does not say.

    The listing is torch's own, which reads it through ``pynvml`` (``pip install "oomprobe[nvml]"``) and needs no CUDA context.
    """
    with suppress(Exception):  # for a message only
        listed = {int(pid): float(mib) for pid, mib in LISTED.findall(torch.cuda.list_gpu_processes(device))}
        others = {pid: mib for pid, mib in listed.items() if not _is_ours(pid)}
        if len(others) < len(listed):  # otherwise the driver's process numbers are not those of this container
            names = {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in others}
            return "; ".join(f"pid {pid} ({names[pid]}) holds {mib:.0f} MiB" for pid, mib in others.items())
    return ""


def _is_ours(pid: int) -> bool:
    """Whether it is this process, or descends from it."""
    while pid > 1 and pid != os.getpid():
        # "4711 (a name) S 1 ...": the name may hold anything, the parent is the second after it
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid == os.getpid()
