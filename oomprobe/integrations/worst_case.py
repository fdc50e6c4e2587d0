"""The worst batch a data set can make: its largest examples, all in one."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset

from oomprobe.errors import InvalidArgumentError

STREAM_EXAMPLES = 32  # of a stream are looked at
# If so many examples all have one shape, of three dimensions or more, the data set holds images of one size.
ALIKE = 64
IMAGE_DIMENSIONS = 3

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Examples of a data set by size."""

    indices: Sequence[int]  # largest first; those that were not looked at come last
    seen: int  # how many were looked at
    complete: bool  # no other can be larger: all were seen, or they are images of one size
    known: bool  # something about their size could be told
    leaders: int = 1  # how many stand first because a field of theirs is the largest of its kind

    def batch(self, size: int, number: int) -> list[int]:
        """Indices of the batch of that number: each begins with the leaders that the one before had no room for."""
        first = number * size % self.leaders
        led = [*self.indices[first : self.leaders], *self.indices[:first]]
        return [*led, *self.indices[self.leaders : max(size, self.leaders)]][:size]

    def batches_of_leaders(self, size: int) -> int:
        """How many batches it takes for each leader to have been in one."""
        return -(-self.leaders // size)

    def notes(self, scan_s: float, what: str = "data set") -> Iterator[str]:
        """What a reader of the result should know."""
        if not self.complete:
            yield (
                f"{self.seen} of {len(self.indices)} examples of the {what} were looked at in {scan_s:g} s, and the largest "
                "of them made the batches: a larger one may follow (allow more time with scan_s)"
            )
        if not self.known:
            yield f"the size of examples of the {what} could not be told: a trial may have lacked the largest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Longest:
    """Examples of a data set, the longest first."""

    examples: Any  # gives one by its index; a data set, or a list
    order: Order
    total: int | None  # how many the data set has; None where it has no length
    notes: tuple[str, ...] = ()  # what a reader of the result should know

    def batches(self, size: int, count: int) -> Subset[Any]:
        """`count` batches of the longest, as a data set to be read in order; smaller data sets are repeated."""
        batches = (self.order.batch(size, number) for number in range(count))
        return Subset(self.examples, [batch[place % len(batch)] for batch in batches for place in range(size)])


def largest_first(dataset: Any, indices: Sequence[int], limit_s: float) -> Order:
    """Look at the examples, in random order and for `limit_s` seconds, and sort them by their number of elements.

    The largest of each field comes before all others: a batch is padded to it, whichever example has it.
    """
    until = time.monotonic() + limit_s
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
    return Order(
        indices=sorted(by_size, key=lambda index: index not in leaders),
        leaders=max(1, len(leaders)),
        seen=len(sizes),
        complete=are_images or len(sizes) == len(shuffled),
        known=any(size for fields in sizes.values() for size in fields.values()),
    )


def longest_of(dataset: Any, *, max_length: int | None = None, scan_s: float = 30.0) -> Longest:
    """Find the longest examples, of those that `scan_s` seconds suffice to look at.

    With `max_length`, the longest is stretched to sequences of that length and stands for all.

    Example:
        >>> data = [{"input_ids": [1, 2]}, {"input_ids": [1, 2, 3, 4]}, {"input_ids": [1]}]
        >>> longest_of(data).order.indices, longest_of(data, max_length=6).examples[0]
        ([1, 0, 2], {'input_ids': [1, 2, 3, 4, 1, 2]})
    """
    total = len(dataset) if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") else None
    if total is None:
        if max_length is None:
            raise InvalidArgumentError(
                "the data set has no length, so its longest example, which decides, cannot be known. Say max_length= (the "
                "most elements a sequence can have)"
            )
        refuse_once(dataset)
        dataset = list(islice(dataset, STREAM_EXAMPLES))
    if not len(dataset):
        raise InvalidArgumentError("the data set is empty: there is no example to make a batch of")
    order = largest_first(dataset, range(len(dataset)), scan_s)
    if max_length is None:
        return Longest(examples=dataset, order=order, total=total, notes=tuple(order.notes(scan_s)))
    longest = [stretched(dataset[order.indices[0]], max_length)]
    note = f"every example was stretched to max_length={max_length}"
    return Longest(examples=longest, order=largest_first(longest, range(1), 0.0), total=total, notes=(note,))


def stretched(example: Any, max_length: int) -> Any:
    """An example whose longest sequences are repeated, or cut, to a length; everything else stays as it is."""
    fields = dict(example) if isinstance(example, Mapping) else {}
    lengths = {key: len(value) for key, value in fields.items() if _is_sequence(value)}
    # Shorter ones are no sequences of the same elements: the labels of several classes, the sides of a picture.
    sequences = {key for key, length in lengths.items() if length == max(lengths.values())}
    if not sequences:
        raise InvalidArgumentError(
            f"max_length={max_length} cannot be made of an example of type {type(example).__name__} without a sequence of "
            "numbers: leave max_length out, or pass a data set whose examples have it"
        )
    return {key: _to_length(value, max_length) if key in sequences else value for key, value in example.items()}


def refuse_once(dataset: Any) -> None:
    """Refuse a stream that a look would use up."""
    if iter(dataset) is iter(dataset):
        raise InvalidArgumentError(
            "the data set can be read only once, and a probe would use it up: pass one whose __iter__ begins anew each time"
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


def _is_sequence(value: Any) -> bool:
    return value.ndim == 1 if hasattr(value, "ndim") else isinstance(value, list | tuple) and _is_numbers(value)


def _to_length(value: Any, length: int) -> Any:
    places = np.arange(length) % len(value)
    return type(value)(value[place] for place in places) if isinstance(value, list | tuple) else value[places]
