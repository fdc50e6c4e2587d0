"""What a kernel asks of the allocator while it runs, besides its results, as steps in its order.

A rule computes the steps from the operator's arguments, as torch's host code does. A replay at another batch size computes
them again: a rule's input (sizes, strides) is linear in the batch size, its steps may not be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch

from oomprobe.tape.calls import RESULT, Kernel, Steps
from oomprobe.tape.reductions import Processors

INT64_BYTES, FLOAT_BYTES = 8, 4


_Function = TypeVar("_Function", bound=Callable[..., Any])


def entry(table: dict[Any, Any], *keys: Any) -> Callable[[_Function], _Function]:
    """Put the function below into a table, by each of these keys."""

    def enter(function: _Function) -> _Function:
        table.update(dict.fromkeys(keys, function))
        return function

    return enter


def given_back(steps: Iterable[int | None]) -> Steps:
    """Return the steps that give back what is held after others."""
    count = 0
    for step in steps:
        if step is RESULT:
            continue
        count += 1
        if step < 0:
            count -= 2
    return (-1,) * count


def throughout(*nbytes: int) -> Steps:
    """Take blocks before the results, and hold them until the end."""
    return *nbytes, RESULT


def afterwards(*nbytes: int) -> Steps:
    """Take blocks once the results are allocated."""
    return RESULT, *nbytes


def around(before: int, *nbytes: int) -> Steps:
    """Take the first `before` blocks before the results, and the others after them."""
    return *nbytes[:before], RESULT, *nbytes[before:]


class Launch(NamedTuple):
    """A kernel with its numbers, and the bytes of its result if they differ from its apparent size."""

    kernel: Kernel
    numbers: tuple[int, ...]
    result_bytes: int | None


def launch(
    rule: Callable[..., Steps],
    fixed: tuple[Any, ...],
    numbers: Sequence[int],
    result_bytes: int | None = None,
) -> Launch:
    """Return the launch of a kernel whose rule takes these fixed values, and numbers that vary with the batch."""
    return Launch(Kernel(rule, fixed, len(numbers)), tuple(numbers), result_bytes)


def scratch(
    rule: Callable[..., Steps], numbers: Sequence[int], fixed: tuple[Any, ...] = ()
) -> Launch | None:
    """Return the launch of a kernel that takes these blocks, by a rule; None if there are none."""
    return launch(rule, fixed, numbers) if numbers else None


class Operator(NamedTuple):
    """An operator on the card, with its arguments."""

    processors: Processors
    func: Any
    args: Any
    kwargs: dict[str, Any]

    def argument(self, name: str) -> Any:
        """Return an argument or its default; None if this overload does not have it."""
        position, default = _position(self.func, name)
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)


Rule = Callable[[Operator], Launch | None]


@cache
def _position(func: Any, name: str) -> tuple[int, Any]:
    arguments = func._schema.arguments
    for position, argument in enumerate(arguments):
        if argument.name == name:
            return position, argument.default_value
    return len(arguments), None


def copied(
    tensor: torch.Tensor, memory_format: torch.memory_format = torch.contiguous_format
) -> tuple[int, ...]:
    """Return the bytes of a copy of a tensor that is not in a memory format; nothing if it is."""
    if tensor.is_contiguous(memory_format=memory_format):
        return ()
    return (tensor.numel() * tensor.element_size(),)
