"""Exception -> verdict (table to come)."""

from __future__ import annotations

from enum import StrEnum


class Verdict(StrEnum):
    """How a trial ended."""

    FITS = "fits"
    OOM = "out of memory"
    HOST_OOM = "out of host memory"
    SIZE_LIMIT = "size limit"
    POISONED = "poisoned"
    CRASHED = "crashed"
    TIMED_OUT = "timed out"
    BUG = "bug"
