"""Training state that each trial resets for a cold start, without copies of tensors."""

from __future__ import annotations

import pickle
import random
import types
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import suppress
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch.utils.weak import WeakIdKeyDictionary

from oomprobe.ground.units import format_bytes, known
from oomprobe.records.options import refuse_lazy
from oomprobe.state.contents import Values, When, of_tensor
from oomprobe.state.counted import counted
from oomprobe.state.places import (
    MAX_ENTRIES,
    OpaquePlace,
    Place,
    is_source,
    kind_of,
    long_place,
    opaque_place,
    saved_item,
    tensor_place,
)
from oomprobe.state.references import Reference, gradient_of, weak
from oomprobe.state.tensors import (
    AnyCopy,
    HostCopies,
    TensorCopy,
    can_copy,
    kind_of_storage,
    tensors_in,
    version_of,
)
from oomprobe.state.walk import (
    Kind,
    Met,
    code_names,
    has_data,
    is_learnable,
    is_training_state,
    visit,
)


class Tracker:
    """What steps and a model hold, as it was when tracking began: the places, and the tensors.

    For a cold start, everything created since then is dropped, and the steps' counters, caches and
    lists are put back. Weights and optimizer state that existed before stay as they are, because
    their values do not affect memory; those that a step has replaced come back. `preserve` adds
    further stateful objects or tensors, `owners` objects of libraries that a step changes.

    Examples:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> tracker = Tracker(model, [lambda model, batch_size: optimizer.step()], [optimizer])
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
        owners: Iterable[object] = (),
    ) -> None:
        """Find and save; a `device` of the user's own counts memory, which must not be put back."""
        self.copies = HostCopies()
        self.stateful: list[Reference] = []  # modules and other objects with a state
        self.places: list[Place] = []
        self.opaque: list[OpaquePlace] = []
        # Tensors of the model, its optimizers and other training state; `late` are those of
        # optimizers found when they stepped.
        self.tensors: dict[AnyCopy, Place] = {}
        self.late: dict[AnyCopy, Place] = {}
        self.uncopied: dict[str, str] = {}  # the kinds, by path, of those that cannot be copied
        # Iterators and queues of data, with their ids; and live optimizers.
        self._sources: list[tuple[OpaquePlace, int]] = []
        self._optimizers: MutableMapping[torch.optim.Optimizer, list[Place]] = WeakIdKeyDictionary()
        self._leaves: list[Callable[[], torch.Tensor | None]] = []
        self._names: set[str] = set()  # that the user's functions use
        self._left_entries = MAX_ENTRIES
        self._only_at_end = False  # whether values are put back only at the end
        others, owners = [*preserve, *steps], list(owners)
        self._roots, self._device = [model, *others, *owners], device
        self._find(
            list(
                visit(
                    [(model, "model"), *((root, "") for root in others)], owners, without=[device]
                )
            )
        )
        self._switches = Switches(self.stateful)
        self._switches.read_flags(self.parameters())
        self.first_weights, self.first_gradients = self.weights(), gradients_of(self.parameters())
        self.take(0)

    def _find(self, every: list[Met]) -> None:
        """Save all that the walk has seen, and from then on keep nothing alive that a step may let go of."""
        references, tuples = self.copies.references, list[Values]()
        for seen in every:
            for values in seen.values:
                if values.owner is not None:
                    references.add(values.owner)
            if isinstance(seen.value, tuple):
                tuples += seen.values
            if isinstance(seen.value, torch.optim.Optimizer):
                self._optimizers[seen.value] = []
        for seen in every:
            self._save(seen, self.places)
        every.clear()
        del seen, values
        every_values = [*tuples, *(place.values for place in self._all_places())]
        references.let_go(
            ((held.read, held.slot) for held in every_values),
            partial(saved_item, copies=self.copies),
        )

    def _save(self, seen: Met, places: list[Place]) -> None:
        value = seen.value
        if isinstance(value, types.FunctionType):
            self._names |= code_names(value.__code__) | {*value.__code__.co_freevars}
        if seen.kind is Kind.TENSOR:
            self._save_tensor(seen)
        if isinstance(value, torch.Tensor | tuple):  # the items of a tuple cannot be replaced
            return
        for values in seen.values:
            size = 0 if values.when is When.COLD else len(values.read())
            if size <= self._left_entries:
                self._left_entries -= size
                places.append(Place(values, self.copies))
            else:
                self.opaque.append(long_place(values))
                if values.owner is not None:
                    values.owner.stay_strong()
        if isinstance(value, torch.optim.Optimizer):
            return
        if is_training_state(seen):
            reference = self.copies.references.to(value)
            if reference is not None:
                self.stateful.append(reference)
            return
        place = opaque_place(seen, self._names)
        if place is not None:
            self.opaque.append(place)
            if is_source(value):
                self._sources.append((place, id(value)))

    def _save_tensor(self, seen: Met) -> None:
        tensor, path = seen.value, seen.path
        if not has_data(tensor):
            refuse_lazy(path, tensor)
            return
        if is_learnable(tensor):
            self._leaves.append(weak(tensor))
        trains = seen.trains or is_learnable(tensor)
        if not can_copy(tensor):
            if trains:
                self.places.append(Place(seen.values[0], self.copies))
                self.uncopied[path or "a tensor"] = kind_of_storage(tensor)
        elif trains:
            copy = self.copies.keep(tensor)
            if copy not in self.tensors:
                self.tensors[copy] = Place(of_tensor(lambda: copy.find(), path), self.copies)
        elif type(tensor) is torch.Tensor and not tensor.requires_grad:
            copy = self.copies.keep(tensor)
            if isinstance(copy, TensorCopy):
                self.opaque.append(tensor_place(copy, path, version_of(tensor)))

    def take(self, left_bytes: int) -> None:
        """Copy the arrays and tensors beside the model that are small, and others as far as `left_bytes` goes."""
        for place in self.opaque:
            left_bytes = place.take(left_bytes)

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Track an optimizer that is about to step for the first time; it may be deleted after its step."""
        if optimizer in self._optimizers:
            return
        known = {*self.tensors}
        places = self._optimizers[optimizer] = []
        for seen in visit(_roots_of(optimizer)):
            is_gradient = seen.path.endswith(".grad")  # the trial has computed it
            if seen.kind in (Kind.HOLDER, Kind.TENSOR) and not is_gradient:
                self._save(seen._replace(trains=True), places)
        self.late |= {copy: self.tensors.pop(copy) for copy in {*self.tensors} - known}
        for place in self.late.values():
            place.forget("grad")

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Live optimizers, first those found at the start, in the same order in every process with the same target."""
        return list(self._optimizers)

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters of modules and optimizers, and other leaf tensors, each once."""
        parameters: list[torch.Tensor] = []
        for module in self._switches.modules():
            parameters += module.parameters(recurse=False)
        parameters += chain.from_iterable(map(parameters_of, self.optimizers))
        parameters += present(self._leaves)
        return _each_once(parameters)

    def resident_tensors(self) -> list[torch.Tensor]:
        """Return what stays on the device between steps: parameters, buffers, gradients and optimizer state."""
        parameters = self.parameters()
        tensors = list(parameters)
        for module in self._switches.modules():
            tensors += module.buffers(recurse=False)
        for _, gradient in gradients_among(parameters):
            tensors.append(gradient)
        tensors += chain.from_iterable(map(state_tensors, self.optimizers))
        return _each_once(tensors)

    # --- before and after each trial ---

    @property
    def is_exact(self) -> bool:
        """Whether every trial starts at the same call, because everything that counts is put back before it."""
        return not self._only_at_end and not any(place.moves for place in self.places)

    @property
    def has_replaced_parameters(self) -> bool:
        """Whether parameters were replaced or freed since the start."""
        return any(copy.is_replaced for copy in self.tensors)

    def weights(self) -> set[tuple[int, int]]:
        """Return marks of the weights, each of which is new once it was changed in place, other than through its ``data``."""
        return {(id(parameter), version_of(parameter)) for parameter in self.parameters()}

    def restore_modes(self) -> None:
        """Restore every module's train or eval mode, as training does between its phases."""
        self._switches.restore_modes()

    def start_cold(self, release: Callable[[], object] = lambda: None) -> None:
        """Drop what trials have created, `release` its memory, and put back what they have changed or freed."""
        self.find_moves()
        unfinished = _put_back_alive(filter(self._goes_back, self._all_places()))
        self._restore_replaced(on_host=True)  # what a step swaps in takes memory of the card
        release()  # no variable here may hold what is to be released
        _put_back(unfinished)
        self._restore_replaced(on_host=False)
        if not self._only_at_end:
            _put_back(self._restarted())
        self._let_go_again()
        self._switches.restore_flags()

    def _restore_replaced(self, *, on_host: bool) -> None:
        """Restore the tensors of the host, or all others, that became other tensors."""
        for copy in self.tensors:
            if not (copy.has_bytes and copy.is_replaced):
                continue
            if copy.find() is not None and (copy.device.type == "cpu") == on_host:
                copy.restore()

    def _goes_back(self, place: Place) -> bool:
        """Return whether a place goes back before each trial."""
        when = place.values.when
        if when is When.EACH_TRIAL:
            return not (place.moves or self._only_at_end)
        return when is When.COLD

    def _restarted(self) -> list[OpaquePlace]:
        """Return the places compared by value that go back before each trial."""
        return [place for place in self.opaque if place.is_restarted]

    def _let_go_again(self) -> None:
        """Track the optimizers that were made anew, and keep alive nothing that was."""
        for optimizer in self.copies.references.alive(torch.optim.Optimizer):
            self._optimizers.setdefault(optimizer, [])
        self.copies.references.let_go_again()

    def _all_places(self) -> list[Place]:
        of_optimizers = chain.from_iterable(list(self._optimizers.values()))
        return [*self.places, *self.tensors.values(), *self.late.values(), *of_optimizers]

    def end_trial(self, *, passed: bool) -> None:
        """Take note of what has moved on, and of what `leave` would bring back.

        If the step's counters cannot be put back, take over what a trial that passed has frozen,
        grouped and registered, and what has become of the state that optimizers had.
        """
        for place in self.places:
            place.left = {}
        self.find_moves()
        if passed and not self.is_exact:
            self._switches.read_flags(self.parameters())
            containers: list[object] = []
            for optimizer in self.optimizers:
                groups, state = optimizer.param_groups, state_of(optimizer)
                lists = map(itemgetter("params"), groups)
                containers += [groups, *groups, *lists, state, *state.values()]
            ids = set(map(id, containers))
            for place in self._all_places():
                had_state = id(place.values.holder) in ids and not place.was_empty
                if place.values.is_registry or had_state:
                    place.restart_from_here()

    def find_moves(self) -> None:
        """Mark the values beside an iterator or a queue that has moved on, up to the roots: they must agree with it."""
        moved = [source for place, source in self._sources if place.has_changed]
        for place in beside_sources(self.places, moved):
            place.moves = True

    def leave(self) -> bool:
        """Bring back the plain values that the last trial left, and put values back only at the end. Return whether there were any."""
        has_left = False
        for place in self.counting():
            with suppress(Exception):
                has_left |= place.leave()
        self._only_at_end = True
        return has_left

    def plain_values(self) -> object:
        """Return the numbers, texts and lengths that the user's code has changed, and the states of random number generators."""
        values = [place.plain_values() for place in self.counting()]
        own = [repr(place.read()) for place in self._restarted()]
        return values, own, random.getstate(), pickle.dumps(np.random.get_state())

    def counted(self) -> list[object] | None:
        """Return `counted` of all that the step can reach now."""
        if not self.is_exact:
            return None
        return counted(self._roots, without=[self._device])

    def counting(self) -> list[Place]:
        """Return the places with which the user's code may count: all but those that decide about memory."""
        return [place for place in self.places if place.values.when is not When.COLD]

    # --- at the end ---

    def put_back(self) -> None:
        """Put everything back but the bytes of the model and its tensors."""
        places = self._all_places()
        for place in places:
            place.go_back_to_start()
        unfinished = _put_back_alive(places)
        for place in places:
            place.left = {}  # the last trial's iterators end, and with them the workers of its data loaders
        _put_back(unfinished)
        self._let_go_again()
        _put_back(self.opaque)

    def differences(self, loaded: set[Reference]) -> list[str]:
        """Return the paths of what of the training state differs, but for attributes of `loaded` objects."""
        paths: list[str] = []
        for place in self._all_places():
            if place.values.trains and place.values.owner not in loaded:
                paths += place.changes()
        return paths

    def changes(self) -> list[str]:
        """Return what of the user's differs from the start, each with its kind, such as ``"trainer.it (an iterator)"``."""
        changed: dict[str, Any] = {}
        for opaque in self.opaque:
            if opaque.has_changed:
                changed[opaque.path] = opaque
        for place in self.places:
            if not place.values.trains:
                changed |= place.changes()
        return [f"{path} ({kind_of(value)})" for path, value in changed.items()]


class Switches:
    """The modes of modules, and which parameters require gradients."""

    def __init__(self, stateful: Iterable[Reference]) -> None:
        self._modes: list[tuple[Reference, bool]] = []
        self._flags: list[tuple[Callable[[], torch.Tensor | None], bool]] = []
        for reference in stateful:
            if issubclass(reference.kind, torch.nn.Module):
                self._modes.append((reference, reference.find().training))

    def modules(self) -> list[torch.nn.Module]:
        """Return the modules that are alive."""
        return present(reference.find for reference, _ in self._modes)

    def read_flags(self, parameters: Iterable[torch.Tensor]) -> None:
        """Save which parameters require gradients."""
        self._flags = [(weak(leaf), leaf.requires_grad) for leaf in parameters if leaf.is_leaf]

    def restore_modes(self) -> None:
        for reference, training in self._modes:
            module = reference.find()
            if module is not None:
                module.training = training

    def restore_flags(self) -> None:
        """Let parameters require gradients as saved: a trial may end while the step has frozen some."""
        for find, requires_grad in self._flags:
            parameter = find()
            if parameter is None:
                continue
            if not parameter.is_leaf:  # the step has written to it in place, and recorded that
                parameter.detach_()
            parameter.requires_grad_(requires_grad)


def _put_back_alive(places: Iterable[Place]) -> list[Place]:
    """Put back what is alive; return the places where something was freed, or that could not be read or written."""
    unfinished = []
    for place in places:
        is_back = False
        with suppress(Exception):
            is_back = place.put_back_alive()
        if not is_back:
            unfinished.append(place)
    return unfinished


def _put_back(places: Iterable[Place | OpaquePlace]) -> None:
    for place in places:
        with suppress(Exception):  # `changes` names what did not come back, also from a lost device
            place.put_back()


def beside_sources(places: Iterable[Place], moved: Iterable[int]) -> set[Place]:
    """Return the places that must agree with sources of data that have moved on, which are given by their ids.

    A counter must agree with the iterator beside it, and with one in an object beside it. So follow
    what holds each source outwards, up to the roots, and from there the containers inwards.
    """
    holders, containers = defaultdict[int, list[Place]](list), defaultdict[int, list[Place]](list)
    outwards, beside = list(moved), set[Place]()
    if not outwards:
        return beside
    for place in places:
        for value in place.ids:
            holders[value].append(place)
        owner = place.values.owner
        if owner is not None and issubclass(owner.kind, dict | list | set | deque):
            containers[owner.first_id].append(place)
    while outwards:
        for place in holders.pop(outwards.pop(), ()):
            beside.add(place)
            if place.values.owner is not None:
                outwards.append(place.values.owner.first_id)
    inwards = list(beside)
    while inwards:
        for value in inwards.pop().ids:
            for place in containers.pop(value, ()):
                beside.add(place)
                inwards.append(place)
    return beside


def gradients_of(parameters: Iterable[torch.Tensor]) -> set[tuple[int, int, int]]:
    """Return marks of the gradients that parameters have, each of which is new once it was computed again."""
    return {(id(leaf), id(grad), version_of(grad)) for leaf, grad in gradients_among(parameters)}


def gradients_among(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the leaves that have a gradient, with it."""
    for tensor in tensors:
        gradient = gradient_of(tensor)
        if gradient is not None:
            yield tensor, gradient


def largest_added(tracker: Tracker, least_bytes: int) -> list[str]:
    """Return what the user's code has added since the start, such as ``"losses (12.00 MiB)"``, largest first.

    Gradients and optimizer state are not among it, since every step of training makes them.
    """
    storages: dict[str, dict[int, int]] = defaultdict(dict)  # by path: the bytes of each
    for place in (*tracker.tensors.values(), *tracker.counting()):
        for path, value in place.added():
            if path.endswith(".grad"):
                continue
            for tensor in filter(can_copy, tensors_in(value)):
                storage = tensor.untyped_storage()
                storages[path][storage._cdata] = storage.nbytes()
    sizes = {path: sum(of_path.values()) for path, of_path in storages.items()}
    largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:3]
    return [
        f"{path} ({format_bytes(sizes[path])})" for path in largest if sizes[path] >= least_bytes
    ]


def present(finders: Iterable[Callable[[], Any]]) -> list[Any]:
    """Return what is still there."""
    return known(find() for find in finders)


def _each_once(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


def _roots_of(optimizer: torch.optim.Optimizer) -> list[tuple[object, str]]:
    """Return the groups and the state of an optimizer, with their paths; one that wraps another may have neither."""
    attributes, roots = vars(optimizer), []
    for name in ("param_groups", "state"):
        if name in attributes:
            roots.append((attributes[name], f"{type(optimizer).__name__}.{name}"))
    return roots


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of an optimizer."""
    groups = map(itemgetter("params"), optimizer.param_groups)
    return [*chain.from_iterable(groups)]


def state_of(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """Return an optimizer's state by parameter; empty if it stores its state in another way."""
    state = getattr(optimizer, "state", None)
    return state if isinstance(state, dict) else {}


def state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield an optimizer's state tensors, without scalars such as step counts, which stay on the host."""
    for state in state_of(optimizer).values():
        # Some optimizers store a single value.
        values = state.values() if isinstance(state, dict) else [state]
        for value in values:
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                yield value
