"""Trials that a simulated device need not run: what the step would ask of the allocator is known, and is replayed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oomprobe.devices import replay_of
from oomprobe.result import Phase, Trial
from oomprobe.verdicts import Verdict

if TYPE_CHECKING:
    from oomprobe.trial import Request


class ContradictedError(Exception):
    """A size that passed when replayed did not run: the search has to begin again without replaying."""


class Rehearsals:
    """Replays trials of the search, where the device can.

    Args:
        device: Any; one that is not simulated replays nothing.
        single: Whether there is one step: of several, each asks for something else.
    """

    def __init__(self, device: object, *, single: bool) -> None:
        self._device = replay_of(device) if single else None

    def trial(self, request: Request) -> Trial | None:
        """Replay a trial; None where it has to be run."""
        if self._device is None or request.exact:
            return None
        rehearsal = self._device.rehearse(request.batch_size, calls=1 + request.steps, limit_bytes=request.cap_bytes)
        if rehearsal is None:
            return None
        return Trial(
            batch_size=request.batch_size,
            verdict=Verdict.FITS if rehearsal.error is None else Verdict.OOM,
            phase=request.phase,
            cap_bytes=request.cap_bytes,
            peak_allocated_bytes=rehearsal.peak_allocated_bytes,
            peak_reserved_bytes=rehearsal.peak_reserved_bytes,
            alloc_retries=rehearsal.alloc_retries,
            error=None if rehearsal.error is None else f"OutOfMemoryError: {rehearsal.error}",
            replayed=True,
        )

    def learn(self, trial: Trial) -> bool:
        """Learn from a trial that was run, and cleaned up after; whether it contradicts what was replayed."""
        if self._device is None or trial.accumulation_steps > 1:
            return False
        if not trial.passed:
            return trial.phase is Phase.CONFIRM
        return not self._device.learn(trial.batch_size)
