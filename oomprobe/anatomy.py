"""What rules of thumb count of a model: its parameters, the elements of a sample and those of its activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    """Counted in one call of a model.

    Attributes:
        parameters: Elements that are trained.
        sample_elements: Of the inputs, for one sample.
        activation_elements: Of the results of all modules without parts, for one sample.
    """

    parameters: int
    sample_elements: int
    activation_elements: int


class AnatomyCounter:
    """Counts what passes through a model inside, by forward hooks on its modules: torch's global ones leave traces.

    Args:
        model: With all its parts.
        batch_size: Samples of a call.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU())
        >>> with AnatomyCounter(model, 2) as counter:
        ...     _ = model(torch.zeros(2, 8))
        >>> counter.anatomy
        Anatomy(parameters=36, sample_elements=8, activation_elements=8)
    """

    def __init__(self, model: torch.nn.Module, batch_size: int) -> None:
        self._model, self._batch_size = model, batch_size
        self._depth = self._activations = 0
        self._handles: list[Any] = []
        self.anatomy: Anatomy | None = None

    def __enter__(self) -> AnatomyCounter:
        for module in self._model.modules():
            self._handles += [
                module.register_forward_pre_hook(self._enter_module),
                module.register_forward_hook(self._leave_module, with_kwargs=True),
            ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter_module(self, module: torch.nn.Module, inputs: Any) -> None:
        if not self._depth:
            self._activations = 0
        self._depth += 1

    def _leave_module(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._depth -= 1
        if next(module.children(), None) is None:
            self._activations += _elements(output)
        if self._depth == 0:
            self._meet(module, _elements((args, kwargs)))

    def _meet(self, model: torch.nn.Module, input_elements: int) -> None:
        activations = self._activations // self._batch_size
        if self.anatomy is None or activations > self.anatomy.activation_elements:
            self.anatomy = Anatomy(
                parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
                sample_elements=input_elements // self._batch_size,
                activation_elements=activations,
            )


def _elements(value: Any) -> int:
    return sum(leaf.numel() for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
