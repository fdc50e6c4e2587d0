"""The worst case first: which examples of a data set are the largest."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

# Of which all have one shape, with three dimensions or more, are taken for images of one size.
ALIKE = 64
IMAGE_DIMENSIONS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Examples of a data set by size.

    Attributes:
        indices: Largest first, and those that were not looked at last.
        seen: How many were looked at.
        complete: Whether no other can be larger: all were, or they are taken for images of one size.
        variable: Whether they differ.
        known: Whether anything about their size could be told.
    """

    indices: Sequence[int]
    seen: int
    complete: bool
    variable: bool
    known: bool


def largest_first(
    dataset: Any, indices: Sequence[int], limit_s: float, *, clock: Callable[[], float] = time.monotonic
) -> Order:
    """Look at the examples, in an order without a pattern, and sort them by their number of elements.

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
    sizes: dict[int, int] = {}
    shapes: set[tuple[Any, ...]] = set()
    for index in shuffled:
        item = dataset[index]
        sizes[index] = _elements(item)
        shapes.add(_shapes(item))
        if clock() >= until or (len(sizes) == ALIKE and _images_of_one_size(shapes)):
            break
    # Sorting is stable: where all are alike, the order is the data set's own.
    return Order(
        indices=sorted(indices, key=lambda index: -sizes.get(index, -1)),
        seen=len(sizes),
        complete=len(sizes) == len(shuffled) or (len(sizes) >= ALIKE and _images_of_one_size(shapes)),
        variable=len(shapes) > 1,
        known=any(sizes.values()),
    )


def _images_of_one_size(shapes: set[tuple[Any, ...]]) -> bool:
    return len(shapes) == 1 and any(len(shape) >= IMAGE_DIMENSIONS for shape in next(iter(shapes)))


def _elements(item: Any) -> int:
    return sum(int(np.prod(shape)) for shape in _shapes(item))


def _shapes(item: Any) -> tuple[tuple[int, ...], ...]:
    """Of everything in an example that has one; a text and a list of numbers have their length."""
    if isinstance(item, torch.Tensor | np.ndarray):
        return (tuple(item.shape),)
    if isinstance(item, str | bytes):
        return ((len(item),),)
    if isinstance(item, Mapping):
        return _all_shapes(item.values())
    if isinstance(item, list | tuple):
        if item and all(isinstance(part, int | float) for part in item):
            return ((len(item),),)
        return _all_shapes(item)
    return ()


def _all_shapes(parts: Iterable[Any]) -> tuple[tuple[int, ...], ...]:
    return tuple(shape for part in parts for shape in _shapes(part))
