"""Accelerators of accelerate, given back as they were: what they count and list is in no ``state_dict``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from oomprobe.scope import scope

SHARED = ("PartialState", "AcceleratorState", "GradientState")  # of accelerate.state: each one for the whole process


@scope
def unchanged(*accelerators: Any) -> Iterator[None]:
    """Give Accelerators, and what all of a process share, back as they were.

    An Accelerator counts micro-batches and lists what it prepared, outside any ``state_dict``. A probe that is left in the
    midst of an accumulation would leave training to step at other micro-batches than without it.

    Args:
        accelerators: Of `accelerate.Accelerator`.

    Example:
        >>> class Accelerator:
        ...     step = 0
        >>> accelerator = Accelerator()
        >>> with unchanged(accelerator):
        ...     accelerator.step = 3
        >>> accelerator.step
        0
    """
    own = [(vars(one), _copy(vars(one))) for one in accelerators]
    shared = {name: _copy(state) for name, state in _shared_states().items()}
    try:
        yield
    finally:
        for attributes, before in own:
            _put_back(attributes, before)
        for name, state in _shared_states().items():  # it may have been imported meanwhile
            _put_back(state, shared.get(name, {}))


def _copy(attributes: dict[str, Any]) -> dict[str, tuple[Any, list[Any]]]:
    """Each value, and what is in it if it is a list: those are filled in place."""
    return {name: (value, list(value) if isinstance(value, list) else []) for name, value in attributes.items()}


def _put_back(attributes: dict[str, Any], before: dict[str, tuple[Any, list[Any]]]) -> None:
    attributes.clear()
    for name, (value, items) in before.items():
        if isinstance(value, list):
            value[:] = items
        attributes[name] = value


def _shared_states() -> dict[str, dict[str, Any]]:
    """By class. Private: accelerate has no other way to them that would not make them."""
    module = sys.modules.get("accelerate.state")
    return {} if module is None else {name: getattr(module, name)._shared_state for name in SHARED}


def accelerators_of(objects: list[Any]) -> list[Any]:
    """Those among all objects there are: the function may reach its own by globals of functions that it calls."""
    module = sys.modules.get("accelerate.accelerator")
    return [] if module is None else of_type(objects, module.Accelerator)


def of_type(objects: list[Any], kind: type) -> list[Any]:
    """Without asking them: lazy modules import what they stand for when they are."""
    return [one for one in objects if issubclass(type(one), kind)]
