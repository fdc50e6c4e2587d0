"""What is shown while a probe runs: one status line on a terminal, elsewhere a line before and a line after each trial."""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol, TextIO

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


class Reporter(Protocol):
    """Is told what the probe does."""

    def opened(self, device: str, options: Options) -> None:
        """The probe is about to begin."""

    def started(self, batch_size: int, phase: Phase) -> None:
        """A trial is about to run."""

    def finished(self, trial: Trial) -> None:
        """A trial ended, in whatever way."""

    def close(self) -> None:
        """The probe is over; nothing temporary stays on the screen."""


def reporter(
    progress: Progress,
    stream: TextIO | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> Reporter:
    """Choose how a probe reports.

    Args:
        progress: ``"auto"`` (on a terminal a status line, and with rich installed a table above it; otherwise as plain),
            ``"plain"`` (a line before each trial, which tells what ran when a machine froze, and one after it), ``"off"``,
            or a callable that takes each `Trial`; what it raises is not caught.
        stream: Where text goes; None is ``sys.stderr``, as it is when something is written.
        clock: Seconds; an argument so that tests need not wait.

    Raises:
        InvalidArgumentError: `progress` is none of these.
    """
    if callable(progress):
        return _Callback(progress)
    if progress == "off":
        return _Callback(lambda trial: None)
    if progress == "auto" and _is_terminal(stream):
        return _StatusLine(_rich_screen(stream) or _Screen(stream), clock)
    if progress in ("auto", "plain"):
        return _Lines(stream)
    raise InvalidArgumentError(f"progress must be 'auto', 'plain', 'off' or a callable, not {progress!r}")


class _Callback:
    def __init__(self, tell: Callable[[Trial], object]) -> None:
        self._tell = tell

    def opened(self, device: str, options: Options) -> None:
        pass

    def started(self, batch_size: int, phase: Phase) -> None:
        pass

    def finished(self, trial: Trial) -> None:
        self._tell(trial)

    def close(self) -> None:
        pass


class _Lines:
    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def opened(self, device: str, options: Options) -> None:
        _write(self._stream, f"probing {device}\n")

    def started(self, batch_size: int, phase: Phase) -> None:
        _write(self._stream, f"batch {batch_size}  {phase} ...\n")

    def finished(self, trial: Trial) -> None:
        line = trial_line(trial)
        if os.environ.get("FORCE_COLOR") and not os.environ.get("NO_COLOR"):  # of logs that show colours, such as CI's
            line = f"{_GREEN if trial.passed else _RED}{line}{_NORMAL}"
        _write(self._stream, line + "\n")

    def close(self) -> None:
        pass


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

    def close(self) -> None:
        self._screen.close()

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

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def show(self, line: str, trials: Sequence[Trial]) -> None:
        # One column stays free: a full line makes some terminals wrap.
        line = f"{_NAME} {line}"[: max(0, shutil.get_terminal_size().columns - 1)]
        if not os.environ.get("NO_COLOR"):
            line = line.replace(_NAME, _BOLD + _NAME + _NORMAL, 1)
        _write(self._stream, _ERASE + line)

    def close(self) -> None:
        _write(self._stream, _ERASE)


class _RichScreen:
    """The same with the table of the latest trials above the line, coloured, by rich."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=stream)
        # Drawn when something happens: a thread that draws would be copied into forked children.
        self._live = Live(
            console=self._console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        )

    def show(self, line: str, trials: Sequence[Trial]) -> None:
        from rich.text import Text

        recent = trials[-max(1, self._console.height - ROWS_BELOW) :]
        colours = {True: "green", False: "red"}
        rows = [
            Text(clip(trial_line(trial), self._console.width - 1), style=colours[trial.passed], no_wrap=True)
            for trial in recent
        ]
        with suppress(OSError, ValueError):  # a closed terminal must not kill the probe that writes to it
            self._live.start()
            self._live.update(
                Text("\n").join([*rows, Text(clip(f"{_NAME} {line}", self._console.width - 1))]), refresh=True
            )

    def close(self) -> None:
        with suppress(OSError, ValueError):
            self._live.stop()


def _rich_screen(stream: TextIO | None) -> _RichScreen | None:
    try:
        return _RichScreen(sys.stderr if stream is None else stream)
    except ImportError:
        return None


def _is_terminal(stream: TextIO | None) -> bool:
    target = sys.stderr if stream is None else stream
    try:
        return os.environ.get("TERM") != "dumb" and target.isatty()
    except (AttributeError, OSError, ValueError):  # no stderr at all, or one that is closed
        return False


def _write(stream: TextIO | None, words: str) -> None:
    """Write what can be written: a closed log must not kill the probe that writes to it."""
    target = sys.stderr if stream is None else stream
    try:
        target.write(words)
        target.flush()
    except (AttributeError, OSError, ValueError):  # no stderr at all, a broken pipe, a closed file
        pass
