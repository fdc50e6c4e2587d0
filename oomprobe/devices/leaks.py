"""Memory between trials: back at its baseline, or a leak with its bytes."""

from __future__ import annotations

from collections.abc import Callable

import tenacity

from oomprobe.devices import Device
from oomprobe.result import Trial
from oomprobe.units import format_bytes

TOLERATED_BYTES = 2**20  # small caches that libraries make for a new shape stay below it
REFUSED_SHARE = 0.05  # of the available memory
SMALLEST_BYTES = 2**14  # in each step: a list of losses as numbers, and what malloc needs to keep it, stay below


class Baseline:
    """What is in use when no trial runs, and what a trial left above it.

    `clean` lets go of what a trial left; `flush` runs the step at the smallest size, which replaces what it keeps of its
    last batch.
    """

    def __init__(self, device: Device, *, clean: Callable[[], None], flush: Callable[[], None]) -> None:
        self._device, self._clean, self._flush = device, clean, flush
        self._live_bytes: int | None = None
        self._residue_bytes = 0  # above the baseline, and known not to come back
        self._available_bytes: int | None = None

    @property
    def known(self) -> bool:
        """Whether it has been taken."""
        return self._live_bytes is not None

    def take(self, available_bytes: int) -> None:
        """After the first trial that passed: library workspaces are there, and belong there."""
        self._live_bytes = self._device.live_bytes()
        self._available_bytes = available_bytes

    def settle(self) -> int:
        """Clean up after a trial, and return the bytes that did not come back (0 when tolerably few)."""
        most_bytes = self._residue_bytes + TOLERATED_BYTES
        leaked_bytes = self._cleaned()
        if leaked_bytes > most_bytes:  # the thread in which backward failed may hold its tensors a moment longer
            leaked_bytes = tenacity.Retrying(
                stop=tenacity.stop_after_attempt(4),
                wait=tenacity.wait_exponential(multiplier=0.05),
                retry=tenacity.retry_if_result(lambda leaked_bytes: leaked_bytes > most_bytes),
                retry_error_callback=lambda state: state.outcome.result() if state.outcome else 0,
            )(self._cleaned)
        if leaked_bytes > most_bytes:
            self._flush()
            leaked_bytes = self._residue_bytes = self._cleaned()
        return leaked_bytes if leaked_bytes > TOLERATED_BYTES else 0

    def _cleaned(self) -> int:
        """The bytes above the baseline after a clean-up."""
        self._clean()
        return 0 if self._live_bytes is None else max(0, self._device.live_bytes() - self._live_bytes)

    def refusal(self, trial: Trial) -> str | None:
        """Why what a trial left would make the answer a wrong one; None where it would not."""
        if self._available_bytes is None or trial.leaked_bytes <= REFUSED_SHARE * self._available_bytes:
            return None
        return (
            f"{format_bytes(trial.leaked_bytes)} did not come back after batch {trial.batch_size}, even after "
            "collecting garbage and a step at the smallest size, so every later trial would have less memory and "
            "the answer would be too small. Something keeps tensors of each step: a list of losses that still have "
            "their graph (append loss.item()), a cache keyed by shape, an output kept in an attribute"
        )
