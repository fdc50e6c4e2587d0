"""What a trial has used of host memory: resident peaks can be reset, those of address space cannot."""

from __future__ import annotations

from oomprobe.devices import linux
from oomprobe.devices.base import Usage

# A text such as "could not create a primitive" is about memory only when the trial had used this share of its cap.
PRESSURE_SHARE = 0.5


class ResidentPeak:
    """Follows the resident memory of this process through a trial."""

    def __init__(self) -> None:
        self._is_fresh = False

    def start(self) -> None:
        """A trial begins."""
        self._is_fresh = linux.reset_resident_peak()

    def usage(self, *, base_bytes: int, limit_bytes: int, cap_bytes: int) -> Usage:
        """What was used since the start.

        Args:
            base_bytes: Resident before it.
            limit_bytes: Of the address space.
            cap_bytes: What of that was there for the trial.
        """
        peak = linux.process_bytes("VmHWM") if self._is_fresh else None
        now = linux.process_bytes("VmSize") or 0  # a failed step is still there when this is asked
        return Usage(
            peak_allocated_bytes=None if peak is None else max(0, peak - base_bytes),
            under_pressure=now >= limit_bytes - (1 - PRESSURE_SHARE) * cap_bytes,
        )
