"""From how a command ended to its exit code, and what is told of it on stderr."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from oomprobe import errors
from oomprobe.report import trials_table
from oomprobe.streams import tell

STEP_FAILED, UNTRUSTED, UNFORESEEN, INTERRUPTED = 3, 6, 70, 130
_EXIT_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (errors.InvalidArgumentError, 2),
    (errors.StepFailedError, STEP_FAILED),
    (errors.NoDeviceError, 4),
    (errors.NothingFitsError, 1),
    (errors.OomProbeError, UNTRUSTED),
)


@contextmanager
def explained(*, required: bool = False) -> Iterator[None]:
    """Where a script's call of oomprobe finds no answer: tell why, and leave with the exit code of ``oomprobe run``.

    Args:
        required: Whether one size was required, so that nothing else would do.

    Example:
        >>> with explained():
        ...     raise errors.NoDeviceError("no device 'cuda' here")
        Traceback (most recent call last):
        ...
        SystemExit: 4
    """
    try:
        yield
    except errors.OomProbeError as error:
        raise SystemExit(explain(error, required=required)) from None


def explain(error: BaseException, *, required: bool) -> int:
    """Tell of whatever ended a command, and return its exit code.

    Args:
        error: What came out of it.
        required: Whether one size was required, so that nothing else would do.
    """
    if isinstance(error, errors.OomProbeError):
        return _explain_ours(error, required=required)
    if isinstance(error, KeyboardInterrupt):
        tell("interrupted", *getattr(error, "__notes__", ()))
        return INTERRUPTED
    if isinstance(error, SystemExit):
        return _explain_exit(error)
    tell("".join(traceback.format_exception(error)).rstrip())
    tell(f"oomprobe: {type(error).__name__}, which nobody foresaw; no answer")
    return UNFORESEEN


def _explain_ours(error: errors.OomProbeError, *, required: bool) -> int:
    if error.trials:
        tell(trials_table(error.trials))
    if isinstance(error, errors.StepFailedError) and error.__cause__ is not None:
        tell("".join(traceback.format_exception(error.__cause__)).rstrip())
    tell(f"oomprobe: {error}")
    if required and isinstance(error, errors.NothingFitsError):
        return 5
    return next(code for kind, code in _EXIT_CODES if isinstance(error, kind))


def _explain_exit(leaving: SystemExit) -> int:
    """A target that leaves has given no answer, whatever code it left with."""
    from oomprobe.interrupts import EXIT_TERMINATED

    notes = getattr(leaving, "__notes__", ())
    if leaving.code == EXIT_TERMINATED:
        tell("terminated", *notes)
        return EXIT_TERMINATED
    frames = traceback.extract_tb(leaving.__traceback__)
    place = f" in {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    tell(
        *notes,
        f"oomprobe: the target or its step left the process, sys.exit({leaving.code!r}){place}: no answer. "
        "Take the call out; a target that reads sys.argv must not: those are the arguments of oomprobe",
    )
    return STEP_FAILED
