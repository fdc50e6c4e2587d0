"""The worst batch a data set can make: its largest examples, all in one."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, Subset

from oomprobe.errors import InvalidArgumentError

# If so many examples all have one shape, of three dimensions or more, the data set holds images of one size.
ALIKE = 64
IMAGE_DIMENSIONS = 3

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestFirst:
    """Examples of a data set by size."""

    dataset: Any
    indices: Sequence[int]  # largest first; those that were not looked at come last
    seen: int  # how many were looked at
    complete: bool  # no other can be larger: all were seen, or they are images of one size
    known: bool  # something about their size could be told
    leaders: int  # how many stand first because a field of theirs is the largest of its kind

    def batch(self, size: int, number: int) -> list[int]:
        """Indices of the batch of that number: each begins with the leaders that the one before had no room for."""
        first = number * size % self.leaders
        led = [*self.indices[first : self.leaders], *self.indices[:first]]
        return [*led, *self.indices[self.leaders : max(size, self.leaders)]][:size]

    def batches(self, size: int, count: int) -> Subset[Any]:
        """`count` batches as a data set to be read in order; smaller data sets are repeated."""
        batches = (self.batch(size, number) for number in range(count))
        return Subset(self.dataset, [batch[place % len(batch)] for batch in batches for place in range(size)])

    def leads(self, size: int) -> bool:
        """Whether a trial, which takes at least two batches of that size, meets the largest examples that there are."""
        return self.complete and self.known and self.leaders <= 2 * size

    def notes(self, scan_s: float, what: str = "data set") -> Iterator[str]:
        """What a reader of the result should know."""
        if not self.complete:
            yield (
                f"{self.seen} of {len(self.indices)} examples of the {what} were looked at in {scan_s:g} s, and the largest "
                "of them made the batches: a larger one may follow (allow more time with scan_s)"
            )
        if not self.known:
            yield f"the size of examples of the {what} could not be told: a trial may have lacked the largest"


def largest_first(dataset: Any, scan_s: float = 30.0, indices: Sequence[int] | None = None) -> LargestFirst:
    """Look at the examples, in random order and for `scan_s` seconds, and sort them by their number of elements.

    The largest of each field comes before all others: a batch is padded to it, whichever example has it.

    Example:
        >>> data = [{"input_ids": [1, 2]}, {"input_ids": [1, 2, 3, 4]}, {"input_ids": [1]}]
        >>> largest_first(data).indices
        [1, 0, 2]
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise InvalidArgumentError(
            "the data set is a stream, so its largest examples, which decide, cannot be known: probe with a list of them "
            "as the data set"
        )
    indices = range(len(dataset)) if indices is None else indices
    if not indices:
        raise InvalidArgumentError("the data set is empty: there is no example to make a batch of")
    until = time.monotonic() + scan_s
    shuffled = list(indices)
    random.Random(0).shuffle(shuffled)
    sizes: dict[int, dict[Any, int]] = {}
    kinds: set[tuple[Any, ...]] = set()
    are_images = False
    for index in shuffled:
        try:
            shapes = shapes_of(dataset[index])
        except Exception as error:
            error.add_note(f"oomprobe: example {index} of the data set raised this, before the first trial")
            raise
        sizes[index] = {key: sum(math.prod(one) for one in found) for key, found in shapes.items()}
        kinds.add(tuple(shapes.items()))
        are_images = len(sizes) >= ALIKE and _images_of_one_size(kinds)
        if time.monotonic() >= until or are_images:
            break
    # Sorting is stable: where all are alike, the order is the data set's own.
    by_size = sorted(indices, key=lambda index: -sum(sizes[index].values()) if index in sizes else 1)
    largest: dict[Any, int] = {}
    for index in by_size:
        for key, size in sizes.get(index, {}).items():
            if key not in largest or size > sizes[largest[key]].get(key, 0):
                largest[key] = index
    leaders = set(largest.values())
    return LargestFirst(
        dataset=dataset,
        indices=sorted(by_size, key=lambda index: index not in leaders),
        leaders=max(1, len(leaders)),
        seen=len(sizes),
        complete=are_images or len(sizes) == len(shuffled),
        known=any(size for fields in sizes.values() for size in fields.values()),
    )


def shapes_of(example: Any) -> dict[Any, tuple[Shape, ...]]:
    """The shapes in each field of an example; a text counts only where there is nothing but texts."""
    if isinstance(example, Mapping):
        fields: dict[Any, Any] = dict(example)
    elif isinstance(example, tuple | list) and not _is_numbers(example):
        fields = dict(enumerate(example))
    else:
        fields = {0: example}
    texts = {key for key, value in fields.items() if isinstance(value, str | bytes)}
    return {key: _shapes(fields[key]) for key in fields if key not in texts or len(texts) == len(fields)}


def _images_of_one_size(kinds: set[tuple[Any, ...]]) -> bool:
    return len(kinds) == 1 and any(len(shape) >= IMAGE_DIMENSIONS for _, found in next(iter(kinds)) for shape in found)


def _shapes(value: Any) -> tuple[Shape, ...]:
    """Of everything in it that has one; a text and a list of numbers have their length, a picture its sides."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return (tuple(value.shape),)
    if isinstance(value, str | bytes) or (isinstance(value, list | tuple) and _is_numbers(value)):
        return ((len(value),),)
    if isinstance(value, Mapping | list | tuple):
        parts = value.values() if isinstance(value, Mapping) else value
        return tuple(shape for part in parts for shape in _shapes(part))
    size = getattr(value, "size", None)
    return (size,) if isinstance(size, tuple) and all(isinstance(side, int) for side in size) else ()


def _is_numbers(values: Any) -> bool:
    """Whether each is one element of a sequence: of Python, of numpy, or a tensor without dimensions."""
    return bool(values) and all(
        isinstance(one, int | float | np.number | np.bool_) or (isinstance(one, torch.Tensor) and one.dim() == 0)
        for one in values
    )
