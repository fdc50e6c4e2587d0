"""Hooks of modules and tensors: the dictionaries they are in, put back in place so that their handles go on working."""

from __future__ import annotations

import torch

from oomprobe.state.kept import Kept
from oomprobe.state.values import Memory

# torch/nn/modules/module.py, Module.__init__.
MODULE_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_is_full_backward_hook",  # None until the first hook says of which kind all are
    "_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")  # None until there is one (torch/_tensor.py)


class KeptHooks:
    """The hooks of one module or tensor."""

    def __init__(self, holder: torch.nn.Module | torch.Tensor, memory: Memory) -> None:
        self._holder = holder
        of_module = isinstance(holder, torch.nn.Module)
        names = [name for name in MODULE_HOOKS if name in vars(holder)] if of_module else TENSOR_HOOKS
        self._kept: dict[str, Kept] = {name: memory.keep(getattr(holder, name)) for name in names}

    @property
    def name(self) -> str:
        return f"hooks of {type(self._holder).__name__}"

    def put_back(self) -> None:
        for name, kept in self._kept.items():
            before, now = kept.recall(), getattr(self._holder, name)
            if now is not before:
                if isinstance(now, dict):
                    now.clear()  # autograd goes on calling what is in it after the attribute is None again
                setattr(self._holder, name, before)

    def differences(self) -> list[str]:
        if any(kept.differs(getattr(self._holder, name, None)) for name, kept in self._kept.items()):
            return [self.name]
        return []
