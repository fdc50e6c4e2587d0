"""Trials that nobody hears, and Ctrl-C that goes on working."""

from __future__ import annotations

import logging
import signal
import threading
import warnings
from collections.abc import Iterator

from oomprobe.scope import scope

_PACKAGES = ("lightning", "pytorch_lightning", "lightning_fabric")
_LOGGERS = (*_PACKAGES, "lightning.pytorch", "lightning.fabric")  # each has a level of its own


@scope
def quiet() -> Iterator[None]:
    """Without what Lightning says of each trial: of its own settings, or what it says again when the user trains.

    Entered once for a probe: each time, Python forgets which warnings have been shown.
    """
    levels = [(logger, logger.level) for logger in map(logging.getLogger, _LOGGERS)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=rf"({'|'.join(_PACKAGES)})(\.|$)")
        try:
            for logger, _ in levels:
                logger.setLevel(logging.ERROR)
            yield
        finally:
            for logger, level in levels:
                logger.setLevel(level)


@scope
def ctrl_c_as_it_was() -> Iterator[None]:
    """Lightning ignores Ctrl-C from the first one on, and may not get to undo that."""
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is not before:
            signal.signal(signal.SIGINT, before)
