"""What the records of a journal say of earlier processes: trials that ended, and trials that their process did not survive."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from oomprobe.journal.records import Record
from oomprobe.result import Phase, Trial, trial_from_dict


class Kind(StrEnum):
    """What a record is about."""

    QUESTION = "question"
    BEGIN = "begin"
    END = "end"
    ABANDON = "abandon"
    FIGURES = "figures"


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """What was asked of a trial; the same key may be asked several times in one probe.

    Attributes:
        batch_size: The size handed to the step.
        phase: Why it is tried.
        steps: Full steps asked for, which `Trial.steps`, the calls that completed, is not.
        cap_bytes: What the allocator is held to; None where the device itself is the limit.
        accumulation_steps: Micro-batches for one optimizer step.
    """

    batch_size: int
    phase: Phase
    steps: int
    cap_bytes: int | None
    accumulation_steps: int = 1

    def to_dict(self) -> dict[str, Any]:
        """As JSON types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Key:
        """Read what `to_dict` wrote."""
        return cls(**{**data, "phase": Phase(data["phase"])})


class Past:
    """Earlier processes' trials, as far as their records can be read.

    Attributes:
        figures: Found once for the probe; of each name the last.
        last_number: Of a record.
        last_session: Of the processes that wrote.
        unreadable: Records that are whole and make no sense.
    """

    def __init__(self, records: Iterable[Record]) -> None:
        self.figures: dict[str, Any] = {}
        self.last_number = self.last_session = -1
        self.unreadable = 0
        self._ended: dict[Key, deque[tuple[Trial, bool]]] = {}
        self._deaths: dict[Key, list[Mapping[str, Any]]] = {}
        self._begun: tuple[Key, Mapping[str, Any]] | None = None  # and not known to have been survived
        for record in records:
            try:
                self._read(record)
            except (KeyError, TypeError, ValueError):
                self.unreadable += 1
        self._bury()

    def recall(self, key: Key) -> tuple[Trial, bool] | None:
        """Take the next ended trial of a key."""
        ended = self._ended.get(key)
        return ended.popleft() if ended else None

    def deaths(self, key: Key) -> tuple[Mapping[str, Any], ...]:
        """Evidence taken before each trial of a key that died and that no ended one has followed."""
        return tuple(self._deaths.get(key, ()))

    def answer(self, key: Key) -> None:
        """A trial of this key has ended, so its deaths count no more."""
        self._deaths.pop(key, None)

    def _read(self, record: Record) -> None:
        self.last_number = max(self.last_number, record["n"])
        if record["session"] != self.last_session:
            self._bury()
        self.last_session = record["session"]
        if record["kind"] == Kind.FIGURES:
            self.figures.update(record["figures"])
        elif record["kind"] in (Kind.BEGIN, Kind.END, Kind.ABANDON):
            self._begun = None  # a process that went on to write this has survived its last trial
            if record["kind"] == Kind.BEGIN:
                self._begun = Key.from_dict(record["key"]), dict(record["evidence"])
            if record["kind"] == Kind.END:
                self._end(record)

    def _end(self, record: Record) -> None:
        key, trial = Key.from_dict(record["key"]), trial_from_dict(record["trial"])
        self.answer(key)
        self._ended.setdefault(key, deque()).append((trial, bool(record["nothing_stepped"])))

    def _bury(self) -> None:
        """The process that had begun this trial is over, and wrote nothing after it."""
        begun, self._begun = self._begun, None
        if begun is not None:
            key, evidence = begun
            self._deaths.setdefault(key, []).append(evidence)
