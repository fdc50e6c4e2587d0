"""What a probe writes down of its trials, and what it knows of those of an earlier one that ended before its answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from oomprobe.devices import linux
from oomprobe.journal import Journal, Key
from oomprobe.result import Trial
from oomprobe.runner import Measured
from oomprobe.scope import scope
from oomprobe.trial import LONG_STEPS, Request, is_cut_anew
from oomprobe.verdict import Verdict

LOST = frozenset({Verdict.POISONED, Verdict.CRASHED})  # the process of the trial was, and with it any word on the size
ENOUGH_DEATHS = 2  # of processes at one size: the next would die too
KILLED = "the process that ran it ended before the trial did: the journal has its beginning and no end"
Writer = Callable[..., None]


class Record:
    """Keeps a journal, if there is one.

    Args:
        journal: Open, and asked this probe's question; None: nothing is kept.
        isolated: Whether trials have processes of their own, so that this one's end says nothing of them.

    Attributes:
        measured: What an earlier probe measured of the device; None when there was none.
        nothing_stepped: Whether an earlier probe saw no optimizer step; None when there was none.
        recalled: Trials that were not run again.
    """

    def __init__(self, journal: Journal | None, *, isolated: bool = False) -> None:
        self._journal, self._isolated = journal, isolated
        self._told: set[Key] = set()
        self.nothing_stepped: bool | None = None
        self.recalled = 0
        figures = {} if journal is None else journal.figures
        self.measured = Measured(**figures) if figures else None

    def take(self, measured: Measured) -> None:
        """Write what was measured of the device."""
        if self._journal is not None and measured != self.measured:
            self._journal.measured(available_bytes=measured.available_bytes, outside_bytes=measured.outside_bytes)

    def recall(self, request: Request, ended: Callable[[Trial], None]) -> Trial | None:
        """The trial as an earlier probe ran it; None where it is to be run.

        A size that ended the process is run once more, unless the system's OOM killer was at work, or that has been
        tried: one death can be anybody's.

        Args:
            request: What is asked for.
            ended: Told of trials that belong into this probe's list.
        """
        if self._journal is None:
            return None
        key, deaths = _key(request), []
        while (found := self._journal.recall(key)) is not None:
            trial, nothing_stepped = found
            if trial.verdict in LOST:
                deaths.append(trial)
            elif trial.verdict is not Verdict.TIMED_OUT and not self._was_cut_short(request, trial):
                self.nothing_stepped = nothing_stepped
                self.recalled += 1
                ended(trial)
                return trial
        unfinished = self._journal.deaths(key)
        deaths += [_death(request, evidence) for evidence in unfinished]
        if not deaths or key in self._told:
            return None
        self._told.add(key)
        ended(deaths[-1])
        others = sum(bool(evidence.get("isolated")) for evidence in unfinished)  # those of a probe, not of its trial
        counts = deaths[-1].verdict is Verdict.HOST_OOM or len(deaths) - others >= ENOUGH_DEATHS
        return deaths[-1] if counts else None

    def _was_cut_short(self, request: Request, trial: Trial) -> bool:
        """Whether an earlier probe had no time to confirm at length what it confirmed."""
        short = request.at_length and trial.passed and trial.steps <= LONG_STEPS
        return short and self.measured is not None and is_cut_anew(trial.holes_bytes, self.measured.available_bytes)

    @scope
    def of(self, request: Request) -> Iterator[Writer]:
        """Around a trial: its beginning is written before it, its end by the function that this gives."""
        journal, key, written = self._journal, _key(request), []

        def write(trial: Trial, *, nothing_stepped: bool) -> None:
            written.append(trial)
            if journal is not None:
                journal.end(key, trial, nothing_stepped=nothing_stepped)

        if journal is not None:
            journal.begin(key, evidence={**_evidence(), "isolated": self._isolated})
        try:
            yield write
        finally:
            if journal is not None and not written:
                journal.abandon(key)

    @property
    def notes(self) -> tuple[str, ...]:
        """What is to be said of the journal."""
        if self._journal is None:
            return ()
        resumed = [f"{self.recalled} trials were recalled from the journal and not run again"] if self.recalled else []
        return (*resumed, *self._journal.notes)


def _key(request: Request) -> Key:
    return Key(
        batch_size=request.batch_size,
        phase=request.phase,
        steps=request.steps,
        cap_bytes=request.cap_bytes,
        accumulation_steps=request.accumulation_steps,
    )


def _evidence() -> dict[str, Any]:
    return {"oom_kills": linux.oom_kills(), "boot_id": linux.boot_id()}


def _death(request: Request, evidence: Mapping[str, Any]) -> Trial:
    """Of memory, where the OOM killer was at work since; otherwise nobody knows of what."""
    now = _evidence()
    then_kills, now_kills = evidence.get("oom_kills"), now["oom_kills"]
    same_boot = now["boot_id"] is not None and evidence.get("boot_id") == now["boot_id"]
    killed = same_boot and isinstance(then_kills, int) and now_kills is not None and now_kills > then_kills
    return Trial(
        batch_size=request.batch_size,
        verdict=Verdict.HOST_OOM if killed else Verdict.CRASHED,
        phase=request.phase,
        cap_bytes=request.cap_bytes,
        accumulation_steps=request.accumulation_steps,
        error=f"{KILLED}{'; the OOM killer of the system was at work meanwhile' if killed else ''}",
    )
