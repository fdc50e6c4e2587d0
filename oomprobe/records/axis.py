"""What steps get beside model and batch size: a row's value, an epoch's shapes; what is around them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from oomprobe.errors import InvalidArgumentError
from oomprobe.records.epoch import EXAMPLE as OF_EPOCHS
from oomprobe.records.epoch import NO_EPOCH, SIZE, TOKENS, UNLIMITED, Epoch, Padded

if TYPE_CHECKING:
    from oomprobe.records.trials import Call

NO_BUCKETS = (
    "in a table with an epoch an example goes to the smallest row that holds its {axis}, which is a "
    'number, and batches are padded (draw="longest"): '
    'over={{"length": [512, 1024]}}, epoch=Epoch({{"length": lengths}})'
)
EXAMPLE = 'over={"length": [512, 1024, 2048]}'
TWO_AXES = (
    "{} has {count} axes, {axes}, and a table has one: let the values of one argument stand for both, such as (640, 480) in "
    "Python, or make a table for each value of the other"
)


@dataclass(frozen=True, slots=True)
class Axis:
    """A keyword argument of the step and its value in each row; without a name, there is no axis.

    Examples:
        >>> Axis.of({"length": range(512, 1025, 512)}).arguments(1)
        {'length': 1024}
        >>> Axis().arguments(0)
        {}
    """

    name: str = ""
    values: tuple[Any, ...] = (None,)
    epochs: Mapping[str, Epoch] = field(default_factory=dict)  # by step; "": of every step
    savings: tuple[str, ...] = ()  # that are on in every call

    @classmethod
    def of(cls, over: object) -> Axis:
        """Return the axis that a mapping states.

        Raises:
            InvalidArgumentError: it states no axis or several, no values, or a value twice.
        """
        if not isinstance(over, Mapping) or not over:
            text = "{} must map an argument of the step to its values, {example}, not {over}"
            raise InvalidArgumentError(text, options=("over",), example=EXAMPLE, over=repr(over))
        if len(over) > 1:
            axes = ", ".join(map(str, over))
            raise InvalidArgumentError(TWO_AXES, options=("over",), count=len(over), axes=axes)
        ((name, values),) = over.items()
        if not isinstance(name, str) or not name.isidentifier() or name in ("model", "batch_size"):
            text = "{name} in {} is not an extra argument of the step: {example}"
            raise InvalidArgumentError(text, options=("over",), name=repr(name), example=EXAMPLE)
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise InvalidArgumentError(
                f"the values of {name} must be a list, not {values!r}: {EXAMPLE}"
            )
        return cls(name, _check_values(name, values))

    def drawing(self, epoch: Any) -> Axis:
        """Return the axis with an epoch, from which the steps get shapes.

        Raises:
            InvalidArgumentError: it is none, nor a mapping of steps to theirs.
        """
        if epoch is None:
            return self
        epochs = epoch if isinstance(epoch, Mapping) else {"": epoch}
        if not epochs or {*map(type, epochs.values())} != {Epoch}:
            raise InvalidArgumentError(
                f"epoch must be an Epoch, or a mapping of steps to theirs, not {epoch!r}: "
                f"{OF_EPOCHS}"
            )
        if self.name:
            self._check_buckets(epochs)
        return replace(self, epochs=epochs)

    def _check_buckets(self, epochs: Mapping[str, Epoch]) -> None:
        """Raise InvalidArgumentError unless each example of an epoch has a row."""
        epoch = epochs.get("", NO_EPOCH)
        values = epoch.values.get(self.name)
        if (
            values is None
            or type(epoch.drawing) is not Padded
            or {*map(type, self.values)} - {int, float}
        ):
            raise InvalidArgumentError(NO_BUCKETS.format(axis=self.name))
        if max(values) > max(self.values):
            raise InvalidArgumentError(
                f"an example has {self.name} {max(values)}, and the largest row is "
                f"{max(self.values)}: add one"
            )

    def arguments(self, row: int) -> dict[str, Any]:
        """Return the keyword arguments of the step in a row."""
        if not self.name:
            return {}
        return {self.name: self.values[row]}

    def arguments_of(self, call: Call) -> tuple[int, dict[str, Any]]:
        """Return the batch size of a call, and the keyword arguments of its step."""
        given = dict(call.arguments)
        if not given:
            usual = self.epoch_of(call.step).drawing.usual(call.batch_size)
            given = {**usual, **self.arguments(call.row)}
        return given.pop(SIZE, call.batch_size), given

    def epoch_of(self, step: str) -> Epoch:
        """Return the epoch of a step; `NO_EPOCH`: it keeps its shape."""
        return self.epochs.get(step, self.epochs.get("", NO_EPOCH))

    @property
    def counts_tokens(self) -> bool:
        """Whether batches hold a number of tokens, not of examples."""
        return any(epoch.drawing.unit == TOKENS for epoch in self.epochs.values())

    @property
    def most(self) -> int:
        """The largest batch size that the examples of an epoch fill."""
        return min((epoch.drawing.most for epoch in self.epochs.values()), default=UNLIMITED)

    def names(self, step: str) -> list[str]:
        """Return what a step gets beside the model and the batch size."""
        return [*self.arguments(0), *self.epoch_of(step).drawing.names]

    def label(self, row: int) -> str:
        """Name a row; without an axis, return an empty text.

        Examples:
            >>> Axis("length", (512,)).label(0), NO_AXIS.label(0)
            ('length=512', '')
        """
        if not self.name:
            return ""
        value = self.values[row]
        if isinstance(value, str):
            return f"{self.name}={value!r}"
        return f"{self.name}={text_of_value(value)}"


NO_AXIS = Axis()
CARDS = "device"  # the axis of a table of simulated cards, which no step takes


def _check_values(name: str, values: Iterable[Any]) -> tuple[Any, ...]:
    # A scalar of numpy or torch holds a number.
    plain = tuple(value.item() if getattr(value, "ndim", 1) == 0 else value for value in values)
    for value in plain:
        if value.__hash__ is None:
            raise InvalidArgumentError(
                f"a value of {name} cannot be a key of the table: write {value!r} as a tuple"
            )
    if not plain or len(set(plain)) < len(plain):
        raise InvalidArgumentError(
            f"{name} must have at least one value, and each only once, not {list(plain)!r}"
        )
    return plain


def text_of_value(value: object) -> str:
    """Return the text of a value.

    Examples:
        >>> text_of_value(512), text_of_value((640, 480)), text_of_value("short")
        ('512', '640x480', 'short')
    """
    return "x".join(map(str, _sides(value)))


def _sides(value: object) -> tuple[Any, ...]:
    if isinstance(value, tuple):
        return value
    return (value,)


def magnitude(value: object) -> float | None:
    """Return a number, or the product of the numbers in a tuple; None for any other value.

    Examples:
        >>> magnitude(512), magnitude((640, 480)), magnitude("short")
        (512, 307200, None)
    """
    sides = _sides(value)
    for side in sides:
        if type(side) not in (int, float) or side <= 0:
            return None
    product: float = math.prod(sides)
    return product if sides else None


def is_larger(value: object, smaller: object) -> bool:
    """Return whether a value is larger than another; a tuple, no smaller in any place.

    Examples:
        >>> is_larger(1024, 512), is_larger((640, 960), (640, 480)), is_larger((320, 960), (640, 480)), is_larger("b", "a")
        (True, True, False, False)
    """
    sides, least = _sides(value), _sides(smaller)
    if value == smaller or len(sides) != len(least):
        return False
    if magnitude(value) is None or magnitude(smaller) is None:
        return False
    return all(side >= limit for side, limit in zip(sides, least, strict=True))
