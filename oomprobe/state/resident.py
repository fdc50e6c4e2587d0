"""Tensors that stay on a device: those that are there before the first step, and those that steps leave there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from oomprobe.state.compare import plain_parts
from oomprobe.state.reach import reachable


def resident_tensors(roots: Iterable[object]) -> list[torch.Tensor]:
    """Parameters, buffers, gradients and optimizer state of everything that steps can reach, each once.

    Args:
        roots: The model, steps, and further objects with state.

    Example:
        >>> model = torch.nn.BatchNorm1d(3)
        >>> [tuple(t.shape) for t in resident_tensors([model])]
        [(3,), (3,), (3,), (3,), ()]
    """
    roots = list(roots)
    given = [one for one in roots if isinstance(one, torch.Tensor)]
    found = {id(tensor): tensor for value in (*reachable(roots), *given) for tensor in _tensors_of(value)}
    return list(found.values())


def _tensors_of(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.nn.Module):
        yield from value.parameters()
        yield from value.buffers()
        yield from (p.grad for p in value.parameters() if p.grad is not None)
    elif isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, torch.optim.Optimizer):
        yield from state_tensors(value)


def state_of(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """What an optimizer keeps, by parameter; some keep theirs in another way."""
    state = getattr(optimizer, "state", None)
    return state if isinstance(state, dict) else {}


def state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """What an optimizer keeps for its parameters; counts of steps, single numbers, stay on the host."""
    for state in state_of(optimizer).values():
        kept = state.values() if isinstance(state, dict) else [state]  # some keep one tensor, or what is no tensor
        yield from (tensor for tensor in kept if isinstance(tensor, torch.Tensor) and tensor.dim() > 0)


def bytes_left_by_steps(
    parameters: Iterable[torch.Tensor], optimizers: Iterable[torch.optim.Optimizer], device_type: str
) -> int:
    """What gradients and optimizer state hold on a kind of device, each memory once.

    Example:
        >>> weight = torch.ones(3, requires_grad=True)
        >>> weight.sum().backward()
        >>> bytes_left_by_steps([weight], [], "cpu")
        12
    """
    held = [parameter.grad for parameter in parameters if parameter.grad is not None]
    held += [tensor for optimizer in optimizers for tensor in state_tensors(optimizer)]
    parts = (part for tensor in held if tensor.device.type == device_type for part in plain_parts(tensor))
    storages = (part.untyped_storage() for part in parts)
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
