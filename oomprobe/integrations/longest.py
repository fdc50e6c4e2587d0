"""The worst batch a data set can make: its longest examples, all in one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from oomprobe.errors import InvalidArgumentError
from oomprobe.integrations.largest import Order, is_number, largest_first, shapes_of
from oomprobe.integrations.loops import refuse_once

STREAM_EXAMPLES = 32  # of a stream are looked at
ONLY = Order(indices=(0,), seen=1, complete=True, variable=False, known=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Longest:
    """Examples, the longest first.

    Attributes:
        examples: Gives one by its index; a data set, or a list.
        order: Of the indices.
        total: How many the data set has; None where it has no length.
        notes: What a reader of the result should know.
    """

    examples: Any
    order: Order
    total: int | None
    notes: tuple[str, ...] = field(default=())

    def batches(self, batch_size: int, count: int) -> Repeated:
        """`count` batches of the longest; smaller data sets are repeated."""
        return Repeated(self, batch_size, count)


class Repeated(Dataset[Any]):
    """Batches of the longest examples, as a data set to be read in order."""

    def __init__(self, longest: Longest, batch_size: int, count: int) -> None:
        self._longest, self._batch_size, self._length = longest, batch_size, batch_size * count

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        number, place = divmod(index, self._batch_size)
        batch = self._longest.order.batch(self._batch_size, number)
        return self._longest.examples[batch[place % len(batch)]]


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
        >>> longest_of(data).order.indices
        [1, 0, 2]
        >>> longest_of(data, max_length=6).examples[0]
        {'input_ids': [1, 2, 3, 4, 1, 2]}
    """
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        return _of_stream(dataset, max_length)
    total = len(dataset)
    if not total:
        raise InvalidArgumentError("the data set is empty: there is no example to make a batch of")
    order = largest_first(dataset, range(total), scan_s, clock=clock)
    if max_length is not None:
        longest = stretched(dataset[order.indices[0]], max_length)
        return Longest(examples=[longest], order=ONLY, total=total, notes=(_stretched(max_length),))
    notes = tuple(_notes(order, total, scan_s))
    return Longest(examples=dataset, order=order, total=total, notes=notes)


def _notes(order: Order, total: int, scan_s: float) -> Iterator[str]:
    if not order.complete:
        yield (
            f"{order.seen} of the {total} examples were looked at in {scan_s:g} s, and the longest of them made the batches: "
            "a longer one may follow. Give scan_s more time, or say max_length"
        )
    if not order.known:
        yield "the size of the examples could not be told: if they differ, the longest may not have been in a trial"


def stretched(example: Any, max_length: int) -> Any:
    """An example whose longest sequences are repeated, or cut, to a length; everything else stays as it is.

    Args:
        example: A mapping of fields, as a tokenizer makes it.
        max_length: Elements.

    Raises:
        InvalidArgumentError: it is no mapping with a sequence of numbers in it.
    """
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


def _of_stream(dataset: Any, max_length: int | None) -> Longest:
    refuse_once(dataset)
    examples = list(islice(dataset, STREAM_EXAMPLES))
    if not examples:
        raise InvalidArgumentError("the data set gave no example to make a batch of")
    if max_length is not None:
        order = largest_first(examples, range(len(examples)), math.inf)
        longest = stretched(examples[order.indices[0]], max_length)
        return Longest(examples=[longest], order=ONLY, total=None, notes=(_stretched(max_length),))
    if any(shapes_of(example) != shapes_of(examples[0]) for example in examples):
        raise InvalidArgumentError(
            f"the data set has no length, and its first {len(examples)} examples differ in theirs: the longest one, which "
            "decides, cannot be known. Say max_length= (the most elements a sequence can have)"
        )
    note = f"the data set has no length: its first {len(examples)} examples, all of one size, stand for all"
    return Longest(
        examples=examples, order=largest_first(examples, range(len(examples)), math.inf), total=None, notes=(note,)
    )


def _stretched(max_length: int) -> str:
    return f"every example was stretched to max_length={max_length}"


def _is_sequence(value: Any) -> bool:
    if isinstance(value, torch.Tensor) or hasattr(value, "ndim"):
        return bool(value.ndim == 1)
    return isinstance(value, list | tuple) and bool(value) and is_number(value[0])


def _to_length(value: Any, length: int) -> Any:
    times = -(-length // max(1, len(value)))
    if isinstance(value, torch.Tensor):
        return value.repeat(times)[:length]
    if hasattr(value, "ndim"):
        return np.resize(value, length)
    return (value * times)[:length]
