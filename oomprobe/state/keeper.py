"""The snapshot of everything a step can change, its restoration in place, and the comparison that proves it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from functools import partial
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from oomprobe.devices import linux
from oomprobe.errors import UnreliableError
from oomprobe.state.capture import reachable
from oomprobe.state.cold import ColdStart
from oomprobe.state.hooks import KeptHooks
from oomprobe.state.kept import Kept
from oomprobe.state.late import KeptLate
from oomprobe.state.modules import KeptModule
from oomprobe.state.objects import KeptObject
from oomprobe.state.preserve import preserved
from oomprobe.state.resident import bytes_left_by_steps
from oomprobe.state.shelf import Shelf, shelf_beside_limits, with_room
from oomprobe.state.storage import once_per_storage
from oomprobe.state.surroundings import Surroundings
from oomprobe.state.tensors import KeptParts, KeptTensor, KeptWhole, copy_storages, plain_parts, storages_of
from oomprobe.state.values import Memory
from oomprobe.units import format_bytes

HOST_SHARE = 0.9  # of the free host memory: more than that for a copy leaves nothing for the steps' own host side

UNREAD = "{name}: its state_dict() could not be read ({why}), so its attributes were kept instead, as far as they go"
UNKNOWN_BEFORE = (
    "{kind} was first seen when it stepped, so what the gradients of {count} of its parameters were before the probe, and "
    "the buffers beside them, is not known: the gradients are None now. Pass it and its modules in preserve to have them "
    "back as they were"
)


class Keeper:
    """Keeps the model, every object with state that the steps reach, and the surroundings.

    Args:
        model: The module that is probed.
        steps: The steps that will run.
        preserve: Further objects with ``state_dict()`` and ``load_state_dict()``, or one, or None.
        device_type: Kind of device the steps run on.

    Raises:
        InvalidArgumentError: an object in `preserve` has no state to keep.
        UnreliableError: the copy does not fit in host memory.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> keeper = Keeper(model, [], [], "cpu")
        >>> _ = torch.nn.init.ones_(model.weight), model.eval(), torch.rand(3)
        >>> keeper.put_back()
        >>> keeper.differences(), model.training
        ([], True)
    """

    def __init__(self, model: torch.nn.Module, steps: Iterable[object], preserve: object, device_type: str) -> None:
        preserve, steps = preserved(preserve), list(steps)
        self._optimizers: list[torch.optim.Optimizer] = []
        self._late: MutableMapping[torch.optim.Optimizer, KeptLate] = WeakIdKeyDictionary()  # some have no hash
        self._late_parameters: list[tuple[weakref.ref[torch.optim.Optimizer], list[int]]] = []
        self._model = model
        self._shelf = shelf_beside_limits()
        self._surroundings = Surroundings(device_type)
        self._memory = Memory()
        self._modules: list[KeptModule] = []
        self._hooks: list[KeptHooks] = []
        self._objects: list[KeptObject] = []
        self._grads: dict[int, tuple[torch.Tensor, Kept]] = {}
        self._seen: dict[int, object] = {}
        self._unread: list[str] = []
        self._unknown_before: list[tuple[str, set[int]]] = []  # by kind of optimizer, the ids of parameters
        found = [model, *preserve, *reachable([model, *steps, *preserve])]
        self._keep_all(found)
        self._cold = ColdStart(found)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that are kept and alive."""
        return [*self._optimizers, *self._late]

    @property
    def notes(self) -> list[str]:
        """What is not kept as well as it should be; nothing of what has died, for nothing is left of it."""
        unknown = [(kind, len(keys)) for kind, keys in self._unknown_before if keys]
        return [*self._unread, *(UNKNOWN_BEFORE.format(kind=kind, count=count) for kind, count in unknown)]

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep an optimizer that shows itself by stepping, just before it does, for as long as it lives."""
        if not self._knows(optimizer):
            self._keep_all([optimizer, *reachable([optimizer])], late=True)
            self._cold.see(optimizer)

    def release_dead(self) -> None:
        """Let go of what died with an optimizer: a step may make its model and optimizer anew on each call."""
        dead = [key for optimizer, keys in self._late_parameters if optimizer() is None for key in keys]
        self._late_parameters = [one for one in self._late_parameters if one[0]() is not None]
        if not dead:
            return
        gradients = {key: self._grads.pop(key)[1] for key in dead}
        for key in dead:
            self._seen.pop(key, None)
        gone = self._memory.release(dead)
        for _, keys in self._unknown_before:
            keys -= gone
        for key in set(dead) - gone:
            parameter = self._seen[key] = self._memory.value(key)
            self._grads[key] = (parameter, gradients[key])

    def put_back(self, *, device_lost: bool = False) -> None:
        """Restore everything in place. With a lost device, only what lives on the host.

        Raises:
            UnreliableError: something could not be restored; everything else was.
        """
        failed: list[str] = []
        with once_per_storage():
            for name, restore in self._restorations(device_lost=device_lost):
                try:
                    restore()
                except Exception as error:  # whatever the user's own objects raise: the rest is still to be restored
                    failed.append(f"{name} ({type(error).__name__}: {error})")
        failed += self._surroundings.put_back(device_lost=device_lost) or []
        if failed and not device_lost:
            raise UnreliableError(
                "not everything could be put back as it was before the probe: "
                + ", ".join(failed[:5])
                + ". Do not train with this model: load it again"
            )

    def _restorations(self, *, device_lost: bool) -> Iterator[tuple[str, Callable[[], object]]]:
        if not device_lost:
            yield "gradients", self._drop_replaced_gradients
        for tensor in self._memory.tensors:
            if not (device_lost and tensor.device.type != "cpu"):
                yield f"a tensor on {tensor.device}", tensor.put_back
        if not device_lost:
            for kept in self._restorables:
                yield kept.name, kept.put_back
            for parameter, grad in self._grads.values():
                yield "a gradient", partial(_put_gradient_back, parameter, grad)

    def _drop_replaced_gradients(self) -> None:
        for parameter, kept in self._grads.values():
            if parameter.grad is not _watched(kept):
                parameter.grad = None

    def differences(self) -> list[str]:
        """What is not, bit for bit, as it was kept; empty when everything is."""
        with once_per_storage():
            found = [name for restorable in self._restorables for name in restorable.differences()]
            grads = self._grads.values()
            found += [f"a gradient of shape {tuple(p.shape)}" for p, kept in grads if kept.differs(p.grad)]
        return found + self._surroundings.differences()

    @property
    def _restorables(self) -> list[KeptModule | KeptHooks | KeptObject | KeptLate]:
        return [*self._modules, *self._hooks, *self._objects, *self._late.values()]

    def close(self) -> None:
        """Let go of what lies in a file, before the training begins: cycles may keep the rest until the next collection."""
        if self._shelf is not None:
            self._shelf.close()

    def restart_counts(self) -> None:
        """Begin schedules and loss scales anew, so that trials do not run them off their end."""
        self._cold.restart_counts()

    def start_cold(self) -> None:
        """Let go of the gradients, optimizer state and buffers that trials have made."""
        self._cold.put_back()

    def put_weights_back(self) -> bool:
        """Restore parameters and buffers, which trials have trained; whether they could be."""
        with once_per_storage():
            for tensor in self._memory.tensors:
                if isinstance(tensor, KeptParts) or tensor.held:
                    tensor.put_back()
        return True

    def restore_modes(self) -> None:
        """Put every module's train or eval mode back, as training does between its phases."""
        for kept in self._modules:
            kept.restore_mode()

    def drop_gradients(self) -> None:
        """Let go of what a failed trial left in ``.grad``."""
        for parameter, _ in self._grads.values():
            parameter.grad = None

    def state_bytes(self, device_type: str) -> int:
        """What gradients and optimizer state hold on a kind of device."""
        return bytes_left_by_steps((parameter for parameter, _ in self._grads.values()), self.optimizers, device_type)

    def host_copy(self) -> dict[str, Any]:
        """The model and the optimizers as they were, in host memory: what survives a lost device.

        What cannot be copied is left out.
        """
        optimizers = [_on_host(kept) for kept in self._objects if kept.is_optimizer]
        return {
            "model": dict(self._host_entries(self._model, "", ())),
            "optimizers": [state for state in optimizers if state is not None],
        }

    def _host_entries(self, module: object, prefix: str, above: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
        kept = next((one for one in self._modules if one.module is module), None)
        if kept is None or id(module) in above:
            return
        for register in ("_parameters", "_buffers"):
            entries = {name: _on_host(value) for name, value in kept.was(register).items()}
            yield from ((prefix + name, value) for name, value in entries.items() if value is not None)
        for name, child in kept.was("_modules").items():
            yield from self._host_entries(_on_host(child), f"{prefix}{name}.", (*above, id(module)))

    def _knows(self, value: object) -> bool:
        return id(value) in self._seen or (isinstance(value, torch.optim.Optimizer) and value in self._late)

    def _keep_all(self, values: Iterable[object], *, late: bool = False) -> None:
        for value in values:
            for part in _with_submodules(value):
                if self._knows(part):
                    continue
                if late and isinstance(part, torch.optim.Optimizer):
                    self._keep_late(part)
                else:
                    self._seen[id(part)] = part
                    self._keep(part, late=late)
        kept = [*self._memory.tensors, *(tensor for one in self._late.values() for tensor in one.tensors)]
        plain = [part for one in kept for part in plain_parts(one)]
        _copy_checked([part for part in (*plain, *self._memory.aliases) if not part.taken], self._shelf)
        self._memory.let_go()

    def _keep_late(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        unknown = {id(p) for p in parameters if p.grad is not None and id(p) not in self._grads}
        if unknown:
            self._unknown_before.append((type(optimizer).__name__, unknown))
        self._late[optimizer] = KeptLate(optimizer)
        self._keep_parameters(optimizer, late=True)

    def _keep_parameters(self, optimizer: torch.optim.Optimizer, *, late: bool) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if late and (new := [id(p) for p in parameters if id(p) not in self._grads]):
            self._late_parameters.append((weakref.ref(optimizer), new))
        for parameter in parameters:
            self._memory.keep(parameter, hold=True)
        self._keep_grads_and_hooks(parameters, late=late)

    def _keep(self, value: object, *, late: bool) -> None:
        if isinstance(value, torch.nn.Module):
            self._modules.append(KeptModule(value, self._memory))
            self._hooks.append(KeptHooks(value, self._memory))
            self._keep_grads_and_hooks(value.parameters(recurse=False), late=late)
        elif isinstance(value, torch.Tensor):
            self._memory.keep(value, hold=True)
            self._keep_grads_and_hooks([value], late=late)
        elif not isinstance(value, torch.utils.data.DataLoader):  # positions of loaders are not covered
            kept = KeptObject(value, self._memory)
            self._objects.append(kept)
            if kept.unread:
                self._unread.append(UNREAD.format(name=kept.name, why=kept.unread))
            if isinstance(value, torch.optim.Optimizer):
                self._optimizers.append(value)
                self._keep_parameters(value, late=late)

    def _keep_grads_and_hooks(self, parameters: Iterable[torch.Tensor], *, late: bool) -> None:
        """A late optimizer's gradients are the step's own already: what there was before it is not known."""
        for parameter in parameters:
            if id(parameter) not in self._grads:
                self._grads[id(parameter)] = (parameter, self._memory.keep(None if late else parameter.grad))
                if not late:
                    self._hooks.append(KeptHooks(parameter, self._memory))


def _with_submodules(value: object) -> Iterator[object]:
    if isinstance(value, torch.nn.Module):
        yield from value.modules()
    else:
        yield value


def _on_host(kept: Kept | KeptObject) -> Any:
    try:
        return kept.on_host()
    except Exception:  # the error that this copy goes with matters more
        return None


def _put_gradient_back(parameter: torch.Tensor, kept: Kept) -> None:
    parameter.grad = kept.recall()


def _watched(kept: Kept) -> torch.Tensor | None:
    return kept.watch() if isinstance(kept, KeptTensor | KeptWhole) else None


def _copy_checked(tensors: list[KeptTensor], shelf: Shelf | None) -> None:
    storages = storages_of(tensors)
    needed = sum(storage.nbytes() for storage, _ in storages.values())
    free = linux.free_bytes()
    if free is not None and needed > HOST_SHARE * free:
        raise UnreliableError(
            f"giving the model back as it was needs a copy of {format_bytes(needed)} in host memory, and "
            f"{format_bytes(free)} is free: nothing was run. Free host memory, or probe a target that can be built anew "
            "(oomprobe run path/to/train.py:build)"
        )
    copy_storages(storages, with_room(shelf, needed, free))
