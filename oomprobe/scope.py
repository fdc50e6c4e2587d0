"""Another name of `contextlib.contextmanager`."""

from contextlib import contextmanager as scope

__all__ = ["scope"]
