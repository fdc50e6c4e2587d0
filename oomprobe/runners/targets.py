"""Targets: functions that build a model and its step, named by module or file. Importing this module does not import torch."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from oomprobe.errors import InvalidArgumentError
from oomprobe.ground.words import did_you_mean
from oomprobe.records.options import StepFn

if TYPE_CHECKING:
    import torch

RECIPE = (
    "Write it as 'path/to/train.py:build' or 'package.module:build', where build() returns (model, step_fn); or probe a command: "
    "oomprobe run -- python train.py --batch-size {batch}"
)


NO_PAIR = (
    "{target} returned {kind}: return the model and the step, in this order and without more. The "
    "step reaches the optimizer and all else as a variable of the function that builds them. "
    "{recipe}"
)
NEEDS_ARGUMENTS = (
    "{target} is called without arguments, and it has {signature}: {error}. Give each argument a "
    "default, or name a function that calls it: def build(): return make_model_and_step(...)"
)


def name_of(target: object) -> str:
    """Return the name under which another process can import a target, after checking that a file which it names exists."""
    if isinstance(target, str):
        _split_target(target)
        return target
    name, module = (
        getattr(target, "__qualname__", ""),
        sys.modules.get(getattr(target, "__module__", None) or ""),
    )
    if module is None or not name.isidentifier() or getattr(module, name, None) is not target:
        raise InvalidArgumentError(
            f"{name or type(target).__name__} cannot be imported in another process: it is a lambda, a closure, a method or an "
            f"object. Move it to the top level of a file. {RECIPE}"
        )
    if module.__name__ != "__main__":
        return f"{module.__name__}:{name}"
    file = getattr(module, "__file__", None)
    if file is None or not file.endswith(".py"):
        raise InvalidArgumentError(
            f"{name} was defined interactively, so other processes cannot import it: put it in a file. {RECIPE}"
        )
    return f"{file}:{name}"


def build(target: str, device: Any = None) -> tuple[torch.nn.Module, StepFn]:
    """Import a target and call it. With a simulated device, the target may use ``"cuda"`` without a GPU."""
    import torch

    from oomprobe.devices import Device

    with device.building() if isinstance(device, Device) else nullcontext():
        function = load(target)
        check_call(target, function)
        built = function()
    if isinstance(built, tuple) and len(built) == 2 and isinstance(built[0], torch.nn.Module):
        return built
    kind = type(built).__name__
    if isinstance(built, tuple):
        kind = f"({', '.join(type(part).__name__ for part in built)})"
        if any(isinstance(part, torch.nn.Module) for part in built):
            raise InvalidArgumentError(NO_PAIR.format(target=target, kind=kind, recipe=RECIPE))
    raise InvalidArgumentError(f"{target} returned {kind}, not a pair (model, step_fn). {RECIPE}")


def check_call(target: str, function: Callable[..., Any]) -> None:
    """Raise InvalidArgumentError unless the function of a target can be called without arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a callable implemented in C
        return
    try:
        signature.bind()
    except TypeError as error:
        raise InvalidArgumentError(
            NEEDS_ARGUMENTS.format(target=target, signature=signature, error=error)
        ) from None


def load(target: str) -> Callable[[], Any]:
    """Return the function of a target without calling it."""
    place, name = _split_target(target)
    module = _from_file(Path(place).resolve()) if place.endswith(".py") else _from_name(place)
    function = getattr(module, name, None)
    if not callable(function):
        functions = [one for one, value in vars(module).items() if callable(value)]
        raise InvalidArgumentError(
            f"{place} has no function {name!r}{did_you_mean(name, functions) or '.'} {RECIPE}"
        )
    return function  # type: ignore[no-any-return]


def _split_target(target: str) -> tuple[str, str]:
    """Return the module or file of a target, and the name of the function."""
    place, _, name = target.rpartition(":")
    if (
        not place
        or (place.startswith(".") and not place.endswith(".py"))
        or not name.isidentifier()
    ):
        raise InvalidArgumentError(f"{target!r} is not a target. {RECIPE}")
    if place.endswith(".py") and not Path(place).is_file():
        files = (one.name for one in Path(place).parent.glob("*.py") if one.is_file())
        meant = did_you_mean(Path(place).name, files) or "."
        raise InvalidArgumentError(
            f"there is no file {str(Path(place).resolve())!r}{meant} {RECIPE}"
        )
    return place, name


def _from_file(path: Path) -> ModuleType:
    # Named by its stem, so that other modules import the same one, unless that name is taken, as ``types`` is.
    name, present = path.stem, sys.modules.get(path.stem)
    if present is not None and getattr(present, "__file__", None) != str(path):
        name = f"_oomprobe_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # as for a script, which can import its siblings
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _from_name(name: str) -> ModuleType:
    if {"", str(Path.cwd())}.isdisjoint(sys.path):
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise InvalidArgumentError(
                f"there is no module {error.name!r} to import. {RECIPE}"
            ) from None
        raise
