"""What the user's code counts with, wherever it can be reached at this moment.

If it is the same after two calls, and the device is too, the calls that follow can only repeat those between. So whatever may
hide a count makes the answer None: what hands out data, an object written in C, more values than one can look at.
"""

from __future__ import annotations

import array
import datetime
import functools
import pickle
import random
import re
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import numpy as np
import torch

from oomprobe.ground.units import known
from oomprobe.state.contents import PLAIN, in_cells
from oomprobe.state.places import access_to, is_source, is_written
from oomprobe.state.references import REGISTRIES, gradient_of, is_made_in_python, slots_of
from oomprobe.state.tensors import addresses_of, can_copy, version_of
from oomprobe.state.walk import (
    PARALLEL,
    code_names,
    is_learnable,
    is_users_code,
    module_of,
    package_of,
)

SMALL_BYTES = 2**12  # tensors and arrays up to this size are counted with, larger ones hold data
MOST_VALUES = 200_000  # reading them takes about 0.2 s
_OF_OPTIMIZERS = ("state", "param_groups", "defaults")
_CODE = (
    types.FunctionType, types.MethodType, types.CellType, type, functools.partial, property, staticmethod, classmethod,
    functools.cached_property,
)  # fmt: skip
# Packages whose objects hold nothing that a step counts with. Torch's own generators and schedules move on, but decide nothing
# about memory.
_STILL = {
    "torch", "numpy", "logging", "typing", "re", "abc", "operator", "enum", "decimal", "fractions", "pathlib", "uuid", "_csv",
}  # fmt: skip
_STILL_KINDS = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.MethodWrapperType, types.WrapperDescriptorType,
    types.GetSetDescriptorType, types.MemberDescriptorType, types.CodeType, types.GenericAlias, re.Pattern, range, slice,
    datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, np.dtype, np.ufunc, weakref.ref,
    type(...), type(NotImplemented), type(threading.Lock()), type(threading.RLock()),
)  # fmt: skip


class _HiddenError(Exception):
    """A value may count without showing it."""


def counted(roots: Iterable[object], *, without: Iterable[object] = ()) -> list[object] | None:
    """Return the numbers, texts, lengths, small tensors and generators' states that can be reached; None if some may be hidden.

    Weights, gradients and optimizer state are there by their addresses alone.

    Examples:
        >>> numbers = {"seen": 3}
        >>> before = counted([numbers])
        >>> numbers["seen"] += 1
        >>> counted([numbers]) == before, counted([iter([1])])
        (False, None)
    """
    counts: list[object] = [random.getstate(), pickle.dumps(np.random.get_state())]
    # Kept alive, so that no other object gets their ids.
    met = {id(value): value for value in without}
    todo = deque(roots)
    while todo:
        value = todo.popleft()
        if isinstance(value, PLAIN):
            counts.append(value)
        elif id(value) not in met:
            met[id(value)] = value
            counts.append(type(value))
            try:
                todo.extend(_inside(value))
            except _HiddenError:
                return None
        if len(counts) > MOST_VALUES:
            return None
    return counts


def _inside(value: Any) -> Iterable[Any]:
    """Return what a value holds and counts with."""
    if is_written(value):
        return ()
    if is_source(value):
        raise _HiddenError
    looks = (look for kinds, look in _LOOKS if isinstance(value, kinds))
    return next(looks, _in_object)(value)


def _in_code(value: Any) -> Iterable[Any]:
    if isinstance(value, types.CellType):
        return in_cells({"": value}).values()
    if isinstance(value, types.FunctionType):
        return _in_function(value)
    if isinstance(value, type):
        if not is_users_code(value.__module__):
            return ()
        # Names of Python's own hold code, and what libraries keep, such as a dataclass's fields.
        variables = [
            part
            for name, part in vars(value).items()
            if isinstance(part, _CODE) or not name.startswith(("__", "_abc_"))
        ]
        return (*value.__bases__, *variables)
    # Of what stands around code.
    names = ("func", "args", "keywords", "__self__", "__func__", "fget", "fset")
    return [getattr(value, name) for name in names if hasattr(value, name)]


def _in_optimizer(optimizer: torch.optim.Optimizer) -> Iterable[Any]:
    """Return what an optimizer that is not torch's own holds; its state counts steps, which decides nothing about memory."""
    if package_of(optimizer) not in _STILL:
        for name, attribute in vars(optimizer).items():
            if name not in _OF_OPTIMIZERS:
                yield attribute


def _in_object(value: Any) -> Iterable[Any]:
    is_data = str(module_of(value)).startswith("torch.utils.data.")
    is_still = (
        isinstance(value, _STILL_KINDS) or type(value) is object or package_of(value) in _STILL
    )
    if is_still and not is_data:
        return ()
    if not is_made_in_python(type(value)):
        raise _HiddenError
    return type(value), *_attributes(value)


def _attributes(value: Any) -> list[Any]:
    slots = [
        member.__get__(value)
        for name, member in slots_of(type(value)).items()
        if hasattr(value, name)
    ]
    return [*slots, *getattr(value, "__dict__", {}).items()]


def _in_function(function: types.FunctionType) -> Iterable[Any]:
    if package_of(function) in _STILL:
        return
    yield from (
        vars(function),
        function.__defaults__,
        function.__kwdefaults__,
        *(function.__closure__ or ()),
    )
    if is_users_code(module_of(function)):
        yield from _variables_named(function.__globals__, code_names(function.__code__), set())


def _variables_named(variables: dict[str, Any], names: set[str], met: set[int]) -> Iterable[Any]:
    """Yield the variables with these names, of this module and of the modules among them."""
    for name in names & variables.keys():
        value = variables[name]
        if not isinstance(value, types.ModuleType):
            yield value
        elif id(value) not in met:
            met.add(id(value))
            yield from _variables_named(vars(value), names, met)


def _in_module(module: torch.nn.Module) -> Iterable[Any]:
    is_torchs = package_of(module) == "torch"
    for tensor in known([*module._parameters.values(), *module._buffers.values()]):
        yield str(addresses_of(tensor))
        gradient = gradient_of(tensor)
        if gradient is not None:
            yield str(addresses_of(gradient))
        # The buffers of batch norms count calls, which decides nothing about memory.
        if not is_torchs:
            yield _small_on_host(tensor)
        yield from vars(tensor).items()
    yield from module._modules.values()
    if not type(module).__module__.startswith(PARALLEL):  # their attributes belong to C++ objects
        yield type(module)
        for name, value in vars(module).items():
            if name not in REGISTRIES:
                yield value


def _in_tensor(tensor: torch.Tensor) -> Iterable[Any]:
    if can_copy(tensor):
        yield str(addresses_of(tensor))
        if not is_learnable(tensor):
            yield from (tensor.shape, version_of(tensor), _small_on_host(tensor))
    yield from vars(tensor).values()


def _small_on_host(tensor: torch.Tensor) -> str | None:
    """Return the values of a small tensor in host memory."""
    if tensor.device.type != "cpu" or not can_copy(tensor):
        return None
    if (
        type(tensor) not in (torch.Tensor, torch.nn.Parameter)
        or tensor.numel() * tensor.element_size() > SMALL_BYTES
    ):
        return None
    return repr(tensor.detach().tolist())


def _in_array(value: Any) -> Iterable[Any]:
    yield str(value.shape)
    if value.nbytes <= SMALL_BYTES:
        yield value.tobytes()
    if value.dtype.hasobject:
        yield from value.ravel().tolist()


# How to look into a value of each kind, by the first that fits: an object of the user's may be of several.
_LOOKS: tuple[tuple[Any, Callable[[Any], Iterable[Any]]], ...] = (
    (torch.Tensor, _in_tensor),
    (torch.nn.Module, _in_module),
    (dict, lambda value: [*chain.from_iterable(dict.items(value)), *_attributes(value)]),
    (
        (list, tuple, set, frozenset, deque),
        lambda value: [len(value), *value, *_attributes(value)],
    ),
    ((np.ndarray, np.generic), _in_array),
    (
        (random.Random, np.random.Generator, np.random.RandomState),
        lambda value: [repr(access_to(value)[0]())],
    ),
    ((array.array, bytearray), lambda value: [len(value), bytes(value[:SMALL_BYTES])]),
    # Its hits say nothing.
    (functools._lru_cache_wrapper, lambda value: [*value.cache_info()[1:], value.__wrapped__]),
    (torch.optim.Optimizer, _in_optimizer),
    (_CODE, _in_code),
)
