"""Other processes on the device, whose memory comes and goes while trials run."""

from __future__ import annotations

from collections.abc import Callable

import tenacity
import torch

from oomprobe.devices.sharing import processes_on
from oomprobe.ground.units import format_bytes
from oomprobe.ground.waiting import until
from oomprobe.records.notes import Notes, remark
from oomprobe.records.patience import PATIENCE, Patience
from oomprobe.records.trials import NO_VERDICT, DeviceInfo, Outcome, Request, Runner, Trial

# Growth outside our allocator that is ignored: this fraction of the device, but at least this many bytes. Kernels that
# libraries load late take over 250 MiB.
MOVED_SHARE, MOVED_BYTES = 0.02, 512 * 2**20
ATTEMPTS = 5  # at one trial, while other processes change their memory
LOOKS = 3  # samples before the next attempt, until memory is steady; all waits together take at most 24 seconds
DISCARDED = "other processes on the device held {grown} more around batch {size}, which failed: that trial was discarded and tried again"
CONTAMINATED = (
    "CONTAMINATED: other processes on the device{which} kept more memory than before around batch {size}, so the answer may be too "
    "small. Probe again once they have ended"
)


class Neighbours:
    """A policy of second tries: a trial that failed while the memory of other processes grew runs again.

    A pass always counts. A failure counts if the others left the whole cap free. After `ATTEMPTS` it counts anyway, and
    the answer is marked as contaminated, because the others may have caused it.
    """

    def __init__(self, runner: Runner, patience: Patience = PATIENCE) -> None:
        self._runner, self._patience = runner, patience
        self._expected_bytes: int | None = None
        self._spoiled = 0  # disturbed attempts at the current trial
        self.contaminated = False
        self.notes = Notes()
        self.held_bytes: list[int] = []  # samples, each after a trial

    @property
    def _device(self) -> DeviceInfo:
        return self._runner.facts.device

    @property
    def _tolerated_bytes(self) -> float:
        return max(MOVED_SHARE * self._device.total_bytes, MOVED_BYTES)

    def expect(self, outside_bytes: int | None) -> None:
        """Take `outside_bytes` as the normal level, once kernels and libraries are loaded."""
        if outside_bytes is not None:
            self._expected_bytes = outside_bytes
            self.held_bytes.append(outside_bytes)

    def names(self) -> str:
        """Describe the other processes on the device; empty if unknown."""
        if not self._device.torch_device.startswith("cuda"):
            return ""
        return processes_on(torch.device(self._device.torch_device))

    def names_in_brackets(self) -> str:
        """Return a space and the names in brackets, to follow a noun; empty if unknown."""
        names = self.names()
        if not names:
            return ""
        return f" ({names})"

    def second_try(
        self, request: Request, outcome: Outcome, look: Callable[[], int | None]
    ) -> Request | None:
        """Return the trial to run again, after waiting for the others, if they may have caused its failure; None if it counts.

        `look` returns the outside bytes now.
        """
        trial, after_bytes = outcome.trial, outcome.outside_after_bytes
        outside_bytes = max(outcome.outside_before_bytes or 0, after_bytes or 0)
        if self._may_have_failed(trial, outside_bytes):
            self._spoiled += 1
            if self._spoiled < ATTEMPTS and not self.contaminated:  # wait in vain only once
                grown = format_bytes(self._grown_bytes(outside_bytes))
                self.notes.add(
                    remark(DISCARDED.format(grown=grown, size=trial.batch_size), trial.batch_size)
                )
                until(
                    lambda grown_bytes: grown_bytes <= self._tolerated_bytes,
                    lambda: self._grown_bytes(look() or 0),
                    wait=tenacity.wait_exponential(multiplier=self._patience.neighbour_s),
                    stop=tenacity.stop_after_attempt(LOOKS),
                    sleep=self._patience.sleep,
                )
                return request
            which = self.names_in_brackets()
            self.notes.add(
                remark(CONTAMINATED.format(which=which, size=trial.batch_size), trial.batch_size)
            )
            self.contaminated, self._expected_bytes = True, after_bytes
        self._spoiled = 0
        if self._expected_bytes is not None and after_bytes is not None:
            self.held_bytes.append(after_bytes)
        return None

    def _may_have_failed(self, trial: Trial, outside_bytes: int) -> bool:
        """Return whether the trial failed, and may have failed because others held this much more than before."""
        if trial.passed or trial.verdict in NO_VERDICT:
            return False
        left_bytes = self._device.total_bytes - outside_bytes
        if trial.cap_bytes is not None and left_bytes >= trial.cap_bytes:
            return False
        return self._grown_bytes(outside_bytes) > self._tolerated_bytes

    def _grown_bytes(self, outside_bytes: int) -> int:
        return 0 if self._expected_bytes is None else outside_bytes - self._expected_bytes
