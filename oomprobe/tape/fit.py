"""Prediction of a step's allocator events at batch sizes that did not run.

The events of a step usually differ between batch sizes only in their sizes, which grow linearly. Tapes of two batch sizes
determine the lines. Other batch sizes are then tried by replaying their predicted tape on the allocator alone, and each
further batch size that runs checks the lines. Steps that do not follow lines (a batch split into chunks, a padded shape)
are not predicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice

from oomprobe.tape.calls import KERNEL, RecordedCall, peak_bytes
from oomprobe.tape.reductions import Processors

NUMBERS_BYTES = 4096  # losses and counts, of which a loop may hold one more at the peak
NO_LINES = "the allocations at batch {size} and {other_size} differ in more than sizes that grow with the batch"
DIFFERENT_TURNS = "step {name!r} allocates something else in its second turn than in its first"


@dataclass(frozen=True, slots=True)
class Line:
    """A call whose sizes are linear in the batch size."""

    call: RecordedCall
    batch_size: int
    slopes: tuple[int, ...]

    def at(self, batch_size: int) -> RecordedCall:
        """Return the call predicted for a batch size."""
        more = batch_size - self.batch_size
        sizes = (
            size + slope * more for size, slope in zip(self.call.sizes, self.slopes, strict=True)
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
    size: int, calls: Sequence[RecordedCall], other_size: int, other_calls: Sequence[RecordedCall]
) -> list[Line] | None:
    """Return the lines through calls of two batch sizes; None if the events differ or a slope is not whole.

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
        if call.events != other_call.events:
            return None
        slopes = []
        for nbytes, other_bytes in zip(call.sizes, other_call.sizes, strict=True):
            slope, rest = divmod(other_bytes - nbytes, other_size - size)
            if rest:
                return None
            slopes.append(slope)
        lines.append(Line(call, size, tuple(slopes)))
    return lines


@dataclass(frozen=True, slots=True)
class _Trial:
    """A trial that ran: the steps that its calls are of, and what these did, without repetitions of the last one."""

    batch_size: int
    names: tuple[str, ...]
    calls: tuple[RecordedCall, ...]
    repeats: bool  # whether the last call does; one of several steps is not taken to

    @classmethod
    def of(cls, batch_size: int, names: Sequence[str], calls: Sequence[RecordedCall]) -> _Trial:
        """Return the trial of these calls."""
        last, distinct = calls[-1], len(calls)
        repeats = len({*names}) == 1 and len(calls) > 1 and last.repeats(calls[-2])
        if repeats:
            while distinct > 1 and calls[distinct - 2] == last:
                distinct -= 1
        return cls(batch_size, tuple(names), tuple(calls[:distinct]), repeats)

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


class Predictor:
    """Prediction of the calls of a cold trial.

    Calls of a single step mostly end with one that repeats: then it may follow any number of times. All others are predicted one by
    one, for trials that make calls of the same steps in the same order.

    Attributes:
        lines: One for each call that does not repeat the one before; None while unknown or after a contradiction.
        reason: Why there are no lines, although two sizes ran; "" if there are, or fewer ran.
        workspace_bytes: The largest workspace that a convolution may want, by batch size that ran.
    """

    def __init__(self, *, gives_up: bool = False) -> None:
        self.lines: list[Line] | None = None
        self.reason = ""
        self.workspace_bytes: dict[int, int] = {}
        self._names: tuple[str, ...] = ()  # of the calls that the lines were found for
        self._repeats = False
        self._last: _Trial | None = None  # that ran
        self._given_up = gives_up

    def on(self, processors: Processors) -> Predictor | None:
        """Return the prediction for a card of the same compute capability with these processors; None if there is none."""
        if self.lines is None:
            return None
        predictor = Predictor(gives_up=True)
        predictor.lines = [line.on(processors) for line in self.lines]
        predictor._names, predictor._repeats = self._names, self._repeats
        predictor.workspace_bytes = self.workspace_bytes
        return predictor

    # --- what ran ---

    def learn(self, batch_size: int, names: Sequence[str], calls: Sequence[RecordedCall]) -> bool:
        """Learn from a trial that ran, with calls of these steps; return False if they contradict the lines and take another peak."""
        if self._given_up:
            return True
        trial = _Trial.of(batch_size, names, calls)
        changing = trial.changing_step
        if changing is not None:
            return self.give_up(DIFFERENT_TURNS.format(name=changing))
        predicted = self.calls(batch_size, names)
        before, self._last = self._last, trial
        if before is None:
            return True
        if predicted is None:
            self._find_lines(before, trial)
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
        if not now.repeats:
            made = min(len(calls), len(other_calls))
            calls, other_calls, names = calls[:made], other_calls[:made], names[:made]
        lines = None
        if (
            before.repeats == now.repeats
            and before.names[: len(names)] == names[: len(before.names)]
        ):
            lines = lines_through(before.batch_size, other_calls, now.batch_size, calls)
        if lines is not None:
            self.lines, self._repeats, self._names, self.reason = lines, now.repeats, names, ""
        elif self.lines is None:
            self.reason = NO_LINES.format(size=before.batch_size, other_size=now.batch_size)

    # --- what follows from it ---

    def calls(self, batch_size: int, names: Sequence[str]) -> list[RecordedCall] | None:
        """Predict the first calls of a cold trial, which are of these steps; None if unknown."""
        if self.lines is None:
            return None
        count, further = len(names), 0
        if self._repeats and {*names} == {*self._names}:
            further = max(0, count - len(self.lines))
        elif tuple(names) != self._names[:count]:
            return None
        predicted = [line.at(batch_size) for line in self.lines[:count]]
        return [*predicted, *predicted[-1:] * further]

    def next_call(
        self, batch_size: int, name: str, calls: Sequence[RecordedCall]
    ) -> RecordedCall | None:
        """Return the call that would follow these, all of one step, if it is known to repeat from there on; None if it must run.

        It is known where the last two calls are alike, where all were as predicted, or where they do what another size did before
        its calls repeated.
        """
        if len(calls) < 2:
            return None
        if calls[-1].repeats(calls[-2]):
            return calls[-1]
        if self.lines is not None:
            return self._as_predicted(batch_size, name, calls)
        if self._last is None or not self._last.repeats:
            return None
        events_before = [call.events for call in self._last.calls]
        return calls[-1] if [call.events for call in calls] == events_before else None

    def _as_predicted(
        self, batch_size: int, name: str, calls: Sequence[RecordedCall]
    ) -> RecordedCall | None:
        predicted = self.calls(batch_size, [name] * (len(calls) + 1))
        if predicted is None:
            return None
        following = predicted.pop()
        if predicted == [*calls] and following.repeats(calls[-1]):
            return following
        return None

    def workspace_at(self, batch_size: int) -> int:
        """Bound what a convolution may want at a size that did not run: it grows no faster than the batch."""
        ran = max(
            (size for size in self.workspace_bytes if size <= batch_size),
            default=min(self.workspace_bytes),
        )
        return -(-self.workspace_bytes[ran] * max(ran, batch_size) // ran)
