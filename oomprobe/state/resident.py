"""Tensors that stay on a device between steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

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
