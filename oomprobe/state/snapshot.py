"""A snapshot of the training state, which can be restored in place and compared bit for bit."""

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

UNREAD = "state of {kind}: its state_dict() could not be read ({why}), so only its attributes were saved"
_MODULE_ATTRIBUTES = frozenset(vars(torch.nn.Module()))  # registries, hooks, the mode
_OPTIMIZER_ATTRIBUTES = frozenset({"defaults", "param_groups", "state"})


class Snapshot:
    """A snapshot of the model, the stateful objects that steps reach, `preserve`, generators and global flags.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> snapshot = Snapshot(model, [], [], "cpu")
        >>> _ = torch.nn.init.ones_(model.weight), model.eval(), torch.rand(3)
        >>> snapshot.restore()
        >>> snapshot.differences(), model.training
        ([], True)
    """

    def __init__(
        self,
        model: torch.nn.Module,
        steps: Iterable[object],
        preserve: object,
        device_type: str,
        device: object = None,
    ) -> None:
        self._surroundings = Surroundings(device_type)
        self.tracker = Tracker(model, steps, preserved(preserve), device)
        self._copies = self.tracker.kept.copies
        self._kept: list[Attributes | Stateful] = []
        self._optimizers: list[StateDict] = []  # for `host_copy` only; their attributes are what is restored
        self._tensors: dict[int, TensorAndGradient] = {}  # by id
        self.notes: list[str] = []  # state that could be saved only in part
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
        self.tracker.kept.copy_large()

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Save an optimizer that the search did not reach, just before its first step; forget it when it is deleted."""
        if optimizer in self.tracker.optimizers:
            return
        self.tracker.add(optimizer)
        for parameter in parameters_of(optimizer):
            self._keep_tensor(parameter, hold=False)
        attributes = Attributes(optimizer, self._copies, _OPTIMIZER_ATTRIBUTES & vars(optimizer).keys())
        attributes.forget_with(optimizer)
        self._kept.append(attributes)
        self._copies.take()

    def release_dead(self) -> None:
        """Drop the copies of deleted objects, because a step may create its model and optimizer on each call."""
        self._kept = [one for one in self._kept if not one.is_gone]
        self._tensors = {key: one for key, one in self._tensors.items() if not one.is_gone}

    def restore(self, *, device_lost: bool = False) -> None:
        """Restore everything in place, or raise UnreliableError; if the device is lost, restore only host memory."""
        failed: list[str] = []
        self.tracker.kept.put_back(at_end=True)
        for name, restore in self._restorations(device_lost=device_lost):
            try:
                restore()
            except Exception as error:  # the user's objects may raise anything; continue with the others
                failed.append(f"{name} ({type(error).__name__}: {error})")
        failed += self._surroundings.restore(device_lost=device_lost)
        if failed and not device_lost:
            raise UnreliableError(
                "not everything could be restored to its state before the probe: "
                + ", ".join(failed[:5])
                + ". Do not train with this model: load it again"
            )

    def _restorations(self, *, device_lost: bool) -> Iterator[tuple[str, Callable[[], object]]]:
        """Yield named actions in order: drop replaced gradients to make room, write bytes, restore references."""
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
        """Return the names of everything that differs from the snapshot; empty if all is identical bit for bit."""
        for storage in self._copies.storages:
            storage.compare()
        kept = (*self._kept, *self._tensors.values())
        return [*(name for one in kept for name in one.differences()), *self._surroundings.differences()]

    def restore_weights(self) -> None:
        """Restore only parameters and buffers."""
        self._copies.restore_held()

    def host_copy(self) -> dict[str, Any]:
        """Return the saved model and optimizers in host memory, which survives a lost device."""
        return {
            "model": {name: tensor.on_host() for name, tensor in self._model.items()},
            "optimizers": [state.on_host() for state in self._optimizers],
        }

    def _keep_module(self, module: torch.nn.Module) -> None:
        """Save registries, hooks and attributes: a flag such as "cache built" must match the restored buffers.

        For parallel wrappers such as DDP, skip other attributes: they belong to C++ objects, which cannot be restored.
        """
        is_parallel = type(module).__module__.startswith(("torch.distributed.", "torch.nn.parallel."))
        attributes = Attributes(module, self._copies, _MODULE_ATTRIBUTES if is_parallel else None)
        has_extra = type(module).get_extra_state is not torch.nn.Module.get_extra_state
        state = self._state_dict(module, module.get_extra_state) if has_extra else None
        self._kept.append(attributes if state is None else Stateful(attributes, state, module.set_extra_state))

    def _keep(self, value: Any) -> None:
        if isinstance(value, torch.optim.Optimizer):
            self._kept.append(Attributes(value, self._copies))
            with suppress(Exception):  # a wrapper around another optimizer may have no state_dict
                self._optimizers.append(StateDict(value.state_dict, self._copies))
        # Tensors and modules are saved already; positions of data loaders are not covered.
        elif not isinstance(value, torch.Tensor | torch.nn.Module | torch.utils.data.DataLoader):
            attributes, state = Attributes(value, self._copies), self._state_dict(value, value.state_dict)
            self._kept.append(attributes if state is None else Stateful(attributes, state, value.load_state_dict))

    def _state_dict(self, owner: object, read: Callable[[], Any]) -> StateDict | None:
        try:
            return StateDict(read, self._copies)
        except Exception as error:  # it may need an argument, or exist only later or only in distributed training
            self.notes.append(UNREAD.format(kind=type(owner).__name__, why=f"{type(error).__name__}: {error}"))
            return None

    def _keep_tensor(self, tensor: torch.Tensor, *, hold: bool = True) -> None:
        known = self._tensors.get(id(tensor))
        if known is None or known.find() is not tensor:
            self._tensors[id(tensor)] = TensorAndGradient(tensor, self._copies, hold=hold)


class TensorAndGradient:
    """The copy of a parameter, or of another tensor, with its gradient.

    A tensor with ``hold=False`` was found when an optimizer stepped in a trial. It may be deleted with that optimizer, and
    its gradient, which the trial computed, is not saved.
    """

    def __init__(self, tensor: torch.Tensor, copies: HostCopies, *, hold: bool) -> None:
        gradient = tensor.grad if hold and tensor.is_leaf else None  # torch warns about other tensors
        self._copy = copies.keep(tensor, hold=hold)
        self._gradient = None if gradient is None else copies.keep(gradient)
        self._shape = tuple(tensor.shape)
        self.name = f"a tensor of shape {self._shape}"
        self.find = self._copy.find

    @property
    def is_gone(self) -> bool:
        return self.find() is None

    def drop_replaced_gradient(self) -> None:
        """Free a new gradient, to make room for the saved one."""
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
    """The saved result of an object's ``state_dict()``, with each tensor replaced by its copy."""

    def __init__(self, read: Callable[[], Any], copies: HostCopies) -> None:
        self._read, state = read, read()
        kept = {id(tensor): copies.keep(tensor) for tensor in _tensors_in(state)}
        self._copies = list(kept.values())
        self._state = copy.deepcopy(state, dict(kept))  # the memo makes deepcopy put the copies in place of the tensors

    def on_host(self) -> Any:
        """Return the saved state with its tensors in host memory; do not modify it."""
        return copy.deepcopy(self._state, {id(one): one.on_host() for one in self._copies})

    def clone(self) -> Any:
        """Return the saved state with new tensors on their original devices."""
        return copy.deepcopy(self._state, {id(one): one.clone() for one in self._copies})

    def differs(self) -> bool:
        """Return whether ``state_dict()`` now returns another state."""
        return not same(self.on_host(), self._read())


class Stateful:
    """An object with ``state_dict``, restored through its attributes and then, if that was not enough, through `load`.

    After `load`, its attributes are no longer compared.
    """

    is_gone = False

    def __init__(self, attributes: Attributes, state: StateDict, load: Callable[[Any], object]) -> None:
        self._attributes, self._state, self._load = attributes, state, load
        self._has_loaded = False
        self.name = attributes.name

    def restore(self) -> None:
        self._attributes.restore()
        if self._state.differs():
            self._load(self._state.clone())
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
    """Return `preserve` as a list; raise InvalidArgumentError for an object without state.

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
                "load_state_dict(): pass a list of tensors, schedulers, EMA or scalers; objects with only Python "
                "attributes cannot be preserved"
            )
    return items
