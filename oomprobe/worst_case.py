"""The largest batch that a data set can produce, made of its largest examples."""

from __future__ import annotations

import math
import random
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import IterableDataset, Subset, default_collate

from oomprobe.errors import InvalidArgumentError, check_size
from oomprobe.records.epoch import Epoch
from oomprobe.records.notes import Note, NoteKind, tell
from oomprobe.records.options import check_seconds

# If SAME_SHAPE_EXAMPLES examples all have one shape, of IMAGE_DIMENSIONS or more, the data set
# holds images of one size.
SAME_SHAPE_EXAMPLES, IMAGE_DIMENSIONS = 64, 3

LARGEST = "worst_case_batches made the batches of the step, of the largest examples of its data set"
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestFirst:
    """The examples of a data set, largest first."""

    dataset: Any
    indices: Sequence[
        int
    ]  # the largest example of each field, then by size, then examples that were not scanned
    scanned: int  # number of examples whose size was read
    complete: bool  # all were scanned, or they are images of one size
    known: bool  # at least one example has a size
    leaders: int  # number of examples at the front that are the largest in some field
    scan_s: float  # seconds that the scan was given
    extents: Mapping[int, Mapping[Any, int]]  # of each scanned example, by field and side

    def varying_sides(self) -> dict[str, tuple[int, ...]]:
        """Return the sides that differ among examples, by a name of their field and place; equal ones once."""
        in_order = [self.extents[index] for index in sorted(self.extents)]
        sides: dict[tuple[int, ...], str] = {}
        for field, side in in_order[0]:
            column = tuple(extents.get((field, side), 0) for extents in in_order)
            if side is not None and len({*column}) > 1:
                sides.setdefault(column, f"{field}[{side}]")
        return {name: column for column, name in sides.items()}

    def batch(self, size: int, number: int) -> list[int]:
        """Return the indices of batch `number`, which begins with the leaders that did not fit into the batch before."""
        first = number * size % self.leaders
        led = [*self.indices[first : self.leaders], *self.indices[:first]]
        return [*led, *self.indices[self.leaders : max(size, self.leaders)]][:size]

    def batches(self, size: int, count: int, last: int = 0) -> Subset[Any]:
        """Return `count` batches and one of `last` as a data set to read in order; one smaller than `size` is repeated."""
        indices: list[int] = []
        for number in range(count):
            indices += islice(cycle(self.batch(size, number)), size)
        return Subset(self.dataset, indices + self.batch(last, 0))

    def has_largest(self, size: int) -> bool:
        """Whether two batches of that size, the least that a trial runs, contain the largest example of every field."""
        return self.complete and self.known and self.leaders <= 2 * size

    def notes(self, what: str = "data set") -> Iterator[str]:
        """Yield notes about sizes that remain unknown."""
        if not self.complete:
            yield (
                f"{self.scanned} of {len(self.indices)} examples of the {what} were scanned in {self.scan_s:g} s, and the largest "
                "of them made the batches: a larger one may follow (allow more time with scan_s)"
            )
        if not self.known:
            yield f"the examples of the {what} have no size that can be read: trials may have run without the largest"


def largest_first(
    dataset: Any, scan_s: float = 30.0, indices: Sequence[int] | None = None
) -> LargestFirst:
    """Scan examples in random order for at most `scan_s` seconds, and sort them by their number of elements.

    The largest examples of each field, in elements and along each axis, come before all others: batches are padded to them.

    Examples:
        >>> data = [{"input_ids": [1, 2]}, {"input_ids": [1, 2, 3, 4]}, {"input_ids": [1]}]
        >>> largest_first(data).indices
        [1, 0, 2]
    """
    check_seconds("scan_s", scan_s)
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise InvalidArgumentError(
            "the data set is a stream, so its largest examples, which decide the answer, are unknown: probe with a list of "
            "them as the data set"
        )
    indices = [*map(int, range(len(dataset)) if indices is None else indices)]
    if not indices:
        raise InvalidArgumentError(
            "the data set is empty: there are no examples to make a batch of"
        )
    sizes, extents, are_images = _scan(dataset, indices, scan_s)
    # Sorting is stable: examples of equal size keep the order of the data set; those that were not
    # scanned come last.
    by_size = sorted(indices, key=lambda index: -sizes.get(index, -1))
    leaders = _leaders(by_size, extents)
    return LargestFirst(
        dataset=dataset,
        indices=sorted(by_size, key=lambda index: index not in leaders),
        leaders=max(1, len(leaders)),
        scanned=len(sizes),
        complete=are_images or len(sizes) == len(indices),
        known=any(sizes.values()),
        scan_s=scan_s,
        extents=extents,
    )


def _scan(
    dataset: Any, indices: Sequence[int], scan_s: float
) -> tuple[dict[int, int], dict[int, dict[Any, int]], bool]:
    """Return examples' numbers of elements, their extents by field and side, and whether all are images of one size."""
    until = time.monotonic() + scan_s
    shuffled = list(indices)
    random.Random(0).shuffle(shuffled)
    sizes: dict[int, int] = {}
    extents: dict[int, dict[Any, int]] = {}  # by field, and by field and axis
    kinds: set[tuple[Any, ...]] = set()
    are_images = False
    for index in shuffled:
        try:
            shapes = shapes_of(dataset[index])
        except Exception as error:
            error.add_note(
                f"oomprobe: example {index} of the data set raised this, before the first trial"
            )
            raise
        extents[index] = dict(_extents(shapes))
        sizes[index] = sum(extents[index][key, None] for key in shapes)
        kinds.add(tuple(shapes.items()))
        are_images = len(sizes) >= SAME_SHAPE_EXAMPLES and _images_of_one_size(kinds)
        if time.monotonic() >= until or are_images:
            break
    return sizes, extents, are_images


def _leaders(by_size: Sequence[int], extents: Mapping[int, Mapping[Any, int]]) -> set[int]:
    """Return the largest example of each field and of each of its sides; among equals, the first `by_size`."""
    longest: dict[Any, int] = {}
    leaders: dict[Any, int] = {}
    for index in by_size:
        for key, extent in extents.get(index, {}).items():
            if extent > longest.get(key, -1):
                longest[key], leaders[key] = extent, index
    return set(leaders.values())


class WorstCaseBatches:
    """Collated batches of the largest examples of a data set; made by `worst_case_batches`.

    Attributes:
        examples: The examples, largest first.

    Examples:
        >>> import oomprobe
        >>> oomprobe.worst_case_batches(["short", "the longest", "middling"]).to("cpu")(2)
        ['the longest', 'middling']
    """

    def __init__(
        self,
        examples: LargestFirst,
        collate_fn: Callable[[list[Any]], Any],
        device: str | torch.device | None = None,
    ) -> None:
        self.examples = examples
        self._collate_fn, self._device = collate_fn, device
        self._read: dict[int, Any] = {}
        self._made = 0

    def to(self, device: str | torch.device) -> WorstCaseBatches:
        """Return the same batches on a device."""
        return WorstCaseBatches(self.examples, self._collate_fn, device)

    def epoch(self, *names: str, **numbers: Any) -> Epoch:
        """Return the epoch of the data set that was scanned, for a step that takes the sizes of its batches.

        Args:
            names: The step's arguments, in the order of the sides of examples that vary; default: "length", if one does.
            **numbers: `draw`, `calls`, `orders` and `seed` of an `Epoch`.

        Raises:
            InvalidArgumentError: as many sides do not vary as there are names, or examples were not scanned.

        Examples:
            >>> import oomprobe
            >>> oomprobe.worst_case_batches(["a", "longer"]).epoch(calls=10).values
            {'length': (1, 6)}
        """
        sides = self.examples.varying_sides()
        if not self.examples.complete or len(sides) != len(names or ("length",)):
            raise InvalidArgumentError(
                f"the scanned examples vary in {len(sides)} sides ({', '.join(sides) or 'none'}): name an argument of the step "
                "for each, or make an Epoch of the numbers that it takes"
            )
        return Epoch(dict(zip(names or ("length",), sides.values(), strict=True)), **numbers)

    def __call__(self, batch_size: int) -> Any:
        """Return a batch of the largest examples, repeated if the data set has fewer.

        Each example is read once. If the batch is too small for the largest of every field and
        axis, the next batch goes on with those that are missing.
        """
        check_size("batch_size", batch_size)
        if self.examples.has_largest(batch_size):
            tell(Note(text=LARGEST, kind=NoteKind.LARGEST_EXAMPLES))
        indices = self.examples.batch(batch_size, self._made)
        self._made += 1
        for index in indices:
            if index not in self._read:
                self._read[index] = self.examples.dataset[index]
        batch = self._collate_fn(
            [self._read[index] for index in islice(cycle(indices), batch_size)]
        )
        if self._device is None:
            return batch
        if hasattr(batch, "to"):
            return batch.to(self._device)
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to(self._device), batch)


def worst_case_batches(
    dataset: Any, collate_fn: Callable[[list[Any]], Any] | None = None, scan_s: float = 30.0
) -> WorstCaseBatches:
    """Return a function of the batch size that makes a batch of the largest examples, for a step to train on.

    Batches of other examples ask for less memory at once. But training that meets many shapes one after the other may reserve
    more, since blocks that one leaves do not fit the next: `WorstCaseBatches.epoch` tries that. Warns if some examples were not
    scanned, or have no size that can be read.

    Args:
        dataset: As for a ``DataLoader``: with ``len()`` and an index. Random crops and augmentations happen once, when an
            example is read.
        collate_fn: As for a ``DataLoader``; None: its default.
        scan_s: Seconds to look for the largest examples, which are read for this; at least 0.

    Raises:
        InvalidArgumentError: the data set is a stream or empty, or `scan_s` is not a number of seconds.

    Examples:
        >>> import torch, oomprobe
        >>> data = [{"tokens": torch.zeros(length)} for length in (3, 9, 5)]
        >>> def padded(examples):
        ...     return torch.nn.utils.rnn.pad_sequence([one["tokens"] for one in examples], batch_first=True)
        >>> batches = oomprobe.worst_case_batches(data, padded).to("cpu")
        >>> batches(2).shape, batches(64).shape
        (torch.Size([2, 9]), torch.Size([64, 9]))
    """
    examples = largest_first(dataset, scan_s)
    for note in examples.notes():
        warnings.warn(note, stacklevel=2)
    return WorstCaseBatches(examples, default_collate if collate_fn is None else collate_fn)


def _extents(shapes: Mapping[Any, tuple[Shape, ...]]) -> Iterator[tuple[Any, int]]:
    """Yield the number of elements of each field, and the longest side along each axis."""
    for key, of_field in shapes.items():
        yield (key, None), sum(map(math.prod, of_field))
        for axis in range(max(map(len, of_field), default=0)):
            yield (key, axis), max(shape[axis] for shape in of_field if len(shape) > axis)


def shapes_of(example: Any) -> dict[Any, tuple[Shape, ...]]:
    """Return the shapes in each field of an example; texts count only if every field is a text."""
    if isinstance(example, Mapping):
        fields: dict[Any, Any] = dict(example)
    elif isinstance(example, tuple | list) and not _is_numbers(example):
        fields = dict(enumerate(example))
    else:
        fields = {0: example}
    without_texts = {
        key: value for key, value in fields.items() if not isinstance(value, str | bytes)
    }
    return {key: _shapes(value) for key, value in (without_texts or fields).items()}


def _images_of_one_size(kinds: set[tuple[Any, ...]]) -> bool:
    if len(kinds) != 1:
        return False
    (fields,) = kinds
    dimensions = [len(shape) for _, shapes in fields for shape in shapes]
    return max(dimensions, default=0) >= IMAGE_DIMENSIONS


def _shapes(value: Any) -> tuple[Shape, ...]:
    """Return the shapes found in a value: the length of a text or list of numbers, the sides of a picture."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return (tuple(value.shape),)
    if isinstance(value, str | bytes) or _is_numbers(value):
        return ((len(value),),)
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return tuple(chain.from_iterable(map(_shapes, value)))
    size = getattr(value, "size", None)
    if isinstance(size, tuple) and all(isinstance(side, int) for side in size):
        return (size,)
    return ()


def _is_numbers(value: Any) -> bool:
    """Whether a value is a list or tuple of scalars: of Python, of numpy, or tensors without dimensions."""
    if not isinstance(value, list | tuple):
        return False
    return bool(value) and all(map(_is_number, value))


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() == 0
    return isinstance(value, int | float | np.number | np.bool_)
