"""What a step reads when it asks a tensor without data for its value."""

from __future__ import annotations

from typing import Any

import torch

from oomprobe.simulation.unknown import user_line

ONE_READ = (
    "{where} reads a whole number from a tensor without data: it was given 1. Where a size depends on it, this answer is "
    "wrong"
)
FALSE_READ = (
    "{where} asks a tensor without data for yes or no: the answer was no. Where the step then does less, this answer is "
    "wrong"
)


def read(tensor: torch.Tensor, notes: dict[str, None]) -> Any:
    """A finite number that is not zero for a loss, 1 for a count, False for a question; these two with a note."""
    if tensor.dtype is torch.bool:
        notes[FALSE_READ.format(where=user_line())] = None
        return False
    if tensor.dtype.is_floating_point:
        return 1.0
    if tensor.dtype.is_complex:
        return 1.0 + 0.0j
    notes[ONE_READ.format(where=user_line())] = None
    return 1
