"""Everything about a Lightning module and its data module as it was, also what `find_max_batch` does not keep."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from oomprobe.devices.choose import model_device
from oomprobe.errors import DeviceLostError, UnreliableError
from oomprobe.scope import scope
from oomprobe.state import Keeper


@scope
def undone(module: torch.nn.Module, others: Iterable[Any], preserve: object, device_type: str) -> Iterator[None]:
    """Put back, at the end, what is done inside: hooks such as ``setup()`` run before the probe keeps anything itself.

    Besides what a `Keeper` keeps, each attribute of a module is again the object that it was.

    Raises:
        UnreliableError: something is not as it was.
    """
    keeper, lost = Keeper(module, others, preserve, device_type), False
    attributes = [(part, dict(vars(part))) for part in module.modules()]
    try:
        yield
    except DeviceLostError:
        lost = True
        raise
    finally:
        try:
            keeper.put_back(device_lost=lost)
        finally:
            for part, before in attributes:
                _give_back(vars(part), before)
        if not lost and (differences := keeper.differences()):
            raise UnreliableError(
                "not everything came back as it was before the probe: "
                + ", ".join(differences[:5])
                + ". Do not train with this module: make it again"
            )


def _give_back(now: dict[str, Any], before: dict[str, Any]) -> None:
    for name in now.keys() - before.keys():
        del now[name]
    for name, value in before.items():
        if now.get(name) is not value:
            now[name] = value


@scope
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


@scope
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
