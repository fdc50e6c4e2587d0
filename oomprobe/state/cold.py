"""Collecting garbage before every trial, cheaply."""

from __future__ import annotations

import gc
from collections.abc import Iterator

from oomprobe.scope import scope


@scope
def garbage_frozen() -> Iterator[None]:
    """Collect garbage, and from then on only what is made inside: 98 ms become 0.01 where frameworks are imported.

    Where the caller froze objects of its own, nothing is frozen: they could not be told from ours afterwards.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
