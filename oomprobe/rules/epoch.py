"""The calls of an epoch: those of its orders, and those that show how requests grow with shapes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol

from oomprobe.errors import InvalidArgumentError
from oomprobe.records.axis import Axis
from oomprobe.records.epoch import SIZE, TAPE_CALLS, Epoch, Padded, shuffle
from oomprobe.records.kinds import Plain
from oomprobe.records.sizes import Sizes
from oomprobe.records.trials import Call

TURNS = 2  # of several steps, as in a trial
NO_ROW = (
    "an example has {axis} {largest}, and the largest row that fits is {most}: leave it out, or "
    "cut it"
)
SHARES = 128  # in which the sizes of buckets shrink together

Shape = tuple[float, ...]


def shape_of(call: Call) -> Shape:
    """Return the numbers of a call: its batch size, and then the others by their names.

    Example:
        >>> shape_of(Call(step="step", batch_size=8, arguments=(("length", 90),)))
        (8, 90)
    """
    given = dict(call.arguments)
    return (given.pop(SIZE, call.batch_size), *(given[name] for name in sorted(given)))


def call_of(step: str, size: int, *of_ranks: Mapping[str, float], row: int = 0) -> Call:
    """Return a call with the arguments that an epoch gives, on each rank or the same on all."""
    first, *others = (tuple(arguments.items()) for arguments in of_ranks)
    return Call(step=step, batch_size=size, row=row, arguments=first, others=tuple(others))


class Orders(Protocol):
    """Orders of an epoch, by size."""

    @property
    def count(self) -> int:
        """How many are tried."""

    @property
    def calls(self) -> int:
        """How many calls one has."""

    def order(self, number: int, size: int) -> Iterator[Call]:
        """Yield the calls of an order at a size."""

    def to_record(self, size: int) -> list[Call]:
        """Return calls of many shapes at two sizes; the last only shows what the others leave.

        The first shape comes again, which shows what only a first call asks for.
        """

    def describe(self) -> Mapping[str, Plain]:
        """Return what a record keeps of them."""


class StepOrders:
    """Orders whose steps take turns, each with its epoch."""

    def __init__(self, epochs: Mapping[str, Epoch], ranks: int = 1) -> None:
        self._epochs, self._ranks = epochs, ranks
        self.count = max(epoch.orders for epoch in epochs.values())
        self.calls = sum(epoch.calls for epoch in epochs.values())
        self._turns = TURNS if len(epochs) > 1 else 1

    def order(self, number: int, size: int) -> Iterator[Call]:
        """Yield the calls of an order at a size."""
        batches = {
            step: epoch.of_ranks(number, size, self._ranks) for step, epoch in self._epochs.items()
        }
        for _ in range(self._turns):
            for step, epoch in self._epochs.items():
                for of_ranks in islice(batches[step], -(-epoch.calls // self._turns)):
                    yield call_of(step, size, *of_ranks)

    def to_record(self, size: int) -> list[Call]:
        """Return calls of many shapes at two sizes; the last only shows what the others leave."""
        made = {}
        for step, epoch in self._epochs.items():
            shapes = epoch.drawing.shapes(random.Random(epoch.seed - 1), size)
            made[step] = [call_of(step, size, arguments) for arguments in shapes]
        calls = list[Call]()
        for turn in range(self._turns):
            for of_step in made.values():
                calls += [*of_step[turn :: self._turns], of_step[0]]
        return [*calls, calls[0], calls[1]]

    def describe(self) -> Mapping[str, Plain]:
        """Return what a record keeps of them; of several steps, by step."""
        described = {step: epoch.describe() for step, epoch in self._epochs.items()}
        if self._turns > 1:
            return described
        (alone,) = described.values()
        return alone


@dataclass(frozen=True)
class BucketOrders:
    """Orders of a table whose rows are buckets: an example goes to the smallest row that holds it.

    A size is a share, of `SHARES`, of the batch sizes.

    Attributes:
        sizes: Batch sizes by row.
        limits: What a row holds at most, by row.
    """

    step: str
    epoch: Epoch
    name: str  # of the argument that has a row
    sizes: Mapping[int, int]
    limits: Mapping[int, float]
    allowed: Sizes
    ranks: int = 1  # that take the batches in turn

    @classmethod
    def of(
        cls,
        axis: Axis,
        steps: Sequence[str],
        sizes: Mapping[int, int],
        allowed: Sizes,
        ranks: int = 1,
    ) -> BucketOrders:
        """Return the orders of a table's rows with these batch sizes.

        Raises:
            InvalidArgumentError: an example is in no row that fits.
        """
        epoch = axis.epoch_of(steps[0])
        limits = {row: axis.values[row] for row in sizes}
        largest, most = max(epoch.values[axis.name]), max(limits.values())
        if largest > most:
            raise InvalidArgumentError(NO_ROW.format(axis=axis.name, largest=largest, most=most))
        return cls(steps[0], epoch, axis.name, sizes, limits, allowed, ranks)

    @property
    def count(self) -> int:
        """How many orders are tried."""
        return self.epoch.orders

    @property
    def calls(self) -> int:
        """How many calls one has."""
        return self.epoch.calls

    def share(self, share: int) -> dict[int, int]:
        """Return the batch sizes at a share."""
        step, shares = self.allowed.step, {}
        for row, size in self.sizes.items():
            shares[row] = max(self.allowed.first, round(size * share / SHARES / step) * step)
        return shares

    def order(self, number: int, size: int) -> Iterator[Call]:
        """Yield the calls of an order: a bucket's whenever it is full, the rest at the end."""
        batches = self._endless(number, size)
        for first in islice(batches, self.epoch.calls):
            others = (call.arguments for call in islice(batches, self.ranks - 1))
            yield replace(first, others=tuple(others))

    def _endless(self, number: int, size: int) -> Iterator[Call]:
        drawn, sizes = random.Random(self.epoch.seed + number), self.share(size)
        rows = sorted(self.limits, key=lambda row: self.limits[row])
        values = self.epoch.values[self.name]
        row_of = [next(row for row in rows if value <= self.limits[row]) for value in values]
        while True:
            waiting: dict[int, list[int]] = {row: [] for row in rows}
            for example in shuffle(drawn, len(values)):
                bucket = waiting[row_of[example]]
                bucket.append(example)
                if len(bucket) == sizes[row_of[example]]:
                    yield self._call(row_of[example], bucket)
                    bucket.clear()
            for row, bucket in waiting.items():
                if bucket:
                    yield self._call(row, bucket)

    def _call(self, row: int, examples: Sequence[int]) -> Call:
        drawing = self.epoch.drawing
        assert isinstance(drawing, Padded)
        return call_of(self.step, len(examples), drawing.arguments_of(examples), row=row)

    def to_record(self, size: int) -> list[Call]:
        """Return calls of all rows at their sizes and at half of them, and some of an order."""
        halves = replace(self, epoch=replace(self.epoch, seed=self.epoch.seed - 1))
        calls = list[Call]()
        for row, of in self.share(size).items():
            for part in (of, max(1, of // 2)):
                value = self.limits[row]
                others = self.epoch.drawing.usual(part)
                calls.append(call_of(self.step, part, {**others, self.name: value}, row=row))
        drawn = [
            *islice(halves._endless(0, size), TAPE_CALLS),
            *islice(halves._endless(0, size // 2), TAPE_CALLS),
        ]
        random.Random(0).shuffle(drawn)
        calls += drawn[:TAPE_CALLS]
        return [*calls, calls[0], calls[0], calls[1]]

    def describe(self) -> Mapping[str, Plain]:
        """Return what a record keeps of them."""
        return self.epoch.describe()
