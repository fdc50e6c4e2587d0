"""What a probe of Lightning's fit puts back: state, methods, the place of the module, Ctrl-C and what is logged."""

from __future__ import annotations

import logging
import signal
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from oomprobe.devices.choose import model_device
from oomprobe.errors import DeviceLostError, UnreliableError
from oomprobe.state import Snapshot

_PACKAGES = ("lightning", "pytorch_lightning", "lightning_fabric")
_LOGGERS = (*_PACKAGES, "lightning.pytorch", "lightning.fabric")  # each has a level of its own


@contextmanager
def undone(module: torch.nn.Module, others: Iterable[Any], preserve: object, device_type: str) -> Iterator[None]:
    """Put back, at the end, what is done inside: hooks such as ``setup()`` run before the probe keeps anything itself.

    Besides what a `Snapshot` keeps, each attribute of a module is again the object that it was.
    """
    keeper, lost = Snapshot(module, others, preserve, device_type), False
    attributes = [(vars(part), dict(vars(part))) for part in module.modules()]
    try:
        yield
    except DeviceLostError:
        lost = True
        raise
    finally:
        try:
            keeper.restore(device_lost=lost)
        finally:
            for now, before in attributes:
                now.clear()
                now.update(before)
        if not lost and (differences := keeper.differences()):
            raise UnreliableError(
                "not everything came back as it was before the probe: "
                + ", ".join(differences[:5])
                + ". Do not train with this module: make it again"
            )


@contextmanager
def on_host(module: torch.nn.Module) -> Iterator[None]:
    """With the module in host memory, where Lightning puts it after each fit.

    What keeps its state would otherwise hold a second copy on the device, which training does not have.
    """
    home = model_device(module)
    if home is None or home.type == "cpu":
        yield
        return
    module.cpu()
    try:
        yield
    except DeviceLostError:
        home = torch.device("cpu")
        raise
    finally:
        module.to(home)


@contextmanager
def replaced(holder: Any, functions: dict[str, Callable[..., Any]]) -> Iterator[None]:
    """Methods of one object, replaced: on the object, so that its class is as it was."""
    own = vars(holder)
    before = {name: own[name] for name in functions if name in own}
    try:
        own.update(functions)
        yield
    finally:
        for name in functions:
            own.pop(name, None)
        own.update(before)


@contextmanager
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


@contextmanager
def ctrl_c_as_it_was() -> Iterator[None]:
    """Lightning ignores Ctrl-C from the first one on, and may not get to undo that."""
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is not before:
            signal.signal(signal.SIGINT, before)
