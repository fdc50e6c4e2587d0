"""Others who use the device too: a trial that failed while they held more than before is tried again.

One that passed has passed, and one that failed at a cap which they left room for has failed by itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import tenacity
import torch

from oomprobe.runner import Ran
from oomprobe.units import format_bytes
from oomprobe.verdict import Verdict

# Of the device, and at least: kernels that libraries load late take 250 MiB and more, 3 % of a card of 8 GB.
MOVED_SHARE, MOVED_BYTES = 0.02, 512 * 2**20
ATTEMPTS = 5  # of a trial
LOOKS = 3  # for quiet, between two attempts; all the waits add up to 24 seconds
WAIT = tenacity.wait_exponential(multiplier=2, max=16)
NO_MATTER = frozenset({Verdict.POISONED, Verdict.CRASHED, Verdict.TIMED_OUT})  # these say nothing about memory


LISTED = re.compile(r"process\s+(\d+) uses\s+([\d.]+) MB")


def processes_on(device: torch.device) -> str:
    """Name the other processes on an NVIDIA card and what each holds; empty where the driver does not say.

    The listing is torch's own, which reads it through ``pynvml`` (``pip install "oomprobe[nvml]"``) and needs no CUDA context.
    """
    with suppress(Exception):  # for a message only
        listed = {int(pid): float(mib) for pid, mib in LISTED.findall(torch.cuda.list_gpu_processes(device))}
        others = {pid: mib for pid, mib in listed.items() if not _is_ours(pid)}
        if len(others) < len(listed):  # otherwise the driver's process numbers are not those of this container
            return "; ".join(f"pid {pid}{_program(pid)} holds {mib:.0f} MiB" for pid, mib in others.items())
    return ""


def _is_ours(pid: int) -> bool:
    """Whether it is this process, or descends from it."""
    while pid > 1 and pid != os.getpid():
        # "4711 (a name) S 1 ...": the name may hold anything, the parent is the second after it
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid == os.getpid()


def _program(pid: int) -> str:
    return f" ({Path(f'/proc/{pid}/comm').read_text().strip()})"


class Neighbours:
    """Watches memory of the device that is not ours.

    Args:
        total_bytes: Of the device.
        names: Says who is on the device; empty where nobody knows.
        sleep: Waits between attempts.

    Attributes:
        contaminated: Whether others held more in every attempt of some trial that failed, so that the answer may be theirs.
        notes: What was seen; in order, without doubles.
        held_bytes: Samples, each after a trial.
    """

    def __init__(self, total_bytes: int, names: Callable[[], str], *, sleep: Callable[[float], None]) -> None:
        self._total_bytes, self._names = total_bytes, names
        self._tolerated_bytes = max(MOVED_SHARE * total_bytes, MOVED_BYTES)
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
            if self.contaminated or not self._was_disturbed(ran):  # once is enough to wait for them in vain
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
            retry=tenacity.retry_if_result(lambda grown_bytes: grown_bytes > self._tolerated_bytes),
            retry_error_callback=lambda state: None,
            sleep=self._sleep,
        )
        retrying(lambda: self._grown_bytes(look()))

    def _was_disturbed(self, ran: Ran) -> bool:
        if not self._is_disturbed(ran):
            return False
        grown_bytes = self._grown_bytes(ran.outside_before_bytes, ran.outside_after_bytes)
        self.notes[
            f"others on the device held {format_bytes(grown_bytes)} more around batch {ran.trial.batch_size}, which failed: "
            "that trial was discarded and tried again"
        ] = None
        return True

    def _is_disturbed(self, ran: Ran) -> bool:
        if ran.trial.passed or ran.trial.verdict in NO_MATTER:
            return False
        outside_bytes = max(ran.outside_before_bytes or 0, ran.outside_after_bytes or 0)
        cap_bytes = ran.trial.cap_bytes
        has_room = cap_bytes is not None and self._total_bytes - outside_bytes >= cap_bytes
        return self._grown_bytes(outside_bytes) > self._tolerated_bytes and not has_room

    def _named(self) -> str:
        names = self._names()
        return f" ({names})" if names else ""

    def _grown_bytes(self, *samples: int | None) -> int:
        if self._expected_bytes is None:
            return 0
        return max((sample for sample in samples if sample is not None), default=0) - self._expected_bytes

    def _give_up(self, ran: Ran) -> None:
        self.contaminated = True
        self._expected_bytes = ran.outside_after_bytes
        self.notes[
            "CONTAMINATED: others on the device kept more memory than before, around batch "
            f"{ran.trial.batch_size}, so the answer may be about them{self._named()}. Probe again when the device is yours "
            "alone"
        ] = None
