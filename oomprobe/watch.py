"""Which optimizers really stepped, seen by torch's global hooks; and steps held back to accumulate gradients."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from oomprobe.state.resident import state_of


class OptimizerWatch:
    """Sees every `torch.optim.Optimizer` that steps, even where a GradScaler or an accumulation skips some steps.

    Args:
        before_step: Called with each optimizer just before it steps.
        model: What is trained: on a GPU, autograd calls its hooks in a thread of its own, and an optimizer that steps in
            one of those is ours where it trains this.
    """

    def __init__(
        self, before_step: Callable[[torch.optim.Optimizer], None], model: torch.nn.Module | None = None
    ) -> None:
        self._before_step = before_step
        self._trained = set() if model is None else {id(parameter) for parameter in model.parameters()}
        self._handles: list[Any] = []
        self.stepped: set[int] = set()
        # Those in the midst of a step, and the parameters they had state of before it, by id.
        self._begun: MutableMapping[torch.optim.Optimizer, set[int]] = WeakIdKeyDictionary()
        self._thread = threading.get_ident()

    def __enter__(self) -> OptimizerWatch:
        self._handles = [
            register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: self._here(self._begin, optimizer)),
            register_optimizer_step_post_hook(lambda optimizer, args, kwargs: self._here(self._after_step, optimizer)),
        ]
        return self

    def _here(self, act: Callable[[torch.optim.Optimizer], None], optimizer: torch.optim.Optimizer) -> None:
        """The hooks are of the whole process: what trains another model in another thread is no part of this probe."""
        if threading.get_ident() == self._thread or self._trains_the_model(optimizer):
            act(optimizer)

    def _trains_the_model(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(id(parameter) in self._trained for group in optimizer.param_groups for parameter in group["params"])

    def _begin(self, optimizer: torch.optim.Optimizer) -> None:
        self._before_step(optimizer)
        self._begun[optimizer] = {id(one) for one, state in state_of(optimizer).items() if not _is_empty(state)}

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._begun.pop(optimizer, None)
        self.stepped.add(id(optimizer))

    def drop_half_made(self) -> None:
        """After a call that failed: the state that an optimizer was making is made anew by its next step.

        An AdamW that ran out of memory on the way has a step count for a parameter and no averages: its next step at any
        size would end in a ``KeyError``, and what it has made already is missing from the memory of that.
        """
        for optimizer, had in self._begun.items():
            state = state_of(optimizer)
            for parameter in [one for one in state if id(one) not in had]:
                del state[parameter]
        self._begun.clear()

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()


def _is_empty(state: object) -> bool:
    """Whether it is what a look at ``optimizer.state[parameter]`` leaves, before there is any."""
    return isinstance(state, dict) and not state


@contextmanager
def outside_modes() -> Iterator[None]:
    """For work of our own in the midst of a step: modes that look at the step's operators do not see it."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


@contextmanager
def held_back(optimizers: Iterable[torch.optim.Optimizer], model: torch.nn.Module) -> Iterator[None]:
    """Make `step` and `zero_grad` do nothing, so that calls of a full step accumulate like micro-batches.

    Of the model only `zero_grad`: a module's `step` is the user's own, a method of a cell or a buffer that counts.
    """
    replaced: list[tuple[Any, str]] = [(model, "zero_grad")]
    replaced += [(optimizer, name) for optimizer in optimizers for name in ("step", "zero_grad")]
    before = [(holder, name, vars(holder).get(name)) for holder, name in replaced]
    try:
        for holder, name in replaced:
            vars(holder)[name] = _do_nothing
        yield
    finally:
        for holder, name, own in before:
            if own is None:
                vars(holder).pop(name, None)
            else:
                vars(holder)[name] = own


def _do_nothing(*args: object, **kwargs: object) -> None:
    return None
