"""What follows from operators about values that are unknown: their range, and what a reader gets.

A range is true whatever the values are: an index of `argmax` lies below the length, a softmax in
[0, 1]. It bounds the shapes that depend on values. What a reader gets is invented, so that a program
takes the path that training takes: numbers are 1, or what is nearest in their range, none is infinite
or NaN, comparisons are made of these, and counts are the most that they can be.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.utils._pytree import tree_leaves

from oomprobe.ground.frames import user_line
from oomprobe.simulation.unknown import Guess
from oomprobe.simulation.values import ALL_CHOSEN, Geometry, Values, written

BOOLEAN = (
    "{line} reads a boolean from a tensor without data and gets False. If the step then does less "
    "work, this answer is wrong"
)
INTEGER = (
    "{line} reads an integer from a tensor without data and gets {value}. If a size or a branch "
    "depends on it, this answer may be wrong"
)
MOST_LOOKED_AT = 2**16  # elements of a tensor with known values, of which the range is taken


class Bounds(NamedTuple):
    """What is known of all elements of a tensor; of floating-point numbers, NaN apart."""

    low: float = -math.inf
    high: float = math.inf
    # What a reader gets, as far as the range allows; inf: the most. None: an unknown boolean.
    answer: float | None = 1.0

    @property
    def read(self) -> float:
        """The answer, in the range."""
        most_read = self.high if math.isfinite(self.high) else max(1.0, self.low)
        return float(max(self.low, min(most_read, self.answer or 0.0)))

    @property
    def is_exact(self) -> bool:
        """Whether all elements have one value."""
        return self.low == self.high


UNKNOWN, UNIT, YES, NO = Bounds(), Bounds(0, 1), Bounds(1, 1, 1.0), Bounds(0, 0, 0.0)
POSITIVE, NEGATIVE, BETWEEN_ONES = Bounds(0), Bounds(high=0), Bounds(-1, 1)
_OF_DTYPE = {torch.bool: Bounds(0, 1, None), torch.uint8: Bounds(0, 255)}


class Applied:
    """An operator that has run, with its arguments by their names.

    Attributes:
        results: What it returned.
    """

    def __init__(self, facts: Facts, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        self._of, self._given = facts.of, {**_defaults(func), **kwargs}
        self._given.update(zip(_defaults(func), args, strict=False))
        self.results: list[torch.Tensor] = tree_leaves(result)

    def __getitem__(self, name: str) -> Any:
        return self._given.get(name)

    def fact(self, name: str = "self") -> Bounds:
        """Return what is known of an argument: a tensor, a number, or all tensors of a list."""
        return self._fact(self[name])

    def _fact(self, value: Any) -> Bounds:
        if isinstance(value, torch.Tensor):
            return self._of(value)
        if isinstance(value, list | tuple):
            return hull(*map(self._fact, value))
        return Bounds(value, value) if isinstance(value, int | float) else UNKNOWN

    @property
    def length(self) -> int:
        """How many elements an index may point at."""
        shape, dimension = self["self"].shape, self["dim"]
        return int(math.prod(shape) if dimension is None or not shape else shape[dimension])

    @property
    def summed(self) -> float:
        """How many elements each one of the result is made of."""
        return float(self["self"].numel() / max(1, self.results[0].numel()))


class Facts:
    """What is known of tensors whose values are not, by their storages: of all views of one alike.

    Attributes:
        read_at: The line that read an unknown value last; "" if none has.
        has_guessed: Whether an integer was read that is not the most that it can be.
    """

    def __init__(
        self,
        values: Values,
        fake: Callable[[torch.Tensor], torch.Tensor],
        notes: dict[str, None],
    ) -> None:
        self._values, self._fake, self._notes = values, fake, notes
        self.read_at, self.has_guessed = "", False
        self._known: WeakKeyDictionary[torch.UntypedStorage, tuple[torch.dtype, Bounds]] = (
            WeakKeyDictionary()
        )

    def of(self, tensor: torch.Tensor) -> Bounds:
        """Return what is known of a tensor's elements."""
        if self._values.knows(tensor) and 0 < tensor.numel() <= MOST_LOOKED_AT:
            values: Any = self._values.of(tensor)
            with torch._C._DisableTorchDispatch():
                low, high = torch.aminmax(values.flatten().to(torch.float64))
                return Bounds(low.item(), high.item())
        unknown = tensor.dtype, _OF_DTYPE.get(tensor.dtype, UNKNOWN)
        dtype, fact = self._known.get(self._fake(tensor).untyped_storage(), unknown)
        return fact if dtype is tensor.dtype else unknown[1]

    def read(self, tensor: torch.Tensor) -> Any:
        """Return the value that stands for all those of a tensor; note what may mislead a program."""
        self.read_at, fact = user_line(), self.of(tensor)
        if tensor.is_floating_point() or tensor.is_complex():
            return float(fact.read)
        if tensor.dtype is torch.bool:
            if fact.answer is None and not fact.is_exact:
                self._notes[BOOLEAN.format(line=self.read_at)] = None
            return bool(fact.read)
        if math.isinf(fact.high):
            self._notes[INTEGER.format(line=self.read_at, value=int(fact.read))] = None
        return int(fact.read)

    def guess(self, tensor: torch.Tensor) -> int:
        """Return the number that stands for one; an index is noted once something depends on it."""
        fact = self.of(tensor)
        if tensor.dtype is torch.bool or math.inf in (fact.high, fact.answer):
            return self.read(tensor)  # type: ignore[no-any-return]
        self.read_at, self.has_guessed = user_line(), True
        note = INTEGER.format(line=self.read_at, value=int(fact.read))
        return Guess.of(int(fact.read), lambda: self._notes.setdefault(note))

    def most_elements(self, func: Any, args: Any, kwargs: dict[str, Any]) -> list[Geometry] | None:
        """Return the largest results of an operator whose results' shapes depend on values.

        None if there is no bound.
        """
        applied = Applied(self, func, args, kwargs, ())
        try:
            largest_results = _MOST[func.overloadpacket.__name__](applied)
        except (KeyError, OverflowError):  # no such operator, or no largest value
            return None
        if applied.fact().high >= (applied["minlength"] or 0):
            self._notes[ALL_CHOSEN.format(line=user_line())] = None
        return largest_results

    def follow(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Keep what follows from an operator that has run.

        The values of what it wrote must not be forgotten yet.
        """
        rule = RULES.get(func.overloadpacket.__name__.rstrip("_"))
        changed = written(func, args, kwargs)
        if rule is None:
            for tensor in changed:
                self._known.pop(self._fake(tensor).untyped_storage(), None)
            return
        applied = Applied(self, func, args, kwargs, result)
        facts = rule(applied)
        if isinstance(facts, Bounds):
            facts = (facts,)
        for tensor, fact in zip(applied.results, facts, strict=False):
            storage = self._fake(tensor).untyped_storage()
            fact = as_dtype(fact, tensor.dtype)
            if changed and tensor.numel() * tensor.element_size() < storage.nbytes():
                fact = hull(self.of(tensor), fact)
            self._known[storage] = tensor.dtype, fact


@functools.cache
def _defaults(func: Any) -> dict[str, Any]:
    return {argument.name: argument.default_value for argument in func._schema.arguments}


# --- arithmetic ---


def _joint(*facts: Bounds) -> float | None:
    """Return the answer about what is made of several: none if one has none; the most, if one has."""
    answers = [fact.answer for fact in facts]
    return None if None in answers else max(filter(None, answers), default=0.0)


def hull(*facts: Bounds) -> Bounds:
    """Return what holds for the elements of several tensors."""
    lows, highs, _ = zip(*facts, strict=True)
    return Bounds(min(lows), max(highs), _joint(*facts))


def as_dtype(fact: Bounds, dtype: torch.dtype) -> Bounds:
    """Return what is known of elements that are converted: integers that do not fit wrap around."""
    low, high, answer = fact
    if dtype is torch.bool:
        return fact if 0 <= low <= high <= 1 else negated(equal(fact, NO))
    if dtype.is_floating_point or dtype.is_complex:
        return Bounds(low, high)
    limits, whole = torch.iinfo(dtype), monotone(math.trunc, fact)
    if any(math.isfinite(end) and not limits.min <= end <= limits.max for end in whole[:2]):
        return _OF_DTYPE.get(dtype, UNKNOWN)
    return whole if answer is not None else whole._replace(answer=1.0)


def corners(operation: Callable[[Any, Any], float], left: Bounds, right: Bounds) -> Bounds:
    """Apply an operation that is monotone in both arguments."""
    ends = [operation(x, y) for x in left[:2] for y in right[:2]]
    if any(map(math.isnan, ends)):
        return UNKNOWN
    return Bounds(min(ends), max(ends), _joint(left, right))


def monotone(function: Callable[[float], float], fact: Bounds) -> Bounds:
    """Apply a function that grows; where it overflows or is undefined, that end is unknown."""
    ends = []
    for end, unknown in ((fact.low, -math.inf), (fact.high, math.inf)):
        try:
            ends.append(function(end))
        except (OverflowError, ValueError):
            ends.append(unknown)
    return Bounds(ends[0], ends[1], fact.answer)


def compared(compare: Callable[[Any, Any], float], left: Bounds, right: Bounds) -> Bounds:
    """Compare two facts by an operation that is monotone in both."""
    low, high, answer = corners(compare, left, right)
    return Bounds(low, high, None if answer is None else compare(left.read, right.read))


def equal(left: Bounds, right: Bounds) -> Bounds:
    """Compare two facts; what is sure of a comparison with NaN does not matter."""
    if left.high < right.low or right.high < left.low:
        return NO
    if left.is_exact and left[:2] == right[:2]:
        return YES
    return Bounds(0, 1, None if _joint(left, right) is None else left.read == right.read)


def negated(fact: Bounds) -> Bounds:
    """Return what `logical_not` makes of a boolean."""
    return Bounds(1 - fact.high, 1 - fact.low, None if fact.answer is None else 1 - fact.read)


def scaled(fact: Bounds, factor: float) -> Bounds:
    """Return a fact of numbers that were multiplied."""
    return corners(operator.mul, fact, Bounds(factor, factor))


def absolute(fact: Bounds) -> Bounds:
    """Return what `abs` makes of numbers."""
    low, high, answer = fact
    return Bounds(max(0, low, -high), max(-low, high), answer)


def quotient(rounded: str | None, left: Bounds, right: Bounds) -> Bounds:
    """Divide, and round if that is named."""
    if right.low <= 0 <= right.high:
        return UNKNOWN
    exact = corners(operator.truediv, left, right)
    if rounded is None:
        return exact
    return monotone(math.floor if rounded == "floor" else math.trunc, exact)


def most(fact: Bounds) -> Bounds:
    """Let counts, and the largest of several, be read as the most that they can be, as sizes are."""
    return fact._replace(answer=math.inf)


def below(length: int) -> Bounds:
    """Return the range of an index."""
    return Bounds(0, max(0, length - 1))


# --- operators ---


def clamped(applied: Applied) -> Bounds:
    """Clamp between limits, each a number, a tensor or none."""
    fact = applied.fact()
    if applied["min"] is not None:
        fact = corners(max, fact, applied.fact("min"))
    if applied["max"] is not None:
        fact = corners(min, fact, applied.fact("max"))
    return fact


def added(sign: int, augend: str, addend: str) -> Rule:
    """Make the rule of an operator that adds a multiple of an argument."""

    def rule(applied: Applied) -> Bounds:
        multiple = scaled(applied.fact(addend), sign * applied["alpha"])
        return corners(operator.add, applied.fact(augend), multiple)

    return rule


def binary(combine: Callable[[Bounds, Bounds], Bounds]) -> Rule:
    """Make the rule of an operator of two arguments."""
    return lambda applied: combine(applied.fact(), applied.fact("other"))


def logical(operation: Callable[[Any, Any], float]) -> Rule:
    """Make the rule of an operator on booleans, or on 0 and 1; other bits are unknown."""

    def rule(applied: Applied) -> Bounds:
        left, right = applied.fact(), applied.fact("other")
        if applied.results[0].dtype is torch.bool:
            left, right = as_dtype(left, torch.bool), as_dtype(right, torch.bool)
        elif not 0 <= min(left.low, right.low) <= max(left.high, right.high) <= 1:
            return UNKNOWN
        return compared(operation, left, right)

    return rule


def remainder(applied: Applied) -> Bounds:
    """Follow what is left of a division by a positive number."""
    divisor = applied.fact("other")
    if not divisor.is_exact or divisor.low <= 0:
        return UNKNOWN
    return Bounds(0, divisor.low - (not applied.results[0].is_floating_point()))


def random_integers(low: str, high: str) -> Rule:
    """Make the rule of an operator that draws from a range."""

    def rule(applied: Applied) -> Bounds:
        return POSITIVE if applied[high] is None else Bounds(applied[low] or 0, applied[high] - 1)

    return rule


def largest(applied: Applied) -> tuple[Bounds, Bounds]:
    """Follow the choice of elements, and their indices."""
    return most(applied.fact()), below(applied.length)


def picked(applied: Applied) -> tuple[Bounds, Bounds]:
    """Follow a sorted order, which reads like any elements, and its indices."""
    return applied.fact(), below(applied.length)


def distinct(applied: Applied) -> tuple[Bounds, ...]:
    """Follow `unique`: elements, where each one went, and how often it was there."""
    count = max(1, applied["self"].numel())
    return applied.fact(), below(count), most(Bounds(1, count))


def bins_at_most(applied: Applied) -> list[Geometry]:
    """Return the largest result of `bincount`; `minlength` says it where values have no bound."""
    bins, highest, weights = applied["minlength"], applied.fact().high, applied["weights"]
    if not bins or math.isfinite(highest):
        bins = max(bins, int(highest) + 1)
    dtype = torch.int64 if weights is None else torch.promote_types(weights.dtype, torch.float32)
    return [((bins,), dtype)]


def distinct_at_most(applied: Applied) -> list[Geometry]:
    """Return the largest results of `unique`: all elements, or each integer of their range once."""
    tensor, fact = applied["self"], applied.fact()
    count = tensor.numel()
    if applied["sorted"] is not None and not tensor.is_floating_point():
        count = int(min(count, fact.high - fact.low + 1))
    return [((count,), tensor.dtype), (tensor.shape, torch.int64), ((count,), torch.int64)]


def rows_at_most(applied: Applied) -> list[Geometry]:
    """Return the largest results of `unique` along a dimension: all rows."""
    tensor, count = applied["self"], applied.length
    return [(tensor.shape, tensor.dtype), ((count,), torch.int64), ((count,), torch.int64)]


def writing(*names: str) -> Rule:
    """Make the rule of an operator that writes one of these arguments to some elements."""

    def rule(applied: Applied) -> Bounds:
        if applied["accumulate"] or applied["reduce"]:
            return UNKNOWN
        return hull(
            applied.fact(), *(applied.fact(name) for name in names if applied[name] is not None)
        )

    return rule


def summed(applied: Applied) -> Bounds:
    """Follow a sum."""
    return most(scaled(applied.fact(), applied.summed))


def summed_up(applied: Applied) -> Bounds:
    """Follow the sums of the first elements."""
    return most(hull(applied.fact(), scaled(applied.fact(), applied.length)))


def raised(applied: Applied) -> Bounds:
    """Follow a power."""
    exponent = applied["exponent"]
    is_even = isinstance(exponent, int | float) and exponent % 2 == 0
    return POSITIVE if is_even else UNKNOWN


Rule = Callable[[Applied], Bounds | tuple[Bounds, ...]]
# By the names of operators, in place or not. Of what others make nothing is known; views are
# known by their storage.
_BY_NAMES: dict[str, Rule] = {
    # the same elements, or some of them
    "_to_copy clone gather index index_select masked_select take repeat flip roll": Applied.fact,
    "any all amin mean": Applied.fact,
    "amax": lambda it: most(it.fact()),
    "max": largest,
    "min sort topk kthvalue mode median nanmedian cummax cummin": picked,
    "_unique2 unique_dim unique_consecutive": distinct,
    # elements of several
    "cat stack": lambda it: hull(it.fact("tensors")),
    "copy": lambda it: it.fact("src"),
    "embedding": lambda it: it.fact("weight"),
    "where": lambda it: hull(it.fact(), it.fact("other")),
    "scatter masked_fill masked_scatter index_fill": writing("src", "value", "source"),
    "index_put _index_put_impl": writing("values"),
    "constant_pad_nd": writing("value"),
    "fill": lambda it: it.fact("value"),
    "full full_like new_full": lambda it: it.fact("fill_value"),
    "zero zeros zeros_like new_zeros": lambda _: NO,
    "ones ones_like new_ones": lambda _: YES,
    "tril triu": lambda it: hull(it.fact(), NO),
    # counts, and indices
    "sum": summed,
    "cumsum": summed_up,
    "count_nonzero": lambda it: most(Bounds(0, it.summed)),
    "bincount": lambda it: (
        most(Bounds(0, it["self"].numel())) if it["weights"] is None else UNKNOWN
    ),
    "argmax argmin": lambda it: below(it.length),
    "multinomial": lambda it: below(it["self"].shape[-1]),
    "nonzero": lambda it: below(max(it["self"].shape, default=1)),
    "max_pool2d_with_indices": lambda it: (it.fact(), below(math.prod(it["self"].shape[-2:]))),
    "searchsorted": lambda it: Bounds(0, it["sorted_sequence"].shape[-1]),
    "bucketize": lambda it: Bounds(0, it["boundaries"].shape[-1]),
    "randint randint_like": random_integers("low", "high"),
    "random": random_integers("from", "to"),
    "randperm": lambda it: below(it["n"]),
    # comparisons; whatever training meets is finite
    "isfinite _is_all_true": lambda _: YES,
    "isnan isinf isposinf isneginf": lambda _: NO,
    "eq": binary(equal),
    "ne": binary(lambda left, right: negated(equal(left, right))),
    "lt": binary(functools.partial(compared, operator.lt)),
    "le": binary(functools.partial(compared, operator.le)),
    "gt": binary(functools.partial(compared, operator.gt)),
    "ge": binary(functools.partial(compared, operator.ge)),
    "logical_and bitwise_and": logical(min),
    "logical_or bitwise_or": logical(max),
    "logical_not bitwise_not": logical(lambda left, _: 1 - left),
    # arithmetic
    "add": added(1, "self", "other"),
    "sub": added(-1, "self", "other"),
    "rsub": added(-1, "other", "self"),
    "mul": binary(functools.partial(corners, operator.mul)),
    "div": lambda it: quotient(it["rounding_mode"], it.fact(), it.fact("other")),
    "floor_divide": binary(functools.partial(quotient, "floor")),
    "remainder": remainder,
    "maximum": binary(functools.partial(corners, max)),
    "minimum": binary(functools.partial(corners, min)),
    "neg": lambda it: scaled(it.fact(), -1),
    "abs": lambda it: absolute(it.fact()),
    "clamp clamp_min clamp_max": clamped,
    "relu": lambda it: corners(max, it.fact(), NO),
    "exp": lambda it: monotone(math.exp, it.fact()),
    "log": lambda it: monotone(math.log, it.fact()),
    "log1p": lambda it: monotone(math.log1p, it.fact()),
    "floor": lambda it: monotone(math.floor, it.fact()),
    "ceil": lambda it: monotone(math.ceil, it.fact()),
    "trunc": lambda it: monotone(math.trunc, it.fact()),
    "pow": raised,
    "sqrt rsqrt softplus std var linalg_vector_norm _standard_gamma poisson": lambda _: POSITIVE,
    # probabilities
    "_softmax _safe_softmax sigmoid hardsigmoid _sample_dirichlet": lambda _: UNIT,
    "rand rand_like bernoulli": lambda _: UNIT,
    "uniform": lambda it: Bounds(it["from"], it["to"]),
    "_log_softmax log_sigmoid_forward": lambda _: NEGATIVE,
    "tanh sin cos erf sign": lambda _: BETWEEN_ONES,
}
RULES = {name: rule for names, rule in _BY_NAMES.items() for name in names.split()}

# The largest results of operators whose shapes depend on values.
_MOST: dict[str, Callable[[Applied], list[Geometry]]] = {
    "nonzero": lambda it: [
        ((it["self"].numel() * (it.fact() != NO), it["self"].dim()), torch.int64)
    ],
    "bincount": bins_at_most,
    "repeat_interleave": lambda it: [
        ((it["output_size"] or it["repeats"].numel() * int(it.fact("repeats").high),), torch.int64)
    ],
    "_unique2": distinct_at_most,
    "unique_consecutive": distinct_at_most,
    "unique_dim": rows_at_most,
}
