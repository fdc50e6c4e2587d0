"""Sizes that a simulated device need not run: what the step would ask of the allocator is known, and is replayed."""

from __future__ import annotations

from oomprobe.devices import Simulated
from oomprobe.result import Phase, Trial
from oomprobe.verdict import Verdict


class ContradictedError(Exception):
    """A size that passed when replayed did not run: the search has to begin again without replaying."""


class Rehearsals:
    """Tries sizes of the search without running them, where the device can.

    Args:
        device: Any; one that is not simulated rehearses nothing.
        single: Whether there is one step: of several, each asks for something else.
    """

    def __init__(self, device: object, *, single: bool) -> None:
        self._device: Simulated | None = device if single and isinstance(device, Simulated) else None
        self._failed: set[int] = set()  # sizes, run or replayed

    def trial(self, size: int, phase: Phase, *, steps: int, cap_bytes: int | None) -> Trial | None:
        """The trial of a size, replayed; None where it has to be run. What decides is always run."""
        if self._device is None or phase not in (Phase.GROW, Phase.BISECT):
            return None
        rehearsal = self._device.rehearse(size, calls=1 + steps, limit_bytes=cap_bytes)
        if rehearsal is None:
            return None
        if rehearsal.error is not None:
            self._failed.add(size)
        return Trial(
            batch_size=size,
            verdict=Verdict.FITS if rehearsal.error is None else Verdict.OOM,
            phase=phase,
            cap_bytes=cap_bytes,
            peak_allocated_bytes=rehearsal.peak_allocated_bytes,
            peak_reserved_bytes=rehearsal.peak_reserved_bytes,
            alloc_retries=rehearsal.alloc_retries,
            error=None if rehearsal.error is None else f"OutOfMemoryError: {rehearsal.error}",
            replayed=True,
        )

    def borne_out(self, trial: Trial) -> bool:
        """Learn from a trial that was run, and cleaned up after. False where it shows that rehearsals were wrong."""
        if self._device is None or trial.accumulation_steps > 1:
            return True
        if not trial.passed:
            self._failed.add(trial.batch_size)
            return trial.phase is not Phase.CONFIRM
        if trial.phase is Phase.RECHECK and trial.batch_size in self._failed:
            return False
        return self._device.learn(trial.batch_size)

    def stop(self) -> None:
        """Run every size from here on."""
        if self._device is not None:
            self._device.stop_rehearsing()
