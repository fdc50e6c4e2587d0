"""Whoever runs trials: in this process (`local`), or in children that may die (`isolation`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from oomprobe.anatomy import Anatomy
from oomprobe.result import Trial
from oomprobe.trial import Request
from oomprobe.work import Work


class Place(Protocol):
    """What is told of the device that trials run on; a `Device` here, or the word of a child."""

    @property
    def name(self) -> str: ...
    @property
    def torch_device(self) -> torch.device: ...
    @property
    def total_bytes(self) -> int: ...
    @property
    def on_host(self) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A sample of the device's memory between trials.

    Attributes:
        available_bytes: What this process may use.
        outside_bytes: What this process's allocator does not hold; None where that is not known.
    """

    available_bytes: int
    outside_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A trial, and what was seen around it.

    Attributes:
        trial: How it went.
        measured: After it, where it was the first to pass in its process.
        outside_before_bytes: Held outside this process's allocator when the trial began; None where it is not known.
        outside_after_bytes: The same when it had ended.
        refusal: Why what it left makes later answers wrong ones; None where it does not.
    """

    trial: Trial
    measured: Measured | None = None
    outside_before_bytes: int | None = None
    outside_after_bytes: int | None = None
    refusal: str | None = None


class Runner(Protocol):
    """Runs what a `Workbench` asks for.

    Attributes:
        place: The device.
        step_names: Of the steps that a trial runs.
        notes: What is to be said of the trials; in order, without doubles.
        in_steps_s: Seconds spent inside the steps so far.
        threads: Of torch, in the process of the trials.
        isolated: Whether they build the target themselves, in processes of their own.
        replaceable: Whether a trial may be tried again in a new process, so that a process may die or be poisoned.
    """

    notes: dict[str, None]
    isolated: bool
    replaceable: bool

    @property
    def place(self) -> Place: ...
    @property
    def step_names(self) -> list[str]: ...
    @property
    def in_steps_s(self) -> float: ...
    @property
    def threads(self) -> int: ...

    @property
    def nothing_stepped(self) -> bool:
        """Whether no optimizer was seen to step in the first trial."""
        ...

    def measure(self) -> Measured:
        """Sample the memory now."""
        ...

    def outside_bytes(self) -> int | None:
        """What is held outside this process's allocator now; None where that is not known."""
        ...

    def run(self, request: Request) -> Ran:
        """Run one trial, and put the memory back to its baseline.

        Raises:
            StepFailedError: a bug in the step.
        """
        ...

    def work_at(self, batch_size: int) -> Work | None:
        """The work of one call of each step; None where that size does not run."""
        ...

    def anatomy_at(self, batch_size: int) -> Anatomy | None:
        """What rules of thumb count, in one call of each step; None where that does not run or calls no module."""
        ...

    def renew(self) -> None:
        """Let the next trial run in a new process, where that can be."""
        ...
