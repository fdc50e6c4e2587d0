"""How objects with state that are no modules are kept."""

from __future__ import annotations

import copy
from typing import Any

import torch

from oomprobe.state.attributes import attributes_of
from oomprobe.state.state_dicts import is_state, read_state, resolved, state_of
from oomprobe.state.values import Memory

OPTIMIZER_STATE = ("state", "param_groups")  # where preconditioners and the like are; elsewhere a trainer may be


class KeptObject:
    """An optimizer, scheduler, scaler, EMA: its attributes in place, then checked through its own ``state_dict``."""

    def __init__(self, value: Any, memory: Memory) -> None:
        self._value = value
        self.is_optimizer = isinstance(value, torch.optim.Optimizer)
        self._state: Any
        self._state, self.unread = (None, "") if self.is_optimizer else read_state(value, memory)
        # Where no state_dict tells what belongs to it, objects that it holds are looked into.
        inside = attributes_of(value) if self.unread else OPTIMIZER_STATE if self.is_optimizer else ()
        self._attributes = memory.keep_attributes(value, inside=inside)
        self._loaded: set[str] = set()  # names of attributes that load_state_dict made anew
        self._params = [list(group["params"]) for group in value.param_groups] if self.is_optimizer else []

    @property
    def name(self) -> str:
        return f"state of {type(self._value).__name__}"

    def put_back(self) -> None:
        self._attributes.put_back(self._value)
        if self._state_differs():
            self._value.load_state_dict(copy.deepcopy(resolved(self._state)))
            self._loaded = self._attributes.changed(self._value)

    def _state_differs(self) -> bool:
        return self._state is not None and not is_state(state_of(self._value), self._state)

    def differences(self) -> list[str]:
        changed = (
            self._attributes.changed(self._value) - self._loaded
        )  # first: some make attributes to tell their state
        return [self.name] if changed or self._state_differs() else []

    def on_host(self) -> dict[str, Any]:
        """An optimizer's ``state_dict`` as it was."""
        kept = self._attributes.on_host()
        index = {id(p): i for i, p in enumerate(p for group in self._params for p in group)}
        return {
            "state": {index[id(p)]: dict(entry) for p, entry in kept["state"].items() if id(p) in index},
            "param_groups": [
                {**kept["param_groups"][i], "params": [index[id(p)] for p in params]}
                for i, params in enumerate(self._params)
            ],
        }
