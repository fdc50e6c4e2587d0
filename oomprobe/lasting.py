"""How long an answer lasts where each of its steps keeps something: what it leaves free is used up in the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oomprobe.errors import UnreliableError
from oomprobe.result import SECOND_OPINIONS, Trial
from oomprobe.units import format_bytes

# What an answer leaves free, and a leak uses up in fewer, is no margin. In the user's own process something beside the step may have grown.
STEPS_TO_LAST = {"isolated": 1000, "in one process": 100}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLeak:
    """What each step of an answer keeps.

    Attributes:
        kept_bytes: By each step.
        free_bytes: What the answer leaves free.

    Example:
        >>> StepLeak(kept_bytes=1 << 20, free_bytes=1 << 25).steps_to_last
        32
    """

    kept_bytes: int
    free_bytes: int

    @property
    def steps_to_last(self) -> int:
        """After how many that is used up."""
        return self.free_bytes // self.kept_bytes


def leak_of_step(
    trials: Sequence[Trial], batch_size: int, *, available_bytes: int, budget_bytes: int
) -> StepLeak | None:
    """What each step of the answer keeps; None where none keeps any.

    Args:
        trials: Of the probe.
        batch_size: The answer.
        available_bytes: On the device.
        budget_bytes: What of it the answer was held to.

    Example:
        >>> from oomprobe.result import Phase, Verdict
        >>> confirmed = Trial(batch_size=8, verdict=Verdict.FITS, phase=Phase.CONFIRM, steps=6, step_leaked_bytes=1 << 20)
        >>> leak_of_step([confirmed], 8, available_bytes=10 << 25, budget_bytes=9 << 25).steps_to_last
        32
    """
    asked = (
        t
        for t in reversed(trials)
        if t.passed and t.batch_size == batch_size and t.phase in SECOND_OPINIONS and t.accumulation_steps == 1
    )
    last = next(asked, None)
    if last is None or not last.step_leaked_bytes:
        return None
    used_bytes = min(budget_bytes, _peak_bytes(last, trials) or budget_bytes)
    return StepLeak(kept_bytes=last.step_leaked_bytes, free_bytes=available_bytes - used_bytes)


def _peak_bytes(answer: Trial, trials: Sequence[Trial]) -> int | None:
    """What the answer took; where only live tensors are seen, and a larger size failed, that says too little."""
    if answer.peak_reserved_bytes is not None:
        return answer.peak_reserved_bytes
    ends_memory = any(not t.passed and t.batch_size > answer.batch_size for t in trials)
    return None if ends_memory else answer.peak_allocated_bytes


def refuse_growing(
    trials: Sequence[Trial], batch_size: int, *, available_bytes: int, budget_bytes: int, isolated: bool
) -> None:
    """Raise where each step of the answer leaks, so that what it leaves free lasts for a moment only.

    Args:
        trials: Of the probe.
        batch_size: The answer.
        available_bytes: On the device.
        budget_bytes: What of it the answer was held to.
        isolated: Whether each trial began in a process of its own, so that what grew is the step's.

    Raises:
        UnreliableError: it would be used up within `STEPS_TO_LAST` steps.

    Example:
        >>> from oomprobe.result import Phase, Verdict
        >>> confirmed = Trial(batch_size=8, verdict=Verdict.FITS, phase=Phase.CONFIRM, steps=6, step_leaked_bytes=1 << 20)
        >>> refuse_growing([confirmed], 8, available_bytes=10 << 34, budget_bytes=9 << 34, isolated=True)
        >>> refuse_growing([confirmed], 8, available_bytes=10 << 25, budget_bytes=9 << 25, isolated=True)
        Traceback (most recent call last):
        ...
        oomprobe.errors.UnreliableError: each step at batch 8 keeps 1.00 MiB, even after collecting garbage: ...
    """
    leak = leak_of_step(trials, batch_size, available_bytes=available_bytes, budget_bytes=budget_bytes)
    if leak is None or leak.steps_to_last >= STEPS_TO_LAST["isolated" if isolated else "in one process"]:
        return
    raise UnreliableError(
        f"each step at batch {batch_size} keeps {format_bytes(leak.kept_bytes)}, even after collecting garbage: the "
        f"{format_bytes(leak.free_bytes)} that it leaves free are used up after about {leak.steps_to_last} more, so it does "
        "not last. Something keeps tensors of each step: a list of losses that still have their graph (append "
        "loss.item()), a cache keyed by shape, or a buffer that was not full yet: then let the step run until it is before "
        "the probe",
        trials=tuple(trials),
    )
