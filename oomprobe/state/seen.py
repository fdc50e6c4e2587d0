"""What trials need to know of a model's state where nothing has to be given back: in a process made for them."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping

import torch
from torch.utils.weak import WeakIdKeyDictionary

from oomprobe.state.capture import reachable
from oomprobe.state.cold import ColdStart
from oomprobe.state.resident import bytes_left_by_steps


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
        self._cold = ColdStart(found)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that are known and alive; the order is the same in each process that builds the same."""
        return [*self._known, *(one for one in self._met if all(one is not known for known in self._known))]

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Meet an optimizer that steps."""
        self._met[optimizer] = True
        self._cold.see(optimizer)

    def restore_modes(self) -> None:
        """Put every module's train or eval mode back, as training does between its phases."""
        for module, training in self._modes:
            module.training = training

    def restart_counts(self) -> None:
        """Begin schedules and loss scales anew, so that trials do not run them off their end."""
        self._cold.restart_counts()

    def start_cold(self) -> None:
        """Let go of the gradients, optimizer state and buffers that trials have made."""
        self._cold.put_back()

    def put_weights_back(self) -> bool:
        """Nothing was kept: a new process has them."""
        return False

    def drop_gradients(self) -> None:
        """Let go of what a failed trial left in ``.grad``."""
        for parameter in self._cold.parameters():
            parameter.grad = None

    def state_bytes(self, device_type: str) -> int:
        """What gradients and optimizer state hold on a kind of device."""
        return bytes_left_by_steps(self._cold.parameters(), self.optimizers, device_type)
