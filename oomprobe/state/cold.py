"""What earlier trials left in Python, put back to how training will find it. Nothing large is copied."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from oomprobe.scope import scope

_COUNTS = (bool, int, float, str, type(None))


class ColdStart:
    """Gradients, optimizer state, buffers, loss scales and schedules as they were at first sight.

    What existed then keeps existing, with whatever values it has now: values need no memory.

    Args:
        found: The model and everything with state that its steps reach.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> cold = ColdStart([model, optimizer])
        >>> model(torch.ones(1, 2)).sum().backward(), optimizer.step()
        (None, None)
        >>> cold.put_back()
        >>> len(optimizer.state), model.weight.grad
        (0, None)
    """

    def __init__(self, found: Iterable[object]) -> None:
        found = list(found)
        modules = {id(m): m for one in found if isinstance(one, torch.nn.Module) for m in one.modules()}
        self._buffers = [(module, set(module._buffers)) for module in modules.values()]
        self._tensors = [one for one in found if isinstance(one, torch.Tensor)]
        self._schedulers = [
            (one, _counts(one)) for one in found if isinstance(one, torch.optim.lr_scheduler.LRScheduler)
        ]
        self._scalers: list[tuple[Any, Any]] = [(one, _scale_of(one)) for one in found if _is_scaler(one)]
        # By optimizer, the names of what it kept for each parameter, by id; some optimizers have no hash.
        self._states: MutableMapping[torch.optim.Optimizer, dict[int, set[Any]]] = WeakIdKeyDictionary()
        for one in found:
            if isinstance(one, torch.optim.Optimizer):
                self.see(one)
        self._with_gradient = {id(parameter) for parameter in self.parameters() if parameter.grad is not None}

    def see(self, optimizer: torch.optim.Optimizer) -> None:
        """Meet an optimizer, just before its first step."""
        if optimizer not in self._states:
            self._states[optimizer] = {id(p): _names(state) for p, state in _state_of(optimizer).items()}

    def put_back(self) -> None:
        """Let go of what came since."""
        for parameter in self.parameters():
            if id(parameter) not in self._with_gradient:
                parameter.grad = None
        for optimizer, before in self._states.items():
            _put_state_back(_state_of(optimizer), before)
        for module, names in self._buffers:
            for name in module._buffers.keys() - names:
                delattr(module, name)
        self.restart_counts()

    def restart_counts(self) -> None:
        """A scheduler does not run off its end; a loss scale starts over, and forgets a step that failed half-way."""
        for scheduler, counts in self._schedulers:
            vars(scheduler).update(counts)
        for scaler, scale in self._scalers:
            scaler._per_optimizer_states.clear()
            if scale is None:
                scaler._scale = scaler._growth_tracker = None
            else:
                scaler.load_state_dict(scale)

    def parameters(self) -> Iterator[torch.Tensor]:
        """Those of the modules and the optimizers, each once."""
        of_modules = (p for module, _ in self._buffers for p in module.parameters(recurse=False))
        of_optimizers = (p for one in self._states for group in one.param_groups for p in group["params"])
        yield from {id(p): p for p in (*of_modules, *of_optimizers, *self._tensors)}.values()


@scope
def garbage_frozen() -> Iterator[None]:
    """Collect garbage, and from then on only what is made inside: 98 ms become 0.01 where frameworks are imported.

    Where the caller froze objects of its own, nothing is frozen: they could not be told from ours afterwards.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _counts(scheduler: object) -> dict[str, Any]:
    """What a scheduler counts with: numbers, and lists of them."""
    plain = {name: value for name, value in vars(scheduler).items() if isinstance(value, _COUNTS)}
    lists = {name: list(value) for name, value in vars(scheduler).items() if isinstance(value, list)}
    return plain | lists


def _is_scaler(value: object) -> bool:
    return isinstance(value, torch.amp.GradScaler) and value.is_enabled()


def _scale_of(scaler: Any) -> dict[str, Any] | None:
    """None while it has no scale yet: it makes one when it first scales a loss."""
    return None if scaler._scale is None else scaler.state_dict()


def _state_of(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """By parameter; some optimizers keep theirs in another way."""
    state = getattr(optimizer, "state", None)
    return state if isinstance(state, dict) else {}


def _names(state: object) -> set[Any]:
    return set(state) if isinstance(state, dict) else set()


def _put_state_back(state: dict[Any, Any], before: dict[int, set[Any]]) -> None:
    for parameter in list(state):
        if id(parameter) not in before:
            del state[parameter]
        elif isinstance(state[parameter], dict):
            for name in state[parameter].keys() - before[id(parameter)]:
                del state[parameter][name]
