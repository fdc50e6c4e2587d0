"""The notes of a finished probe, for whoever listens to the logger ``oomprobe``: warnings as such, all others as information."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TypeVar

from oomprobe.report.blocks import NOTES, Table, is_warning
from oomprobe.results.base import Reported

LOGGER = logging.getLogger("oomprobe")
LOGGER.addHandler(logging.NullHandler())  # so that nothing is printed unless the program configures logging
Record = TypeVar("Record", bound=Reported)


def logged(record: Record) -> Record:
    """Log the notes and the warning of a finished probe's report, and return what it found."""
    report = record.report()
    for block in report.blocks:
        if block.title == NOTES and not isinstance(block.content, Table):
            log_notes(block.content)
    if report.warning:
        LOGGER.warning(report.warning)
    return record


def log_notes(notes: Iterable[str]) -> None:
    """Log each note, a warning as such."""
    for note in notes:
        level = logging.WARNING if is_warning(note) else logging.INFO
        LOGGER.log(level, "%s", note)
