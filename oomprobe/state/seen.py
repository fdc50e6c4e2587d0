"""What trials need to know of a model's state where nothing has to be given back: in a process made for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from oomprobe.state.capture import reachable
from oomprobe.state.resident import bytes_left_by_steps

_COUNTS = (bool, int, float, str, type(None))


class Seen:
    """The optimizers, the modules' modes and what counts steps, without copies of anything large.

    Args:
        model: The module that is probed.
        steps: The steps that will run.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> seen = Seen(model, [])
        >>> _ = model.eval(), model(torch.ones(1, 2)).sum().backward()
        >>> seen.restore_modes(), seen.state_bytes("cpu"), model.training
        (None, 12, True)
    """

    def __init__(self, model: torch.nn.Module, steps: Iterable[object]) -> None:
        found = [model, *reachable([model, *steps])]
        modules = {id(m): m for one in found if isinstance(one, torch.nn.Module) for m in one.modules()}
        self._modes = [(module, module.training) for module in modules.values()]
        self._known = [one for one in found if isinstance(one, torch.optim.Optimizer)]
        self._met: MutableMapping[torch.optim.Optimizer, bool] = WeakIdKeyDictionary()
        self._schedulers = [
            (one, _counts(one)) for one in found if isinstance(one, torch.optim.lr_scheduler.LRScheduler)
        ]
        self._scalers = [one for one in found if isinstance(one, torch.amp.GradScaler)]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that are known and alive; the order is the same in each process that builds the same."""
        return [*self._known, *(one for one in self._met if all(one is not known for known in self._known))]

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Meet an optimizer that steps."""
        self._met[optimizer] = True

    def restore_modes(self) -> None:
        """Put every module's train or eval mode back, as training does between its phases."""
        for module, training in self._modes:
            module.training = training

    def start_over(self) -> None:
        """A scheduler does not run off its end, a scaler forgets a step that failed half-way."""
        for scheduler, counts in self._schedulers:
            vars(scheduler).update(counts)
        for scaler in self._scalers:
            getattr(scaler, "_per_optimizer_states", {}).clear()  # a disabled one has none

    def drop_gradients(self) -> None:
        """Let go of what a failed trial left in ``.grad``."""
        for parameter in self._parameters():
            parameter.grad = None

    def state_bytes(self, device_type: str) -> int:
        """What gradients and optimizer state hold on a kind of device."""
        return bytes_left_by_steps(self._parameters(), self.optimizers, device_type)

    def _parameters(self) -> Iterator[torch.Tensor]:
        of_modules = (p for module, _ in self._modes for p in module.parameters(recurse=False))
        of_optimizers = (p for one in self.optimizers for group in one.param_groups for p in group["params"])
        seen: set[int] = set()
        for parameter in (*of_modules, *of_optimizers):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter


def _counts(scheduler: object) -> dict[str, Any]:
    """What a scheduler counts with: numbers, and lists of them."""
    plain = {name: value for name, value in vars(scheduler).items() if isinstance(value, _COUNTS)}
    lists = {name: list(value) for name, value in vars(scheduler).items() if isinstance(value, list)}
    return plain | lists
