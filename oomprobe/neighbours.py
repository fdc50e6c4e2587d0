"""Others who use the device too: a trial during which their memory moved says nothing, and is tried again."""

from __future__ import annotations

from collections.abc import Callable

import tenacity

from oomprobe.runner import Ran
from oomprobe.units import format_bytes
from oomprobe.verdict import Verdict

MOVED_SHARE = 0.02  # of the device: more than libraries take for kernels that they load late
ATTEMPTS = 5  # of a trial
LOOKS = 3  # for quiet, between two attempts; all the waits add up to 24 seconds
WAIT = tenacity.wait_exponential(multiplier=2, max=16)
NO_MATTER = frozenset({Verdict.POISONED, Verdict.CRASHED, Verdict.TIMED_OUT})  # these say nothing about memory


class Neighbours:
    """Watches memory of the device that is not ours.

    Args:
        total_bytes: Of the device.
        names: Says who is on the device; empty where nobody knows.
        sleep: Waits between attempts.

    Attributes:
        contaminated: Whether it moved in every attempt of some trial, so that the answer may be theirs.
        notes: What was seen; in order, without doubles.
        held_bytes: Samples, each after a trial.
    """

    def __init__(self, total_bytes: int, names: Callable[[], str], *, sleep: Callable[[float], None]) -> None:
        self._tolerated_bytes, self._names = MOVED_SHARE * total_bytes, names
        self._sleep = sleep
        self._expected_bytes: int | None = None
        self.contaminated = False
        self.notes: dict[str, None] = {}
        self.held_bytes: list[int] = []

    def expect(self, outside_bytes: int | None) -> None:
        """What is held while nothing moves: known once kernels and libraries are loaded."""
        if outside_bytes is not None:
            self._expected_bytes = outside_bytes
            self.held_bytes.append(outside_bytes)

    def undisturbed(self, run: Callable[[], Ran], look: Callable[[], int | None]) -> Ran:
        """Run a trial, and again while memory of others moved; in the end what came is taken, and said to be theirs.

        Args:
            run: Runs it.
            look: Tells what is held outside this process's allocator now.
        """
        ran = run()
        for _ in range(ATTEMPTS - 1):
            if not self._was_disturbed(ran):
                break
            self._wait_for_quiet(look)
            ran = run()
        if self._is_disturbed(ran):
            self._give_up(ran)
        if self._expected_bytes is not None and ran.outside_after_bytes is not None:
            self.held_bytes.append(ran.outside_after_bytes)
        return ran

    def _wait_for_quiet(self, look: Callable[[], int | None]) -> None:
        """Until others hold what they held before; on values, for a kept exception would keep a failed step alive."""
        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(LOOKS),
            wait=WAIT,
            retry=tenacity.retry_if_result(lambda moved_bytes: moved_bytes > self._tolerated_bytes),
            retry_error_callback=lambda state: None,
            sleep=self._sleep,
        )
        retrying(lambda: self._moved_bytes(look()))

    def _was_disturbed(self, ran: Ran) -> bool:
        if not self._is_disturbed(ran):
            return False
        moved_bytes = self._moved_bytes(ran.outside_before_bytes, ran.outside_after_bytes)
        self.notes[
            f"others on the device took or gave back {format_bytes(moved_bytes)} around batch {ran.trial.batch_size}: "
            "that trial was discarded and tried again"
        ] = None
        return True

    def _is_disturbed(self, ran: Ran) -> bool:
        moved_bytes = self._moved_bytes(ran.outside_before_bytes, ran.outside_after_bytes)
        return moved_bytes > self._tolerated_bytes and ran.trial.verdict not in NO_MATTER

    def _named(self) -> str:
        names = self._names()
        return f" ({names})" if names else ""

    def _moved_bytes(self, *samples: int | None) -> int:
        known = [sample for sample in (self._expected_bytes, *samples) if sample is not None]
        return max(known) - min(known) if self._expected_bytes is not None else 0

    def _give_up(self, ran: Ran) -> None:
        self.contaminated = True
        self._expected_bytes = ran.outside_after_bytes
        self.notes[
            "CONTAMINATED: memory of others on the device went on moving, or did not come back, around batch "
            f"{ran.trial.batch_size}, so the answer may be about them{self._named()}. Probe again when the device is yours "
            "alone"
        ] = None
