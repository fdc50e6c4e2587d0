"""What the decorator `find_executable_batch_size` refuses, where it is written or where the function is called."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from oomprobe import probe
from oomprobe.errors import InvalidArgumentError
from oomprobe.options import Options, check_size


def checked(options: dict[str, Any], starting_batch_size: int | None, trial_steps: int) -> dict[str, Any]:
    """The options with all that is passed on: the contract counts optimizer steps, and a call makes several.

    Raises:
        InvalidArgumentError: one is wrong.
    """
    check_size("trial_steps", trial_steps)
    if starting_batch_size is not None:
        check_size("starting_batch_size", starting_batch_size)
    try:
        bound = inspect.signature(probe.find_max_batch).bind(None, None, max_batch=starting_batch_size, **options)
    except TypeError as error:
        raise TypeError(f"find_executable_batch_size() {error}") from None
    bound.apply_defaults()
    _check_numbers(bound.kwargs)
    counts = {name: math.ceil(bound.kwargs[name] / trial_steps) for name in ("steps", "confirm_steps")}
    return {**options, **counts, "max_batch": starting_batch_size}


def _check_numbers(options: dict[str, Any]) -> None:
    """As the probe would when the function is called, in the decorator's own words."""
    largest = options["max_batch"]
    check_size("min_batch", options["min_batch"])
    if largest is not None and options["min_batch"] > largest:
        raise InvalidArgumentError(
            f"min_batch={options['min_batch']} is larger than starting_batch_size={largest}, the largest size that is "
            "tried: raise starting_batch_size, or pass None to search until the memory ends"
        )
    try:
        Options(**{one.name: options[one.name] for one in fields(Options)})
    except InvalidArgumentError as error:
        raise InvalidArgumentError(str(error).replace("max_batch", "starting_batch_size")) from None


def check_function(function: Callable[..., Any]) -> None:
    """Refuse what cannot be trained by a call with the batch size first.

    Raises:
        InvalidArgumentError: so it is.
    """
    if not callable(function) or inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise InvalidArgumentError(
            f"{function!r} cannot be probed: it must be a function that trains when it is called with the batch size first"
        )
    name = name_of(function)
    if hasattr(function, "oomprobe_decorated"):
        raise InvalidArgumentError(f"{name} is decorated with find_executable_batch_size already: once is enough")
    try:
        signature = inspect.signature(function)
    except ValueError:  # a callable of C has no signature to look at
        return
    names = list(signature.parameters)
    if names[:1] in (["self"], ["cls"]):
        others = ", ".join([names[0], *(one for one in names[1:] if one != "batch_size")])
        raise InvalidArgumentError(
            f"{name}{signature} is a method, and the batch size is passed before everything else, as with accelerate, so "
            f"that {names[0]} would be a number. Write def {name}(batch_size, {others}) and call it as before, without "
            "the batch size, or decorate a function inside the method"
        )
    try:
        signature.bind_partial(1)
    except TypeError:
        raise InvalidArgumentError(
            f"{name}{signature} takes no batch size, which is passed first: write def {name}(batch_size, ...)"
        ) from None


def check_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse arguments that the function does not take after the batch size, before it is called in vain.

    Raises:
        TypeError: so it is.
    """
    name = name_of(function)
    try:
        inspect.signature(function).bind(1, *args, **kwargs)
    except ValueError:  # a callable of C has no signature to look at
        return
    except TypeError as error:
        raise TypeError(
            f"{name}{inspect.signature(function)} was called with arguments it does not take ({error}). The batch size is "
            f"passed by the decorator: call {name} without it"
        ) from None


def name_of(function: Callable[..., Any]) -> str:
    """What messages call it."""
    return str(getattr(function, "__name__", function))
