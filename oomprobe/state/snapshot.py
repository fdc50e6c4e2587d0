"""A snapshot of the training state, which can be restored in place and compared bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch

from oomprobe.errors import InvalidArgumentError, UnreliableError
from oomprobe.state.compare import same
from oomprobe.state.places import COPIED_BYTES
from oomprobe.state.surroundings import Surroundings
from oomprobe.state.tensors import HostCopies, tensors_in, write_back
from oomprobe.state.tracker import Tracker
from oomprobe.state.walk import has_state

UNREAD = "state of {kind}: its state_dict() could not be read ({why}), so only its attributes were saved"


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
        self._copies = self.tracker.copies
        self._states: list[Stateful] = []
        self._optimizers: list[StateDict] = []  # for `host_copy` only; their attributes are what is restored
        self.notes: list[str] = []  # state that could be saved only in part
        named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        self._model = {name: self._copies.keep(tensor) for name, tensor in named}
        self._copies.take([*self.tracker.tensors, *self._model.values()])
        for optimizer in self.tracker.optimizers:
            with suppress(Exception):  # a wrapper around another optimizer may have no state_dict
                self._optimizers.append(StateDict(optimizer.state_dict, self._copies, compares=False))
        for value in self.tracker.found:
            self._keep(value)
        self.tracker.take(COPIED_BYTES)

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Save an optimizer that the search did not reach, just before its first step; forget it when it is deleted."""
        self.tracker.add(optimizer)
        self._copies.take(self.tracker.late)

    def release_dead(self) -> None:
        """Drop the copies of deleted objects, because a step may create its model and optimizer on each call."""
        late = self.tracker.late
        self.tracker.late = {one: place for one, place in late.items() if one.find() is not None}

    def restore(self, *, device_lost: bool = False) -> None:
        """Restore everything in place, or raise UnreliableError; if the device is lost, restore only host memory."""
        failed: list[str] = []
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
        """Yield named actions in order: put values back, then the bytes of tensors, then what only `load_state_dict` can."""
        if not device_lost:
            yield "what the step has replaced", self.tracker.put_back
            for one, place in (self.tracker.tensors | self.tracker.late).items():
                if one.find() is not None:
                    yield place.name, one.restore
        for storage in list(self._copies.storages):
            if not device_lost or storage.device.type == "cpu":
                yield f"a tensor on {storage.device}", storage.write
        if device_lost:
            return
        yield "modes", self.tracker.restore_modes
        for state in self._states:
            yield state.name, state.restore

    def differences(self) -> list[str]:
        """Return the names of everything that differs from the snapshot; empty if all is identical bit for bit."""
        for storage in self._copies.storages:
            storage.compare()
        loaded = {id(one.owner) for one in self._states if one.has_loaded}
        tensors = (self.tracker.tensors | self.tracker.late).items()
        return [
            *(place.name for one, place in tensors if one.find() is not None and one.differs(one.find())),
            *self.tracker.differences(loaded),
            *(one.name for one in self._states if one.differs()),
            *self._surroundings.differences(),
        ]

    def restore_weights(self) -> None:
        """Restore only parameters and buffers."""
        write_back(self._model.values())

    def host_copy(self) -> dict[str, Any]:
        """Return the saved model and optimizers in host memory, which survives a lost device."""
        return {
            "model": {name: tensor.on_host() for name, tensor in self._model.items()},
            "optimizers": [state.on_host() for state in self._optimizers],
        }

    def _keep(self, value: Any) -> None:
        read, load = value.state_dict, value.load_state_dict
        if isinstance(value, torch.nn.Module):  # its parameters and buffers are saved already
            if type(value).get_extra_state is torch.nn.Module.get_extra_state:
                return
            read, load = value.get_extra_state, value.set_extra_state
        try:
            self._states.append(Stateful(value, StateDict(read, self._copies), load))
        except Exception as error:  # it may need an argument, or exist only later or only in distributed training
            self.notes.append(UNREAD.format(kind=type(value).__name__, why=f"{type(error).__name__}: {error}"))


class StateDict:
    """The saved result of an object's ``state_dict()``, with each tensor replaced by its copy."""

    def __init__(self, read: Callable[[], Any], copies: HostCopies, *, compares: bool = True) -> None:
        state, self._read = read(), read if compares else dict  # `read` may keep its object alive
        kept = {id(tensor): copies.keep(tensor) for tensor in tensors_in(state)}
        self._copies = list(kept.values())
        copies.take(self._copies)
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
    """An object with ``state_dict``, restored through its attributes and then, if that was not enough, through `load`."""

    def __init__(self, owner: object, state: StateDict, load: Callable[[Any], object]) -> None:
        self.owner, self._state, self._load = owner, state, load
        self.has_loaded = False  # then its attributes are no longer compared
        self.name = f"state of {type(owner).__name__}"
        self.differs = state.differs

    def restore(self) -> None:
        if self._state.differs():
            self._load(self._state.clone())
            self.has_loaded = True


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
