"""torch.compile under a probe: many sizes must not change what training at one of them compiles.

Dynamo remembers the sizes it has seen. A second one makes it compile for changing shapes where training alone would
have a static graph, and after its recompile limit (8) it runs later ones without compiling. So it forgets between
sizes. What is compiled is asked of the modules that torch.compile has loaded; where it has not, nothing is imported.
"""

from __future__ import annotations

import sys
from typing import Any


class Compiled:
    """What torch.compile did in one probe, and that it forgets each size before the next.

    Example:
        >>> compiled = Compiled()
        >>> for size in (1, 2, 4):
        ...     compiled.start_size(size)  # and then a trial of that size
        >>> compiled.finish()
        >>> compiled.graphs, compiled.notes
        (0, ())
    """

    def __init__(self) -> None:
        self._frames = _count("frames", "total")  # tried since dynamo last forgot; also those that did not compile
        self._graphs_before = self._graphs_seen = _count("stats", "unique_graphs")
        self._graphs = 0
        self._size: int | None = None
        self._sizes: set[int] = set()  # at which graphs were compiled
        self._forgot = False
        self._failed: str | None = None

    def start_size(self, size: int, *, anew: bool = False) -> None:
        """Before the steps of a trial, or any other call of a step: compile this size as if it were the only one.

        Args:
            size: The batch size.
            anew: Whether to forget also what was compiled for this very size.
        """
        if anew or size != self._size:
            self._forget()
        self._size = size

    def finish(self) -> None:
        """At the end of the probe: training is to compile as if there had been none."""
        self._forget()

    @property
    def graphs(self) -> int:
        """Graphs compiled in this probe."""
        self._tally()
        return self._graphs

    @property
    def notes(self) -> tuple[str, ...]:
        """What the report says of a compiled step; nothing where none was compiled."""
        if not self.graphs:
            return ()
        sizes = len(self._sizes)
        notes = [
            f"the step is compiled by torch.compile: {self.graphs} {_plural('graph', self.graphs)} for {sizes} "
            f"{_plural('size', sizes)}; each size was compiled anew, as training at that size alone would, and training "
            "compiles once more"
        ]
        if self._graphs_before and self._forgot:
            one = (
                f"; batch {self._size} may have been compiled for changing shapes because of them" if sizes == 1 else ""
            )
            notes.append(
                f"graphs that were compiled before the probe ({self._graphs_before}) are compiled again at their next "
                f"call{one}"
            )
        if self._failed is not None:
            notes.append(
                f"torch.compile could not be made to forget a size ({self._failed}): later ones may have been compiled "
                "for changing shapes; check the answer in a fresh process with oomprobe.check"
            )
        if _profile_kept():
            notes.append(
                "torch.compile keeps a profile of the sizes it sees under the job id of this process: it may compile for "
                "changing shapes from now on; check the answer with another job id"
            )
        return tuple(notes)

    def _tally(self) -> None:
        now = _count("stats", "unique_graphs")
        made = max(0, now - self._graphs_seen)  # the counters are anybody's to clear
        self._graphs_seen = now
        self._graphs += made
        if made and self._size is not None:
            self._sizes.add(self._size)

    def _forget(self) -> None:
        self._tally()
        if _count("frames", "total") == self._frames:
            return
        if _compiling_here():  # what dynamo would forget is in use further up this thread's stack: it dies
            self._failed = "it is compiling in this thread"
            return
        try:
            _reset()
            self._forgot = True
        except Exception as error:  # such as another thread in the midst of compiling
            self._failed = type(error).__name__
        self._frames = _count("frames", "total")


def _count(kind: str, name: str) -> int:
    """A counter of dynamo, which its own reset leaves alone; 0 where dynamo is not loaded, or not yet altogether."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    return 0 if counters is None else int(counters[kind][name])


def _compiling_here() -> bool:
    """Whether this thread is called by torch.compile's own compilation, as a backend is."""
    context = getattr(sys.modules.get("torch._guards"), "CompileContext", None)
    return context is not None and context.try_get() is not None


def _reset() -> None:
    """Reset dynamo, but for the callbacks that the user registered with it.

    Source: torch/_dynamo/__init__.py (2.13): code caches, automatic dynamic shapes, recompile counts, CUDA graphs.
    """
    dynamo: Any = sys.modules["torch._dynamo"]
    handler = dynamo.callback.callback_handler
    kept = [(callbacks, list(callbacks)) for callbacks in (handler.start_callbacks, handler.end_callbacks)]
    try:
        dynamo.reset()
    finally:
        for callbacks, before in kept:
            callbacks[:] = before


def _profile_kept() -> bool:
    return getattr(sys.modules.get("torch.compiler.config"), "job_id", None) is not None


def _plural(noun: str, count: int) -> str:
    return noun if count == 1 else noun + "s"
