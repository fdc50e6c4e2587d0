"""The worst case first: which examples of a data set are the largest."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from oomprobe.errors import add_note

# Of which all have one shape, with three dimensions or more, are taken for images of one size.
ALIKE = 64
IMAGE_DIMENSIONS = 3

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Examples of a data set by size.

    Attributes:
        indices: Largest first, and those that were not looked at last.
        seen: How many were looked at.
        complete: Whether no other can be larger: all were, or they are taken for images of one size.
        variable: Whether they differ.
        known: Whether anything about their size could be told.
        leaders: How many stand first because a field of theirs is the largest of its kind.
    """

    indices: Sequence[int]
    seen: int
    complete: bool
    variable: bool
    known: bool
    leaders: int = 1

    def batch(self, size: int, number: int) -> list[int]:
        """Indices of the batch of that number: each begins with the leaders that the one before had no room for.

        Example:
            >>> order = largest_first([([1], [5, 5]), ([1, 2, 3], [5]), ([1], [5])], range(3), 1.0)
            >>> order.indices, order.leaders, order.batch(1, 0), order.batch(1, 1), order.batch(2, 0)
            ([1, 0, 2], 2, [1], [0], [1, 0])
        """
        first = number * size % self.leaders
        led = [*self.indices[first : self.leaders], *self.indices[:first]]
        return [*led, *self.indices[self.leaders : max(size, self.leaders)]][:size]

    def batches_of_leaders(self, size: int) -> int:
        """How many batches it takes for each leader to have been in one."""
        return -(-self.leaders // size)


def largest_first(
    dataset: Any, indices: Sequence[int], limit_s: float, *, clock: Callable[[], float] = time.monotonic
) -> Order:
    """Look at the examples, in an order without a pattern, and sort them by their number of elements.

    The largest of each field comes before all others: a batch is padded to it, whichever example has it.

    Args:
        dataset: Has ``__getitem__``.
        indices: Those that training draws from.
        limit_s: Seconds after which the rest is left unseen.
        clock: Tells them.

    Example:
        >>> largest_first([[1], [1, 2, 3], [1, 2]], range(3), 1.0).indices
        [1, 2, 0]
    """
    until = clock() + limit_s
    shuffled = list(indices)
    random.Random(0).shuffle(shuffled)
    seen: dict[int, dict[Any, tuple[Shape, ...]]] = {}
    kinds: set[tuple[Any, ...]] = set()
    for index in shuffled:
        seen[index] = shapes_of(_example(dataset, index))
        kinds.add(tuple(seen[index].items()))
        if clock() >= until or (len(seen) == ALIKE and _images_of_one_size(kinds)):
            break
    sizes = {index: {key: _elements(shapes) for key, shapes in fields.items()} for index, fields in seen.items()}
    by_size, leaders = _sorted(list(indices), sizes)
    return Order(
        indices=by_size,
        leaders=leaders,
        seen=len(seen),
        complete=len(seen) == len(shuffled) or (len(seen) >= ALIKE and _images_of_one_size(kinds)),
        variable=len(kinds) > 1,
        known=any(size for fields in sizes.values() for size in fields.values()),
    )


def _example(dataset: Any, index: int) -> Any:
    try:
        return dataset[index]
    except Exception as error:
        add_note(error, f"oomprobe: example {index} of the data set raised this, before the first trial")
        raise


def shapes_of(example: Any) -> dict[Any, tuple[Shape, ...]]:
    """The shapes in each field of an example; a text counts only where there is nothing but texts.

    Example:
        >>> shapes_of({"ids": [5, 7, 9], "text": "never fed to a model"})
        {'ids': ((3,),)}
    """
    if isinstance(example, Mapping):
        fields: dict[Any, Any] = dict(example)
    elif isinstance(example, tuple | list) and not _is_numbers(example):
        fields = dict(enumerate(example))
    else:
        fields = {0: example}
    texts = {key for key, value in fields.items() if isinstance(value, str | bytes)}
    if len(texts) < len(fields):
        fields = {key: value for key, value in fields.items() if key not in texts}
    return {key: _shapes(value) for key, value in fields.items()}


def _sorted(indices: list[int], sizes: Mapping[int, Mapping[Any, int]]) -> tuple[list[int], int]:
    """With the number of those that lead. Sorting is stable: where all are alike, the order is the data set's own."""
    totals = {index: sum(fields.values()) for index, fields in sizes.items()}
    by_size = sorted(indices, key=lambda index: -totals.get(index, -1))
    largest: dict[Any, int] = {}
    for index in by_size:
        for key, size in sizes.get(index, {}).items():
            if key not in largest or size > sizes[largest[key]].get(key, 0):
                largest[key] = index
    first = set(largest.values())
    leading = [index for index in by_size if index in first]
    return leading + [index for index in by_size if index not in first], max(1, len(leading))


def _images_of_one_size(kinds: set[tuple[Any, ...]]) -> bool:
    if len(kinds) != 1:
        return False
    return any(len(shape) >= IMAGE_DIMENSIONS for _, shapes in next(iter(kinds)) for shape in shapes)


def _elements(shapes: tuple[Shape, ...]) -> int:
    return sum(int(np.prod(shape)) for shape in shapes)


def _shapes(value: Any) -> tuple[Shape, ...]:
    """Of everything in it that has one; a text and a list of numbers have their length, a picture its sides."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return (tuple(value.shape),)
    if isinstance(value, str | bytes):
        return ((len(value),),)
    if isinstance(value, Mapping):
        return tuple(shape for part in value.values() for shape in _shapes(part))
    if isinstance(value, list | tuple):
        if _is_numbers(value):
            return ((len(value),),)
        return tuple(shape for part in value for shape in _shapes(part))
    size = getattr(value, "size", None)
    return (size,) if isinstance(size, tuple) and all(isinstance(side, int) for side in size) else ()


def _is_numbers(value: Any) -> bool:
    return bool(value) and all(is_number(part) for part in value)


def is_number(value: Any) -> bool:
    """Whether it is one element of a sequence: of Python, of numpy, or a tensor without dimensions."""
    return isinstance(value, int | float | np.number | np.bool_) or (
        isinstance(value, torch.Tensor) and value.dim() == 0
    )
