"""The tensors that are on a device before the first step, where there is a device to put them on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from oomprobe.state.capture import reachable


def resident_tensors(roots: Iterable[object]) -> list[torch.Tensor]:
    """Parameters, buffers, gradients and optimizer state of everything that steps can reach, each once.

    Args:
        roots: The model, steps, and further objects with state.

    Example:
        >>> model = torch.nn.BatchNorm1d(3)
        >>> [tuple(t.shape) for t in resident_tensors([model])]
        [(3,), (3,), (3,), (3,), ()]
    """
    found = {id(tensor): tensor for value in reachable(roots) for tensor in _tensors_of(value)}
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


def state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """What an optimizer keeps for its parameters; counts of steps, single numbers, stay on the host."""
    for state in optimizer.state.values():
        yield from (tensor for tensor in state.values() if isinstance(tensor, torch.Tensor) and tensor.dim() > 0)
