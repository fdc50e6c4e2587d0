"""How modules and other objects with state are kept."""

from __future__ import annotations

import copy
from typing import Any

import torch

from oomprobe.state.surroundings import same
from oomprobe.state.values import Kept, Memory


class KeptModule:
    """One module, without its children: parameters, buffers, mode, and which of each it had."""

    def __init__(self, module: torch.nn.Module, memory: Memory) -> None:
        self._module = module
        self._training = module.training
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            memory.keep(tensor, hold=True)
        registers = (module._parameters, module._buffers, module._modules, module._non_persistent_buffers_set)
        self._registers: list[tuple[Any, Kept]] = [
            (register, memory.keep(register, hold=True)) for register in registers
        ]
        self._extra = _extra_state(module)

    def put_back(self) -> None:
        self._module.training = self._training
        for _, kept in self._registers:
            kept.recall()
        if self._extra is not None and not same(_extra_state(self._module), self._extra):
            self._module.set_extra_state(copy.deepcopy(self._extra))

    def differences(self) -> list[str]:
        names = ("parameters", "buffers", "children", "non-persistent buffers")
        kind = type(self._module).__name__
        found = [
            f"{name} of {kind}" for name, (now, kept) in zip(names, self._registers, strict=True) if kept.differs(now)
        ]
        if self._module.training is not self._training:
            found.append(f"mode of {kind}")
        if self._extra is not None and not same(_extra_state(self._module), self._extra):
            found.append(f"extra state of {kind}")
        return found


def _extra_state(module: torch.nn.Module) -> Any:
    if type(module).get_extra_state is torch.nn.Module.get_extra_state:
        return None
    return to_host(module.get_extra_state())


class KeptObject:
    """An optimizer, scheduler, scaler, EMA: its attributes in place, then checked through its own ``state_dict``."""

    def __init__(self, value: Any, memory: Memory) -> None:
        self._value = value
        self.is_optimizer = isinstance(value, torch.optim.Optimizer)
        self._attributes = memory.keep(vars(value)) if hasattr(value, "__dict__") else None
        self._state = None if self.is_optimizer else _state_dict(value)

    def put_back(self) -> None:
        if self._attributes is not None:
            self._attributes.recall()
        if self._state is not None and not same(_state_dict(self._value), self._state):
            self._value.load_state_dict(copy.deepcopy(self._state))

    def differences(self) -> list[str]:
        kind = type(self._value).__name__
        if self._state is not None:
            return [] if same(_state_dict(self._value), self._state) else [f"state of {kind}"]
        attributes = self._attributes
        return [f"state of {kind}"] if attributes is not None and attributes.differs(vars(self._value)) else []

    def on_host(self) -> dict[str, Any]:
        """An optimizer's ``state_dict`` as it was."""
        assert self._attributes is not None
        kept = self._attributes.on_host()
        groups = self._value.param_groups
        index = {id(p): i for i, p in enumerate(p for group in groups for p in group["params"])}
        return {
            "state": {index[id(p)]: dict(entry) for p, entry in kept["state"].items() if id(p) in index},
            "param_groups": [
                {**kept["param_groups"][i], "params": [index[id(p)] for p in group["params"]]}
                for i, group in enumerate(groups)
            ],
        }


def _state_dict(value: Any) -> Any:
    try:
        return to_host(value.state_dict())
    except Exception:  # some objects have a state only later, or only where they are distributed
        return None


def to_host(value: Any) -> Any:
    """A deep copy whose tensors are in host memory."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: to_host(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        parts = [to_host(part) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    return copy.deepcopy(value)
