"""What autograd computes in place on CUDA.

Its formulas, and the engine that adds gradients, write into tensors of their own; not into those of a tensor subclass, as
fakes are. Sources: torch/csrc/autograd/FunctionsManual.cpp (areAnyTensorSubclassLike), input_buffer.cpp
(can_accumulate_inplace).
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from oomprobe.ground import torch_versions
from oomprobe.ground.units import known

_aten = torch.ops.aten
_ZEROS = {_aten.new_zeros.default, _aten.zeros.default, _aten.zeros_like.default}
# What formulas compute into zeros that they have just made, to scatter gradients into them.
_INTO_ZEROS = {
    _aten.scatter.src, _aten.scatter.value, _aten.scatter_add.default, _aten.index_put.default, _aten.index_add.default,
    _aten.put.default, _aten.masked_scatter.default,
}  # fmt: skip
# What they compute into another of their results, by the node that autograd runs.
_MASKED = frozenset((_aten.masked_fill.Scalar,))
_ALL_EXTREMES = frozenset((_aten.logical_or.default, _aten.logical_and.default))
_IN_PLACE_IN_NODE = {
    **dict.fromkeys(
        ("MaximumBackward0", "MinimumBackward0", "FmaxBackward0", "FminBackward0"), _MASKED
    ),
    **dict.fromkeys(("MaxBackward1", "MinBackward1"), _ALL_EXTREMES),
    "BinaryCrossEntropyWithLogitsBackward0": frozenset(
        (_aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor, _aten.div.Scalar)
    ),
}
# Nodes whose own formulas add, in C++, and do so out of place.
_SUMMING_NODES = {"VarMeanBackward0", "StdMeanBackward0"}
_IN_NODES = frozenset().union(*_IN_PLACE_IN_NODE.values())


class Formulas:
    """What autograd has computed last, and so may write into."""

    def __init__(self) -> None:
        self._last_zeros: Callable[[], Any] = lambda: None
        self._recent: deque[Callable[[], Any]] = deque(maxlen=3)
        self._is_wrapped = False

    @contextmanager
    def of_pass(self, outputs: Sequence[Any]) -> Iterator[None]:
        """Compute a backward pass; in ``torch.func``, formulas write into none of its tensors."""
        tensors = [output for output in outputs if isinstance(output, torch.Tensor)]
        outside = self._is_wrapped
        self._is_wrapped = any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors))
        try:
            yield
        finally:
            self._is_wrapped = outside

    def ran(self, func: Any, result: Any) -> None:
        """Take note of an operator's result."""
        if func in _ZEROS:
            self._last_zeros = weakref.ref(result)
        if isinstance(result, FakeTensor):
            self._recent.append(weakref.ref(result))

    def run_in_place(self, func: Any, args: Any) -> bool:
        """Whether autograd runs an operator in place on CUDA that it runs out of place here."""
        if self._is_wrapped:
            return False
        if func is _aten.add.Tensor:
            return _adds_in_place((*args,))
        if func in _INTO_ZEROS:
            return in_backward() and self._last_zeros() is args[0]
        if func not in _IN_NODES:
            return False
        if not in_backward() or func not in _IN_PLACE_IN_NODE.get(_node_name(), ()):
            return False
        return any(result() is args[0] for result in self._recent)


class DeviceThread:
    """The thread in which CUDA runs a backward pass.

    Autograd runs those nodes first that have the highest numbers, and each thread counts the nodes that it makes: those that a backward
    pass makes with ``create_graph=True`` mostly run after those of the forward pass. On the host, one thread makes and counts them all.
    Sources: ATen/SequenceNumber.cpp, torch/csrc/autograd/engine.cpp (thread_init).
    """

    def __init__(self, formulas: Formulas) -> None:
        self._formulas = formulas
        self._count = 0
        self._begun = _next_number()

    def wrap(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Make what runs a backward pass give the nodes that it makes the numbers of this thread."""

        def run_backward(outputs: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
            first = _next_number()
            with self._formulas.of_pass(outputs):
                gradients = run(outputs, *args, **kwargs)
            if _next_number() == first:
                return gradients
            mine = (
                self._begun + 2 * self._count
            )  # twice: the main thread's numbers include these nodes
            leaves = (node.variable for node in _nodes(outputs) if hasattr(node, "variable"))
            for node in _nodes([*(gradients or ()), *(leaf.grad for leaf in leaves)], first):
                # What sums the gradients of a leaf has the highest number.
                if not hasattr(node, "variable"):
                    node._set_sequence_nr(mine + node._sequence_nr() - first)
            self._count += _next_number() - first
            return gradients

        return run_backward


def _next_number() -> int:
    return torch._C._autograd._get_sequence_nr()


def _nodes(tensors: Sequence[torch.Tensor | None], first: int = 0) -> list[Any]:
    """Return the nodes of the graph that computed tensors, from a number on."""
    nodes: dict[Any, None] = {}
    waiting: list[Any] = known(tensor.grad_fn for tensor in known(tensors))
    while waiting:
        node = waiting.pop()
        if node not in nodes and node._sequence_nr() >= first:
            nodes[node] = None
            waiting += known(following for following, _ in node.next_functions)
    return [*nodes]


def in_backward() -> bool:
    """Whether this thread runs a backward pass."""
    return torch._C._current_graph_task_id() != -1


def _node_name() -> str:
    node = torch._C._current_autograd_node()
    return "" if node is None else str(node.name())


def _adds_in_place(args: Sequence[Any]) -> bool:
    """Whether the engine adds two gradients in place on CUDA, because it holds the only reference to the first.

    Takes the sequence, not its items: once torch.compile has run, callers keep references to the arguments they pass.
    """
    if not in_backward() or torch.is_grad_enabled() or _node_name() in _SUMMING_NODES:
        return False
    first, second = args[0], args[1]
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return False
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    if not _aten.is_non_overlapping_and_dense.default(first):
        return False
    most = torch_versions.HELD_BY_ENGINE
    if sys.getrefcount(first) > most.references or first._use_count() > most.uses:  # type: ignore[attr-defined]
        return False
    return torch._C._storage_Use_Count(first.untyped_storage()._cdata) <= most.storage_uses
