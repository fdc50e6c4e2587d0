"""The worst batch a data set can make: its longest examples, all in one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from oomprobe.errors import InvalidArgumentError

STREAM_EXAMPLES = 32  # of a stream are looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class Longest:
    """Examples, the longest first.

    Attributes:
        examples: Gives one by its place in `order`; a data set, or a list.
        order: Indices of `examples`, the longest first.
        total: How many the data set has; None where it has no length.
        notes: What a reader of the result should know.
    """

    examples: Any
    order: tuple[int, ...]
    total: int | None
    notes: tuple[str, ...] = field(default=())

    def batches(self, batch_size: int, count: int) -> Repeated:
        """`count` batches, each of the `batch_size` longest; smaller data sets are repeated."""
        return Repeated(self, batch_size, count)


class Repeated(Dataset[Any]):
    """The same batch several times, as a data set to be read in order."""

    def __init__(self, longest: Longest, batch_size: int, count: int) -> None:
        self._longest, self._batch_size, self._length = longest, batch_size, batch_size * count

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        order = self._longest.order
        return self._longest.examples[order[index % self._batch_size % len(order)]]


def longest_of(
    dataset: Any, *, max_length: int | None = None, scan_s: float = 30.0, clock: Callable[[], float] = time.monotonic
) -> Longest:
    """Find the longest examples.

    Args:
        dataset: With ``len()`` and indices, or an iterable without.
        max_length: Length that sequences may have; the longest example is stretched to it. None: as they are.
        scan_s: Seconds for looking at examples; what was not seen by then is told in a note.
        clock: Gives seconds.

    Raises:
        InvalidArgumentError: there is no example, or a stream whose examples differ in length says no `max_length`.

    Example:
        >>> data = [{"input_ids": [1, 2]}, {"input_ids": [1, 2, 3, 4]}, {"input_ids": [1]}]
        >>> longest_of(data).order
        (1, 0, 2)
        >>> longest_of(data, max_length=6).examples[0]
        {'input_ids': [1, 2, 3, 4, 1, 2]}
    """
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        return _of_stream(dataset, max_length)
    total = len(dataset)
    if not total:
        raise InvalidArgumentError("the data set is empty: there is no example to make a batch of")
    sizes = _sizes(dataset, total, clock() + scan_s, clock)
    order = _longest_first(sizes)
    notes = []
    if len(sizes) < total:
        notes.append(
            f"{len(sizes)} of the {total} examples were looked at in {scan_s:g} s, and the longest of them made the batches: "
            "a longer one may follow. Give scan_s more time, or say max_length"
        )
    if max_length is not None:
        return Longest(
            examples=[stretched(dataset[order[0]], max_length)],
            order=(0,),
            total=total,
            notes=(_stretched(max_length),),
        )
    return Longest(examples=dataset, order=order, total=total, notes=tuple(notes))


def stretched(example: Any, max_length: int) -> Any:
    """An example whose sequences are repeated, or cut, to a length; what is not a sequence stays as it is.

    Args:
        example: A mapping of fields, as a tokenizer makes it.
        max_length: Elements.

    Raises:
        InvalidArgumentError: it is no mapping with a sequence of numbers in it.
    """
    sequences = (
        {key for key, value in example.items() if _is_sequence(value)} if isinstance(example, Mapping) else set()
    )
    if not sequences:
        raise InvalidArgumentError(
            f"max_length={max_length} cannot be made of an example of type {type(example).__name__} without a sequence of "
            "numbers: leave max_length out, or pass a data set whose examples have it"
        )
    return {key: _to_length(value, max_length) if key in sequences else value for key, value in example.items()}


def elements(value: Any) -> int:
    """How many numbers a value holds.

    Example:
        >>> elements([[1, 2], [3]]), elements(torch.zeros(2, 3)), elements(7)
        (3, 6, 1)
    """
    if isinstance(value, torch.Tensor):
        return value.numel()
    size = getattr(value, "size", None)
    if isinstance(size, int):  # of an array
        return size
    if isinstance(size, tuple):  # of a picture
        return int(torch.Size(size).numel())
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(elements, value.values()))
    if isinstance(value, Sequence):
        return len(value) if value and isinstance(value[0], int | float) else sum(map(elements, value))
    return 1


def _fields(example: Any) -> dict[Any, int]:
    if isinstance(example, Mapping):
        items: list[tuple[Any, Any]] = list(example.items())
    elif isinstance(example, tuple | list):
        items = list(enumerate(example))
    else:
        items = [(0, example)]
    texts = {key for key, value in items if isinstance(value, str | bytes)}
    if len(texts) < len(items):  # beside numbers a text is for people
        items = [(key, value) for key, value in items if key not in texts]
    return {key: elements(value) for key, value in items}


def _sizes(dataset: Any, total: int, until_s: float, clock: Callable[[], float]) -> list[dict[Any, int]]:
    sizes = []
    for index in range(total):
        sizes.append(_fields(dataset[index]))
        if clock() > until_s:
            break
    return sizes


def _longest_first(sizes: list[dict[Any, int]]) -> tuple[int, ...]:
    """By all their elements; but first the longest in each field, to whose length a batch is padded."""
    totals = [sum(fields.values()) for fields in sizes]
    keys = dict.fromkeys(key for fields in sizes for key in fields)
    longest = [max(range(len(sizes)), key=lambda i: (sizes[i].get(key, 0), totals[i])) for key in keys]
    first = sorted(set(longest), key=lambda i: -totals[i])
    rest = sorted(set(range(len(sizes))) - set(first), key=lambda i: (-totals[i], i))
    return (*first, *rest)


def _of_stream(dataset: Any, max_length: int | None) -> Longest:
    examples = [example for example, _ in zip(dataset, range(STREAM_EXAMPLES), strict=False)]
    if not examples:
        raise InvalidArgumentError("the data set gave no example to make a batch of")
    sizes = [_fields(example) for example in examples]
    if max_length is not None:
        longest = examples[_longest_first(sizes)[0]]
        return Longest(
            examples=[stretched(longest, max_length)], order=(0,), total=None, notes=(_stretched(max_length),)
        )
    if any(fields != sizes[0] for fields in sizes):
        raise InvalidArgumentError(
            f"the data set has no length, and its first {len(examples)} examples differ in theirs: the longest one, which "
            "decides, cannot be known. Say max_length= (the most elements a sequence can have)"
        )
    note = f"the data set has no length: its first {len(examples)} examples, all of one size, stand for all"
    return Longest(examples=examples, order=tuple(range(len(examples))), total=None, notes=(note,))


def _stretched(max_length: int) -> str:
    return f"every example was stretched to max_length={max_length}"


def _is_sequence(value: Any) -> bool:
    if isinstance(value, torch.Tensor) or hasattr(value, "ndim"):
        return bool(value.ndim == 1)
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], int | float)


def _to_length(value: Any, length: int) -> Any:
    times = -(-length // max(1, len(value)))
    if isinstance(value, torch.Tensor):
        return value.repeat(times)[:length]
    if hasattr(value, "ndim"):
        return np.resize(value, length)
    return (value * times)[:length]
