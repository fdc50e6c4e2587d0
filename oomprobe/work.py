"""How much work a step does: operators and elements, counted at torch's dispatcher."""

from __future__ import annotations

from contextlib import suppress
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


class WorkCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what is dispatched inside; compiled code runs as it was written.

    Example:
        >>> with WorkCounter() as counter:
        ...     _ = torch.ones(3) + 1
        >>> counter.work
        Work(operators=2, elements=6)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work = Work(operators=0, elements=0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        elements = sum(leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        self.work = Work(operators=self.work.operators + 1, elements=self.work.elements + elements)
        return result


def load_counter() -> None:
    """Count nothing, once: torch imports torch._dynamo with the first operator counted, as with the first optimizer.

    If a probe imported it between trials, each later garbage collection would traverse its objects (50 ms), and on host
    memory its 20 MiB would pass for a leak of the step. An import that fails for want of memory is ignored: this only counts.
    """
    with suppress(Exception), WorkCounter():
        torch.empty(0)
