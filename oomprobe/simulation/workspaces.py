"""Memory that CUDA's libraries take for themselves, as far as it is known without them."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from oomprobe.simulation.memory import Memory

_aten = torch.ops.aten
_LINEAR_ALGEBRA = {
    getattr(_aten, name).default
    for name in ("mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot", "addbmm", "_scaled_mm", "_int_mm")
}
_CONVOLUTION, _CONVOLUTION_BACKWARD = _aten.convolution.default, _aten.convolution_backward.default


def needs(func: Any) -> bool:
    """Whether an operator uses the linear algebra library, which takes a workspace for each thread."""
    return func in _LINEAR_ALGEBRA


class PerThread:
    """A cuBLAS handle, and so a workspace, for the main thread and for the thread of backward."""

    def __init__(self, memory: Memory, nbytes: int) -> None:
        self._memory, self._nbytes = memory, nbytes
        self._have: set[bool] = set()

    def clear(self) -> None:
        """Give them back, as ``torch._C._cuda_clearCublasWorkspaces`` does."""
        self._memory.clear_workspaces()
        self._have.clear()

    def ensure(self) -> None:
        """Take the workspace of this thread, where it was not taken yet."""
        in_backward = torch._C._current_graph_task_id() != -1
        if self._nbytes and in_backward not in self._have:
            self._memory.workspace(self._nbytes)
            self._have.add(in_backward)


def of_convolution(func: Any, args: Any) -> int:
    """Bytes that a convolution would like, at most: the patches of its input side by side; 0 for other operators.

    cuDNN chooses among kernels by what is free, and knows ones that need nothing: this is an upper end, no prediction.
    """
    if func is _CONVOLUTION:
        images, weight, stride, padding, dilation, transposed = args[0], args[1], args[3], args[4], args[5], args[6]
    elif func is _CONVOLUTION_BACKWARD:
        images, weight, stride, padding, dilation, transposed = args[1], args[2], args[4], args[5], args[6], args[7]
    else:
        return 0
    kernel = list(weight.shape[2:])
    if prod(kernel) == 1:
        return 0
    if transposed:  # the patches are those of its output, one for each place of its input
        return int(weight.shape[1] * args[-1 if func is _CONVOLUTION else 9] * prod(kernel) * images.shape[0]
                   * prod(images.shape[2:]) * images.element_size())  # fmt: skip
    spread = range(len(kernel))
    out = [
        (images.shape[2 + i] + 2 * _at(padding, i) - _at(dilation, i) * (kernel[i] - 1) - 1) // _at(stride, i) + 1
        for i in spread
    ]
    patches = images.shape[0] * images.shape[1] * prod(kernel) * prod(out)
    return int(max(0, patches) * images.element_size())


def _at(values: Any, index: int) -> int:
    return int(values[index] if len(values) > 1 else values[0])
