"""How a module is kept."""

from __future__ import annotations

import copy
from typing import Any

import torch

from oomprobe.state.attributes import KeptAttributes
from oomprobe.state.containers import rebuilt
from oomprobe.state.kept import Kept
from oomprobe.state.nested import KeptContainer
from oomprobe.state.state_dicts import is_state, leaf_of, resolved
from oomprobe.state.values import Memory, is_plain

REGISTERS = {
    "_parameters": "parameters",
    "_buffers": "buffers",
    "_modules": "children",
    "_non_persistent_buffers_set": "non-persistent buffers",
}
_MADE_BY_TORCH = frozenset(vars(torch.nn.Module()))  # registers, hooks, the mode: kept as what they are


class KeptModule:
    """One module, without its children: parameters, buffers, mode, which of each it had, and plain attributes."""

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
        self._attributes = None if _lives_elsewhere(module) else _attributes(module, memory)
        self._loaded: set[str] = set()  # names of attributes that set_extra_state made anew
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
        if self._attributes is not None:
            self._attributes.put_back(self.module)
        if self._extra_differs():
            self.module.set_extra_state(copy.deepcopy(resolved(self._extra)))
            self._loaded = self._changed()

    def _extra_differs(self) -> bool:
        return self._extra is not None and not is_state(_extra_state(self.module), self._extra)

    def _changed(self) -> set[str]:
        return set() if self._attributes is None else self._attributes.changed(self.module)

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
        hidden = self._shadowed()
        found += [f"{name} of {kind}, hidden by an attribute" for name in hidden]
        found += [f"{name} of {kind}" for name in sorted(self._changed().difference(hidden, self._loaded))]
        if self.module.training is not self._training:
            found.append(f"mode of {kind}")
        if self._extra_differs():
            found.append(f"extra state of {kind}")
        return found


def _extra_state(module: torch.nn.Module, memory: Memory | None = None) -> Any:
    if type(module).get_extra_state is torch.nn.Module.get_extra_state:
        return None
    return rebuilt(module.get_extra_state(), leaf_of(memory))


def _attributes(module: torch.nn.Module, memory: Memory) -> KeptAttributes:
    """Flags, sizes, caches: a module whose buffers are as before must not believe that it has grown them.

    Other objects are neither kept nor held. Names that come later go: they tell of what was rolled back.
    """
    values = {name: value for name, value in vars(module).items() if name not in _MADE_BY_TORCH}
    parts = {name: memory.keep(value) for name, value in values.items() if _can_be_kept(value)}
    return KeptAttributes(parts, _MADE_BY_TORCH | (values.keys() - parts.keys()))


def _can_be_kept(value: object) -> bool:
    return is_plain(value) or (isinstance(value, torch.Tensor) and value.device.type != "meta")


def _lives_elsewhere(module: torch.nn.Module) -> bool:
    """What DDP and its like note in Python goes with C++ objects, which cannot be rolled back."""
    return type(module).__module__.startswith(("torch.distributed.", "torch.nn.parallel."))
