"""The snapshot of everything a step can change, its restoration in place, and the comparison that proves it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from oomprobe.devices import linux
from oomprobe.errors import InvalidArgumentError, UnreliableError
from oomprobe.state.capture import has_state, reachable
from oomprobe.state.objects import KeptModule, KeptObject
from oomprobe.state.surroundings import Surroundings
from oomprobe.state.tensors import KeptTensor, copy_storages, plain_parts, storages_of
from oomprobe.state.values import Kept, Memory
from oomprobe.units import format_bytes

HOST_SHARE = 0.9  # of the free host memory: more than that for a copy leaves nothing for the steps' own host side


class Keeper:
    """Keeps the model, every object with state that the steps reach, and the surroundings.

    Args:
        model: The module that is probed.
        steps: The steps that will run.
        preserve: Further objects with ``state_dict()`` and ``load_state_dict()``.
        device_type: Kind of device the steps run on.

    Raises:
        InvalidArgumentError: an object in `preserve` has no state to keep.
        UnreliableError: the copy does not fit in host memory.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> keeper = Keeper(model, [], [], "cpu")
        >>> _ = torch.nn.init.ones_(model.weight), model.eval(), torch.rand(3)
        >>> keeper.put_back()
        >>> keeper.differences(), model.training
        ([], True)
    """

    def __init__(
        self, model: torch.nn.Module, steps: Iterable[object], preserve: Iterable[object], device_type: str
    ) -> None:
        preserve, steps = list(preserve), list(steps)
        for item in preserve:
            if not has_state(item):
                raise InvalidArgumentError(
                    f"preserve holds a {type(item).__name__}, which has no state_dict() and load_state_dict(): "
                    "pass schedulers, EMA or scalers; what is only Python attributes cannot be kept"
                )
        self.optimizers: list[torch.optim.Optimizer] = []
        self._model = model
        self._surroundings = Surroundings(device_type)
        self._memory = Memory()
        self._modules: list[KeptModule] = []
        self._objects: list[KeptObject] = []
        self._grads: dict[int, tuple[torch.Tensor, Kept]] = {}
        self._seen: dict[int, object] = {}
        self._keep_all([model, *preserve, *reachable([model, *steps, *preserve])])

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep an optimizer that shows itself by stepping, just before it does."""
        if id(optimizer) not in self._seen:
            self._keep_all([optimizer, *reachable([optimizer])], late=True)

    def put_back(self, *, device_lost: bool = False) -> None:
        """Restore everything in place. With a lost device, only what lives on the host."""
        for parameter, kept in self._grads.values():
            if not device_lost and parameter.grad is not _watched(kept):
                parameter.grad = None
        for kept_tensor in self._memory.tensors:
            if not (device_lost and kept_tensor.device.type != "cpu"):
                kept_tensor.put_back()
        if not device_lost:
            for restorable in self._restorables:
                restorable.put_back()
            for parameter, kept in self._grads.values():
                parameter.grad = kept.recall()
        self._surroundings.put_back(device_lost=device_lost)

    def differences(self) -> list[str]:
        """What is not, bit for bit, as it was kept; empty when everything is."""
        found = [name for restorable in self._restorables for name in restorable.differences()]
        found += [f"a gradient of shape {tuple(p.shape)}" for p, kept in self._grads.values() if kept.differs(p.grad)]
        return found + self._surroundings.differences()

    @property
    def _restorables(self) -> list[KeptModule | KeptObject]:
        return [*self._modules, *self._objects]

    def drop_gradients(self) -> None:
        """Let go of what a failed trial left in ``.grad``."""
        for parameter, _ in self._grads.values():
            parameter.grad = None

    def host_copy(self) -> dict[str, Any]:
        """The model and the optimizers as they were, in host memory: what survives a lost device."""
        model = self._model
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        return {
            "model": {name: self._memory.on_host(tensor) for name, tensor in named},
            "optimizers": [kept.on_host() for kept in self._objects if kept.is_optimizer],
        }

    def _keep_all(self, values: Iterable[object], *, late: bool = False) -> None:
        for value in values:
            for part in _with_submodules(value):
                if id(part) not in self._seen:
                    self._seen[id(part)] = part
                    self._keep(part, late=late)
        _copy_checked([p for kept in self._memory.tensors for p in plain_parts(kept) if not p.taken])
        self._memory.let_go()

    def _keep(self, value: object, *, late: bool) -> None:
        if isinstance(value, torch.nn.Module):
            self._modules.append(KeptModule(value, self._memory))
            self._keep_grads(value.parameters(recurse=False), late=late)
        elif isinstance(value, torch.Tensor):
            self._memory.keep(value, hold=True)
            self._keep_grads([value], late=late)
        elif not isinstance(value, torch.utils.data.DataLoader):  # positions of loaders are not covered
            self._objects.append(KeptObject(value, self._memory))
            if isinstance(value, torch.optim.Optimizer):
                self.optimizers.append(value)
                parameters = [p for group in value.param_groups for p in group["params"]]
                for parameter in parameters:
                    self._memory.keep(parameter, hold=True)
                self._keep_grads(parameters, late=late)

    def _keep_grads(self, parameters: Iterable[torch.Tensor], *, late: bool) -> None:
        """A late optimizer's gradients are the step's own already: before it, there were none."""
        for parameter in parameters:
            if id(parameter) not in self._grads:
                self._grads[id(parameter)] = (parameter, self._memory.keep(None if late else parameter.grad))


def _with_submodules(value: object) -> Iterator[object]:
    if isinstance(value, torch.nn.Module):
        yield from value.modules()
    else:
        yield value


def _watched(kept: Kept) -> torch.Tensor | None:
    return kept.watch() if isinstance(kept, KeptTensor) else None


def _copy_checked(tensors: list[KeptTensor]) -> None:
    storages = storages_of(tensors)
    needed = sum(storage.nbytes() for storage, _ in storages.values())
    free = linux.free_bytes()
    if free is not None and needed > HOST_SHARE * free:
        raise UnreliableError(
            f"giving the model back as it was needs a copy of {format_bytes(needed)} in host memory, and "
            f"{format_bytes(free)} is free: nothing was run. Free host memory, or probe a target that can be built anew "
            "(oomprobe run path/to/train.py:build)"
        )
    copy_storages(storages)
