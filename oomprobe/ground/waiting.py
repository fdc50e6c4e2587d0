"""Waiting for a condition: sampling until it holds, and for how long it has held."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import tenacity
from tenacity.stop import stop_base
from tenacity.wait import wait_base

T = TypeVar("T")


def until(
    done: Callable[[T], bool],
    sample: Callable[[], T],
    *,
    wait: wait_base,
    stop: stop_base,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """Sample until `done` of the sample or until `stop`, and return the last one. What `sample` raises is not tried again.

    Examples:
        >>> numbers = iter(range(10))
        >>> attempts = {"wait": tenacity.wait_none(), "stop": tenacity.stop_after_attempt(5)}
        >>> until(lambda number: number > 2, lambda: next(numbers), **attempts)
        3
        >>> until(lambda number: False, lambda: next(numbers), **attempts)
        8
    """
    retrying = tenacity.Retrying(
        wait=wait,
        stop=stop,
        sleep=sleep,
        retry=tenacity.retry_if_not_result(done),
        retry_error_callback=lambda state: state.outcome.result() if state.outcome else None,
    )
    return retrying(sample)


class Held:
    """For how long a condition has held."""

    def __init__(self) -> None:
        self._since_s: float | None = None

    def for_s(self, holds: bool) -> float:
        """Return for how many seconds it has held now; 0 if it does not."""
        if not holds:
            self._since_s = None
            return 0.0
        now_s = time.monotonic()
        if self._since_s is None:
            self._since_s = now_s
        return now_s - self._since_s
