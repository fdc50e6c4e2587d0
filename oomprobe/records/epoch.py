"""An epoch: the shapes of a training's batches, in the orders in which training may meet them."""

from __future__ import annotations

import hashlib
import json
import math
import random
import statistics
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, repeat
from pathlib import Path
from typing import Any, Literal

from oomprobe.errors import InvalidArgumentError, check_size
from oomprobe.ground.words import clip
from oomprobe.records.kinds import Bytes, Plain, Samples

Number = int | float
Values = Mapping[str, tuple[Number, ...]]  # of each example, by argument
Arguments = dict[str, Any]  # of the step, by name; "batch_size" is one of them
Draw = Callable[[random.Random, int], Iterable[Mapping[str, Any]]]
FEW_DRAWS = 50  # of a function, of which the largest is common
NO_NUMBERS = (
    "{path} gave no numbers: {error}. Write one for each example, a line each and without a head; "
    "a JSON list or an array of numpy (.npy) will do too"
)
EXAMPLE = 'Epoch({"length": [len(example) for example in dataset]})'
SIZE = "batch_size"
UNLIMITED = sys.maxsize
SAMPLES, TOKENS = "samples", "tokens"  # what batch sizes count
TAPE_CALLS = 24  # of a step whose shapes vary, that are recorded
FIXED_CALLS = 4  # of one that keeps its shape, in an order too
# Parts of a size at which shapes are recorded, out of order: a step may act each other call.
HALVES = (1, 2)
PARTS = (1, 1, 2)  # of a batch whose shapes are recorded
MOST_STRETCHES = 200  # of the calls of an order, of which a record keeps what was reserved
SHORT_PARTS = (1, 1, 1, 2, 8)  # where few examples make a short batch


class Drawing(ABC):
    """How an epoch makes batches.

    Attributes:
        label: Its name in a result.
        most: The largest batch size that the examples fill.
        unit: What batch sizes count.
    """

    label: str
    most: int = UNLIMITED
    unit: str = SAMPLES

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The arguments of the step that it gives, except ``batch_size``."""

    @abstractmethod
    def batches(self, drawn: random.Random, size: int, ranks: int) -> Iterator[list[Arguments]]:
        """Yield without end the arguments of one call after the other, for each rank."""

    @abstractmethod
    def usual(self, size: int) -> Arguments:
        """Return the arguments of a call that bounds the sizes that train."""

    def sample(self, drawn: random.Random, size: int) -> Arguments:
        """Return a shape of about this size, to learn how requests grow."""
        part = max(1, size // drawn.choice(PARTS))
        return next(self.batches(drawn, part, 1))[0]

    def shapes(self, drawn: random.Random, size: int) -> list[Arguments]:
        """Return shapes that show how requests grow, at a size and at half of it."""
        count = max(TAPE_CALLS, 2 * len(self.names) ** 2)
        sizes = [max(1, size // drawn.choice(HALVES)) for _ in range(count)]
        return [self.sample(drawn, at) for at in sizes]


class Fixed(Drawing):
    """Keeps the shape of the step."""

    label, names = "fixed", ()

    def batches(self, drawn: random.Random, size: int, ranks: int) -> Iterator[list[Arguments]]:
        """Yield the size."""
        return repeat([{SIZE: size}] * ranks)

    def usual(self, size: int) -> Arguments:
        """Return nothing: a call says its size itself."""
        return {}

    def shapes(self, drawn: random.Random, size: int) -> list[Arguments]:
        """Return a few calls, which are alike."""
        return [{SIZE: size}] * FIXED_CALLS


class Padded(Drawing):
    """Pads a batch to its largest example."""

    label = "longest"
    most: int

    def __init__(self, values: Values) -> None:
        self.values = values
        self.most = min(map(len, values.values()))
        self._largest = {name: max(of) for name, of in values.items()}
        self._means = {name: math.ceil(sum(of) / len(of)) for name, of in values.items()}

    @property
    def names(self) -> tuple[str, ...]:
        """The arguments that have values."""
        return tuple(self.values)

    def batches(self, drawn: random.Random, size: int, ranks: int) -> Iterator[list[Arguments]]:
        """Yield without end batches of examples, each of which comes once before any comes again."""
        while True:
            examples = shuffle(drawn, self.most)
            while batch := [*islice(examples, size * ranks)]:
                shares = [batch[rank::ranks] for rank in range(min(ranks, len(batch)))]
                yield [self.arguments_of(share) for share in shares]

    def arguments_of(self, examples: Sequence[int]) -> Arguments:
        """Return the arguments of a call with these examples."""
        arguments: Arguments = {SIZE: len(examples)}
        for name, of in self.values.items():
            arguments[name] = self.reduce(of[at] for at in examples)
        return arguments

    def reduce(self, numbers: Iterable[Number]) -> Number:
        """Return the number of a batch whose examples have these."""
        return max(numbers)

    def usual(self, size: int) -> Arguments:
        """Return the arguments of a call of the largest examples."""
        return {SIZE: size, **self._largest}

    def sample(self, drawn: random.Random, size: int) -> Arguments:
        """Return a shape of this size whose length a few examples decide, to meet short ones too."""
        part = max(1, size // drawn.choice(SHORT_PARTS))
        return {**next(self.batches(drawn, part, 1))[0], SIZE: size}

    def shapes(self, drawn: random.Random, size: int) -> list[Arguments]:
        """Return shapes of long examples and of short ones, and of the largest."""
        first, *others = super().shapes(drawn, size)
        return [first, self.usual(size), self.usual(max(1, size // 2)), *others]


class Added(Padded):
    """Adds the examples of a batch up."""

    label = "sum"
    sample, shapes = Drawing.sample, Drawing.shapes

    def reduce(self, numbers: Iterable[Number]) -> Number:
        """Return the sum."""
        return sum(numbers)

    def usual(self, size: int) -> Arguments:
        """Return the arguments of a common call, which grow with the size."""
        return {SIZE: size, **{name: size * mean for name, mean in self._means.items()}}


class Sampler(Drawing):
    """Draws as a function does."""

    def __init__(self, draw: Draw) -> None:
        self._draw = draw
        self.label = getattr(draw, "__qualname__", type(draw).__name__)

    @property
    def names(self) -> tuple[str, ...]:
        """The arguments of a first call."""
        return tuple(self.usual(1).keys() - {SIZE})

    def batches(self, drawn: random.Random, size: int, ranks: int) -> Iterator[list[Arguments]]:
        """Yield what the function does, for ranks in turn."""
        calls = ({SIZE: size, **arguments} for arguments in self._draw(drawn, size))
        of_ranks = [*islice(calls, ranks)]
        if not of_ranks:
            raise InvalidArgumentError(
                f"draw yields no call at batch_size {size}: if the data end before, set max_batch"
            )
        while of_ranks:
            yield of_ranks
            of_ranks = [*islice(calls, ranks)]

    def usual(self, size: int) -> Arguments:
        """Return the largest of a few calls."""
        few = [call for (call,) in islice(self.batches(random.Random(0), size, 1), FEW_DRAWS)]
        if not {type(number) for number in few[0].values()} <= {int, float}:
            raise InvalidArgumentError(f"draw must yield numbers by argument, not {few[0]!r}")
        return max(few, key=lambda call: math.prod(call.values()))


class TokenBudget(Sampler):
    """Draws batches that stay within a number of tokens, which stands for the batch size.

    With padding, examples are taken while examples times the longest stay within it; packed, while
    their sum does.
    """

    unit = TOKENS

    def __init__(self, lengths: tuple[Number, ...], *, packed: bool = False) -> None:
        super().__init__(self._each)
        self.lengths, self.packed = lengths, packed
        self.label = "packed tokens" if packed else "padded tokens"
        self._longest, self._mean = max(lengths), sum(lengths) / len(lengths)
        self.most = math.ceil(sum(lengths) if packed else len(lengths) * self._longest)

    @property
    def names(self) -> tuple[str, ...]:
        """The length."""
        return ("length",)

    def _each(self, drawn: random.Random, budget: int) -> Iterator[Arguments]:
        while True:
            count = 0
            longest: Number = 0
            tokens: Number = 0
            for at in shuffle(drawn, len(self.lengths)):
                length = self.lengths[at]
                more = tokens + length if self.packed else (count + 1) * max(longest, length)
                if count and more > budget:
                    yield self._of(count, longest, tokens)
                    count, longest, tokens = 0, 0, 0
                count, longest, tokens = count + 1, max(longest, length), tokens + length
            yield self._of(count, longest, tokens)

    def _of(self, count: int, longest: Number, tokens: Number) -> Arguments:
        return {SIZE: count, "length": tokens if self.packed else longest}

    def usual(self, budget: int) -> Arguments:
        """Return the arguments of a full call: of the longest examples, or of all tokens."""
        if self.packed:
            return {SIZE: max(1, int(budget / self._mean)), "length": budget}
        return {SIZE: max(1, int(budget // self._longest)), "length": self._longest}


_DRAWINGS: Mapping[object, Callable[[Values], Drawing]] = {"longest": Padded, "sum": Added}


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """The shapes of the batches that training draws from a data set.

    Args:
        values: A number for each example of the data set, by the argument of the step that gets it:
            lists or arrays of one length, of positive numbers. Those of several arguments belong
            together.
        draw: "longest" pads a batch to its largest example, "sum" adds its examples up. A function
            ``draw(random.Random, batch_size)`` yields the arguments of one call after the other, as
            your own sampler does.
        calls: Calls of each order, at least 1.
        orders: Orders that are tried, at least 1. If none of 40 dies, at most 7.2 % of all do, at
            95 % confidence.
        seed: Order k is drawn by ``random.Random(seed + k)``.

    Raises:
        InvalidArgumentError: no values, or not as many for each argument; one that is not a
            positive finite number.

    Examples:
        >>> for batch in Epoch({"length": [5, 9, 7]}, calls=2).batches(0, 2):
        ...     print(batch)
        {'batch_size': 2, 'length': 9}
        {'batch_size': 1, 'length': 5}
        >>> Epoch({"length": [5, 9, 7]}).describe()["values"]["length"]["most"]
        9
    """

    values: Mapping[str, Sequence[Number]] = field(kw_only=False, default_factory=dict)
    draw: Literal["longest", "sum"] | Draw | Drawing = "longest"
    calls: int = 1000
    orders: int = 40
    seed: int = 0
    drawing: Drawing = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_size("calls", self.calls)
        check_size("orders", self.orders)
        if not isinstance(self.seed, int):
            raise InvalidArgumentError(f"seed must be an integer, not {self.seed!r}")
        if self.values or isinstance(self.draw, str):
            object.__setattr__(self, "values", check_values(self.values))
        if isinstance(self.draw, Drawing):
            drawing: Drawing = self.draw
        elif callable(self.draw):
            drawing = Sampler(self.draw)
        elif isinstance(self.draw, str) and self.draw in _DRAWINGS:
            drawing = _DRAWINGS[self.draw](self.values)  # type: ignore[arg-type]
        else:
            raise InvalidArgumentError(
                f'draw must be "longest", "sum" or a function, not {self.draw!r}'
            )
        object.__setattr__(self, "drawing", drawing)

    def batches(
        self, order: int, batch_size: int, rank: int = 0, world_size: int = 1
    ) -> Iterator[Arguments]:
        """Yield the arguments of each call of an order, among them its own ``batch_size``.

        Examples are drawn without replacement until the data end, and then anew; a rank takes every
        `world_size`-th. A last batch of the data may be smaller; ranks for which no example of it is
        left repeat the first one's, so that none waits for another.
        """
        check_size("batch_size", batch_size)
        check_size("world_size", world_size)
        yield from (of_ranks[rank] for of_ranks in self.of_ranks(order, batch_size, world_size))

    def of_ranks(self, order: int, batch_size: int, world_size: int) -> Iterator[list[Arguments]]:
        """Yield the arguments of each call of an order, on all ranks.

        Examples:
            >>> next(Epoch({"length": [5, 9, 7]}).of_ranks(0, 1, world_size=2))
            [{'batch_size': 1, 'length': 9}, {'batch_size': 1, 'length': 7}]
        """
        drawn = random.Random(self.seed + order)
        for made in islice(self.drawing.batches(drawn, batch_size, world_size), self.calls):
            yield made + made[:1] * (world_size - len(made))

    def describe(self) -> dict[str, Plain]:
        """Return what a result keeps of it: plain data, without the values themselves."""
        values: dict[str, Plain] = {}
        for name, of in self.values.items():
            digest = hashlib.sha256(repr(of).encode()).hexdigest()[:16]
            ends = {"least": min(of), "median": statistics.median(of), "most": max(of)}
            values[name] = {"count": len(of), **ends, "digest": digest}
        numbers = {"calls": self.calls, "orders": self.orders, "seed": self.seed}
        return {"draw": self.drawing.label, **numbers, "values": values}


NO_EPOCH = Epoch(draw=Fixed(), calls=FIXED_CALLS, orders=1)  # of a step that keeps its shape


def check_values(given: object) -> dict[str, tuple[Number, ...]]:
    """Return the values of an epoch's examples as plain numbers.

    Raises:
        InvalidArgumentError: there are none, they are not of one number for each argument, or not
            all positive and finite.
    """
    if not isinstance(given, Mapping) or not given:
        raise InvalidArgumentError(
            f"values must map an argument of the step to its numbers, {EXAMPLE}, not "
            f"{clip(repr(given), 80)}"
        )
    values = {name: _read_values(name, numbers) for name, numbers in given.items()}
    counts = {name: len(numbers) for name, numbers in values.items()}
    if len({*counts.values()}) > 1:
        raise InvalidArgumentError(
            f"each example has a number for each argument, but there are {counts}: give all "
            "arguments as many"
        )
    return values


def _read_values(name: object, given: Any) -> tuple[Number, ...]:
    if not str(name).isidentifier() or name in ("model", SIZE):
        raise InvalidArgumentError(f"{name!r} is not an extra argument of the step: {EXAMPLE}")
    if not isinstance(given, Iterable):
        raise InvalidArgumentError(f"the values of {name} must be a list, not {given!r}: {EXAMPLE}")
    # The elements of arrays and tensors are no plain numbers.
    numbers = tuple(of.item() if hasattr(of, "item") else of for of in given)
    if not numbers:
        raise InvalidArgumentError(f"there are no values of {name}: {EXAMPLE}")
    for at, number in enumerate(numbers):
        if type(number) not in (int, float) or not 0 < number < math.inf:
            raise InvalidArgumentError(
                f"value {at} of {name} is {number!r}, and must be a positive finite number"
            )
    return numbers


def read_numbers(path: Path) -> list[Number]:
    """Return the numbers of a file: one a line, a JSON list, or ``.npy``.

    Raises:
        InvalidArgumentError: it cannot be read as such.
    """
    try:
        if path.suffix == ".npy":
            import numpy as np

            numbers = np.load(path, allow_pickle=False).tolist()
        else:
            text = path.read_text().strip()
            is_json = text.startswith(("[", "{"))
            numbers = json.loads(text if is_json else f"[{','.join(text.split())}]")
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(NO_NUMBERS.format(path=path, error=error)) from None
    if not isinstance(numbers, list):
        raise InvalidArgumentError(f"{path} has no list of numbers, but {clip(repr(numbers), 40)}")
    return numbers


def shuffle(drawn: random.Random, count: int) -> Iterator[int]:
    """Yield the numbers below `count` in a random order, each drawn only when it is wanted."""
    moved: dict[int, int] = {}
    for last in range(count - 1, -1, -1):
        at = drawn.randrange(last + 1)
        yield moved.get(at, at)
        moved[at] = moved.pop(last, last)


def tokens_of(lengths: object, *, packed: bool = False, **numbers: int) -> Epoch:
    """Return the epoch of a data set whose batches hold a number of tokens.

    Raises:
        InvalidArgumentError: a length, or a number, is wrong.
    """
    values = check_values({"length": lengths})
    draw = TokenBudget(values["length"], packed=packed)
    return Epoch(values, draw=draw, **numbers)


def token_options(epoch: Any, given: Mapping[str, Any]) -> dict[str, int]:
    """Return the least number of tokens to try: that of the longest example.

    Raises:
        InvalidArgumentError: larger numbers are not allowed, or an option means nothing for tokens.
    """
    if given.get("global_batch") is not None:
        text = "{} counts samples, and here batches hold tokens: leave it out"
        raise InvalidArgumentError(text, options=("global_batch",))
    longest, most = math.ceil(max(epoch.drawing.lengths)), given.get("max_batch")
    if most is not None and longest > most:
        text = f"an example has {longest} tokens, more than {{}}={most}: raise it, or leave that example out"
        raise InvalidArgumentError(text, options=("max_batch",))
    return {"min_batch": max(longest, given.get("min_batch", 1))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Memory that the allocator reserves over the calls of an order.

    Of a long order, stretches of calls stand for their most; only changes are kept.

    Attributes:
        calls: The first call of a stretch, from 1; at last the last call.
        reserved_bytes: The most in the stretch, and until the next.

    Examples:
        >>> Curve.of([2, 2, 6, 6, 4, 4, 4], stretches=4)
        Curve(calls=(1, 3, 5, 7), reserved_bytes=(2, 6, 4, 4))
    """

    calls: tuple[int, ...]
    reserved_bytes: tuple[Bytes, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.calls) == len(self.reserved_bytes):
            raise TypeError("it needs as many reserved_bytes as calls, and at least one")

    @classmethod
    def of(cls, peaks: Sequence[int], stretches: int = MOST_STRETCHES) -> Curve:
        """Return the curve of the peaks of all calls."""
        length = -(-len(peaks) // stretches)
        calls, reserved_bytes = list[int](), list[int]()
        for first in range(0, len(peaks), length):
            most = max(peaks[first : first + length])
            if most not in reserved_bytes[-1:]:
                calls.append(first + 1)
                reserved_bytes.append(most)
        calls.append(len(peaks))
        return cls(calls=tuple(calls), reserved_bytes=(*reserved_bytes, reserved_bytes[-1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochRecord:
    """How many orders of an epoch run out of memory under the cap, as replayed on the allocator.

    Attributes:
        batch_size: The size that they have.
        ends: For each order, the number of the call, from 1, that ran out of memory; None where
            none did. Empty where no epoch could be replayed.
        deaths: How many did; None where no epoch could be replayed.
        settings: How many do under other settings of the allocator, by what to set.
        longest_only_batch_size: The answer without the epoch: the largest size whose largest batch
            runs.
        longest_only_ends: `ends` at that size.
        peak_allocated_bytes: The most in live tensors in any order that runs.
        peak_reserved_bytes: The most that the allocator reserves in any order that runs.
        reserved: For each order, what is reserved in its calls.
        longest_only_reserved: `reserved` at the size that `longest_only_ends` is about.
        hardest: The order, from 0, and the number of its call, from 1, in which it does.
        matched_fraction: Of the requests of calls that ran, those that came as predicted.
        reason: Why no epoch could be replayed; "" if one was.
        drawn: What was drawn from, without the values: draw, calls, orders, seed, and of each
            argument count, least, median, most and a digest; by step, if several have an epoch.

    Examples:
        >>> drawn = Epoch({"length": [5, 9, 7]}).describe()
        >>> record = EpochRecord(batch_size=8, ends=(None, 3), deaths=1, drawn=drawn)
        >>> record.longest, record.lowered_from
        ({'length': 9}, 0)
    """

    batch_size: Samples
    ends: tuple[int | None, ...] = ()
    deaths: int | None = None
    settings: Mapping[str, int] = field(default_factory=dict)
    longest_only_batch_size: Samples | None = None
    longest_only_ends: tuple[int | None, ...] = ()
    peak_allocated_bytes: Bytes | None = None
    peak_reserved_bytes: Bytes | None = None
    reserved: tuple[Curve, ...] = ()
    longest_only_reserved: tuple[Curve, ...] = ()
    hardest: tuple[int, int] | None = None
    matched_fraction: float | None = None
    reason: str = ""
    drawn: Mapping[str, Plain] = field(default_factory=dict)

    @property
    def lowered_from(self) -> int:
        """The size that runs its largest batch alone, if that is larger; otherwise 0."""
        alone = self.longest_only_batch_size or 0
        return alone if alone > self.batch_size else 0

    @property
    def longest(self) -> dict[str, Number]:
        """The largest example by argument, to which batches are padded; empty where they are not."""
        if self.drawn.get("draw") not in ("longest", "padded tokens"):
            return {}
        return {name: of["most"] for name, of in self.drawn["values"].items()}
