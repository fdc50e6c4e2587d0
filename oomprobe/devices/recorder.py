"""Record one step, and tell what held the memory at its peak."""

from __future__ import annotations

import re
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from oomprobe.devices.base import History
from oomprobe.report.breakdown import (
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
from oomprobe.state import state_tensors

OUTSIDE = "(outside the model)"
MOST_MODULES = 10


class Recorder:
    """Sees what allocates while one step runs: which module, autograd, or an optimizer."""

    def __init__(self, model: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._model, self._optimizers = model, list(optimizers)
        self._modules = {id(module): (name, type(module).__name__) for name, module in model.named_modules()}
        self._contexts = [(ACTIVATIONS, OUTSIDE)]  # kind of what is allocated now, and the module that does
        self._autocast = self._recomputes = False

    @contextmanager
    def recording(self, history: History) -> Iterator[None]:
        """Record one step; the caller records what the allocator does meanwhile as `history`."""
        self._history = history
        self._known = dict(self._blocks_before())
        # After so many allocations: what allocates from then on, or the address of a block that has become a gradient.
        self._seen: list[tuple[int, tuple[str, str] | int]] = [(history.count(), self._contexts[-1])]
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message=".*there are global hooks on modules")  # ours, which go again
            for handle in self._hooks():
                stack.callback(handle.remove)
            stack.enter_context(self._backward_seen())
            yield

    def _blocks_before(self) -> Iterator[tuple[int, str]]:
        """Address and kind of what is there before the step; the last kind of a block counts."""
        kinds = [
            (STATE, (tensor for optimizer in self._optimizers for tensor in state_tensors(optimizer))),
            (GRADIENTS, (p.grad for p in self._model.parameters() if p.grad is not None)),
            (PARAMETERS, (*self._model.parameters(), *self._model.buffers())),
        ]
        for kind, tensors in kinds:
            for tensor in tensors:
                address = self._history.address(tensor)
                if address is not None:
                    yield address, kind

    def _hooks(self) -> Iterator[Any]:
        yield torch_module.register_module_forward_pre_hook(self._enter_module)
        yield torch_module.register_module_forward_hook(lambda *_: self._leave(), always_call=True)
        yield register_optimizer_step_pre_hook(lambda *_: self._enter(STEPPING))
        yield register_optimizer_step_post_hook(lambda *_: self._leave())
        for parameter in self._model.parameters():
            if parameter.requires_grad and parameter.is_leaf:
                yield parameter.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]

    @contextmanager
    def _backward_seen(self) -> Iterator[None]:
        """Torch has no hook around the whole of backward, so its two entrances are wrapped."""
        own = {name: getattr(torch.autograd, name) for name in ("backward", "grad")}

        def wrapped(run: Any) -> Any:
            def seen(*args: Any, **kwargs: Any) -> Any:
                self._enter(BACKWARD)
                try:
                    return run(*args, **kwargs)
                finally:
                    self._leave()

            return seen

        vars(torch.autograd).update({name: wrapped(run) for name, run in own.items()})
        try:
            yield
        finally:
            vars(torch.autograd).update(own)

    def _enter_module(self, module: torch.nn.Module, args: Any) -> None:
        self._autocast |= torch.is_autocast_enabled("cuda")
        self._recomputes |= any(kind == BACKWARD for kind, _ in self._contexts)
        self._enter(ACTIVATIONS, self._modules.get(id(module), (OUTSIDE, ""))[0])

    def _enter(self, kind: str, module: str = OUTSIDE) -> None:
        self._contexts.append((kind, module))
        self._seen.append((self._history.count(), self._contexts[-1]))

    def _leave(self) -> None:
        self._contexts.pop()
        self._seen.append((self._history.count(), self._contexts[-1]))

    def _accumulated(self, parameter: torch.Tensor) -> None:
        address = None if parameter.grad is None else self._history.address(parameter.grad)
        if address is not None:
            self._seen.append((self._history.count(), address))

    def breakdown(
        self, batch_size: int, step_name: str | None, *, peak_allocated_bytes: int, peak_reserved_bytes: int
    ) -> Breakdown:
        """Tell what held the memory, once the step and the recording have ended."""
        held, kind_at_peak = held_at_peak(self._history, self._seen, self._known)
        parts, by_module = Counter[str](), Counter[str]()
        for nbytes, kind, module in held:
            parts[kind] += nbytes
            if kind == ACTIVATIONS:
                by_module[module] += nbytes
        parts[FRAGMENTATION] = max(0, peak_reserved_bytes - parts.total())
        dtypes = Counter(str(p.dtype).removeprefix("torch.") for p in self._model.parameters())
        return Breakdown(
            batch_size=batch_size,
            peak_allocated_bytes=peak_allocated_bytes,
            peak_reserved_bytes=peak_reserved_bytes,
            parts={kind: parts[kind] for kind in KINDS},
            step_name=step_name,
            peak_in={BACKWARD: "backward", STEPPING: "optimizer"}.get(kind_at_peak, "forward"),
            modules=self._largest(by_module),
            repeated=None if self._recomputes else self._repeated(by_module),
            autocast=self._autocast,
            parameter_dtype=dtypes.most_common(1)[0][0] if dtypes else "float32",
        )

    def _largest(self, by_module: Counter[str]) -> tuple[ModuleMemory, ...]:
        """Modules at the same place of repeated blocks, together."""
        groups: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
        kinds = dict(self._modules.values())
        for name, nbytes in by_module.items():
            place = re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
            groups[place, kinds.get(name, "")][name or "(the model itself)"] = nbytes
        largest = sorted(groups.items(), key=lambda group: -sum(group[1].values()))[:MOST_MODULES]
        return tuple(
            ModuleMemory(
                name=place if len(sizes) > 1 else next(iter(sizes)),
                kind=kind,
                count=len(sizes),
                activation_bytes=sum(sizes.values()),
            )
            for (place, kind), sizes in largest
        )

    def _repeated(self, by_module: Counter[str]) -> tuple[str, int, int] | None:
        """The list of modules of one class that holds the most, with all that is in them."""
        found: list[tuple[str, int, int]] = []
        for name, module in self._model.named_modules():
            if not isinstance(module, torch.nn.ModuleList | torch.nn.Sequential):
                continue
            kinds = Counter(type(child).__name__ for child in module if any(True for _ in child.children()))
            if kinds and kinds.most_common(1)[0][1] > 1:
                inside = f"{name}." if name else ""
                held = sum(nbytes for held_by, nbytes in by_module.items() if held_by.startswith(inside))
                found.append((*kinds.most_common(1)[0], held))
        return max(found, key=lambda one: one[2], default=None)


def held_at_peak(
    history: History, seen: Sequence[tuple[int, tuple[str, str] | int]], known: Mapping[int, str]
) -> tuple[list[list[Any]], str]:
    """Replay the recording: bytes, kind and module of each block in use at the peak, and the kind being allocated then.

    `seen` tells in order, after how many allocations of the allocator, what allocates from then on, or which address
    holds a gradient now; `known` are kinds of the blocks that were there before, by address.
    """
    last = {address: [nbytes, known.get(address, WORKSPACES), ""] for address, nbytes in history.base.items()}
    living = dict(last)  # `last` keeps the block that was at an address last, too
    totals = list(accumulate((nbytes for _, nbytes in history.events), initial=sum(history.base.values())))
    peak = totals.index(max(totals))  # events until then
    held, kind_at_peak = list(living.values()), ACTIVATIONS
    waiting, served = deque(seen), seen[0][0]
    for number, (address, nbytes) in enumerate([*history.events, (0, 0)], start=1):
        while waiting and waiting[0][0] <= served:
            _, what = waiting.popleft()
            if isinstance(what, tuple):
                kind, module = what
            elif what in last:
                last[what][1:] = GRADIENTS, ""
        if nbytes <= 0:
            living.pop(address, None)
            continue
        last[address] = living[address] = [nbytes, kind, module]
        served += 1
        if number == peak:
            held, kind_at_peak = list(living.values()), kind
    return held, kind_at_peak
