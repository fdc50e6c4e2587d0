"""The notes of a finished probe, for whoever listens to the logger ``oomprobe``: warnings as such, all others as information."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TypeVar

from oomprobe.records.result import ProbeResult
from oomprobe.records.table import ProbeTable
from oomprobe.report.blocks import NOTES, Table, is_warning
from oomprobe.report.table import report_of

LOGGER = logging.getLogger("oomprobe")
LOGGER.addHandler(logging.NullHandler())  # so that nothing is printed unless the program configures logging
Found = TypeVar("Found", ProbeResult, ProbeTable)


def logged(found: Found) -> Found:
    """Log the notes and the warning of a finished probe's report, and return what was found."""
    report = report_of(found)
    for block in report.blocks:
        if block.title == NOTES and not isinstance(block.content, Table):
            log_notes(block.content)
    if report.warning:
        LOGGER.warning(report.warning)
    return found


def log_notes(notes: Iterable[str]) -> None:
    """Log each note, a warning as such."""
    for note in notes:
        LOGGER.log(logging.WARNING if is_warning(note) else logging.INFO, "%s", note)
