"""What trials need to know of a training's state, without copies of anything large."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from oomprobe.state.reach import reachable
from oomprobe.state.tensors import HostCopies
from oomprobe.state.values import Attributes


class Tracker:
    """The modules, optimizers, loss scales and schedules that steps reach, and how they were at first sight.

    Every trial starts cold: what came since first sight goes. What existed then keeps existing, with whatever values it
    has now, for values need no memory. `preserve` holds further objects with state, or tensors.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> tracker = Tracker(model, [lambda model, batch_size: optimizer.step()])
        >>> model.eval()(torch.ones(1, 2)).sum().backward(), optimizer.step()
        (None, None)
        >>> tracker.restore_modes(), tracker.start_cold()
        (None, None)
        >>> model.training, len(optimizer.state), model.weight.grad
        (True, 0, None)
    """

    def __init__(self, model: torch.nn.Module, steps: Iterable[object], preserve: Iterable[object] = ()) -> None:
        preserve = list(preserve)
        found = [model, *preserve, *reachable([model, *steps, *preserve])]
        self.found: list[object] = list({id(one): one for one in found}.values())
        self.modules: list[torch.nn.Module] = list(
            {id(m): m for one in self.found if isinstance(one, torch.nn.Module) for m in one.modules()}.values()
        )
        self._modes = [(module, module.training) for module in self.modules]
        self._buffers = [(module, set(module._buffers)) for module in self.modules]
        self._leaves = [one for one in self.found if isinstance(one, torch.Tensor) and one.is_leaf]
        schedulers = [one for one in self.found if isinstance(one, torch.optim.lr_scheduler.LRScheduler)]
        self._schedules = [Attributes(one, HostCopies()) for one in schedulers]
        scalers = [one for one in self.found if isinstance(one, torch.amp.GradScaler) and one.is_enabled()]
        # One that has not scaled a loss yet has no scale.
        self._scales: list[tuple[Any, Any]] = [
            (one, one.state_dict() if one._scale is not None else None) for one in scalers
        ]
        # Each optimizer that is alive, with the names of what it kept for each parameter at first sight, by the parameter's id.
        self._met: MutableMapping[torch.optim.Optimizer, dict[int, set[Any]]] = WeakIdKeyDictionary()
        for one in self.found:
            if isinstance(one, torch.optim.Optimizer):
                self.add(one)
        self._with_gradient = {id(parameter) for parameter in self.parameters() if parameter.grad is not None}

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that are alive: first those known from the start, in the same order in each process that builds the same."""
        return list(self._met)

    def knows(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it was found, or added, and is alive."""
        return optimizer in self._met

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Note an optimizer that shows itself by stepping, just before it does; it may end with its step."""
        if optimizer not in self._met:
            self._met[optimizer] = state_names(optimizer)

    def resident_tensors(self) -> list[torch.Tensor]:
        """What stays on a device between steps: parameters, buffers, gradients and optimizer state, each once."""
        parameters = list(self.parameters())
        buffers = (buffer for module in self.modules for buffer in module.buffers(recurse=False))
        gradients = (parameter.grad for parameter in parameters if parameter.grad is not None)
        states = (tensor for optimizer in self.optimizers for tensor in state_tensors(optimizer))
        return list({id(tensor): tensor for tensor in (*parameters, *buffers, *gradients, *states)}.values())

    def restore_modes(self) -> None:
        """Put every module's train or eval mode back, as training does between its phases."""
        for module, training in self._modes:
            module.training = training

    def start_cold(self) -> None:
        """Let go of the gradients, optimizer state and buffers that trials have made."""
        for parameter in self.parameters():
            if id(parameter) not in self._with_gradient:
                parameter.grad = None
        for optimizer, names in self._met.items():
            drop_later_state(optimizer, names)
        for module, buffers in self._buffers:
            for name in module._buffers.keys() - buffers:
                delattr(module, name)
        # A scheduler does not run off its end; a loss scale starts over, and forgets a step that failed half-way.
        for schedule in self._schedules:
            schedule.restore()
        for scaler, scale in self._scales:
            scaler._per_optimizer_states.clear()
            if scale is None:
                scaler._scale = scaler._growth_tracker = None
            else:
                scaler.load_state_dict(scale)

    def parameters(self) -> Iterator[torch.Tensor]:
        """Those of the modules and the optimizers, each once."""
        of_modules = (p for module in self.modules for p in module.parameters(recurse=False))
        of_optimizers = (p for one in self.optimizers for p in parameters_of(one))
        yield from {id(p): p for p in (*of_modules, *of_optimizers, *self._leaves)}.values()


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """What an optimizer trains."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def state_of(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """What an optimizer keeps, by parameter; some keep theirs in another way."""
    state = getattr(optimizer, "state", None)
    return state if isinstance(state, dict) else {}


def state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """What an optimizer keeps for its parameters; counts of steps, single numbers, stay on the host."""
    for state in state_of(optimizer).values():
        kept = state.values() if isinstance(state, dict) else [state]  # some keep one tensor, or what is no tensor
        yield from (tensor for tensor in kept if isinstance(tensor, torch.Tensor) and tensor.dim() > 0)


def state_names(optimizer: torch.optim.Optimizer) -> dict[int, set[Any]]:
    """Names of the state that an optimizer keeps, by the parameter's id."""
    names = {}
    for parameter, kept in state_of(optimizer).items():
        if not isinstance(kept, dict) or kept:  # reading ``optimizer.state[parameter]`` leaves an empty dict
            names[id(parameter)] = set(kept) if isinstance(kept, dict) else set()
    return names


def drop_later_state(optimizer: torch.optim.Optimizer, before: dict[int, set[Any]]) -> None:
    """Drop the state that an optimizer made since `state_names` was called."""
    state = state_of(optimizer)
    for parameter in list(state):
        if id(parameter) not in before:
            del state[parameter]
        elif isinstance(state[parameter], dict):
            for name in state[parameter].keys() - before[id(parameter)]:
                del state[parameter][name]
