"""Whether the calls of a trial repeat, so that further ones cannot fail if they are identical."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any

from oomprobe.rules.look import calls_since


class Repeats:
    """Notes after each call what it did on the device and left there, and what the user's code counts with once calls repeat.

    Where the device is as it was some calls before, and nothing else that counts has changed since, the next calls can be the
    same as those; that they were the same once ends the doubt.

    A call in which Python collected garbage that held device memory is not like others: the next collection may come later. As a
    context manager, it watches for such collections.
    """

    def __init__(
        self,
        mark: Callable[[], int | None],
        counted: Callable[[], list[object] | None],
        live_bytes: Callable[[], int],
        *,
        period: int,
    ) -> None:
        self._mark, self._counted, self._live_bytes, self._period = mark, counted, live_bytes, period
        self._marks: list[int] = []
        self._length = 0  # of the calls that seem to repeat: each mark since has been the one so many calls before
        self._before: list[object] | None = None  # what the user's code counted with then
        self._due = 0  # the number of the call after which it is compared
        self._is_hidden = False  # whether it may count with what cannot be seen
        self.have_settled = False
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
        mark = None if self._is_hidden else self._mark()
        if mark is None or was_collected:
            self._marks.clear()
        else:
            self._marks.append(mark)
        if not self._marks or (self._length and self._marks[-1] != self._marks[-1 - self._length]):
            self._length, self.have_settled = 0, False
        if not self._length:
            self._length = calls_since(self._marks, self._period)
            self._due = len(self._marks) + self._length
            self._before = self._count() if self._length else None
        elif len(self._marks) == self._due and not self.have_settled:
            now = self._count()
            self.have_settled = now == self._before and not self._is_hidden
            self._before, self._due = now, self._due + self._length

    def _count(self) -> list[object] | None:
        found = self._counted()
        self._is_hidden = found is None
        return found
