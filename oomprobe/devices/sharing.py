"""Sharing of a card's memory: drivers that spill to the host, and other processes."""

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
    """Explain why memory may spill to the host instead of running out; None if it does not.

    Source: NVIDIA's "CUDA - Sysmem Fallback Policy", and microsoft/WSL#11050: WSL ignores that setting.
    """
    if sys.platform == "win32":
        where = "Windows"
    elif "microsoft" in platform.release().lower():
        where = "WSL"
    else:
        return None
    return (
        f"every trial was capped: on {where} the driver lends system memory, many times slower, when a card is full, "
        "so the allocator was limited to the memory available on the card"
    )


def processes_on(device: torch.device) -> str:
    """Describe the other processes on an NVIDIA card and their memory; empty if unknown.

    Torch lists them through ``pynvml`` (``pip install "oomprobe[nvml]"``), which needs no CUDA context.
    """
    with suppress(Exception):  # the result is only part of a message
        texts, ours_are_listed = [], False
        listed = dict(LISTED.findall(torch.cuda.list_gpu_processes(device)))
        for pid, mib in listed.items():
            if _is_ours(int(pid)):
                ours_are_listed = True
            else:
                name = Path(f"/proc/{pid}/comm").read_text().strip()
                texts.append(f"pid {pid} ({name}) holds {float(mib):.0f} MiB")
        if ours_are_listed:  # otherwise the driver's process ids are not those of this container
            return "; ".join(texts)
    return ""


def _is_ours(pid: int) -> bool:
    """Return whether it is this process or a descendant."""
    while pid > 1 and pid != os.getpid():
        # "4711 (a name) S 1 ...": the name may contain anything; the parent is the second field after it.
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid == os.getpid()
