"""The result of a probe: plain data, and its JSON form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oomprobe.records.breakdown import Breakdown
from oomprobe.records.fit import LinearFit
from oomprobe.records.plain import from_plain, reading, written
from oomprobe.records.plan import PlanEntry, plan
from oomprobe.records.trials import Trial

# The methods that render import `report` when they are called, and `report` reads results: the only circle of the package.
if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCHEMA_VERSION = 1
MEASURED = ("peak_allocated_bytes", "peak_reserved_bytes", "step_s", "samples_per_s")  # of a trial, for a summary
Flat = dict[str, int | float | str | bool | None]  # what trackers of experiments take


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """The answer and all the evidence for it.

    Attributes:
        batch_size: The answer: it ran, at exactly this size, with the allocator capped at `budget_bytes`.
        limit_batch_size: Largest size that ran at all (on a simulated device, or was replayed).
        first_failing_batch_size: Smallest size that failed without the margin, or None.
        limited_by: ``"memory"``, ``"host_memory"``, ``"max_batch"``, ``"size_limit"`` or ``"step"``: the step splits its
            batch itself, so memory limits no size.
        limiting_step: Name of the step that limits, when several were given.
        trials: Every trial, in the order they ran.
        fit: The straight line through (batch size, peak), a diagnostic; None with fewer than three points.
        device: Name of the device.
        budget_bytes: Cap on the allocator for the answer: `memory_fraction` of `available_bytes`.
        available_bytes: Memory available to this process.
        notes: What a careful reader should know about this number.
        not_covered: What could need memory in training but was not part of the trials.
        contaminated: Whether other processes may have changed the answer.
        state_verified: Whether the restored state was compared bit for bit and equal.
        environment: Versions and settings the number is valid for, and the date and the target of the probe.
        estimates: What rules of thumb would have answered, by name. Never used.
        options: The options of the call.
        elapsed_s: Wall time of the probe.
        in_steps_s: Part of `elapsed_s` spent inside the step.
        breakdown: What held the memory at the answer; None if not requested.
        world_size: Ranks that ran each trial. All batch sizes are per rank.
        limiting_rank: The rank that limits, if there are several: which failed at the next size, or had the least memory left.
        schema_version: Version of the JSON form.

    Examples:
        >>> import oomprobe, tempfile
        >>> target = "oomprobe.demo:wide_mlp"
        >>> result = oomprobe.probe_target(target, device="sim:1GiB", multiple_of=64, progress="off")
        >>> result.batch_size, result.limited_by, result.confirmation.steps, result.was_replayed
        (832, 'memory', 50, False)
        >>> [(entry.micro_batch, entry.accumulation_steps) for entry in result.plan(1024) if entry.exact]
        [(512, 2)]
        >>> ProbeResult.from_dict(json.loads(result.to_json())) == ProbeResult.from_dict(result.to_dict())
        True
        >>> result.summary()["options/memory_fraction"]
        0.9
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     result.to_html(f"{folder}/probe.html")
        ...     figure = result.plot()
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
    world_size: int = 1
    limiting_rank: int | None = None
    schema_version: int = SCHEMA_VERSION

    @property
    def confirmation(self) -> Trial | None:
        """The last trial of the answer, which confirmed it; None if `trials` has none."""
        ran = (t for t in reversed(self.trials) if t.passed and t.accumulation_steps == 1)
        return next((t for t in ran if t.batch_size == self.batch_size), None)

    @property
    def was_replayed(self) -> bool:
        """Whether the answer was not run: in a table of simulated cards, what the step allocated on one is replayed on others."""
        return self.confirmation is not None and self.confirmation.replayed

    def plan(self, global_batch: int, world_size: int | None = None) -> tuple[PlanEntry, ...]:
        """Return ways to reach a global batch with gradient accumulation, best first.

        Args:
            global_batch: Samples per optimizer step over all ranks, at least 1.
            world_size: Ranks that share the global batch, at least 1; None: as many as ran the trials.

        Returns:
            Entries whose ``ran`` says whether this probe ran that micro-batch and it passed.

        Raises:
            InvalidArgumentError: a size is not a positive integer.
        """
        accumulated = [t for t in self.trials if t.accumulation_steps > 1]
        largest = self.batch_size
        if not all(t.passed for t in accumulated):  # then trust only sizes that passed with accumulation
            largest = max((t.batch_size for t in accumulated if t.passed), default=1)
        return plan(
            global_batch,
            world_size=self.world_size if world_size is None else world_size,
            max_micro_batch=largest,
            min_micro_batch=int(self.options.get("min_batch") or 1),
            multiple_of=int(self.options.get("multiple_of") or 1),
            ran=frozenset((t.batch_size, t.accumulation_steps) for t in self.trials if t.passed and not t.replayed),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON types; `from_dict` reads them back."""
        return json.loads(json.dumps(asdict(self), default=str))  # type: ignore[no-any-return]

    def to_json(self, path: str | Path | None = None) -> str:
        """Return the result as JSON text, and write it to `path` if given."""
        return written(json.dumps(self.to_dict(), indent=2) + "\n", path)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ProbeResult:
        """Return the result that `to_dict` wrote.

        Raises:
            InvalidArgumentError: the data has another schema version, or is not a result.
        """
        with reading("result", data, SCHEMA_VERSION):
            return from_plain(cls, data)

    def summary(self) -> Flat:
        """Return the result as one flat mapping for a tracker of experiments.

        It has the fields that are numbers or texts, all notes as one text, what was measured at the answer, and the environment and
        the options, as ``"environment/torch"`` and ``"options/memory_fraction"``.
        """
        plain = self.to_dict()
        parts = {f"{part}/{name}": value for part in ("environment", "options") for name, value in plain[part].items()}
        measured = {name: getattr(self.confirmation, name, None) for name in MEASURED}
        told = {**plain, "notes": "\n".join(self.notes), **measured, **parts}
        return {name: value for name, value in told.items() if value is None or isinstance(value, int | float | str)}

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw peak memory and throughput against batch size.

        Args:
            path: File to save the plot to; its suffix sets the format: ``.png``, ``.svg``, ``.pdf``. None: do not save.

        Returns:
            The figure, one column wide.

        Raises:
            InvalidArgumentError: matplotlib is not installed (``pip install 'oomprobe[plot]'``).
        """
        from oomprobe.report.plot import result_figure, saved

        return saved(result_figure(self), path)

    def to_html(self, path: str | Path) -> None:
        """Write the result as one self-contained HTML file.

        Raises:
            InvalidArgumentError: matplotlib is not installed (``pip install 'oomprobe[plot]'``).
        """
        from oomprobe.report.html import page

        written(page(self), path)

    def _repr_html_(self) -> str:
        from oomprobe.report.html import notebook

        return notebook(self)

    def __repr__(self) -> str:
        from oomprobe.report.table import in_one_line

        return in_one_line(self)

    def __str__(self) -> str:
        from oomprobe.report.table import text

        return text(self)
