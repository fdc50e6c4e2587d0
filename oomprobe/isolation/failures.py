"""From what failed in a child to the error that is raised for it here."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from oomprobe import errors


def raise_failure(failed: dict[str, Any], batch_size: int) -> NoReturn:
    """Raise what a child told.

    Args:
        failed: Its message.
        batch_size: The size that was being tried.

    Raises:
        OomProbeError: what the child told.
        Exception: an error of oomprobe's own, as it was raised there.
    """
    cause = _rebuilt(failed["cause"])
    if failed["kind"] == "StepFailedError":
        raise errors.StepFailedError(failed["text"], batch_size=batch_size) from cause
    if failed["kind"] is not None:
        raise getattr(errors, failed["kind"], errors.OomProbeError)(failed["text"]) from cause
    if failed["left"]:
        where = f"the target {failed['building']}" if failed["building"] else f"the step at batch size {batch_size}"
        raise errors.StepFailedError(
            f"{where} left the process, sys.exit({failed['text']}), and gave no answer. Take the call out",
            batch_size=batch_size,
        ) from cause
    if failed["building"] is not None:
        raise errors.target_failed(cause, failed["building"]) from cause
    raise cause


class _InChild(Exception):
    """The traceback of an exception in a child, shown as its cause."""

    def __str__(self) -> str:
        return f"in the process of the trial:\n{self.args[0]}"


def _rebuilt(cause: dict[str, Any]) -> BaseException:
    """An exception like the one in the child: of the same class where that is known here without importing anything."""
    kind = _known_class(cause["module"], cause["name"])
    shown = _InChild(cause["traceback"])
    try:
        error: BaseException = kind(*cause["arguments"])
        error.__cause__ = shown
    except Exception:  # it takes other arguments, or no attributes
        error = RuntimeError(cause["text"])
        error.__cause__ = shown
    return error


def _known_class(module: str, name: str) -> type[BaseException]:
    kind = getattr(sys.modules.get(module), name, None)
    if isinstance(kind, type) and issubclass(kind, BaseException):
        return kind
    return type(name.rpartition(".")[2], (Exception,), {"__module__": module})
