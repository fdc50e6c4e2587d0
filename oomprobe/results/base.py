"""What a result and a table have in common: both can be read as JSON, text, a page and a plot."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oomprobe.ground.words import clean
from oomprobe.records.files import write_file
from oomprobe.records.notes import Note
from oomprobe.results.blocks import Report, as_text
from oomprobe.results.html import notebook, page
from oomprobe.results.plot import titled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Reported(ABC):
    """A record that makes a report of itself; all that people read is made of that report."""

    __slots__ = ()

    @abstractmethod
    def report(self, *, verbose: bool = False, all_trials: bool = False) -> Report:
        """Return the report, of which text, page and plot are made: with all trials, or verbose, which leaves nothing out."""

    @abstractmethod
    def _noted(self) -> Sequence[Note]:
        """Return the notes of the report, each with what it means for the answer."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON types; `from_dict` reads them back."""

    def to_json(self, path: str | Path | None = None) -> str:
        """Return the record as JSON text, and write it to `path` if given, whole or not at all.

        Raises:
            InvalidArgumentError: the file cannot be written; one that was there is unchanged.
        """
        text = json.dumps(self.to_dict(), indent=2) + "\n"
        write_file(path, text.encode())
        return text

    def to_html(self, path: str | Path) -> None:
        """Write everything as one self-contained HTML file; of a table, with the report of each row.

        Raises:
            InvalidArgumentError: matplotlib is not installed (``pip install 'oomprobe[plot]'``),
                or the file cannot be written.
        """
        write_file(path, page(self.report(all_trials=True)).encode())

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw peak memory and throughput against batch size; of a table, the batch size for each value.

        Args:
            path: File to save the plot to; its suffix sets the format: ``.png``, ``.svg``, ``.pdf``. None: do not save.

        Returns:
            The figure, one column wide.

        Raises:
            InvalidArgumentError: matplotlib is not installed (``pip install 'oomprobe[plot]'``)
                or has no such format, or the file cannot be written.
        """
        report = self.report()
        draw, *_ = report.pictures.values()
        title = report.verdict
        if report.subject:
            title = f"{report.subject}: {title}"
        return titled(draw(), title, path)

    def _repr_html_(self) -> str:
        return notebook(self.report())

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {clean(self.report().verdict)}>"

    def __str__(self) -> str:
        return as_text(self.report())
