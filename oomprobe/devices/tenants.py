"""Who else is on an NVIDIA card."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

import torch

LISTED = re.compile(r"process\s+(\d+) uses\s+([\d.]+) MB")


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
