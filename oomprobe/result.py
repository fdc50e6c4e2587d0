"""What a probe returns: plain data, and its JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oomprobe.errors import InvalidArgumentError
from oomprobe.report.breakdown import Breakdown
from oomprobe.report.fit import LinearFit
from oomprobe.report.plan import PlanEntry, plan
from oomprobe.verdicts import Verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCHEMA_VERSION = 1


class Phase(StrEnum):
    """Why a size was tried."""

    GROW = "grow"
    BISECT = "bisect"
    RECHECK = "recheck"
    CONFIRM = "confirm"


SECOND_OPINIONS = (Phase.RECHECK, Phase.CONFIRM)  # asked of a process that has run nothing else, where there can be one


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One batch size, tried.

    Attributes:
        batch_size: The size handed to the step.
        verdict: How it ended.
        phase: Why it was tried.
        steps: Calls of the step that completed.
        cap_bytes: What the allocator was held to; None where the device's own limit held, as while growing in a process
            that may die.
        peak_allocated_bytes: Most memory in live tensors during the trial; None where it is not measured.
        peak_reserved_bytes: Most memory held by the allocator during the trial; None where not measured.
        peak_upper_bytes: On a simulated device, the upper end of the peak: with the largest workspace that a
            convolution would take if there is room. None elsewhere.
        step_s: Median wall time of a call once every optimizer had stepped; None when none completed.
        samples_per_s: ``batch_size / step_s``.
        alloc_retries: Times the allocator had to give its cache back to serve a request.
        leaked_bytes: Memory that did not come back after the trial and a full clean-up.
        step_leaked_bytes: Memory that each further step keeps, garbage that awaits collection aside.
        error: Text of the failure; None when it passed.
        where: Where it failed, such as ``"backward, model.py:142"``.
        step_name: Which of several named steps failed, or had the highest peak; None for a single step.
        accumulation_steps: Micro-batches run for one optimizer step; 1 unless a plan was being run.
        replayed: Whether a simulated device only replayed what the step asks of the allocator. Such a trial guides the
            search; what decides is run.
    """

    batch_size: int
    verdict: Verdict
    phase: Phase
    steps: int = 0
    cap_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    peak_upper_bytes: int | None = None
    step_s: float | None = None
    samples_per_s: float | None = None
    alloc_retries: int = 0
    leaked_bytes: int = 0
    step_leaked_bytes: int = 0
    error: str | None = None
    where: str | None = None
    step_name: str | None = None
    accumulation_steps: int = 1
    replayed: bool = False

    @property
    def passed(self) -> bool:
        """Whether the size ran."""
        return self.verdict is Verdict.FITS


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """The answer, and everything it rests on.

    Attributes:
        batch_size: The answer: it ran, at exactly this size, with the allocator held to `budget_bytes`.
        limit_batch_size: Largest size that ran at all (on a simulated device also one that was replayed).
        first_failing_batch_size: Smallest size that failed without the margin, or None.
        limited_by: ``"memory"``, ``"host_memory"``, ``"max_batch"`` or ``"size_limit"``.
        limiting_step: Name of the step that limits, when several were given.
        trials: Every trial, in the order they were run.
        fit: The straight line through (batch size, peak), a diagnostic; None with fewer than three points.
        device: Name of the device.
        budget_bytes: What the allocator was held to for the answer.
        available_bytes: What the budget is a share of.
        notes: What a careful reader should know about this number.
        not_covered: What could need memory in training and was not part of the trials.
        contaminated: Whether memory outside this process's allocator moved while probing.
        state_verified: Whether the restored state was compared, bit for bit, and equal.
        environment: Versions and settings the number holds for.
        estimates: What rules of thumb would have answered, by name. Never used.
        options: The options of the call.
        elapsed_s: Wall time of the probe.
        in_steps_s: Part of it spent inside the step.
        breakdown: What held the memory at the answer; None where that was not asked for.
        schema_version: Version of the JSON form.
    """

    batch_size: int
    limit_batch_size: int
    first_failing_batch_size: int | None
    limited_by: str
    limiting_step: str | None = None
    trials: tuple[Trial, ...]
    fit: LinearFit | None = None
    device: str
    budget_bytes: int
    available_bytes: int
    notes: tuple[str, ...] = ()
    not_covered: tuple[str, ...] = ()
    contaminated: bool = False
    state_verified: bool = False
    environment: Mapping[str, Any] = field(default_factory=dict)
    estimates: Mapping[str, float | None] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    elapsed_s: float = 0.0
    in_steps_s: float = 0.0
    breakdown: Breakdown | None = None
    schema_version: int = SCHEMA_VERSION

    def plan(self, global_batch: int, world_size: int = 1) -> tuple[PlanEntry, ...]:
        """Ways to reach a global batch with gradient accumulation, best first.

        Args:
            global_batch: Samples for one optimizer step over all ranks, at least 1.
            world_size: Ranks that share them, at least 1.

        Returns:
            Entries whose ``ran`` says whether that micro-batch was executed by this probe and passed.

        Raises:
            InvalidArgumentError: a size is not a positive integer.
        """
        accumulated = [t for t in self.trials if t.accumulation_steps > 1]
        largest = self.batch_size
        if not all(t.passed for t in accumulated):  # then only what passed with accumulation counts
            largest = max((t.batch_size for t in accumulated if t.passed), default=1)
        return plan(
            global_batch,
            world_size=world_size,
            max_micro_batch=largest,
            min_micro_batch=int(self.options.get("min_batch") or 1),
            multiple_of=int(self.options.get("multiple_of") or 1),
            ran=frozenset((t.batch_size, t.accumulation_steps) for t in self.trials if t.passed and not t.replayed),
        )

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON types; `from_dict` reads it back."""
        return json.loads(json.dumps(asdict(self), default=str))  # type: ignore[no-any-return]

    def to_json(self, path: str | Path | None = None) -> str:
        """The result as JSON text, also written to `path` when one is given."""
        text = json.dumps(self.to_dict(), indent=2) + "\n"
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ProbeResult:
        """Read what `to_dict` wrote.

        Raises:
            InvalidArgumentError: the data is of another schema version, or not a result.
        """
        version = data.get("schema_version") if isinstance(data, Mapping) else None
        if version != SCHEMA_VERSION:
            raise InvalidArgumentError(
                f"this result has schema_version {version!r}; this oomprobe reads {SCHEMA_VERSION}: run the probe again, "
                "or read it with the oomprobe that wrote it"
            )
        try:
            known = _known(cls, data)
            known["trials"] = tuple(trial_from_dict(t) for t in data["trials"])
            known["fit"] = None if data.get("fit") is None else LinearFit(**_known(LinearFit, data["fit"]))
            known["breakdown"] = None if data.get("breakdown") is None else Breakdown.from_dict(data["breakdown"])
            known |= {name: tuple(data[name]) for name in ("notes", "not_covered")}
            return cls(**known)
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidArgumentError(f"this is not a result that oomprobe wrote: {error!r}") from error

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw peak memory and throughput against batch size.

        Args:
            path: Where to save the picture; the suffix says how: ``.png``, ``.svg``, ``.pdf``. None: nowhere.

        Returns:
            The figure, a `matplotlib.figure.Figure` of one column's width.

        Raises:
            InvalidArgumentError: matplotlib is not installed (``pip install 'oomprobe[plot]'``).
        """
        from oomprobe.report.plot import result_figure

        figure = result_figure(self)
        if path is not None:
            figure.savefig(path)
        return figure

    def to_html(self, path: str | Path) -> None:
        """Write the result as one HTML file with its pictures inside, to send to a colleague.

        Raises:
            InvalidArgumentError: matplotlib is not installed (``pip install 'oomprobe[plot]'``).
        """
        from oomprobe.report.html import page

        Path(path).write_text(page(self), encoding="utf-8")

    def _repr_html_(self) -> str:
        from oomprobe.report.html import notebook

        return notebook(self)

    def __str__(self) -> str:
        from oomprobe.report.page import text

        return text(self)


def trial_from_dict(data: Mapping[str, Any]) -> Trial:
    """Read a trial that was written as JSON."""
    return Trial(**{**_known(Trial, data), "verdict": Verdict(data["verdict"]), "phase": Phase(data["phase"])})


def _known(cls: type, data: Mapping[str, Any]) -> dict[str, Any]:
    """Take the keys `cls` has a field for; a newer oomprobe of the same schema may have written more."""
    return {f.name: data[f.name] for f in fields(cls) if f.name in data}
