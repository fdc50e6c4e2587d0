"""What is shown while a probe runs: one status line on a terminal, elsewhere a line before and a line after each trial."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TextIO

from oomprobe.errors import InvalidArgumentError
from oomprobe.report.table import trial_line
from oomprobe.units import format_seconds

if TYPE_CHECKING:
    from oomprobe.result import Phase, Trial

Progress = str | Callable[["Trial"], object]
_ERASE = "\r\x1b[K"  # back to the first column, erase to the end: ECMA-48, 8.3.41 (EL)
_BOLD, _NORMAL = "\x1b[1m", "\x1b[0m"
_NAME = "oomprobe:"


class Reporter(Protocol):
    """Is told what the probe does."""

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
        progress: ``"auto"`` (a status line on a terminal, otherwise as plain), ``"plain"`` (a line before each
            trial, which tells what ran when a machine froze, and one after it), ``"off"``, or a callable that takes each
            `Trial`; what it raises is not caught.
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
        return _StatusLine(stream, clock)
    if progress in ("auto", "plain"):
        return _Lines(stream)
    raise InvalidArgumentError(f"progress must be 'auto', 'plain', 'off' or a callable, not {progress!r}")


class _Callback:
    def __init__(self, tell: Callable[[Trial], object]) -> None:
        self._tell = tell

    def started(self, batch_size: int, phase: Phase) -> None:
        pass

    def finished(self, trial: Trial) -> None:
        self._tell(trial)

    def close(self) -> None:
        pass


class _Lines:
    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def started(self, batch_size: int, phase: Phase) -> None:
        _write(self._stream, f"batch {batch_size}  {phase} ...\n")

    def finished(self, trial: Trial) -> None:
        _write(self._stream, trial_line(trial) + "\n")

    def close(self) -> None:
        pass


class _StatusLine:
    def __init__(self, stream: TextIO | None, clock: Callable[[], float]) -> None:
        self._stream, self._clock, self._start_s = stream, clock, clock()
        self._passed: set[int] = set()
        self._failed: set[int] = set()

    def started(self, batch_size: int, phase: Phase) -> None:
        self._show(f"{phase}  batch {batch_size} ...")

    def finished(self, trial: Trial) -> None:
        size = trial.batch_size
        # The cap comes and goes between trials: a later verdict overrules an earlier one that contradicts it.
        if trial.passed:
            self._passed.add(size)
            self._failed = {failed for failed in self._failed if failed > size}
        else:
            self._failed.add(size)
            self._passed = {passed for passed in self._passed if passed < size}
        self._show(f"{trial.phase}  batch {size} {trial.verdict}")

    def close(self) -> None:
        _write(self._stream, _ERASE)

    def _show(self, doing: str) -> None:
        good, failing = max(self._passed, default="--"), min(self._failed, default="--")
        elapsed_s = int(self._clock() - self._start_s)
        bracket = f"last good {good}, first failing {failing}"
        line = f"{_NAME} {doing} | {bracket} | {format_seconds(elapsed_s) if elapsed_s else '0 s'}"
        # One column stays free: a full line makes some terminals wrap.
        line = line[: max(0, shutil.get_terminal_size().columns - 1)]
        if not os.environ.get("NO_COLOR"):
            line = line.replace(_NAME, _BOLD + _NAME + _NORMAL, 1)
        _write(self._stream, _ERASE + line)


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
