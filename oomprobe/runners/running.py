"""The trial that is running: what was requested, and what has been measured so far."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

from oomprobe.devices import Usage
from oomprobe.records.breakdown import Breakdown
from oomprobe.records.options import Step
from oomprobe.records.trials import Calls, Request, Trial, Verdict
from oomprobe.rules.look import Series
from oomprobe.runners.repeats import Repeats
from oomprobe.verdicts.failure import Failure

OVER_CAP = "it ran, but its peak was over the cap: it reused memory that the allocator had reserved earlier"


@dataclass(slots=True, kw_only=True)
class Running:
    """One trial in progress; `trial()` makes its record."""

    request: Request
    name: str = ""  # of the step whose turn it is
    step: Step
    every: dict[str, Series] = field(default_factory=dict)  # by the name of the step
    calls: int = 0
    allocations: int = 0
    repeats: Repeats
    settled_after: int | None = None  # as in `Trial`
    past_least: bool = False  # whether a bug now ends the trial, which has passed
    ended_early: str | None = None
    counts: bool = False
    values: object = None  # what the user's code counted after the last call
    step_leaked_bytes: int = 0
    held: tuple[str, ...] = ()  # as in `Outcome`
    gradients_hold_graphs: bool = False
    peak_bytes: int = 0  # the highest of several steps
    limiting_step: str = ""  # the step that reached it
    failure: Failure | None = None
    verdict: Verdict = Verdict.FITS
    usage: Usage = field(default_factory=Usage)
    breakdown: Breakdown | None = None

    @property
    def series(self) -> Series:
        """The numbers of the step whose turn it is."""
        return self.every[self.name]

    @property
    def next_row(self) -> int:
        """The row of a table whose value the next call gets."""
        turns = self.request.turns
        return turns[self.calls % len(turns)][0] if turns else self.request.row

    @property
    def next_size(self) -> int:
        """The batch size of the next call."""
        turns = self.request.turns
        return turns[self.calls % len(turns)][1] if turns else self.request.batch_size

    @property
    def is_over_cap(self) -> bool:
        """Whether cached blocks pushed the peak over the cap, which torch checks only when it asks the driver for memory."""
        cap_bytes, usage = self.request.cap_bytes, self.usage
        if cap_bytes is None or usage.peak_reserved_bytes is None:  # without reserved memory there is no such cache
            return False
        return (usage.peak_allocated_bytes or 0) > cap_bytes

    def trial(self, *, several: bool, timed: bool) -> Trial:
        """Return the record of the trial; of `several` steps it names the one that failed, or had the highest peak."""
        request, usage, failure, failed = self.request, self.usage, self.failure, self.verdict is not Verdict.FITS
        durations_s = [series.durations_s[series.timed_from :] for series in self.every.values()]
        is_timed = timed and failure is None and any(durations_s)
        step_s = sum(statistics.median(one) for one in durations_s if one) if is_timed else None
        return Trial.of(
            request,
            self.verdict,
            steps=self.calls,
            peak_allocated_bytes=usage.peak_allocated_bytes,
            peak_reserved_bytes=usage.peak_reserved_bytes,
            peak_upper_bytes=usage.peak_upper_bytes,
            step_s=step_s,
            samples_per_s=request.batch_size / step_s if step_s and self.step.is_timed else None,
            alloc_retries=usage.alloc_retries,
            settled_after=self.settled_after,
            step_leaked_bytes=self.step_leaked_bytes,
            error=failure.text if failure else OVER_CAP if self.verdict is Verdict.OOM else None,
            where=failure.where if failure else None,
            step_name=(self.name if failed else self.limiting_step) if several else None,
        )

    def calls_made(self, *, is_exact: bool) -> Calls:
        """Return what the calls showed; `is_exact` says whether every trial starts at the same call."""
        request, every = self.request, self.every.values()
        has_looked = request.looks and self.verdict is Verdict.FITS
        medians = [statistics.median(series.durations_s) for series in every if series.durations_s]
        return Calls(
            made=max((len(series.served_bytes) - series.waited_calls for series in every), default=0),
            first=max((series.first_calls or 0 for series in every), default=0),
            needed=max(series.calls_needed(request.least_calls or 0, is_exact=is_exact) for series in every)
            if has_looked
            else 0,
            call_s=sum(medians) if medians else None,
            served_bytes=sum(sum(series.after_first_bytes) for series in every),
            allocations=self.allocations,
            varying=any(series.varies for series in every),
            period=math.lcm(*(series.period(request.least_calls or 0) for series in every)) if has_looked else 0,
            counts=self.counts,
            ended_early=self.ended_early,
        )
