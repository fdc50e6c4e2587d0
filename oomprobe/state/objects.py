"""How modules and other objects with state are kept."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from oomprobe.state.compare import same
from oomprobe.state.tensors import KeptTensor
from oomprobe.state.values import Kept, KeptContainer, Memory

REGISTERS = {
    "_parameters": "parameters",
    "_buffers": "buffers",
    "_modules": "children",
    "_non_persistent_buffers_set": "non-persistent buffers",
}


class KeptModule:
    """One module, without its children: parameters, buffers, mode, and which of each it had."""

    def __init__(self, module: torch.nn.Module, memory: Memory) -> None:
        self.module = module
        self._training = module.training
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            memory.keep(tensor, hold=True)
        self._registers: dict[str, tuple[str, Any, Kept]] = {
            name: (said, register, memory.keep(register, hold=True))
            for name, said in REGISTERS.items()
            for register in [getattr(module, name)]
        }
        self._extra = _extra_state(module, memory)
        self._own_names = set(vars(module))

    def restore_mode(self) -> None:
        """Train or eval, as it was."""
        self.module.training = self._training

    @property
    def name(self) -> str:
        return f"state of {type(self.module).__name__}"

    def put_back(self) -> None:
        self.module.training = self._training
        for _, _, kept in self._registers.values():
            kept.recall()
        for name in self._shadowed():
            del vars(self.module)[name]
        if self._extra is not None and not _is_state(_extra_state(self.module), self._extra):
            self.module.set_extra_state(copy.deepcopy(_resolved(self._extra)))

    def _shadowed(self) -> list[str]:
        """Parameters, buffers and children that a plain attribute of the same name now hides."""
        names = {str(name) for register in ("_parameters", "_buffers", "_modules") for name in self.was(register)}
        return [name for name in vars(self.module) if name in names and name not in self._own_names]

    def was(self, register: str) -> dict[str, Kept]:
        """What a register held, by name."""
        kept = self._registers[register][2]
        return kept.parts if isinstance(kept, KeptContainer) else {}

    def differences(self) -> list[str]:
        kind = type(self.module).__name__
        found = [f"{said} of {kind}" for said, now, kept in self._registers.values() if kept.differs(now)]
        found += [f"{name} of {kind}, hidden by an attribute" for name in self._shadowed()]
        if self.module.training is not self._training:
            found.append(f"mode of {kind}")
        if self._extra is not None and not _is_state(_extra_state(self.module), self._extra):
            found.append(f"extra state of {kind}")
        return found


def _extra_state(module: torch.nn.Module, memory: Memory | None = None) -> Any:
    if type(module).get_extra_state is torch.nn.Module.get_extra_state:
        return None
    return _rebuilt(module.get_extra_state(), _leaf_of(memory))


class KeptObject:
    """An optimizer, scheduler, scaler, EMA: its attributes in place, then checked through its own ``state_dict``."""

    def __init__(self, value: Any, memory: Memory) -> None:
        self._value = value
        self.is_optimizer = isinstance(value, torch.optim.Optimizer)
        self._attributes = memory.keep(vars(value)) if hasattr(value, "__dict__") else None
        self._state = None if self.is_optimizer else _state_dict(value, memory)
        self._params = [list(group["params"]) for group in value.param_groups] if self.is_optimizer else []

    def start_over(self) -> None:
        """Between trials: a scheduler does not run off its end, a scaler forgets a step that failed half-way."""
        if isinstance(self._value, torch.optim.lr_scheduler.LRScheduler) and self._attributes is not None:
            self._attributes.recall()
        elif isinstance(self._value, torch.amp.GradScaler):
            getattr(self._value, "_per_optimizer_states", {}).clear()  # a disabled one has none

    @property
    def name(self) -> str:
        return f"state of {type(self._value).__name__}"

    def put_back(self) -> None:
        if self._attributes is not None:
            self._attributes.recall()
        if self._state is not None and not _is_state(_state_dict(self._value), self._state):
            self._value.load_state_dict(copy.deepcopy(_resolved(self._state)))

    def differences(self) -> list[str]:
        kind = type(self._value).__name__
        if self._state is not None:
            return [] if _is_state(_state_dict(self._value), self._state) else [f"state of {kind}"]
        attributes = self._attributes
        return [f"state of {kind}"] if attributes is not None and attributes.differs(vars(self._value)) else []

    def on_host(self) -> dict[str, Any]:
        """An optimizer's ``state_dict`` as it was."""
        assert self._attributes is not None
        kept = self._attributes.on_host()
        index = {id(p): i for i, p in enumerate(p for group in self._params for p in group)}
        return {
            "state": {index[id(p)]: dict(entry) for p, entry in kept["state"].items() if id(p) in index},
            "param_groups": [
                {**kept["param_groups"][i], "params": [index[id(p)] for p in params]}
                for i, params in enumerate(self._params)
            ],
        }


def _state_dict(value: Any, memory: Memory | None = None) -> Any:
    """Its state with plain containers; with a memory, as something that lasts."""
    try:
        return _rebuilt(value.state_dict(), _leaf_of(memory))
    except Exception:  # some objects have a state only later, or only where they are distributed
        return None


def _is_state(now: Any, kept: Any) -> bool:
    return same(now, _resolved(kept))


def _rebuilt(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """The same containers, in plain types, with other leaves."""
    if isinstance(value, dict):
        return {key: _rebuilt(part, leaf) for key, part in value.items()}
    if isinstance(value, list | tuple):
        parts = [_rebuilt(part, leaf) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    if isinstance(value, deque):
        return deque((_rebuilt(part, leaf) for part in value), value.maxlen)
    return leaf(value)


def _leaf_of(memory: Memory | None) -> Callable[[Any], Any]:
    return (lambda value: value) if memory is None else partial(_lasting, memory)


def _lasting(memory: Memory, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if type(value) in (torch.Tensor, torch.nn.Parameter) and _has_plain_memory(value):
            return memory.alias(value)
        return value.detach().cpu().clone()
    try:
        return copy.deepcopy(value)
    except Exception:  # a lock, a file, a handle
        return value


def _has_plain_memory(tensor: torch.Tensor) -> bool:
    whole = tensor.layout is torch.strided and not tensor.is_quantized and tensor.device.type != "meta"
    return whole and not tensor.is_conj() and not tensor.is_neg()


def _resolved(kept: Any) -> Any:
    return _rebuilt(kept, lambda leaf: leaf.on_host() if isinstance(leaf, KeptTensor) else leaf)
