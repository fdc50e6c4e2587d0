"""Prediction of a step's allocator events at batch sizes that did not run.

The events of a step usually differ between batch sizes only in their sizes, which grow linearly. Tapes of two batch sizes
determine the lines. Other batch sizes are then tried by replaying their predicted tape on the allocator alone, and each
further batch size that runs checks the lines. Steps that do not follow lines (a batch split into chunks, a padded shape)
are not predicted.

A simulated card knows which kernel asks for a size. The history of a real one has bare sizes: there
`Predictor` recognizes the scratch memory of reductions, allows slopes that are not whole, and goes on
with other lines where a size that ran did not follow them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from fractions import Fraction
from itertools import chain, cycle, groupby, islice
from math import ceil

from oomprobe.tape.calls import (
    ALLOCATED,
    FREED,
    KERNEL,
    Kernel,
    RecordedCall,
    lengthen_turns,
    peak_bytes,
    reducing,
)
from oomprobe.tape.reductions import Processors, Reduction, buffers

NUMBERS_BYTES = 4096  # losses and counts, of which a loop may hold one more at the peak
LONGEST_PERIOD = 24  # of calls on a real card: micro-batches, or those between evaluations
NO_LINES = "the allocations at batch {size} and {other_size} differ in more than sizes that grow with the batch"
DIFFERENT_TURNS = "step {name!r} allocates something else in its second turn than in its first"


@dataclass(frozen=True, slots=True)
class Line:
    """A call whose sizes are linear in the batch size."""

    call: RecordedCall
    batch_size: int
    slopes: tuple[Fraction, ...]

    def at(self, batch_size: int) -> RecordedCall:
        """Return the call predicted for a batch size."""
        more = batch_size - self.batch_size
        sizes = (
            max(0, size + ceil(slope * more))
            for size, slope in zip(self.call.sizes, self.slopes, strict=True)
        )
        return RecordedCall(self.call.events, tuple(sizes))

    def on(self, processors: Processors) -> Line:
        """Return the line on a card of the same compute capability with these processors."""
        events = []
        for kind, index, detail in self.call.events:
            if kind == KERNEL:
                kernel, part = detail
                detail = kernel.on(processors), part
            events.append((kind, index, detail))
        return replace(self, call=replace(self.call, events=tuple(events)))


def lines_through(
    size: int,
    calls: Sequence[RecordedCall],
    other_size: int,
    other_calls: Sequence[RecordedCall],
    *,
    are_whole: bool = True,
) -> list[Line] | None:
    """Return the lines through calls of two batch sizes; None if there are none.

    The events must be the same, and slopes whole numbers. Unless `are_whole`, as on a real card,
    only requests must be the same, and the frees are those of the first call.

    Example:
        >>> from oomprobe.tape.calls import ALLOCATED, FREED
        >>> events = ((ALLOCATED, 0, 0), (FREED, 0, 0))
        >>> lines_through(1, [RecordedCall(events, (12,))], 2, [RecordedCall(events, (16,))])[0].at(100).sizes
        (408,)
    """
    if len(calls) != len(other_calls):
        return None
    lines = []
    for call, other_call in zip(calls, other_calls, strict=True):
        same = call.asked == other_call.asked
        if are_whole:
            same = call.events == other_call.events
        if not same:
            return None
        slopes = list[Fraction]()
        for nbytes, other_bytes in zip(call.sizes, other_call.sizes, strict=True):
            slope = Fraction(other_bytes - nbytes, other_size - size)
            if are_whole and slope.denominator > 1:
                return None
            slopes.append(slope)
        lines.append(Line(call, size, tuple(slopes)))
    return lines


def borrow_slopes(
    lines: Sequence[Line], batch_size: int, calls: Sequence[RecordedCall]
) -> list[Line]:
    """Return lines through the calls of one batch size, whose events may be others than theirs.

    A size that the lines have there too takes their slope; any other grows with the batch. So does
    what a size differs by from its line, where the requests are the same.
    """
    borrowed = []
    for number, call in enumerate(calls):
        line = lines[min(number, len(lines) - 1)]
        slopes = [Fraction(nbytes, batch_size) for nbytes in call.sizes]
        for kind, index, detail in call.events:
            if kind == KERNEL:  # of whose numbers only the rows grow
                count = detail[0].count
                slopes[index : index + count] = (Fraction(),) * count
                slopes[index + _ROWS] = Fraction(call.sizes[index + _ROWS], batch_size)
        here = line.at(batch_size).sizes
        if call.asked == line.call.asked:
            slopes = [
                slope + Fraction(nbytes - predicted, batch_size)
                for slope, nbytes, predicted in zip(line.slopes, call.sizes, here, strict=True)
            ]
        else:
            matcher = SequenceMatcher(None, here, call.sizes, autojunk=False)
            for start, mine, length in matcher.get_matching_blocks():
                slopes[mine : mine + length] = line.slopes[start : start + length]
        borrowed.append(Line(call, batch_size, tuple(slopes)))
    return borrowed


# --- scratch memory in bare sizes ---

_ROWS = 1  # the place of the rows among the numbers of a reduction: offset, shape and strides
_MOST_FREES = 16  # that follow each other, in which those of scratch memory are looked for


def recognize_reductions(
    call: RecordedCall, batch_size: int, processors: Processors
) -> RecordedCall:
    """Return the call with reductions over the batch as kernels, which have a rule.

    A reduction asks for its result, for partial results and for semaphores, and gives the last two
    back before anything else is asked for. Its input has a column for each element of the result.
    """
    events, sizes = list(call.events), list(call.sizes)
    for at in range(len(call.events) - 4, -1, -1):
        asked = call.events[at : at + 3]
        if [kind for kind, *_ in asked] != [ALLOCATED] * 3:
            continue
        result, partial, semaphores = (index for _, index, _ in asked)
        pair = partial, semaphores
        frees = [(FREED, 0, index) for index in pair]
        after = events[at + 3 : at + 3 + _MOST_FREES]
        if not {*frees} <= {*after}:
            continue
        asked_bytes = [call.sizes[index] for index in (result, *pair)]
        inputs = [*_live_bytes(call, at), *sorted({*call.sizes} - {0})]
        kernel_and_numbers = _reduction(inputs, batch_size, processors, asked_bytes)
        if kernel_and_numbers is None:
            continue
        kernel, numbers = kernel_and_numbers
        events[at + 3 : at + 3 + _MOST_FREES] = [event for event in after if event not in frees]
        events[at + 1 : at + 3] = [(KERNEL, len(sizes), (kernel, 0))]
        sizes += numbers
        sizes[partial] = sizes[semaphores] = 0
    return RecordedCall(tuple(events), tuple(sizes))


def _live_bytes(call: RecordedCall, until: int) -> list[int]:
    """Return the sizes of a call's tensors that are live before an event, the last first."""
    live = dict[int, int]()
    for kind, index, detail in call.events[:until]:
        if kind == ALLOCATED:
            live[index] = call.sizes[index]
        elif kind == FREED and index == 0:
            live.pop(detail, None)
    return [nbytes for nbytes in reversed(live.values()) if nbytes]


def _reduction(
    inputs: Sequence[int], batch_size: int, processors: Processors, asked: Sequence[int]
) -> tuple[Kernel, tuple[int, ...]] | None:
    """Return the first reduction over a multiple of the batch that asks for these sizes, if any does.

    Its scratch memory has a bound, so large inputs ask for the same; its own is mostly recent.
    """
    result_bytes, *pair = asked
    for item_bytes, result_item_bytes in ((4, 4), (2, 4), (2, 2)):
        kind = Reduction(processors, item_bytes, 4, (True, False))
        columns = max(1, result_bytes // result_item_bytes)
        row_bytes = item_bytes * columns
        for rows in [size // row_bytes for size in inputs if size % (row_bytes * batch_size) == 0]:
            if buffers(kind, (rows, columns), (columns, 1), 0) == (tuple(pair),):
                return Kernel(reducing, (kind,), 5), (0, rows, columns, columns, 1)
    return None


@dataclass(frozen=True, slots=True)
class _Trial:
    """A trial that ran: the steps that its calls are of, and what these did, up to the first of those that repeat."""

    batch_size: int
    names: tuple[str, ...]
    calls: tuple[RecordedCall, ...]
    period: int  # how many of the last calls repeat; 0: none, nor if there are several steps

    @classmethod
    def of(
        cls,
        batch_size: int,
        names: Sequence[str],
        calls: Sequence[RecordedCall],
        *,
        longest_period: int,
    ) -> _Trial:
        """Return the trial of these calls."""
        distinct, period = len(calls), 0
        if len({*names}) == 1:
            longest = min(longest_period, distinct // 2)
            distinct, period = min(_periods(calls, longest), default=(distinct, 0))
        return cls(batch_size, tuple(names), tuple(calls[:distinct]), period)

    @property
    def changing_step(self) -> str | None:
        """The step whose later turn ended with a call that its first turn did not make; None if there is none."""
        in_first_turn: dict[str, set[tuple[object, object]]] = {}
        calls = iter(self.calls)
        for name, names in groupby(self.names[: len(self.calls)]):
            turn = [(call.core, call.sizes) for call in islice(calls, len([*names]))]
            if turn[-1] not in in_first_turn.setdefault(name, {*turn}):
                return name
        return None


def _periods(calls: Sequence[RecordedCall], longest: int) -> Iterator[tuple[int, int]]:
    """Yield each number of calls after which the last ones repeat, after how many calls differ.

    Calls between evaluations are alike too, but those that differ from them end later.
    """
    done = [(call.core, call.sizes) for call in calls]
    for period in range(1, longest + 1):
        is_closed, end = period > 1 or calls[-1].closed, len(calls)
        if is_closed and done[-period:] == done[-2 * period : -period]:
            start = end - period
            while start >= period and calls[start - period : start] == calls[start:end]:
                start, end = start - period, start
            yield end, period


class Predictor:
    """Prediction of the calls of a cold trial.

    Calls of a single step mostly end with one that repeats: then it may follow any number of times. All others are predicted one by
    one, for trials that make calls of the same steps in the same order.

    Attributes:
        lines: One for each call that does not repeat the one before; None while unknown or after a contradiction.
        reason: Why there are no lines, although two sizes ran; "" if there are, or fewer ran.
        period: How many of the last calls repeat; 0: none.
        workspace_bytes: The largest workspace that a convolution may want, by batch size that ran.
    """

    def __init__(self, *, processors: Processors | None = None) -> None:
        self._processors = (
            processors  # of the card whose history has bare sizes; None: no such history
        )
        self.lines: list[Line] | None = None
        self.reason = ""
        self.workspace_bytes: dict[int, int] = {}
        self._names: tuple[str, ...] = ()  # of the calls that the lines were found for
        self.period = 0
        self._last: _Trial | None = None  # that ran
        self._given_up = False

    def on(self, processors: Processors) -> Predictor | None:
        """Return the prediction for a card of the same compute capability with these processors; None if there is none."""
        if self.lines is None:
            return None
        predictor = self.following([line.on(processors) for line in self.lines])
        predictor.workspace_bytes, predictor._given_up = self.workspace_bytes, True
        return predictor

    def following(self, lines: list[Line] | None) -> Predictor:
        """Return a prediction of the same calls by other lines, as of another row of a table."""
        predictor = Predictor(processors=self._processors)
        predictor.lines, predictor._names, predictor.period = lines, self._names, self.period
        return predictor

    # --- what ran ---

    def learn(self, batch_size: int, names: Sequence[str], calls: Sequence[RecordedCall]) -> bool:
        """Learn from a trial that ran, with calls of these steps; return False if they contradict the lines and take another peak."""
        if self._given_up:
            return True
        longest = 1
        if self._processors is not None:
            calls = [recognize_reductions(call, batch_size, self._processors) for call in calls]
            longest = LONGEST_PERIOD
        trial = _Trial.of(batch_size, names, calls, longest_period=longest)
        changing = trial.changing_step
        if changing is not None:
            return self.give_up(DIFFERENT_TURNS.format(name=changing))
        predicted = self.calls(batch_size, names)
        before, self._last = self._last or trial, trial
        if predicted is None:
            self._find_lines(before, trial)
        elif self._processors is not None:
            assert self.lines is not None
            if batch_size <= self.lines[0].batch_size or predicted == [*calls]:
                return True
            made = trial.names[: len(self._names)]
            if self.period != trial.period or made != self._names:
                return self.give_up(NO_LINES.format(size=before.batch_size, other_size=batch_size))
            self.lines = borrow_slopes(self.lines, batch_size, trial.calls)
        # A loop whose smaller last batch only some sizes leave makes other calls, with the same peak.
        elif abs(peak_bytes(predicted) - peak_bytes(calls)) > NUMBERS_BYTES:
            return self.give_up(NO_LINES.format(size=before.batch_size, other_size=batch_size))
        return True

    def give_up(self, reason: str) -> bool:
        """Predict nothing from here on; return whether nothing was predicted until now."""
        had_none = self.lines is None
        self.lines, self.reason, self._given_up = None, reason, True
        return had_none

    def _find_lines(self, before: _Trial, now: _Trial) -> None:
        if before.batch_size == now.batch_size:
            return
        calls, other_calls, names = now.calls, before.calls, now.names
        if not now.period:
            made = min(len(calls), len(other_calls))
            calls, other_calls, names = calls[:made], other_calls[:made], names[:made]
        lines = None
        if before.period == now.period and before.names[: len(names)] == names[: len(before.names)]:
            lines = lines_through(
                before.batch_size,
                other_calls,
                now.batch_size,
                calls,
                are_whole=self._processors is None,
            )
        if lines is not None:
            self.lines, self.period, self._names, self.reason = lines, now.period, names, ""
        elif self.lines is None:
            self.reason = NO_LINES.format(size=before.batch_size, other_size=now.batch_size)

    # --- what follows from it ---

    def calls(self, batch_size: int, names: Sequence[str]) -> list[RecordedCall] | None:
        """Predict the first calls of a cold trial, which are of these steps; None if unknown."""
        if self.lines is None:
            return None
        predicted = [line.at(batch_size) for line in self.lines]
        repeats = self.period > 0 and {*names} == {*self._names}
        if repeats or tuple(names) == self._names[: len(names)]:
            again = cycle(predicted[-self.period :])
            return [*islice(chain(predicted, again), len(names))]
        return None if self.period else lengthen_turns(predicted, self._names, names)

    def workspace_at(self, batch_size: int) -> int:
        """Bound what a convolution may want at a size that did not run: it grows no faster than the batch."""
        ran = max(
            (size for size in self.workspace_bytes if size <= batch_size),
            default=min(self.workspace_bytes, default=batch_size),
        )
        return -(-self.workspace_bytes.get(ran, 0) * max(ran, batch_size) // ran)
