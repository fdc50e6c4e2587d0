"""What a journal's trials are an answer to: the model, its steps, the device, the versions and the options."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch

from oomprobe import __version__
from oomprobe.journal.fingerprint import described, digest, function_of
from oomprobe.journal.sources import sources_of
from oomprobe.options import Options

_HOW_LONG = {"time_limit_s", "trial_time_limit_s"}  # a probe that ran out of time is resumed with more of it


def question_of(
    model: torch.nn.Module,
    steps: Mapping[str, Callable[..., object]],
    device_name: str,
    options: Options,
    *,
    memory: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """What a trial depends on, as JSON types that are the same in every process; total.

    Not seen, so not compared: values of tensors, and settings inside objects that a step reaches otherwise than by its
    closure, its module or its own attributes, such as ``config.sequence_length``.

    Args:
        model: As it will be trained.
        steps: By name.
        device_name: As `Device.name`.
        options: Those about time are left out.
        memory: What the device has, and what holds this process to less, in bytes by name.

    Example:
        >>> question = question_of(torch.nn.Linear(2, 2), {"step": print}, "cpu", Options(time_limit_s=60))
        >>> question["device"], question["steps"]["step"]["name"], "time_limit_s" in question["options"]
        ('cpu', 'print', False)
    """
    return {
        "oomprobe": ".".join(__version__.split(".")[:2]),
        "python": ".".join(platform.python_version_tuple()[:2]),  # code is compiled otherwise by each
        "torch": str(torch.__version__),
        "device": device_name,
        "memory": dict(memory or {}),
        "threads": torch.get_num_threads(),
        "model": _model(model),
        "steps": {name: _step(step) for name, step in steps.items()},
        "sources": sources_of([*map(function_of, steps.values()), *{type(part): None for part in model.modules()}]),
        "options": {name: value for name, value in asdict(options).items() if name not in _HOW_LONG},
    }


def _step(step: Callable[..., object]) -> dict[str, Any]:
    function = function_of(step)
    return {
        "module": _name(function, "__module__"),
        "name": _name(function, "__qualname__"),
        "sha256": digest(step),
        "asked": _asked(step),
    }


def _asked(step: Callable[..., object]) -> str | None:
    """What an adapter says its step depends on, hashed: settings inside objects of a framework are not looked into."""
    try:
        asked = getattr(step, "oomprobe_asked", None)
        return hashlib.sha256(repr(asked).encode()).hexdigest() if isinstance(asked, tuple) else None
    except Exception:  # an object's own attributes may do anything
        return None


def _name(function: object, name: str) -> str:
    """Its own, or that of its type."""
    for one in (function, type(function)):
        try:
            value = getattr(one, name, None)
        except Exception:  # an object's own attributes may do anything
            value = None
        if isinstance(value, str):
            return value
    return "unknown"


def _model(model: torch.nn.Module) -> dict[str, Any]:
    """Besides shapes, what else decides the memory: kinds of modules and their code, modes, what is frozen."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    modules = [(name, type(part).__qualname__, part.training) for name, part in model.named_modules()]
    kinds = {type(part) for part in model.modules() if not type(part).__module__.startswith("torch.")}
    forwards = sorted(([kind.__qualname__, described(kind.forward)] for kind in kinds), key=json.dumps)
    parts = [sorted(map(_tensor, *zip(*tensors, strict=True))) if tensors else [], sorted(modules), forwards]
    return {
        "class": type(model).__qualname__,
        "parameters": sum(_count(parameter) for parameter in model.parameters()),
        "sha256": hashlib.sha256(json.dumps(parts).encode()).hexdigest(),
    }


def _tensor(name: str, tensor: torch.Tensor) -> list[Any]:
    return [name, _shape(tensor), str(tensor.dtype), tensor.requires_grad]


def _shape(tensor: torch.Tensor) -> list[int] | str:
    try:
        return [int(size) for size in tensor.shape]
    except Exception:  # of a lazy module, before its first call
        return type(tensor).__qualname__


def _count(parameter: torch.Tensor) -> int:
    shape = _shape(parameter)
    return 0 if isinstance(shape, str) else parameter.numel()
