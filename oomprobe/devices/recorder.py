"""Record one step and break down its peak memory by purpose and module."""

from __future__ import annotations

import re
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from oomprobe.devices.base import History
from oomprobe.ground.units import known
from oomprobe.records.breakdown import (
    ACTIVATIONS,
    BACKWARD,
    FRAGMENTATION,
    GRADIENTS,
    KINDS,
    PARAMETERS,
    STATE,
    STEPPING,
    WORKSPACES,
    Breakdown,
    ModuleMemory,
)
from oomprobe.records.timeline import Timeline, highest_moments, live_over_time
from oomprobe.state import state_tensors

OUTSIDE = "(outside the model)"
MOST_MODULES = 100


class Recorder:
    """Tracks what allocates during one step: a module, autograd or an optimizer."""

    def __init__(self, model: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._model, self._optimizers = model, list(optimizers)
        self._modules = {
            id(module): (name, type(module).__name__) for name, module in model.named_modules()
        }
        # A stack: the kind of memory allocated now, and the module's name.
        self._contexts = [(ACTIVATIONS, OUTSIDE)]

    @contextmanager
    def recording(self, history: History) -> Iterator[None]:
        """Track one step while the caller records the allocator as `history`."""
        self._history = history
        self._kinds_before = dict(self._blocks_before())
        # (number of allocations so far, the context from then on or the address of a new gradient)
        self._marks: list[tuple[int, tuple[str, str] | int]] = [
            (history.count(), self._contexts[-1])
        ]
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            # Those below.
            warnings.filterwarnings("ignore", message=".*there are global hooks on modules")
            for handle in self._hooks():
                stack.callback(handle.remove)
            stack.enter_context(backward_wrapped(self._in_backward))
            yield

    def _blocks_before(self) -> Iterator[tuple[int, str]]:
        """Yield the address and kind of each block allocated before the step; a later kind replaces an earlier one."""
        parameters = [*self._model.parameters()]
        kinds: list[tuple[str, Iterable[torch.Tensor]]] = [
            *((STATE, state_tensors(optimizer)) for optimizer in self._optimizers),
            (GRADIENTS, known(parameter.grad for parameter in parameters)),
            (PARAMETERS, [*parameters, *self._model.buffers()]),
        ]
        for kind, tensors in kinds:
            for tensor in tensors:
                address = self._history.address(tensor)
                if address is not None:
                    yield address, kind

    def _hooks(self) -> Iterator[Any]:
        yield torch_module.register_module_forward_pre_hook(
            lambda module, _: self._enter(
                ACTIVATIONS, self._modules.get(id(module), (OUTSIDE, ""))[0]
            )
        )
        yield torch_module.register_module_forward_hook(lambda *_: self._leave(), always_call=True)
        yield register_optimizer_step_pre_hook(lambda *_: self._enter(STEPPING))
        yield register_optimizer_step_post_hook(lambda *_: self._leave())
        for parameter in self._model.parameters():
            if parameter.requires_grad and parameter.is_leaf:
                yield parameter.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]

    def _in_backward(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self._enter(BACKWARD)
            try:
                return run(*args, **kwargs)
            finally:
                self._leave()

        return wrapped

    def _enter(self, kind: str, module: str = OUTSIDE) -> None:
        self._contexts.append((kind, module))
        self._marks.append((self._history.count(), self._contexts[-1]))

    def _leave(self) -> None:
        self._contexts.pop()
        self._marks.append((self._history.count(), self._contexts[-1]))

    def _accumulated(self, parameter: torch.Tensor) -> None:
        if parameter.grad is None:
            return
        address = self._history.address(parameter.grad)
        if address is not None:
            self._marks.append((self._history.count(), address))

    def breakdown(
        self,
        batch_size: int,
        step_name: str | None,
        *,
        peak_allocated_bytes: int,
        peak_reserved_bytes: int,
    ) -> Breakdown:
        """Return the breakdown, after the step and the recording have ended."""
        blocks, kind_at_peak, timeline = held_at_peak(
            self._history, self._marks, self._kinds_before
        )
        parts, by_module = bytes_by_kind(blocks), Counter[str]()
        for nbytes, kind, module in blocks:
            if kind == ACTIVATIONS:
                by_module[module] += nbytes
        parts[FRAGMENTATION] = max(0, peak_reserved_bytes - parts.total())
        return Breakdown(
            batch_size=batch_size,
            peak_allocated_bytes=peak_allocated_bytes,
            peak_reserved_bytes=peak_reserved_bytes,
            parts={kind: parts[kind] for kind in KINDS},
            step_name=step_name,
            peak_in={BACKWARD: "backward", STEPPING: "optimizer"}.get(kind_at_peak, "forward"),
            modules=self._largest(by_module),
            timeline=timeline,
        )

    def _largest(self, by_module: Counter[str]) -> tuple[ModuleMemory, ...]:
        """Return the largest modules, with those at the same position of repeated blocks combined."""
        groups: dict[tuple[str, str], list[str]] = defaultdict(list)
        classes = dict(self._modules.values())
        own = Counter[str]()
        for name, module in self._model.named_modules():
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                own[name] += tensor.nbytes
        for name in dict.fromkeys([*by_module, *+own]):
            position = re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
            groups[position, classes.get(name, "")].append(name)
        modules = []
        for (position, kind), names in groups.items():
            shown = position
            if len(names) == 1:
                shown = names[0] or "(the model itself)"
            memory = ModuleMemory(
                name=shown,
                kind=kind,
                count=len(names),
                activation_bytes=sum(by_module[name] for name in names),
                parameter_bytes=sum(own[name] for name in names),
            )
            modules.append(memory)
        modules.sort(key=lambda memory: (-memory.activation_bytes, -memory.parameter_bytes))
        return tuple(modules[:MOST_MODULES])


@contextmanager
def backward_wrapped(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Wrap the two entry points of backward, because torch has no hook around all of it; not calls of them inside backward."""
    originals = {name: getattr(torch.autograd, name) for name in ("backward", "grad")}
    is_inside = False

    def outermost(run: Callable[..., Any]) -> Callable[..., Any]:
        wrapped = wrap(run)

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_inside
            if is_inside:
                return run(*args, **kwargs)
            is_inside = True
            try:
                return wrapped(*args, **kwargs)
            finally:
                is_inside = False

        call.__name__ = run.__name__
        return call

    vars(torch.autograd).update({name: outermost(run) for name, run in originals.items()})
    try:
        yield
    finally:
        vars(torch.autograd).update(originals)


def held_at_peak(
    history: History,
    marks: Sequence[tuple[int, tuple[str, str] | int]],
    kinds_before: Mapping[int, str],
) -> tuple[list[list[Any]], str, Timeline]:
    """Return [bytes, kind, module] of each block in use at the recorded peak, the kind being allocated then, and the memory over time.

    Each of `marks` pairs a number of allocations with either the (kind, module) that allocates from then on, or the address
    of a block that became a gradient. `kinds_before` maps the addresses of earlier blocks to their kinds.
    """
    latest = {
        address: [nbytes, kinds_before.get(address, WORKSPACES), ""]
        for address, nbytes in history.base.items()
    }
    in_use = dict(latest)  # `latest` keeps freed blocks too, until their address is used again
    totals = list(
        accumulate((nbytes for _, nbytes in history.events), initial=sum(history.base.values()))
    )
    peak = totals.index(max(totals))  # the number of events up to the peak
    at_peak, kind_at_peak = list(in_use.values()), ACTIVATIONS
    moments = dict.fromkeys(highest_moments(totals))
    over_time = []
    pending, allocations = deque(marks), marks[0][0]
    for number, (address, nbytes) in enumerate([*history.events, (0, 0)], start=1):
        while pending and pending[0][0] <= allocations:
            _, mark = pending.popleft()
            if isinstance(mark, tuple):
                kind, module = mark
            elif mark in latest:
                latest[mark][1:] = GRADIENTS, ""
        if number - 1 in moments:
            over_time.append(bytes_by_kind(in_use.values()))
        if nbytes <= 0:
            in_use.pop(address, None)
            continue
        latest[address] = in_use[address] = [nbytes, kind, module]
        allocations += 1
        if number == peak:
            at_peak, kind_at_peak = list(in_use.values()), kind
    return (
        at_peak,
        kind_at_peak,
        Timeline(events=tuple(moments), live_bytes=live_over_time(over_time)),
    )


def bytes_by_kind(blocks: Iterable[Sequence[Any]]) -> Counter[str]:
    """Return the bytes of blocks of [bytes, kind, module] by kind."""
    totals = Counter[str]()
    for nbytes, kind, _ in blocks:
        totals[kind] += nbytes
    return totals
