"""The journal of a probe: every trial is written before and after it runs, so that one whose process died is resumed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from types import MappingProxyType, TracebackType
from typing import Any

from oomprobe.errors import InvalidArgumentError
from oomprobe.journal.differences import differences
from oomprobe.journal.opening import checked_path, open_records
from oomprobe.journal.past import Key, Kind, Past
from oomprobe.journal.records import Appender, Record
from oomprobe.result import Trial

SCHEMA_VERSION = 1


class Journal:
    """Trials that outlive their process. Made by `Journal.open`; nothing of it is open after `close`.

    A journal never costs a probe: what cannot be written any more is said in `notes`, and what was read still answers.

    It holds the lock on its file until `close`: use it in a ``with``.

    Attributes:
        resumed: Whether an earlier process had asked the same question here; known after `ask`.
        skipped_lines: Lines that were torn or garbled, and do not count.
        notes: What a reader of the result should know.
    """

    def __init__(self, path: str, file: Appender, records: list[Record], skipped_lines: int) -> None:
        self._path, self._file = path, file
        self._header = records[0] if records else None
        self._past = Past(records)
        self._number, self._session = self._past.last_number, self._past.last_session + 1
        self._begun: Key | None = None  # by this process
        self._answered = 0  # trials recalled or written
        self._whole_bytes = file.size_bytes  # of the file when no trial was begun
        self._writes = True
        self.resumed = False
        self.skipped_lines = skipped_lines + self._past.unreadable
        self.notes: tuple[str, ...] = ()

    @classmethod
    def open(cls, path: object, *, retry_sleep: Callable[[float], None] = time.sleep) -> Journal:
        """Open a journal, or make it, and keep other probes from writing it.

        Args:
            path: A plain file, or of none yet in a folder that is there.
            retry_sleep: Waits before a write that failed for a reason that may pass is tried again; tests do not.

        Raises:
            InvalidArgumentError: nothing can be written there, another probe is writing it, or it is something else.

        Example:
            >>> import tempfile
            >>> from oomprobe.result import Phase
            >>> from oomprobe.verdict import Verdict
            >>> key = Key(batch_size=8, phase=Phase.GROW, steps=2, cap_bytes=None)
            >>> trial = Trial(batch_size=8, phase=Phase.GROW, verdict=Verdict.FITS)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     with Journal.open(f"{folder}/probe.jsonl") as journal:
            ...         journal.ask({"device": "cpu"})
            ...         journal.begin(key, evidence={"oom_kills": 0})
            ...         journal.end(key, trial, nothing_stepped=False)
            ...     with Journal.open(f"{folder}/probe.jsonl") as journal:
            ...         journal.ask({"device": "cpu"})
            ...         journal.resumed, journal.recall(key) == (trial, False), journal.recall(key)
            (True, True, None)
        """
        name = checked_path(path)
        file, records, skipped_lines = open_records(name, sleep=retry_sleep)
        try:
            _refuse_other_version(records, name)
        except InvalidArgumentError:
            file.close()
            raise
        return cls(name, file, records, skipped_lines)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file, which lets others have it. Never fails, and may be called again."""
        self._writes = False
        self._file.close()

    # --- what earlier processes left ---

    def ask(self, question: Mapping[str, Any]) -> None:
        """Write what the trials are an answer to; or compare it, where an earlier process did.

        Args:
            question: JSON types, whatever a trial depends on.

        Raises:
            InvalidArgumentError: the journal answers another question, or its first record cannot be written.
        """
        question = json.loads(json.dumps(question, default=str))  # as it will be read
        if self._header is None:
            self._write_header(question)
            return
        self.resumed = True
        differing = differences(self._header["question"], question)
        if differing:
            raise InvalidArgumentError(
                f"the journal {self._path!r} is of another question, so its trials are no answer to this one:\n  "
                + "\n  ".join(differing)
                + "\nDelete it to begin anew, or name another file"
            )

    def recall(self, key: Key) -> tuple[Trial, bool] | None:
        """Take the next trial of a key that an earlier process has ended, in their order.

        Returns:
            The trial, and whether no optimizer stepped; None: it is to be run.
        """
        recalled = self._past.recall(key)
        self._answered += recalled is not None
        return recalled

    def deaths(self, key: Key) -> tuple[Mapping[str, Any], ...]:
        """What was handed to `begin` for each trial of a key that its process did not survive, in their order.

        Only those count that no ended trial of the same key has followed.
        """
        return self._past.deaths(key)

    @property
    def figures(self) -> Mapping[str, Any]:
        """What `measured` wrote, of each name the last."""
        return MappingProxyType(self._past.figures)

    # --- what this process does ---

    def begin(self, key: Key, *, evidence: Mapping[str, Any]) -> None:
        """Write that a trial is about to run; on the disk when this returns.

        Args:
            key: Of the trial.
            evidence: JSON types; what `deaths` gives back where this process is not heard of again.
        """
        self._begun = key  # first: a signal may come while it is written
        self._write(Kind.BEGIN, key, evidence=dict(evidence))

    def end(self, key: Key, trial: Trial, *, nothing_stepped: bool) -> None:
        """Write how a trial ended; also of one that was not begun, such as a verdict on deaths."""
        self._past.answer(key)
        self._write(Kind.END, key, trial=asdict(trial), nothing_stepped=nothing_stepped)
        self._between_trials()
        self._answered += 1

    def abandon(self, key: Key) -> None:
        """Write that the trial that was begun ended without a verdict, by an interrupt or a time limit: no death."""
        if self._begun == key:
            self._write(Kind.ABANDON, key)
            self._between_trials()

    def measured(self, **figures: Any) -> None:
        """Write figures that are found once for the whole probe."""
        self._past.figures.update(figures)
        self._write(Kind.FIGURES, None, figures=figures)
        if self._begun is None:
            self._between_trials()

    def _between_trials(self) -> None:
        self._begun = None
        if self._writes:
            self._whole_bytes = self._file.size_bytes

    def _write(self, kind: Kind, key: Key | None, **rest: Any) -> None:
        if not self._writes:
            return
        refusal = self._append(kind=kind, key=key and key.to_dict(), **rest)
        if refusal is not None:
            self._stop(key, refusal)

    def _append(self, **record: Any) -> str | None:
        self._number += 1  # first: a record that a signal interrupted may be whole, and numbers count once
        first = {} if self._header else {"oomprobe_journal": SCHEMA_VERSION}  # by which the file is known as ours
        return self._file.append({**first, "n": self._number, "session": self._session, **record})

    def _write_header(self, question: Mapping[str, Any]) -> None:
        refusal = self._append(kind=Kind.QUESTION, question=question)
        if refusal is not None:
            self._writes = False
            self._file.cut(self._whole_bytes)
            raise InvalidArgumentError(
                f"journal={self._path!r} cannot be written ({refusal}): make room, name a file elsewhere, or leave "
                "journal out"
            )
        self._header = {"question": question}
        self._between_trials()

    def _stop(self, key: Key | None, refusal: str) -> None:
        """From here on nothing is written. A trial that has begun is taken back: it would be read as a death."""
        self._writes = False
        self._file.cut(self._whole_bytes)
        size = "" if key is None else f" (batch {key.batch_size})"
        self.notes += (
            f"the journal {self._path!r} stopped at trial {self._answered + 1}{size} because it could not be written "
            f"({refusal}), so a resume would begin there",
        )


def _refuse_other_version(records: list[Record], name: str) -> None:
    version = records[0].get("oomprobe_journal") if records else SCHEMA_VERSION
    if version != SCHEMA_VERSION:
        raise InvalidArgumentError(
            f"journal={name!r} has schema version {version!r}, and this oomprobe writes {SCHEMA_VERSION}: delete it, "
            "name another file, or resume with the oomprobe that wrote it"
        )
