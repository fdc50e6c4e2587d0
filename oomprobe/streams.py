"""stdout for the answer alone, and stderr for people."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO


def tell(*lines: str) -> None:
    """Say something to people."""
    write(sys.stderr, "\n".join(lines) + "\n")


def write(stream: IO[str] | None, text: str) -> None:
    """Write at once."""
    if stream is not None:  # Python's own where a shell closed it
        stream.write(text)
        stream.flush()


@contextmanager
def stdout_kept(*, for_good: bool) -> Iterator[IO[str]]:
    """Give stdout to the answer alone: what anybody else writes to it, or to its descriptor, goes to stderr.

    Args:
        for_good: For the rest of the process too, where C libraries flush and ``atexit`` functions print.
    """
    stdout, kept = sys.stdout, None
    try:
        stdout.flush()
        kept = os.dup(1)
        os.dup2(2, 1)
    except (AttributeError, OSError):  # there is no stdout or no stderr
        pass
    is_descriptor = kept is not None and _is_descriptor_1(stdout)
    answers = os.fdopen(os.dup(kept), "w", encoding="utf-8") if kept is not None and is_descriptor else stdout
    sys.stdout = sys.stderr
    try:
        yield answers
    finally:
        if answers is not stdout:
            answers.close()
        if not for_good:
            sys.stdout = stdout
            if kept is not None:
                os.dup2(kept, 1)
        if kept is not None:
            os.close(kept)


def _is_descriptor_1(stream: IO[str]) -> bool:
    try:
        return stream.fileno() == 1
    except (AttributeError, OSError, ValueError):  # a stream that tests put there
        return False
