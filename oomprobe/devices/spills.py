"""Where a card does not simply run out of memory: drivers that spill, and neighbours that a fault would kill."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

# https://docs.nvidia.com/deploy/mps/: where clients look for the control daemon when nothing else was said
MPS_PIPES = Path("/tmp/nvidia-mps")
MPS_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"


def reasons(device_type: str) -> tuple[str, ...]:
    """Every reason, a sentence each, why no trial may run without a cap on a device of this type."""
    found = (why_spills(), why_neighbours() if device_type == "cuda" else None)
    return tuple(reason for reason in found if reason is not None)


def why_spills(*, system: str | None = None, release: str | None = None) -> str | None:
    """Say why memory may spill to the host here instead of running out; None where it runs out.

    Args:
        system: For ``sys.platform``.
        release: For ``platform.release()``, in which WSL names its maker.

    Source: NVIDIA's "CUDA - Sysmem Fallback Policy", and microsoft/WSL#11050, by which WSL ignores that switch.

    Example:
        >>> why_spills(system="win32", release="10")[:39]
        'no trial ran without a cap: on Windows '
        >>> why_spills(system="linux", release="6.8.0-45-generic")
    """
    system = sys.platform if system is None else system
    release = platform.release() if release is None else release
    if system == "win32":
        where = "Windows"
    elif "microsoft" in release.lower():
        where = "WSL"
    else:
        return None
    return (
        f"no trial ran without a cap: on {where} the driver lends system memory, many times as slow, where a card "
        "would be out of memory, so the allocator is held to the card's own memory that was available"
    )


def why_neighbours(*, environ: Mapping[str, str] | None = None, default_pipes: Path = MPS_PIPES) -> str | None:
    """Say that other processes share a CUDA context with this one; None where NVIDIA MPS does not run.

    Args:
        environ: For ``os.environ``.
        default_pipes: Where the daemon is found when the environment names no directory.

    Source: https://docs.nvidia.com/deploy/mps/ ("a fatal exception ... will be reported to all the clients").
    """
    named = (os.environ if environ is None else environ).get(MPS_VARIABLE)
    if named == os.devnull:  # the customary way to stay out of MPS
        return None
    if not named and not (default_pipes / "control").exists():
        return None
    return (
        f"NVIDIA MPS runs here ({named or default_pipes}): a fatal fault in a trial of this process may kill its "
        "neighbours on the card, so no trial ran without a cap; a card of one's own is the safer place for a probe"
    )
