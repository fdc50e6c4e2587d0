"""What calls of other shapes ask for: sizes of requests as polynomials of a shape's numbers.

A shape is the numbers that a step gets: its batch size, and then such as lengths or counts. Calls
that make the same requests in the same order are of one structure. In it, each request is a
polynomial: the batch size to the power 0 or 1, times products of up to two of the other numbers,
which a kernel may round up.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import combinations_with_replacement
from operator import eq

import numpy as np
import numpy.typing as npt

from oomprobe.tape.calls import (
    ALLOCATED,
    FREED,
    KERNEL,
    SHARED,
    Event,
    Kernel,
    RecordedCall,
    parts_of,
)
from oomprobe.tape.fit import Line, lines_through, recognize_reductions
from oomprobe.tape.reductions import Processors

Shape = tuple[float, ...]
ROUNDINGS = (1, 32, 8, 16, 64, 128, 2, 4)  # attention pads to 32; a stride halves a side
FEW_SHAPES = 2  # which show how a request grows only if it has a single term
MANY_SAMPLES = 1024  # that are added to a batch, to tell a row's lines
MOST_SHAPES = 4096  # whose calls are kept
_Floats = npt.NDArray[np.float64]


def name_by_rank(calls: Sequence[RecordedCall]) -> list[RecordedCall]:
    """Return calls in which what one leaves for a later one is numbered in turn.

    So calls of other structures can follow each other. The last call is left out: who frees what it
    leaves is unknown. What was there before the trial has its own names, which only the first call
    may use.
    """
    left = [set[int]() for _ in calls]
    for number, call in enumerate(calls):
        for kind, ago, detail in call.events:
            if kind == FREED and 0 < ago <= number:
                left[number - ago].add(detail)
    places = list[dict[int, int]]()
    for call, kept in zip(calls, left, strict=True):
        order = sorted(kept) + [index for index in range(len(call.sizes)) if index not in kept]
        places.append({before: place for place, before in enumerate(order)})
    named = []
    for number, call in enumerate(calls[:-1]):
        events = [_rename(event, number, places) for event in call.events]
        sizes = [0] * len(call.sizes)
        for before, place in places[number].items():
            sizes[place] = call.sizes[before]
        renamed = tuple(event for event in events if event is not None)
        named.append(RecordedCall(renamed, tuple(sizes)))
    return named


def _rename(event: Event, number: int, places: Sequence[Mapping[int, int]]) -> Event | None:
    """Return an event of a call with new names; None if it frees what was there before the trial."""
    kind, index, detail = event
    if kind in (ALLOCATED, KERNEL):
        return kind, places[number][index], detail
    if kind not in (FREED, SHARED) or index > number == 0:
        return event
    if index > number:
        return None
    if kind == FREED:
        return kind, index, places[number - index][detail]
    name, stream = detail
    return kind, index, (places[number - index][name], stream)


def share_alike(ran: RecordedCall, predicted: RecordedCall) -> tuple[int, int]:
    """Return how many of a call's requests came as predicted, and how many there are."""
    made, expected = _requests(ran), _requests(predicted)
    if len(made) == len(expected):
        return sum(map(eq, made, expected)), len(made)
    matcher = SequenceMatcher(None, made, expected, autojunk=False)
    return sum(block.size for block in matcher.get_matching_blocks()), len(made)


def _requests(call: RecordedCall) -> list[int]:
    """Return the bytes of a call's requests in their order, also of those that kernels make."""
    requests = list[int]()
    for kind, index, detail in call.events:
        if kind == ALLOCATED:
            requests.append(call.sizes[index])
        elif kind == KERNEL:
            kernel, part = detail
            parts = parts_of(kernel, call.sizes[index : index + kernel.count])
            requests += [step for step in parts[part] if step > 0]
    return [nbytes for nbytes in requests if nbytes]


def features(shape: Shape, rounding: int = 1) -> list[float]:
    """Return the terms of a polynomial: 1, the numbers and products of two, and each also times the batch size."""
    size, *others = shape
    rounded = others
    if rounding > 1:
        rounded = [math.ceil(number / rounding) * rounding for number in others]
    terms = [1.0, *map(float, rounded)]
    terms += [float(math.prod(pair)) for pair in combinations_with_replacement(rounded, 2)]
    return [*terms, *(size * term for term in terms)]


def kinds_of_polynomials(shape: Shape) -> list[list[int]]:
    """Return kinds of polynomials by their terms, the simplest first: one term, one and a constant, linear, all."""
    every, others = range(len(features(shape))), len(shape) - 1
    linear = range(1 + others)
    half = len(every) // 2
    return [
        *([term] for term in every),
        *([0, term] for term in every[1:]),
        [*linear, *(half + term for term in linear)],
        [*every],
    ]


@dataclass(frozen=True, slots=True)
class _Polynomials:
    """Polynomials of the same terms, and which of a list of numbers follow them."""

    terms: list[int]
    rounding: int
    which: npt.NDArray[np.bool_]
    coefficients: _Floats  # of each number

    def at(self, shape: Shape) -> _Floats:
        """Return the numbers that follow them."""
        terms = np.array(features(shape, self.rounding))[self.terms]
        numbers: _Floats = self.coefficients[self.which] @ terms
        return numbers

    def of(self, places: npt.NDArray[np.int64]) -> _Polynomials:
        """Return those of numbers that are like the ones at these places; -1: like none."""
        which = np.where(places >= 0, self.which[places], False)
        return _Polynomials(self.terms, self.rounding, which, self.coefficients[places])


class Growth:
    """How a list of numbers grows with shapes.

    Attributes:
        known: The numbers at each shape that ran.
    """

    def __init__(self) -> None:
        self.known: dict[Shape, tuple[int, ...]] = {}
        self._polynomials: list[_Polynomials] = []

    def fit(self) -> None:
        """Find the simplest polynomial for each number."""
        shapes, numbers = [*self.known], np.array([*self.known.values()], dtype=float)
        left = np.ones(numbers.shape[1], dtype=bool)
        self._polynomials = []
        nearest = None
        every = {
            rounding: np.array([features(shape, rounding) for shape in shapes])
            for rounding in ROUNDINGS
        }
        for terms in kinds_of_polynomials(shapes[0]):
            if len(terms) >= max(2, len(shapes)) or not left.any():
                break  # they would go through any numbers
            for rounding in ROUNDINGS:
                of_terms = every[rounding][:, terms]
                scale = np.abs(of_terms).max(0) + 1e-30  # equally large: solved exactly
                scaled = of_terms / scale
                fitted, *_ = np.linalg.lstsq(scaled, numbers, rcond=1e-12)
                follow = left & (np.abs(np.rint(scaled @ fitted) - numbers) < 0.5).all(0)
                followed = _Polynomials(terms, rounding, follow, (fitted / scale[:, None]).T)
                left = left & ~follow
                if follow.any():
                    self._polynomials.append(followed)
                if rounding == 1:
                    nearest = followed
        if nearest is not None:
            self._polynomials.append(replace(nearest, which=left))

    def borrow(self, lender: Growth, shape: Shape) -> dict[int, int]:
        """Scale numbers as those of another list that are as large at a shape.

        Return which of theirs come here in the same order, and where.
        """
        mine, theirs = self.known[shape], lender.at(shape)
        of_bytes = {nbytes: there for there, nbytes in enumerate(theirs)}
        places = np.array([of_bytes.get(nbytes, -1) for nbytes in mine])
        in_order = dict[int, int]()
        matcher = SequenceMatcher(None, mine, theirs, autojunk=False)
        for here, there, length in matcher.get_matching_blocks():
            places[here : here + length] = np.arange(there, there + length)
            in_order |= zip(range(there, there + length), range(here, here + length), strict=True)
        constant = _Polynomials([0], 1, places < 0, np.array(mine, dtype=float)[:, None])
        lent = [polynomials.of(places) for polynomials in lender._polynomials]
        self._polynomials = [constant, *lent]
        return in_order

    @property
    def is_scaled(self) -> bool:
        """Whether enough shapes ran to show how the numbers grow."""
        return len(self.known) > FEW_SHAPES

    def at(self, shape: Shape) -> tuple[int, ...]:
        """Return the numbers at a shape."""
        known = self.known.get(shape)
        if known is not None:
            return known
        sizes = np.zeros(len(next(iter(self.known.values()))))
        for polynomials in self._polynomials:
            if polynomials.which.any():
                sizes[polynomials.which] = polynomials.at(shape)
        whole: list[int] = np.maximum(np.rint(sizes), 0).astype(np.int64).tolist()
        return tuple(whole)

    def distance(self, shape: Shape) -> float:
        """Return how far a shape is from the nearest that is known."""
        return min(
            sum(
                (math.log(mine + 1) - math.log(number + 1)) ** 2
                for mine, number in zip(known, shape, strict=True)
            )
            for known in self.known
        )


# Of the lines of a table's rows: by the number of a call, and what it asked for.
Growths = defaultdict[tuple[int, object], Growth]


def learn_row(growths: Growths, value: float, lines: Sequence[Line]) -> None:
    """Learn from a row: its lines, and not its trials, tell apart what grows with the batch.

    Of trials alone, half the batch of twice the length asks for as much.
    """
    for number, line in enumerate(lines):
        growth = growths[number, line.call.asked]
        for size in (line.batch_size, line.batch_size + MANY_SAMPLES):
            growth.known[size, value] = line.at(size).sizes


def lines_of_row(growths: Growths, last: Sequence[Line], value: float) -> list[Line] | None:
    """Return the lines of a row; None unless two rows made the same requests as the last."""
    few, many = list[RecordedCall](), list[RecordedCall]()
    for number, line in enumerate(last):
        growth = growths[number, line.call.asked]
        if not growth.is_scaled:
            return None
        growth.fit()
        few.append(replace(line.call, sizes=growth.at((0, value))))
        many.append(replace(line.call, sizes=growth.at((MANY_SAMPLES, value))))
    return lines_through(0, few, MANY_SAMPLES, many, are_whole=False) or None


class Structure:
    """Calls that made the same requests in the same order, whatever scratch memory kernels took.

    Where shapes are small, a reduction takes none: so its kernel is no part of the structure.

    Attributes:
        events: What they did.
        sizes: Of the requests.
        kernels: By the request of its result, a recognized reduction and its numbers.
        phases: Of a step's period, in which such calls were made.
    """

    def __init__(self, events: tuple[Event, ...]) -> None:
        self.events = events
        self.sizes = Growth()
        self.kernels: dict[int, tuple[Kernel, Growth]] = {}
        self.phases = set[int]()

    def learn(self, shape: Shape, call: RecordedCall, kernels: Mapping[int, Event]) -> None:
        """Learn from a call at a shape, and from the reductions that were recognized in it."""
        self.sizes.known[shape] = call.sizes[: _count(self.events)]
        for result, (_, index, (kernel, _)) in kernels.items():
            _, growth = self.kernels.setdefault(result, (kernel, Growth()))
            growth.known[shape] = call.sizes[index : index + kernel.count]

    def fit(self) -> None:
        """Find polynomials for the sizes, and for the numbers of the kernels."""
        for growth in (self.sizes, *(growth for _, growth in self.kernels.values())):
            growth.fit()

    def borrow(self, scaled: Sequence[Structure]) -> None:
        """Scale as another structure does, of the same phase and known at a shape of this if there is one."""

        def preference(structure: Structure) -> tuple[bool, bool, int]:
            shared = self.sizes.known.keys() & structure.sizes.known.keys()
            is_alike = bool(self.phases & structure.phases)
            return is_alike, bool(shared), len(structure.sizes.known)

        lender = max(scaled, key=preference)
        shared = self.sizes.known.keys() & lender.sizes.known.keys()
        shape = next(iter(shared or self.sizes.known))
        places = self.sizes.borrow(lender.sizes, shape)
        for result, kernel in lender.kernels.items():
            if result in places:
                self.kernels[places[result]] = kernel

    def call(self, shape: Shape) -> RecordedCall:
        """Predict the call of a shape."""
        events, sizes = list[Event](), [*self.sizes.at(shape)]
        for event in self.events:
            events.append(event)
            if event[0] == ALLOCATED and event[1] in self.kernels:
                kernel, growth = self.kernels[event[1]]
                events.append((KERNEL, len(sizes), (kernel, 0)))
                sizes += growth.at(shape)
        return RecordedCall(tuple(events), tuple(sizes))


def _count(events: Sequence[Event]) -> int:
    """Return how many sizes these events have."""
    ends = [index + 1 for kind, index, _ in events if kind == ALLOCATED]
    ends += [index + detail[0].count for kind, index, detail in events if kind == KERNEL]
    return max(ends, default=0)


def take_kernels_out(call: RecordedCall) -> tuple[RecordedCall, dict[int, Event]]:
    """Return a call without its recognized reductions, and these by the request of their result."""
    asked = sorted(index for kind, index, _ in call.events if kind == ALLOCATED)
    places = {index: place for place, index in enumerate(asked)}
    events, kernels = list[Event](), dict[int, Event]()
    sizes = [call.sizes[index] for index in asked]
    for kind, index, detail in call.events:
        if kind == KERNEL:
            kernels[events[-1][1]] = kind, len(sizes), detail
            sizes += call.sizes[index : index + detail[0].count]
        elif kind == ALLOCATED:
            events.append((kind, places[index], detail))
        elif kind == FREED and index == 0:
            events.append((kind, index, places[detail]))
        else:
            events.append((kind, index, detail))
    return RecordedCall(tuple(events), tuple(sizes)), kernels


class ShapedTape:
    """What calls of a trial ask for, by step and shape, learned from those that ran.

    Args:
        processors: Those of a card whose history has bare sizes; None: what is recorded names its
            kernels.
        period: Calls after which a step does the same again, as where it accumulates gradients.
    """

    def __init__(self, processors: Processors | None, period: int = 1) -> None:
        self._processors, self._period = processors, period
        # By step, and whether a call is of its first period in a trial.
        self._structures = defaultdict[tuple[str, bool], dict[tuple[Event, ...], Structure]](dict)
        self._calls: dict[tuple[str, int, Shape], RecordedCall] = {}

    def learn(self, made: Sequence[tuple[str, Shape]], calls: Sequence[RecordedCall]) -> None:
        """Learn from the calls of a cold trial; the last only shows what the others leave."""
        made_before, processors = Counter[str](), self._processors
        if processors is not None:
            calls = [recognize_reductions(call, 1, processors) for call in calls]
        for (step, shape), call in zip(made, name_by_rank(calls), strict=False):
            number = made_before[step]
            made_before[step] += 1
            kernels: Mapping[int, Event] = {}
            if processors is not None:
                call, kernels = take_kernels_out(call)
            structures = self._structures[step, number < self._period]
            structure = structures.setdefault(call.events, Structure(call.events))
            structure.learn(shape, call, kernels)
            structure.phases.add(number % self._period)
        self._fit()

    def _fit(self) -> None:
        self._calls.clear()
        for structures in self._structures.values():
            for structure in structures.values():
                structure.fit()
        for (step, _), structures in self._structures.items():
            of_later = self._structures.get((step, False), structures).values()
            known = [structure for structure in of_later if structure.sizes.is_scaled]
            for structure in structures.values():
                if known and not structure.sizes.is_scaled:
                    structure.borrow(known)

    @property
    def structures(self) -> int:
        """In how many structures the later calls of a step came, at most."""
        return max(map(len, self._structures.values()))

    def call(self, step: str, shape: Shape, number: int) -> RecordedCall:
        """Predict the call of a step that has this number among those of the trial, from 0."""
        phase = number % self._period
        key = step, min(number, self._period + phase), shape
        call = self._calls.get(key)
        if call is None:
            structures = [*self._structures[step, number < self._period].values()]
            of_phase = [structure for structure in structures if phase in structure.phases]
            nearest = min(of_phase or structures, key=lambda one: one.sizes.distance(shape))
            call = nearest.call(shape)
            if len(self._calls) == MOST_SHAPES:
                self._calls.clear()
            self._calls[key] = call
        return call
