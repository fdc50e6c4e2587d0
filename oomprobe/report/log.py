"""The notes of a finished probe, for whoever listens to the logger ``oomprobe``: warnings as such, all others as information."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import TypeVar

from oomprobe.records.result import ProbeResult
from oomprobe.records.table import ProbeTable
from oomprobe.report.blocks import NOTES, Table
from oomprobe.report.table import report_of

LOGGER = logging.getLogger("oomprobe")
LOGGER.addHandler(logging.NullHandler())  # so that nothing is printed unless the program configures logging
Found = TypeVar("Found", ProbeResult, ProbeTable)
# A note of a table may begin with the rows that it is about.
_WARNING = re.compile(r"(?:^|: )(?:weak|leak|marginal|not restored): |^the step varies|^THE MODEL")


def is_warning(note: str) -> bool:
    """Return whether a note says that the answer may not hold."""
    return _WARNING.search(note) is not None


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
