"""The notes of a finished probe, for whoever listens to the logger ``oomprobe``: warnings as such, all others as information."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable
from typing import TypeVar

from oomprobe.records.notes import Note
from oomprobe.results.base import Reported

LOGGER = logging.getLogger("oomprobe")
# So that nothing is printed unless the program configures logging.
LOGGER.addHandler(logging.NullHandler())
Record = TypeVar("Record", bound=Reported)


def logged(record: Record) -> Record:
    """Log the notes and the warning of a finished probe's report, and return what it found."""
    log_notes(record._noted())
    warning = record.report().warning
    if warning:
        LOGGER.warning(warning)
    return record


def warn(text: str) -> None:
    """Warn while a probe begins, whether or not the program listens to the logger."""
    LOGGER.warning(text)
    warnings.warn_explicit(text, UserWarning, "oomprobe", 1)  # no line of this package helps


def log_notes(notes: Iterable[Note]) -> None:
    """Log each note, a warning as such."""
    for note in notes:
        LOGGER.log(logging.WARNING if note.warns else logging.INFO, "%s", note.text)
