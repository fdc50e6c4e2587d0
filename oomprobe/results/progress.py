"""Progress while a probe runs: a status line on a terminal and in a notebook, otherwise a line for each trial."""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module

from oomprobe.errors import InvalidArgumentError
from oomprobe.ground.units import format_seconds
from oomprobe.records.options import Options
from oomprobe.records.trials import Phase, Trial
from oomprobe.results.trials import trial_line

Progress = str | Callable[["Trial"], object]
_GREEN, _RED, _NORMAL = "\x1b[32m", "\x1b[31m", "\x1b[0m"
_ERASE = "\r\x1b[K"  # back to the first column, erase to the end: ECMA-48, 8.3.41 (EL)
LAST_TRIALS = 2  # after bisecting: the recheck of the smallest failure, and the confirmation


def notice(line: str) -> None:
    """Write a line to stderr, on a terminal in place of what another program's progress bar has drawn there."""
    if _is_terminal():
        line = _ERASE + line
    _write(f"{line}\n")


def _ignore(*arguments: object) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Reporter:
    """Callbacks for the progress of a probe."""

    # Before the first trial, with the device and whether it is simulated.
    opened: Callable[[str, Options, bool], object] = _ignore
    row: Callable[[str], object] = _ignore  # before each row of a table, with its name
    started: Callable[[int, Phase], object] = _ignore  # before each trial
    finished: Callable[[Trial], object] = _ignore  # with each trial that ended, passed or not
    # After the last trial: removes the status line from the screen.
    close: Callable[[], object] = _ignore


def reporter(progress: Progress, *, clock: Callable[[], float] = time.monotonic) -> Reporter:
    """Return the reporter for the `progress` option.

    ``"auto"`` shows a status line in a notebook and on a terminal; elsewhere it is ``"plain"``, which writes a line for each trial. ``"off"`` writes nothing. A callable gets each `Trial`, and what it
    raises is not caught.
    """
    if callable(progress):
        return Reporter(finished=progress)
    if progress == "off":
        return Reporter()
    if progress not in ("auto", "plain"):
        raise InvalidArgumentError(
            f"progress must be 'auto', 'plain', 'off' or a callable, not {progress!r}"
        )
    shown: _Log | _StatusLine = _Log()
    if progress == "auto" and (screen := _screen()):
        shown = _StatusLine(*screen, clock)
    return Reporter(
        opened=shown.opened,
        row=shown.row,
        started=shown.started,
        finished=shown.finished,
        close=shown.close,
    )


class _Log:
    """A line for each trial. On a real device its beginning is written before the trial: it names the size if the machine freezes."""

    def __init__(self) -> None:
        self._is_real, self._is_open = True, False

    def opened(self, device: str, options: Options, is_simulated: bool) -> None:
        self._is_real = not is_simulated
        _write(f"probing {device}\n")

    def row(self, name: str) -> None:
        _write(f"{name}\n")

    def started(self, batch_size: int, phase: Phase) -> None:
        if self._is_real:
            self.close()
            self._is_open = True
            _write(f"batch {batch_size} ... ")

    def finished(self, trial: Trial) -> None:
        line = trial_line(trial)
        if self._is_open:
            line = line.removeprefix(f"batch {trial.batch_size}  ")
        self._is_open = False
        # Set for logs that show colours, such as CI's.
        if os.environ.get("FORCE_COLOR") and not os.environ.get("NO_COLOR"):
            colour = _GREEN if trial.passed else _RED
            line = f"{colour}{line}{_NORMAL}"
        _write(line + "\n")

    def close(self) -> None:
        if self._is_open:
            _write("\n")
        self._is_open = False


_Show = Callable[[str], None]


class _StatusLine:
    """One line: the current trial, the bracket, the elapsed time, and how many trials are left."""

    def __init__(
        self, show: _Show, close: Callable[[], object], clock: Callable[[], float]
    ) -> None:
        self._show, self.close, self._clock, self._start_s = show, close, clock, clock()
        self._trials: list[Trial] = []
        self._row = ""
        self._step, self._resolution = 1, 0.0

    def opened(self, device: str, options: Options, is_simulated: bool) -> None:
        self._step, self._resolution = options.multiple_of, options.resolution

    def row(self, name: str) -> None:
        self._row, self._trials, self._start_s = f"{name}  ", [], self._clock()

    def started(self, batch_size: int, phase: Phase) -> None:
        self._update(f"{phase}  batch {batch_size} ...", phase)

    def finished(self, trial: Trial) -> None:
        self._trials.append(trial)
        self._update(f"{trial.phase}  batch {trial.batch_size} {trial.verdict}", trial.phase)

    def _update(self, doing: str, phase: Phase) -> None:
        good, failing = self._bracket()
        elapsed_s = int(self._clock() - self._start_s)
        elapsed = format_seconds(elapsed_s) if elapsed_s else "0 s"
        parts = [
            f"oomprobe: {self._row}{doing}",
            f"last good {good or '--'}, first failing {failing or '--'}",
            elapsed,
        ]
        if good and failing and phase == Phase.BISECT:
            steps = (failing - good) / max(self._step, self._resolution * good)
            left = math.ceil(math.log2(max(1, steps))) + LAST_TRIALS
            left_s = left * elapsed_s / max(1, len(self._trials))
            parts.append(f"about {left} trials left")
            if left_s >= 1:
                parts[-1] += f", {format_seconds(round(left_s))}"
        self._show(" | ".join(parts))

    def _bracket(self) -> tuple[int | None, int | None]:
        """Return the largest size that passed below all that failed, and the smallest that failed."""
        # A size that ran without a cap may fail under it, so the last verdict on each size counts.
        passed = {trial.batch_size: trial.passed for trial in self._trials}
        good = None
        for size in sorted(passed):
            if not passed[size]:
                return good, size
            good = size
        return good, None


def _screen() -> tuple[_Show, Callable[[], object]] | None:
    """Return functions that show the status line on a terminal or in a notebook, and that clear it; None if stderr is neither."""
    if type(sys.stderr).__module__ == "ipykernel.iostream":
        return _cell()
    if not _is_terminal():
        return None

    def show(line: str) -> None:
        # Leave the last column free: some terminals wrap a full line.
        _write(_ERASE + line[: max(0, shutil.get_terminal_size().columns - 1)])

    return show, lambda: _write(_ERASE)


def _cell() -> tuple[_Show, Callable[[], object]]:
    """Return functions for an output of the running cell that is updated: each write to stderr would be kept in the file."""
    handle = import_module("IPython.display").display({"text/plain": ""}, raw=True, display_id=True)

    def show(line: str) -> None:
        with suppress(OSError, ValueError):
            handle.update({"text/plain": line}, raw=True)

    return show, partial(show, "")


def _is_terminal() -> bool:
    try:
        return os.environ.get("TERM") != "dumb" and sys.stderr.isatty()
    except (AttributeError, ValueError):  # stderr is None, or closed
        return False


def _write(text: str) -> None:
    """Write to stderr; an error there must not end the probe."""
    with suppress(AttributeError, OSError, ValueError):  # stderr is None, a broken pipe, or closed
        sys.stderr.write(text)
        sys.stderr.flush()
