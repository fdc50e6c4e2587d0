"""Memory between trials: back at its baseline, or a leak with its bytes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import pairwise

import tenacity

from oomprobe.devices import Device, asked_bytes
from oomprobe.result import Trial
from oomprobe.units import format_bytes

TOLERATED_BYTES = 2**20  # small caches that libraries make for a new shape stay below it
REFUSED_SHARE = 0.05  # of the available memory
SMALLEST_BYTES = 2**14  # in each step: a list of losses as numbers, and what malloc needs to keep it, stay below
FURTHER_CALLS = 4  # that show what each step keeps, at most: two, and two again where those kept something


class Baseline:
    """What is in use when no trial runs, and what a trial left above it.

    Args:
        device: Whose memory.
        clean: Lets go of what a trial left.
        flush: Runs the step once at the smallest size, which replaces what a step keeps of its last batch.
        sleep: Waits; tests do not.
    """

    def __init__(
        self,
        device: Device,
        *,
        clean: Callable[[], None],
        flush: Callable[[], None],
        sleep: Callable[[float], None],
    ) -> None:
        self._device, self._clean, self._flush, self._sleep = device, clean, flush, sleep
        self._live_bytes: int | None = None
        self._settled_bytes = 0  # above it after the last trial that passed
        self._grown_bytes = 0  # what that one added
        self._residue_bytes = 0  # above the baseline, and known not to come back
        self._available_bytes: int | None = None

    @property
    def known(self) -> bool:
        """Whether it has been taken."""
        return self._live_bytes is not None

    def take(self, available_bytes: int) -> None:
        """After the first trial that passed: library workspaces are there, and belong there."""
        self._clean()
        self._live_bytes = asked_bytes(self._device, "live_bytes")
        self._available_bytes = available_bytes

    def settle(self, *, passed: bool) -> int:
        """Clean up after a trial, and return the bytes that did not come back (0 when tolerably few)."""
        self._clean()
        leaked_bytes = self._leaked_bytes()
        if leaked_bytes > self._residue_bytes + TOLERATED_BYTES:
            leaked_bytes = self._residue_bytes = self._reclaim()
        if passed:  # after others the gradients are gone, which hides what was left
            added_bytes = self._leaked_bytes()
            self._grown_bytes, self._settled_bytes = added_bytes - self._settled_bytes, added_bytes
        return leaked_bytes if leaked_bytes > TOLERATED_BYTES else 0

    def may_be_growing(self, steps: int) -> bool:
        """Whether so many steps left enough since the trial before that each of them may have kept something."""
        return not self.known or bool(self.grown_by_each(steps))

    def grown_by_each(self, steps: int) -> int:
        """What the last trial that passed added, for each of its steps; 0 where it is little, or not known."""
        grown_bytes = self._grown_bytes // steps if self.known else 0
        return grown_bytes if grown_bytes >= SMALLEST_BYTES else 0

    def added_by(self, call: Callable[[], None]) -> int:
        """What each further call keeps, the least of two: what libraries make for a shape they make once."""
        # A full collection takes a tenth of a second, and most steps keep nothing.
        return self._added_by(call, generation=1) and self._added_by(call, generation=2)

    def _added_by(self, call: Callable[[], None], generation: int) -> int:
        lives = [self._live_after(again, generation) for again in (lambda: None, call, call)]
        added_bytes = min(after - before for before, after in pairwise(lives))
        return added_bytes if added_bytes >= SMALLEST_BYTES else 0

    def _live_after(self, call: Callable[[], None], generation: int) -> int:
        call()
        gc.collect(generation)
        self._device.release()
        return asked_bytes(self._device, "live_bytes")

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

    def _added_bytes(self) -> int:
        """What is in use above the baseline."""
        return 0 if self._live_bytes is None else asked_bytes(self._device, "live_bytes") - self._live_bytes

    def _leaked_bytes(self) -> int:
        return max(0, self._added_bytes())

    def _reclaim(self) -> int:
        """Collect, flush, and wait a little. What is still there then is no cache of the last batch but a leak."""
        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(3),
            wait=tenacity.wait_exponential(multiplier=0.05, max=0.4),
            retry=tenacity.retry_if_result(lambda leaked_bytes: leaked_bytes > TOLERATED_BYTES),
            retry_error_callback=lambda state: state.outcome.result() if state.outcome else 0,
            sleep=self._sleep,
        )
        attempts = iter((lambda: None, self._flush, lambda: None))
        return int(retrying(lambda: self._collected(next(attempts))))

    def _collected(self, first: Callable[[], None]) -> int:
        first()
        gc.collect()
        self._clean()
        return self._leaked_bytes()
