"""Whether the calls of a trial repeat, so that further ones cannot fail if they are identical."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any

from oomprobe.rules.look import repeats


class Repeats:
    """Notes after each call what it did and what it left: on the device, and in the values that the user's code keeps.

    A call in which Python collected garbage that held device memory is not like others: the next collection may come later. As a
    context manager, it watches for such collections.
    """

    def __init__(
        self, fingerprint: Callable[[], int | None], values: Callable[[], int | None], live_bytes: Callable[[], int]
    ) -> None:
        self._fingerprint, self._values, self._live_bytes = fingerprint, values, live_bytes
        self._marks: list[tuple[int, int]] = []
        self._before_bytes = 0
        self._was_collected = False

    def __enter__(self) -> Repeats:
        gc.callbacks.append(self._watch_collector)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._watch_collector)

    def _watch_collector(self, phase: str, info: Mapping[str, Any]) -> None:
        now_bytes = self._live_bytes()
        self._was_collected |= phase == "stop" and now_bytes < self._before_bytes
        self._before_bytes = now_bytes

    def end_call(self) -> None:
        """Take note of a call; forget earlier ones if its mark says too little."""
        was_collected, self._was_collected = self._was_collected, False
        fingerprint = self._fingerprint()
        values = None if fingerprint is None else self._values()
        if fingerprint is None or values is None or was_collected:
            self._marks.clear()
        else:
            self._marks.append((fingerprint, values))

    def have_settled(self, period: int) -> bool:
        """Whether a whole period has repeated, a multiple of this one."""
        return repeats(self._marks, period)
