"""What a device with real memory of its own leaves undone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext


class PlainDevice:
    """Steps run in the world as it is, and need no preparation. The rest of `Device` is its heirs' own."""

    on_host = False

    def session(self) -> AbstractContextManager[None]:
        """Nothing around the steps."""
        return nullcontext()

    def warm(self, step: Callable[[], object]) -> None:
        """Nothing: the first trial that passes has loaded the kernels."""

    def prime(self, step: Callable[[], object]) -> None:
        """Nothing: a size that fails leaves nothing behind."""
