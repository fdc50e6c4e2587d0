"""An optimizer that shows itself only by stepping: kept without keeping it, or what it holds, alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from oomprobe.state.compare import same
from oomprobe.state.tensors import KeptParts, KeptTensor, KeptWhole, keep_tensor

_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_NOT_KEPT = object()  # a hook, a patched method: it may lead back to the optimizer


class KeptLate:
    """The tensors, containers and plain values of an optimizer; nothing when it has died, for nothing is left then.

    Its parameters are not kept here: the keeper holds them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.watch: Callable[[], torch.optim.Optimizer | None] = weakref.ref(optimizer)
        self.tensors: list[KeptTensor | KeptWhole | KeptParts] = []
        self._kept = self._keep(vars(optimizer))

    def _keep(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return weakref.ref(value) if value.is_leaf and value.requires_grad else self._keep_tensor(value)
        if isinstance(value, dict):
            return {key: self._keep(part) for key, part in value.items()}
        if type(value) in (list, tuple):
            return [self._keep(part) for part in value]
        return value if isinstance(value, _PLAIN) else _NOT_KEPT

    def _keep_tensor(self, tensor: torch.Tensor) -> KeptTensor | KeptWhole | KeptParts:
        self.tensors.append(keep_tensor(tensor, hold=False))
        return self.tensors[-1]

    @property
    def name(self) -> str:
        return f"state of {type(self.watch()).__name__}"

    def put_back(self) -> None:
        optimizer = self.watch()
        if optimizer is not None:
            for tensor in self.tensors:
                tensor.put_back()
            _restored(self._kept, vars(optimizer))

    def differences(self) -> list[str]:
        optimizer = self.watch()
        if optimizer is None or not _differs(self._kept, vars(optimizer)):
            return []
        return [f"state of {type(optimizer).__name__}"]


def _restored(kept: Any, now: Any) -> Any:
    if kept is _NOT_KEPT:
        return now
    if isinstance(kept, dict):
        target = now if isinstance(now, dict) else {}
        parts = {k: _restored(part, target.get(k)) for k, part in kept.items() if part is not _NOT_KEPT or k in target}
        target.clear()
        target.update(parts)
        return target
    if isinstance(kept, list):
        olds = now if isinstance(now, list | tuple) else ()
        items = [_restored(part, olds[i] if i < len(olds) else None) for i, part in enumerate(kept)]
        if isinstance(now, list):
            now[:] = items
            return now
        return tuple(items) if isinstance(now, tuple) else items
    if isinstance(kept, weakref.ref):
        return kept()
    return kept.recall() if isinstance(kept, KeptTensor | KeptWhole | KeptParts) else kept


def _differs(kept: Any, now: Any) -> bool:
    if kept is _NOT_KEPT:
        return False
    if isinstance(kept, dict):
        if not isinstance(now, dict) or kept.keys() != now.keys():
            return True
        return any(_differs(part, now[key]) for key, part in kept.items())
    if isinstance(kept, list):
        if not isinstance(now, list | tuple) or len(kept) != len(now):
            return True
        return any(_differs(part, one) for part, one in zip(kept, now, strict=True))
    if isinstance(kept, weakref.ref):
        return now is not kept()
    if isinstance(kept, KeptTensor | KeptWhole | KeptParts):
        return kept.differs(now)
    return not same(kept, now)
