"""What a ``state_dict`` said, kept for a comparison and for ``load_state_dict``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from oomprobe.state.compare import same
from oomprobe.state.containers import rebuilt
from oomprobe.state.tensors import KeptTensor
from oomprobe.state.values import Memory


def read_state(value: Any, memory: Memory | None = None) -> tuple[Any, str]:
    """Its state; with a memory, as something that lasts. Or why there is none."""
    try:
        return rebuilt(value.state_dict(), leaf_of(memory)), ""
    except Exception as error:  # some want an argument; some have a state only later, or only where distributed
        return None, f"{type(error).__name__}: {error}"


def state_of(value: Any) -> Any:
    """Its state; None where there is none."""
    return read_state(value)[0]


def is_state(now: Any, kept: Any) -> bool:
    """Whether a state is the one that was kept."""
    return same(now, resolved(kept))


def leaf_of(memory: Memory | None) -> Callable[[Any], Any]:
    """What `rebuilt` makes of the leaves: something that lasts, where there is a memory for it."""
    return (lambda value: value) if memory is None else partial(_lasting, memory)


def _lasting(memory: Memory, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if type(value) in (torch.Tensor, torch.nn.Parameter) and _has_plain_memory(value):
            return memory.alias(value)
        return value.detach().cpu().clone()
    try:
        return copy.deepcopy(value)
    except Exception:  # a lock, a file, a handle
        return value


def _has_plain_memory(tensor: torch.Tensor) -> bool:
    whole = tensor.layout is torch.strided and not tensor.is_quantized and tensor.device.type != "meta"
    return whole and not tensor.is_conj() and not tensor.is_neg()


def resolved(kept: Any) -> Any:
    """A state that was kept, with its tensors in host memory."""
    return rebuilt(kept, lambda leaf: leaf.on_host() if isinstance(leaf, KeptTensor) else leaf)
