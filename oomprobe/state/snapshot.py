"""The snapshot of everything a step can change, its restoration in place, and the comparison that proves it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch

from oomprobe.errors import InvalidArgumentError, UnreliableError
from oomprobe.state.compare import same
from oomprobe.state.reach import has_state
from oomprobe.state.surroundings import Surroundings
from oomprobe.state.tensors import HostCopies
from oomprobe.state.tracker import Tracker, parameters_of
from oomprobe.state.values import Attributes, has_bytes

UNREAD = "state of {kind}: its state_dict() could not be read ({why}), so only its attributes were kept"
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))  # registers, hooks, the mode
_OF_EVERY_OPTIMIZER = frozenset({"defaults", "param_groups", "state"})


class Snapshot:
    """Keeps the model, every object with state that the steps reach or that is in `preserve`, and the surroundings.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> snapshot = Snapshot(model, [], [], "cpu")
        >>> _ = torch.nn.init.ones_(model.weight), model.eval(), torch.rand(3)
        >>> snapshot.restore()
        >>> snapshot.differences(), model.training
        ([], True)
    """

    def __init__(self, model: torch.nn.Module, steps: Iterable[object], preserve: object, device_type: str) -> None:
        self._surroundings = Surroundings(device_type)
        self.tracker = Tracker(model, steps, preserved(preserve))
        self._copies = HostCopies()
        self._kept: list[Attributes | Stateful] = []
        self._optimizers: list[StateDict] = []  # for `host_copy`: they come back through their attributes
        self._tensors: dict[int, TensorAndGradient] = {}  # by id
        self.notes: list[str] = []  # what is not kept as well as it should be
        buffers = [buffer for module in self.tracker.modules for buffer in module.buffers(recurse=False)]
        given = [value for value in self.tracker.found if isinstance(value, torch.Tensor)]
        for tensor in (*self.tracker.parameters(), *buffers, *given):
            self._keep_tensor(tensor)
        for module in self.tracker.modules:
            self._keep_module(module)
        for value in self.tracker.found:
            self._keep(value)
        named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        self._model = {name: self._copies.keep(tensor) for name, tensor in named}
        self._copies.take()

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep an optimizer that shows itself by stepping, just before it does, for as long as it lives."""
        if self.tracker.knows(optimizer):
            return
        self.tracker.add(optimizer)
        for parameter in parameters_of(optimizer):
            self._keep_tensor(parameter, hold=False)
        attributes = Attributes(optimizer, self._copies, _OF_EVERY_OPTIMIZER & vars(optimizer).keys())
        attributes.forget_with(optimizer)
        self._kept.append(attributes)
        self._copies.take()

    def release_dead(self) -> None:
        """Let go of what has died: a step may make its model and optimizer anew on each call."""
        self._kept = [one for one in self._kept if not one.is_gone]
        self._tensors = {key: one for key, one in self._tensors.items() if not one.is_gone}

    def restore(self, *, device_lost: bool = False) -> None:
        """Restore everything in place, or raise UnreliableError. With a lost device, only what lives on the host."""
        failed: list[str] = []
        for name, restore in self._restorations(device_lost=device_lost):
            try:
                restore()
            except Exception as error:  # whatever the user's own objects raise: the rest is still to be restored
                failed.append(f"{name} ({type(error).__name__}: {error})")
        failed += self._surroundings.restore(device_lost=device_lost)
        if failed and not device_lost:
            raise UnreliableError(
                "not everything could be put back as it was before the probe: "
                + ", ".join(failed[:5])
                + ". Do not train with this model: load it again"
            )

    def _restorations(self, *, device_lost: bool) -> Iterator[tuple[str, Callable[[], object]]]:
        """Bytes first, then what looks at them; of all that is to come back, gradients want the most room."""
        if not device_lost:
            yield from ((one.name, one.drop_replaced_gradient) for one in self._tensors.values())
        for storage in list(self._copies.storages):
            if not device_lost or storage.device.type == "cpu":
                yield f"a tensor on {storage.device}", storage.write
        if device_lost:
            return
        yield "modes", self.tracker.restore_modes
        for one in (*self._kept, *self._tensors.values()):
            yield one.name, one.restore

    def differences(self) -> list[str]:
        """What is not, bit for bit, as it was kept; empty when everything is."""
        for storage in self._copies.storages:
            storage.compare()
        kept = (*self._kept, *self._tensors.values())
        return [*(name for one in kept for name in one.differences()), *self._surroundings.differences()]

    def restore_weights(self) -> None:
        """Restore parameters and buffers, which trials have trained."""
        self._copies.restore_held()

    def host_copy(self) -> dict[str, Any]:
        """The model and the optimizers as they were, in host memory: what survives a lost device."""
        return {
            "model": {name: tensor.on_host() for name, tensor in self._model.items()},
            "optimizers": [state.on_host() for state in self._optimizers],
        }

    def _keep_module(self, module: torch.nn.Module) -> None:
        """Registers, hooks and attributes: a flag such as "cache built" must match the restored buffers.

        Of DDP and its like no attributes, for what those note goes with C++ objects, which cannot be rolled back.
        """
        is_parallel = type(module).__module__.startswith(("torch.distributed.", "torch.nn.parallel."))
        attributes = Attributes(module, self._copies, _OF_EVERY_MODULE if is_parallel else None)
        has_extra = type(module).get_extra_state is not torch.nn.Module.get_extra_state
        state = self._state_dict(module, module.get_extra_state) if has_extra else None
        self._kept.append(attributes if state is None else Stateful(attributes, state, module.set_extra_state))

    def _keep(self, value: Any) -> None:
        if isinstance(value, torch.optim.Optimizer):
            self._kept.append(Attributes(value, self._copies))
            with suppress(Exception):  # a shell around another optimizer may have no state_dict of its own
                self._optimizers.append(StateDict(value.state_dict, self._copies))
        # Tensors and modules are kept already; positions of loaders are not covered.
        elif not isinstance(value, torch.Tensor | torch.nn.Module | torch.utils.data.DataLoader):
            attributes, state = Attributes(value, self._copies), self._state_dict(value, value.state_dict)
            self._kept.append(attributes if state is None else Stateful(attributes, state, value.load_state_dict))

    def _state_dict(self, owner: object, tell: Callable[[], Any]) -> StateDict | None:
        try:
            return StateDict(tell, self._copies)
        except Exception as error:  # some want an argument; some have a state only later, or only where distributed
            self.notes.append(UNREAD.format(kind=type(owner).__name__, why=f"{type(error).__name__}: {error}"))
            return None

    def _keep_tensor(self, tensor: torch.Tensor, *, hold: bool = True) -> None:
        known = self._tensors.get(id(tensor))
        if known is None or known.find() is not tensor:
            self._tensors[id(tensor)] = TensorAndGradient(tensor, self._copies, hold=hold)


class TensorAndGradient:
    """A parameter, or another tensor, with its gradient.

    One that is not held became known when an optimizer stepped in a trial, and may die with that optimizer. Its gradient is
    the step's own already, and goes.
    """

    def __init__(self, tensor: torch.Tensor, copies: HostCopies, *, hold: bool) -> None:
        gradient = tensor.grad if hold and tensor.is_leaf else None  # of others torch warns
        self._copy = copies.keep(tensor, hold=hold)
        self._gradient = None if gradient is None else copies.keep(gradient)
        self._shape = tuple(tensor.shape)
        self.name = f"a tensor of shape {self._shape}"
        self.find = self._copy.find

    @property
    def is_gone(self) -> bool:
        return self.find() is None

    def drop_replaced_gradient(self) -> None:
        """Make room for the one that comes back."""
        tensor = self.find()
        kept = None if self._gradient is None else self._gradient.find()
        if tensor is not None and tensor.is_leaf and tensor.grad is not kept:
            tensor.grad = None

    def restore(self) -> None:
        if self.find() is not None:
            tensor = self._copy.restore()
            if self._gradient is not None:
                tensor.grad = self._gradient.restore()

    def differences(self) -> list[str]:
        tensor = self.find()
        if tensor is None:
            return []
        found = [self.name] if self._copy.differs(tensor) else []
        now = tensor.grad if tensor.is_leaf else None
        if now is not None if self._gradient is None else self._gradient.differs(now):
            found.append(f"a gradient of shape {self._shape}")
        return found


class StateDict:
    """What an object's ``state_dict`` tells; what it shows of its own memory is copied once."""

    def __init__(self, tell: Callable[[], Any], copies: HostCopies) -> None:
        self._tell, told = tell, tell()
        kept = {id(tensor): copies.keep(tensor) for tensor in _tensors_in(told)}
        self._copies = list(kept.values())
        self._told = copy.deepcopy(told, dict(kept))  # with what was kept in the place of each tensor

    def on_host(self) -> Any:
        """The state as it was, its tensors in host memory, to be read only."""
        return copy.deepcopy(self._told, {id(one): one.on_host() for one in self._copies})

    def anew(self) -> Any:
        """The state as it was, its tensors where they were, for somebody to keep."""
        return copy.deepcopy(self._told, {id(one): one.anew() for one in self._copies})

    def differs(self) -> bool:
        """Whether the object tells another one now."""
        return not same(self.on_host(), self._tell())


class Stateful:
    """An object that hides state from its attributes: it has to `load` what its ``state_dict`` told.

    Once it has, its attributes are as it makes them.
    """

    is_gone = False

    def __init__(self, attributes: Attributes, state: StateDict, load: Callable[[Any], object]) -> None:
        self._attributes, self._state, self._load = attributes, state, load
        self._has_loaded = False
        self.name = attributes.name

    def restore(self) -> None:
        self._attributes.restore()
        if self._state.differs():
            self._load(self._state.anew())
            self._has_loaded = True

    def differences(self) -> list[str]:
        if self._state.differs():
            return [self.name]
        return [] if self._has_loaded else self._attributes.differences()


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if has_bytes(value):
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(part)


def preserved(preserve: object) -> list[object]:
    """The objects in `preserve`; a single one is taken as a list of one, None as an empty list.

    Example:
        >>> preserved(None), [type(o).__name__ for o in preserved(torch.nn.Sequential())]
        ([], ['Sequential'])
    """
    if preserve is None:
        return []
    is_one = isinstance(preserve, torch.Tensor) or has_state(preserve)  # a Sequential and a tensor are iterable too
    items = list(preserve) if isinstance(preserve, Iterable) and not is_one else [preserve]
    for item in items:
        if not isinstance(item, torch.Tensor) and not has_state(item):
            raise InvalidArgumentError(
                f"preserve {'is' if item is preserve else 'holds'} a {type(item).__name__}, which has no state_dict() and "
                "load_state_dict(): pass a list of tensors, schedulers, EMA or scalers; what is only Python attributes "
                "cannot be kept"
            )
    return items
