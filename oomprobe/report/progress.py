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
_ERASE = "\r\x1b[K"  # back to the first column, erase to the end: ECMA-48, 8.3.41 (EL)
_BOLD, _GREEN, _RED, _NORMAL = "\x1b[1m", "\x1b[32m", "\x1b[31m", "\x1b[0m"
_NAME = "oomprobe:"
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
        screen = _rich_screen() or _Screen()
        line = _StatusLine(screen, clock)
        return Reporter(opened=line.opened, started=line.started, finished=line.finished, close=screen.close)
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


class _StatusLine:
    """One line: what runs now, the bracket, the time, and how many trials a bracket of that width takes."""

    def __init__(self, screen: _Screen | _RichScreen, clock: Callable[[], float]) -> None:
        self._screen, self._clock, self._start_s = screen, clock, clock()
        self._trials: list[Trial] = []
        self._passed: set[int] = set()
        self._failed: set[int] = set()
        self._step, self._resolution = 1, 0.0

    def opened(self, device: str, options: Options) -> None:
        self._step, self._resolution = options.multiple_of, options.resolution

    def started(self, batch_size: int, phase: Phase) -> None:
        self._show(f"{phase}  batch {batch_size} ...", phase)

    def finished(self, trial: Trial) -> None:
        size = trial.batch_size
        # The cap comes and goes between trials: a later verdict overrules an earlier one that contradicts it.
        if trial.passed:
            self._passed.add(size)
            self._failed = {failed for failed in self._failed if failed > size}
        else:
            self._failed.add(size)
            self._passed = {passed for passed in self._passed if passed < size}
        self._trials.append(trial)
        self._show(f"{trial.phase}  batch {size} {trial.verdict}", trial.phase)

    def _show(self, doing: str, phase: Phase) -> None:
        good, failing = max(self._passed, default=None), min(self._failed, default=None)
        elapsed_s = int(self._clock() - self._start_s)
        parts = [
            doing,
            f"last good {good or '--'}, first failing {failing or '--'}",
            format_seconds(elapsed_s) if elapsed_s else "0 s",
        ]
        if good and failing and phase == "bisect":
            steps = (failing - good) / max(self._step, self._resolution * good)
            parts.append(f"about {math.ceil(math.log2(max(1, steps))) + LAST_TRIALS} trials left")
        self._screen.show(" | ".join(parts), self._trials)


class _Screen:
    """A terminal of which one line is written again and again."""

    def show(self, line: str, trials: Sequence[Trial]) -> None:
        # One column stays free: a full line makes some terminals wrap.
        line = f"{_NAME} {line}"[: max(0, shutil.get_terminal_size().columns - 1)]
        if not os.environ.get("NO_COLOR"):
            line = line.replace(_NAME, _BOLD + _NAME + _NORMAL, 1)
        _write(_ERASE + line)

    def close(self) -> None:
        _write(_ERASE)


class _RichScreen:
    """The same with the table of the latest trials above the line, coloured, by rich."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=sys.stderr)
        # Drawn when something happens: a thread that draws would be copied into forked children.
        self._live = Live(
            console=self._console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        )

    def show(self, line: str, trials: Sequence[Trial]) -> None:
        from rich.text import Text

        width = self._console.width - 1
        rows = [
            Text(clip(trial_line(trial), width), style="green" if trial.passed else "red", no_wrap=True)
            for trial in trials[-max(1, self._console.height - ROWS_BELOW) :]
        ]
        with suppress(OSError, ValueError):  # a closed terminal must not kill the probe that writes to it
            self._live.start()
            self._live.update(Text("\n").join([*rows, Text(clip(f"{_NAME} {line}", width))]), refresh=True)

    def close(self) -> None:
        with suppress(OSError, ValueError):
            self._live.stop()


def _rich_screen() -> _RichScreen | None:
    try:
        return _RichScreen()
    except ImportError:
        return None


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
