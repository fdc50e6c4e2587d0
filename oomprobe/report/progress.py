"""What is shown while a probe runs: one status line on a terminal, elsewhere a line before and a line after each trial."""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from oomprobe.errors import InvalidArgumentError
from oomprobe.report.table import trial_line
from oomprobe.report.words import clip
from oomprobe.units import format_seconds

if TYPE_CHECKING:
    from oomprobe.options import Options
    from oomprobe.result import Phase, Trial

Progress = str | Callable[["Trial"], object]
_GREEN, _RED, _NORMAL = "\x1b[32m", "\x1b[31m", "\x1b[0m"
_ERASE = "\r\x1b[K"  # back to the first column, erase to the end: ECMA-48, 8.3.41 (EL)
LAST_TRIALS = 2  # after bisecting: the failure that decided once more, and the confirmation
ROWS_BELOW = 3  # of a screen that the table of trials leaves free


def _nothing(*told: object) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Reporter:
    """What is called as the probe goes on."""

    opened: Callable[[str, Options], object] = _nothing  # with the name of the device, before the first trial
    started: Callable[[int, Phase], object] = _nothing  # before each trial
    finished: Callable[[Trial], object] = _nothing  # with each trial that ended, in whatever way
    close: Callable[[], object] = _nothing  # after the last one: nothing temporary stays on the screen


def reporter(progress: Progress, *, clock: Callable[[], float] = time.monotonic) -> Reporter:
    """Choose how a probe reports.

    ``"auto"``: on a terminal a status line, and with rich installed a table above it; otherwise as plain. ``"plain"``: a line
    before each trial, which tells what ran when a machine froze, and one after it. ``"off"``. Or a callable that takes each
    `Trial`; what it raises is not caught.
    """
    if callable(progress):
        return Reporter(finished=progress)
    if progress == "off":
        return Reporter()
    if progress == "auto" and _is_terminal():
        show, close = _rich_screen() or (_show_line, lambda: _write(_ERASE))
        line = _StatusLine(show, clock)
        return Reporter(opened=line.opened, started=line.started, finished=line.finished, close=close)
    if progress in ("auto", "plain"):
        return Reporter(
            opened=lambda device, options: _write(f"probing {device}\n"),
            started=lambda batch_size, phase: _write(f"batch {batch_size}  {phase} ...\n"),
            finished=_write_trial,
        )
    raise InvalidArgumentError(f"progress must be 'auto', 'plain', 'off' or a callable, not {progress!r}")


def _write_trial(trial: Trial) -> None:
    line = trial_line(trial)
    if os.environ.get("FORCE_COLOR") and not os.environ.get("NO_COLOR"):  # of logs that show colours, such as CI's
        line = f"{_GREEN if trial.passed else _RED}{line}{_NORMAL}"
    _write(line + "\n")


_Show = Callable[[str, "Sequence[Trial]"], None]


class _StatusLine:
    """One line: what runs now, the bracket, the time, and how many trials a bracket of that width takes."""

    def __init__(self, show: _Show, clock: Callable[[], float]) -> None:
        self._show, self._clock, self._start_s = show, clock, clock()
        self._trials: list[Trial] = []
        self._step, self._resolution = 1, 0.0

    def opened(self, device: str, options: Options) -> None:
        self._step, self._resolution = options.multiple_of, options.resolution

    def started(self, batch_size: int, phase: Phase) -> None:
        self._tell(f"{phase}  batch {batch_size} ...", phase)

    def finished(self, trial: Trial) -> None:
        self._trials.append(trial)
        self._tell(f"{trial.phase}  batch {trial.batch_size} {trial.verdict}", trial.phase)

    def _tell(self, doing: str, phase: Phase) -> None:
        # The cap comes and goes between trials: the last verdict on a size counts, and a failure below a size that ran.
        passed = {trial.batch_size: trial.passed for trial in self._trials}
        failing = min((size for size in passed if not passed[size]), default=None)
        good = max((size for size in passed if passed[size] and size < (failing or math.inf)), default=None)
        elapsed_s = int(self._clock() - self._start_s)
        parts = [
            f"oomprobe: {doing}",
            f"last good {good or '--'}, first failing {failing or '--'}",
            format_seconds(elapsed_s) if elapsed_s else "0 s",
        ]
        if good and failing and phase == "bisect":
            steps = (failing - good) / max(self._step, self._resolution * good)
            parts.append(f"about {math.ceil(math.log2(max(1, steps))) + LAST_TRIALS} trials left")
        self._show(" | ".join(parts), self._trials)


def _show_line(line: str, trials: Sequence[Trial]) -> None:
    # One column stays free: a full line makes some terminals wrap.
    _write(_ERASE + line[: max(0, shutil.get_terminal_size().columns - 1)])


def _rich_screen() -> tuple[_Show, Callable[[], object]] | None:
    """The latest trials above the line, coloured, and what takes them off the screen; None without rich."""
    try:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text
    except ImportError:
        return None
    console = Console(file=sys.stderr)
    # Drawn when something happens: a thread that draws would be copied into forked children.
    live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False)

    def show(line: str, trials: Sequence[Trial]) -> None:
        width = console.width - 1
        rows = [
            Text(clip(trial_line(trial), width), style="green" if trial.passed else "red", no_wrap=True)
            for trial in trials[-max(1, console.height - ROWS_BELOW) :]
        ]
        with suppress(OSError, ValueError):  # a closed terminal must not kill the probe that writes to it
            live.start()
            live.update(Text("\n").join([*rows, Text(clip(line, width))]), refresh=True)

    def close() -> None:
        with suppress(OSError, ValueError):
            live.stop()

    return show, close


def _is_terminal() -> bool:
    try:
        return os.environ.get("TERM") != "dumb" and sys.stderr.isatty()
    except (AttributeError, ValueError):  # no stderr at all, or one that is closed
        return False


def _write(words: str) -> None:
    """Write what can be written: a closed log must not kill the probe that writes to it."""
    with suppress(AttributeError, OSError, ValueError):  # no stderr at all, a broken pipe, a closed file
        sys.stderr.write(words)
        sys.stderr.flush()
