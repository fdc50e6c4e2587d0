"""How much work a step does: operators and elements, counted at torch's dispatcher."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Operators dispatched and elements of their results."""

    operators: int
    elements: int


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators = self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operators += 1
        self.elements += sum(leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        return result


def compiled_graphs() -> int:
    """Graphs that torch.compile has made in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])


def count_work(call: Callable[[AbstractContextManager[object]], object]) -> Work:
    """Run a call and count what it dispatches; compiled code runs as it was written.

    Args:
        call: Enters what it is given around the work.

    Example:
        >>> def call(counting):
        ...     with counting:
        ...         return torch.ones(3) + 1
        >>> count_work(call)
        Work(operators=2, elements=6)
    """
    counter = _Counter()
    call(counter)
    return Work(operators=counter.operators, elements=counter.elements)
