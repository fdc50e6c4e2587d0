"""Calls of the steps beside the trials: to flush a leak, to count work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from oomprobe.anatomy import Anatomy, AnatomyCounter
from oomprobe.clock import Clock
from oomprobe.devices import Device
from oomprobe.interrupts import TimeUp
from oomprobe.result import Trial
from oomprobe.trial import Trials
from oomprobe.verdict import Verdict, classify_error
from oomprobe.work import Work, WorkCounter


class Aside:
    """Calls each step once; what fails here is left to a trial, only the time limit ends the probe.

    Args:
        device: Where the steps run.
        trials: Calls them.
        recorded: The trials so far, for the error when time has passed.
        clock: Knows until when.
    """

    def __init__(
        self,
        device: Device,
        trials: Trials,
        recorded: Sequence[Trial],
        clock: Clock,
    ) -> None:
        self._device, self._trials, self._recorded, self._clock = device, trials, recorded, clock

    def flush(self, size: int) -> bool:
        """Replace what a step keeps of its last batch; a trial that has passed is not lost for want of time for this.

        Returns:
            Whether there was memory for it: the leak itself may have filled it, which is measured next.
        """
        try:
            self._call(size)
            return True
        except TimeUp as up:
            self._trials.interrupts.check_own(up)
            enough = True
        except Exception as error:
            enough = classify_error(error) not in (Verdict.OOM, Verdict.HOST_OOM)
        return enough

    def work_at(self, size: int) -> Work | None:
        """The work of one call; None where that size does not run."""
        with self._in_time(size):
            try:
                with self._device.cap(None):
                    self._call(size, counter := WorkCounter())
                return counter.work
            except Exception:
                return None

    def anatomy_at(self, size: int) -> Anatomy | None:
        """What rules of thumb count; None where that is not known. Compiled code would be compiled again for the hooks."""
        if self._trials.compiled.graphs:
            return None
        with self._in_time(size):
            try:
                with self._device.cap(None):
                    self._call(size, counter := AnatomyCounter(self._trials.model, size))
                return counter.anatomy
            except Exception:  # no answer hangs on it
                return None

    def _call(self, size: int, inside: AbstractContextManager[object] | None = None) -> None:
        self._trials.call_once(size, self._clock.deadline_s(), inside)

    @contextmanager
    def _in_time(self, size: int) -> Iterator[None]:
        """Until here our time limit is a `TimeUp`: an error would pass for the step's."""
        try:
            yield
        except TimeUp as up:
            self._trials.interrupts.check_own(up)
            raise self._clock.time_is_up(size, self._recorded) from None
