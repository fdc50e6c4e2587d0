"""A snapshot of the training state, which can be restored in place and compared bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from oomprobe.errors import InvalidArgumentError, UnreliableError
from oomprobe.state.compare import same
from oomprobe.state.places import COPIED_BYTES
from oomprobe.state.references import Reference
from oomprobe.state.surroundings import Surroundings
from oomprobe.state.tensors import NO_COPY, AnyCopy, HostCopies, can_copy, tensors_in, write_back
from oomprobe.state.tracker import Tracker
from oomprobe.state.walk import has_state

UNREAD = (
    "state of {kind}: its state_dict() could not be read ({why}), so only its attributes were saved"
)


class Snapshot:
    """A snapshot of the model, the stateful objects that steps reach, `preserve`, generators and global flags.

    Examples:
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
        for path, kind in self.tracker.uncopied.items():
            raise InvalidArgumentError(NO_COPY.format(name=path, kind=kind))
        self.notes: list[str] = []  # state that could be saved only in part
        of_model = (*model.parameters(), *model.buffers())
        self._model = [self._copies.keep(tensor) for tensor in of_model if can_copy(tensor)]
        self._copies.take([*self.tracker.tensors, *self._model])
        for reference in self.tracker.stateful:
            self._keep(reference)
        self.tracker.take(COPIED_BYTES)

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Save an optimizer that the search did not reach, just before its first step; forget it when it is deleted."""
        self.tracker.add(optimizer)
        self._copies.take(self.tracker.late)

    def release_dead(self) -> None:
        """Drop the copies of deleted objects, because a step may create its model and optimizer on each call."""
        late = self.tracker.late
        self.tracker.late = {
            copied: place for copied, place in late.items() if copied.find() is not None
        }

    def restore(self) -> None:
        """Restore all that can be restored, in place; raise UnreliableError if something cannot."""
        failed: list[str] = []
        for name, restore in self._restorations():
            try:
                restore()
            except (
                Exception
            ) as error:  # the user's objects may raise anything; go on with the others
                failed.append(f"{name} ({type(error).__name__}: {error})")
        failed += self._surroundings.restore()
        if failed:
            raise UnreliableError(
                "not everything could be restored to its state before the probe: "
                + ", ".join(failed[:5])
                + ". Do not train with this model: load it again"
            )

    def _restorations(self) -> Iterator[tuple[str, Callable[[], object]]]:
        """Yield named actions in order: put values back, then the bytes of tensors, then what only `load_state_dict` can."""
        yield "what the step has replaced", self.tracker.put_back
        for copied, name in self._alive():
            yield name, copied.restore
        for storage in list(self._copies.storages):
            yield f"a tensor on {storage.device}", storage.write
        yield "modes", self.tracker.restore_modes
        for state in self._states:
            yield state.name, state.restore

    def differences(self) -> list[str]:
        """Return the names of everything that differs from the snapshot; empty if all is identical bit for bit."""
        for storage in self._copies.storages:
            storage.compare()
        tensors = [name for copied, name in self._alive() if copied.differs(copied.find())]
        loaded = {state.owner for state in self._states if state.has_loaded}
        states = [state.name for state in self._states if state.differs()]
        return [
            *tensors,
            *self.tracker.differences(loaded),
            *states,
            *self._surroundings.differences(),
        ]

    def _alive(self) -> Iterator[tuple[AnyCopy, str]]:
        """Yield the copies of the tensors that are there, with their names."""
        for copied, place in (self.tracker.tensors | self.tracker.late).items():
            if copied.find() is not None:
                yield copied, place.name

    def restore_weights(self) -> None:
        """Restore only parameters and buffers."""
        write_back(self._model)

    def _keep(self, owner: Reference) -> None:
        value, read, load = owner.find(), "state_dict", "load_state_dict"
        if isinstance(value, torch.nn.Module):  # its parameters and buffers are saved already
            if type(value).get_extra_state is torch.nn.Module.get_extra_state:
                return
            read, load = "get_extra_state", "set_extra_state"
        try:
            self._states.append(Stateful(owner, read, load, self._copies))
        # It may need an argument, or exist only later or only in distributed training.
        except Exception as error:
            self.notes.append(
                UNREAD.format(kind=owner.kind.__name__, why=f"{type(error).__name__}: {error}")
            )


class Stateful:
    """An object with a state, restored through its attributes and then, if that was not enough, through its method `load`.

    In the saved state, which its method `read` returned, a copy stands in the place of each tensor.
    """

    def __init__(self, owner: Reference, read: str, load: str, copies: HostCopies) -> None:
        self.owner, self._read, self._load = owner, read, load
        self.has_loaded = False  # then its attributes are no longer compared
        self.name = f"state of {owner.kind.__name__}"
        state = self._state_now()
        kept = {id(tensor): copies.keep(tensor) for tensor in tensors_in(state)}
        self._copies = list(kept.values())
        copies.take(self._copies)
        self._state = copy.deepcopy(
            state, dict(kept)
        )  # the memo makes deepcopy put the copies in place of the tensors

    def _state_now(self) -> Any:
        return getattr(self.owner.find(), self._read)()

    def restore(self) -> None:
        if self.differs():
            state = copy.deepcopy(self._state, {id(one): one.clone() for one in self._copies})
            getattr(self.owner.find(), self._load)(state)
            self.has_loaded = True

    def differs(self) -> bool:
        """Return whether the object now returns another state; one that is gone for good has none."""
        if self.owner.find() is None:
            return False
        return not same(
            copy.deepcopy(self._state, {id(one): one.on_host() for one in self._copies}),
            self._state_now(),
        )


def preserved(preserve: object) -> list[object]:
    """Return `preserve` as a list; raise InvalidArgumentError for an object without state.

    Examples:
        >>> preserved(None), [type(o).__name__ for o in preserved(torch.nn.Sequential())]
        ([], ['Sequential'])
    """
    if preserve is None:
        return []
    items = [preserve]
    if isinstance(preserve, Iterable) and not _can_preserve(
        preserve
    ):  # a Sequential and a tensor are iterable too
        items = list(preserve)
    for item in items:
        if not _can_preserve(item):
            verb = "is" if item is preserve else "holds"
            raise InvalidArgumentError(
                f"preserve {verb} a {type(item).__name__}, which has no state_dict() and "
                "load_state_dict(): pass a list of tensors, schedulers, EMA or scalers; objects with only Python "
                "attributes cannot be preserved"
            )
    return items


def _can_preserve(value: object) -> bool:
    return isinstance(value, torch.Tensor) or has_state(value)
