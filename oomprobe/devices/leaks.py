"""Detection of memory that a trial leaks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import tenacity

from oomprobe.devices import Device
from oomprobe.ground.units import format_bytes
from oomprobe.ground.waiting import until
from oomprobe.records.trials import Trial

TOLERATED_BYTES = 2**20  # more than the small caches that libraries make for a new shape
REFUSED_SHARE = 0.05  # of the available memory
GUESS = (
    "Something keeps tensors of each step: a list of losses that still have their graph (append loss.item()), a cache keyed by "
    "shape, or an output kept in an object of a library"
)
POOLS = (
    "{kept} stayed in a private memory pool after batch {size} (torch.cuda.MemPool, or a captured graph), "
    "which gives nothing back while it lives, so every later trial would have less memory. Make the "
    "pool inside the step, or probe a target (oomprobe run train.py:build), whose trials get new pools"
)
THREADS = (
    "Threads that the step started still run ({names}) and may hold it: start them before the probe, "
    "or probe a target (oomprobe run train.py:build)"
)
CACHES = (
    "The step fills the cache of a function, which is not emptied before each trial because it was not empty when the probe "
    "began: call {emptying} before the probe"
)


class Baseline:
    """Memory in use between trials, and what a trial left above it.

    `clean` frees what a trial left.
    """

    def __init__(self, device: Device, *, clean: Callable[[], None]) -> None:
        self._device, self._clean = device, clean
        self._live_bytes: int | None = None
        self._residue_bytes = 0  # above the baseline, and already reported as leaked
        self._available_bytes: int | None = None
        self._cached_bytes = 0  # free, and not given back
        self._threads = {*threading.enumerate()}

    @property
    def known(self) -> bool:
        """Whether `take` was called."""
        return self._live_bytes is not None

    def take(self, available_bytes: int) -> None:
        """Set the baseline, after the first trial that passed: library workspaces are part of it."""
        self._live_bytes, self._cached_bytes = (
            self._device.live_bytes(),
            self._device.cached_bytes(),
        )
        self._available_bytes = available_bytes

    def pooled_bytes(self) -> int:
        """Return what private pools keep from later trials, once the last one is cleaned up."""
        if self._live_bytes is None:
            return 0
        return max(0, self._device.cached_bytes() - self._cached_bytes)

    def settle(self, *, keeps: bool = False) -> int:
        """Clean up after a trial and return the leaked bytes, or 0 if they are within the tolerance.

        With `keeps`, what the step holds is not put back, and belongs to every later trial, as in training.
        """

        def above_bytes() -> int:
            self._clean()
            live_bytes = self._device.live_bytes()
            return 0 if self._live_bytes is None else max(0, live_bytes - self._live_bytes)

        most_bytes = self._residue_bytes + TOLERATED_BYTES
        # The autograd thread of a failed backward may hold its tensors a moment longer.
        leaked_bytes = until(
            lambda leaked_bytes: leaked_bytes <= most_bytes,
            above_bytes,
            wait=tenacity.wait_exponential(multiplier=0.05),
            stop=tenacity.stop_after_attempt(5),
        )
        if leaked_bytes > most_bytes:
            if keeps:
                self._live_bytes, leaked_bytes = self._device.live_bytes(), 0
            else:
                self._residue_bytes = leaked_bytes
        return leaked_bytes if leaked_bytes > TOLERATED_BYTES else 0

    def refusal(
        self, trial: Trial, emptying: Sequence[str] = (), *, lives_on: bool = True
    ) -> str | None:
        """Explain why the trial's leak would make the answer wrong; None if it would not.

        `emptying` is what to type for each cache that has grown, such as ``"mask.cache_clear()"``;
        `lives_on` is whether later trials use the private pools of this one.
        """
        if self._available_bytes is None:
            return None
        most_bytes = REFUSED_SHARE * self._available_bytes
        pooled_bytes = self.pooled_bytes()
        if pooled_bytes > most_bytes and lives_on:
            return POOLS.format(kept=format_bytes(pooled_bytes), size=trial.batch_size)
        if trial.leaked_bytes <= most_bytes:
            return None
        leaked = (
            f"{format_bytes(trial.leaked_bytes)} did not come back after batch {trial.batch_size}, even after "
            "collecting garbage, so every later trial would have less memory and the answer would be too small. "
        )
        if emptying:
            return leaked + CACHES.format(emptying=", ".join(emptying))
        started = {thread.name for thread in {*threading.enumerate()} - self._threads}
        if started:
            return leaked + THREADS.format(names=", ".join(sorted(started)))
        return leaked + GUESS
