"""The two places of a simulated world, as fake tensors know them.

A tensor on the simulated card is a fake tensor on ``cpu:0``, one on the host a fake tensor on ``cpu``: autograd treats
both as CPU tensors (backward through a fake ``cuda`` tensor ends the process on a machine without a GPU), and
`FakeTensorMode` keeps the two apart by itself. What code *sees* is ``cuda:0`` and ``cpu``.
"""

from __future__ import annotations

from typing import Any

import torch

CARD = torch.device("cpu", 0)
HOST = torch.device("cpu")
STATED_HOST = torch.device("cpu", 1)  # the code said "cpu" itself; a plain one may be torch's own default
SEEN_CARD = torch.device("cuda", 0)


def place_of(device: Any) -> torch.device | None:
    """The place that code means with a device argument; None where it said nothing or names another device.

    Example:
        >>> place_of("cuda:0") == CARD, place_of(torch.device("cpu")) == STATED_HOST, place_of(None)
        (True, True, None)
    """
    if device is None:
        return None
    if isinstance(device, int):
        return CARD
    if isinstance(device, str):
        device = torch.device(device)
    if device.type == "cuda":
        return CARD
    return STATED_HOST if device.type == "cpu" and device.index != 0 else None


def place_of_any(location: Any) -> torch.device | None:
    """The place of a ``map_location``: a device, a mapping to devices, or a function, which is taken to mean the card."""
    if isinstance(location, dict):
        location = next(iter(location.values()), None)
    return CARD if callable(location) else place_of(location)
