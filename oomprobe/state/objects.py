"""How modules and other objects with state are kept."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from oomprobe.state.attributes import attributes_of
from oomprobe.state.compare import same
from oomprobe.state.containers import rebuilt
from oomprobe.state.kept import Kept
from oomprobe.state.nested import KeptContainer
from oomprobe.state.tensors import KeptTensor
from oomprobe.state.values import Memory

OPTIMIZER_STATE = ("state", "param_groups")  # where preconditioners and the like are; elsewhere a trainer may be
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
    return rebuilt(module.get_extra_state(), _leaf_of(memory))


class KeptObject:
    """An optimizer, scheduler, scaler, EMA: its attributes in place, then checked through its own ``state_dict``."""

    def __init__(self, value: Any, memory: Memory) -> None:
        self._value = value
        self.is_optimizer = isinstance(value, torch.optim.Optimizer)
        self._state: Any
        self._state, self.unread = (None, "") if self.is_optimizer else _state_and_error(value, memory)
        # Where no state_dict tells what belongs to it, objects that it holds are looked into.
        inside = attributes_of(value) if self.unread else OPTIMIZER_STATE if self.is_optimizer else ()
        self._attributes = memory.keep_attributes(value, inside=inside)
        self._loaded: set[str] = set()  # names of attributes that load_state_dict made anew
        self._params = [list(group["params"]) for group in value.param_groups] if self.is_optimizer else []

    def start_over(self) -> None:
        """Between trials: a scheduler does not run off its end, a scaler forgets a step that failed half-way."""
        if isinstance(self._value, torch.optim.lr_scheduler.LRScheduler):
            self._attributes.put_back(self._value)
        elif isinstance(self._value, torch.amp.GradScaler):
            self._value._per_optimizer_states.clear()

    @property
    def name(self) -> str:
        return f"state of {type(self._value).__name__}"

    def put_back(self) -> None:
        self._attributes.put_back(self._value)
        if self._state_differs():
            self._value.load_state_dict(copy.deepcopy(_resolved(self._state)))
            self._loaded = self._attributes.changed(self._value)

    def _state_differs(self) -> bool:
        return self._state is not None and not _is_state(_state_dict(self._value), self._state)

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


def _state_and_error(value: Any, memory: Memory | None = None) -> tuple[Any, str]:
    """Its state; with a memory, as something that lasts. Or why there is none."""
    try:
        return rebuilt(value.state_dict(), _leaf_of(memory)), ""
    except (
        Exception
    ) as error:  # some want an argument, some have a state only later, or only where they are distributed
        return None, f"{type(error).__name__}: {error}"


def _state_dict(value: Any) -> Any:
    return _state_and_error(value)[0]


def _is_state(now: Any, kept: Any) -> bool:
    return same(now, _resolved(kept))


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
    return rebuilt(kept, lambda leaf: leaf.on_host() if isinstance(leaf, KeptTensor) else leaf)
