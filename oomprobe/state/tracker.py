"""Training state that each trial resets for a cold start, without copies of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from oomprobe.state.kept import Kept
from oomprobe.state.reach import reachable
from oomprobe.state.tensors import HostCopies
from oomprobe.state.values import Attributes


class Tracker:
    """The modules, optimizers, loss scalers and schedulers that steps reach, and what existed when tracking began.

    For a cold start, everything created since then is dropped, and what steps count with is put back. Weights and optimizer
    state that existed before stay as they are, because their values do not affect memory. `preserve` adds further stateful
    objects or tensors.

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

    def __init__(
        self,
        model: torch.nn.Module,
        steps: Iterable[object],
        preserve: Iterable[object] = (),
        device: object = None,
    ) -> None:
        preserve, steps = list(preserve), list(steps)
        self.kept = Kept(steps, model, device)
        found = [model, *preserve, *reachable([model, *steps, *preserve])]
        self.found: list[object] = list({id(one): one for one in found}.values())
        self.modules: list[torch.nn.Module] = list(
            {id(m): m for one in self.found if isinstance(one, torch.nn.Module) for m in one.modules()}.values()
        )
        self._modes = [(module, module.training) for module in self.modules]
        self._names = [(module, {*module._buffers, *module._parameters}) for module in self.modules]
        self._leaves = [one for one in self.found if isinstance(one, torch.Tensor) and one.is_leaf]
        schedulers = [one for one in self.found if isinstance(one, torch.optim.lr_scheduler.LRScheduler)]
        self._schedulers = [Attributes(one, HostCopies()) for one in schedulers]
        scalers = [one for one in self.found if isinstance(one, torch.amp.GradScaler) and one.is_enabled()]
        self._scalers: list[tuple[Any, Any]] = [  # a scaler that has not scaled a loss yet has no state
            (one, one.state_dict() if one._scale is not None else None) for one in scalers
        ]
        self._groups: MutableMapping[torch.optim.Optimizer, _Groups] = WeakIdKeyDictionary()
        # For each live optimizer, the names of its initial state, by parameter id.
        self._initial_names: MutableMapping[torch.optim.Optimizer, dict[int, set[Any]]] = WeakIdKeyDictionary()
        for one in self.found:
            if isinstance(one, torch.optim.Optimizer):
                self.add(one)
        self._flags = self._read_flags()
        self._with_gradient = {id(parameter) for parameter in self.parameters() if parameter.grad is not None}

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Live optimizers, first those found at the start, in the same order in every process with the same target."""
        return list(self._initial_names)

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Track an optimizer that is about to step for the first time; it may be deleted after its step."""
        if optimizer not in self._initial_names:
            self._initial_names[optimizer] = state_names(optimizer)
            self._groups[optimizer] = _Groups(optimizer)

    def resident_tensors(self) -> list[torch.Tensor]:
        """Return what stays on the device between steps: parameters, buffers, gradients and optimizer state."""
        parameters = list(self.parameters())
        buffers = (buffer for module in self.modules for buffer in module.buffers(recurse=False))
        gradients = (parameter.grad for parameter in parameters if parameter.grad is not None)
        states = (tensor for optimizer in self.optimizers for tensor in state_tensors(optimizer))
        return list({id(tensor): tensor for tensor in (*parameters, *buffers, *gradients, *states)}.values())

    def restore_modes(self) -> None:
        """Restore every module's train or eval mode, as training does between its phases."""
        for module, training in self._modes:
            module.training = training

    def end_trial(self, *, passed: bool) -> None:
        """Take over what a trial that passed has frozen and grouped, if the step's counters cannot be put back either."""
        self.kept.end_trial()
        if passed and not self.kept.is_exact:
            self._flags = self._read_flags()
            for optimizer in list(self._groups):
                self._groups[optimizer] = _Groups(optimizer)

    def _read_flags(self) -> list[tuple[torch.Tensor, bool]]:
        """Return which parameters require gradients."""
        parameters = (*(p for module in self.modules for p in module.parameters(recurse=False)), *self._leaves)
        return [(one, one.requires_grad) for one in parameters if one.is_leaf]

    def start_cold(self) -> None:
        """Drop what trials have created, and reset what they have changed: all that decides about memory but the weights."""
        self.kept.put_back()
        for parameter, requires_grad in self._flags:  # a trial may end while the step has frozen some
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)
        for groups in self._groups.values():
            groups.restore()
        for parameter in self.parameters():
            if id(parameter) not in self._with_gradient:
                parameter.grad = None
        for optimizer, names in self._initial_names.items():
            drop_later_state(optimizer, names)
        for module, known in self._names:
            for name in {*module._buffers, *module._parameters} - known:
                delattr(module, name)
        # Otherwise schedulers would run past their end, and scalers would refuse to continue after a failed step.
        for scheduler in self._schedulers:
            scheduler.restore()
        for scaler, state in self._scalers:
            scaler._per_optimizer_states.clear()
            if state is None:
                scaler._scale = scaler._growth_tracker = None
            else:
                scaler.load_state_dict(state)

    def parameters(self) -> Iterator[torch.Tensor]:
        """Yield the parameters of modules and optimizers, and other leaf tensors, each once."""
        of_modules = (p for module in self.modules for p in module.parameters(recurse=False))
        of_optimizers = (p for one in self.optimizers for p in parameters_of(one))
        yield from {id(p): p for p in (*of_modules, *of_optimizers, *self._leaves)}.values()


class _Groups:
    """The parameter groups of an optimizer: learning rates that the step sets, and groups that it adds."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._list = optimizer.param_groups
        self._groups = [(group, dict(group), list(group["params"])) for group in optimizer.param_groups]

    def restore(self) -> None:
        self._list[:] = [group for group, _, _ in self._groups]
        for group, values, parameters in self._groups:
            group.clear()
            group.update(values)
            group["params"][:] = parameters


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def state_of(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """Return an optimizer's state by parameter; empty if it stores its state in another way."""
    state = getattr(optimizer, "state", None)
    return state if isinstance(state, dict) else {}


def state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield an optimizer's state tensors, without scalars such as step counts, which stay on the host."""
    for state in state_of(optimizer).values():
        values = state.values() if isinstance(state, dict) else [state]  # some optimizers store a single value
        yield from (value for value in values if isinstance(value, torch.Tensor) and value.dim() > 0)


def state_names(optimizer: torch.optim.Optimizer) -> dict[int, set[Any]]:
    """Return the names of an optimizer's state by parameter id."""
    names = {}
    for parameter, state in state_of(optimizer).items():
        if not isinstance(state, dict) or state:  # reading ``optimizer.state[parameter]`` creates an empty dict
            names[id(parameter)] = set(state) if isinstance(state, dict) else set()
    return names


def drop_later_state(optimizer: torch.optim.Optimizer, before: dict[int, set[Any]]) -> None:
    """Drop the state that an optimizer created since `state_names` returned `before`."""
    state = state_of(optimizer)
    for parameter in list(state):
        if id(parameter) not in before:
            del state[parameter]
        elif isinstance(state[parameter], dict):
            for name in state[parameter].keys() - before[id(parameter)]:
                del state[parameter][name]
