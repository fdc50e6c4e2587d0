"""Answer requests by replaying what trials asked of a simulated card's allocator.

Such a card takes time to run a step, and none to replay what the step asked for. `Predicting` stands
around the runner of a card's trials. It answers a trial that follows from those that ran. It ends a
trial that runs as soon as its calls repeat, and replays the rest. A trial that must run runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby, islice
from typing import TYPE_CHECKING, cast

from oomprobe.records.trials import (
    Call,
    CallRecord,
    Measured,
    Outcome,
    Request,
    Runner,
    RunnerInfo,
    Trial,
    Verdict,
)
from oomprobe.rules import program
from oomprobe.runners.local import LocalRunner, Workload
from oomprobe.tape.fit import Predictor

if TYPE_CHECKING:
    from oomprobe.devices.simulated import SimulatedDevice
    from oomprobe.runners.command.runner import CommandRunner
    from oomprobe.tape.calls import RecordedCall

FEW_CALLS = 2  # of a trial, that run before anything is known of the next
LEAST_CALLS, UNPREDICTED_CALLS = 3, 6  # that run before others are replayed; the latter to confirm
MORE_CALLS = 2  # that a trial makes to show whether its calls repeat
CALLS_A_TURN = 6  # that run of a turn of one of several steps: they are not replayed
REPLAYED_CALLS = 8  # of a trial that is answered, at least, where its calls repeat
COUNTS_VALUES = "what it allocates depends on values of the batch"


class Predicting:
    """Runs trials on a simulated card, or replays them; see `oomprobe.records.trials.Runner`.

    Attributes:
        runner: Runs a trial. If it `shortens`, its further calls are those of `further`.
    """

    def __init__(
        self,
        card: SimulatedDevice,
        *,
        shortens: bool = True,
        cap_of: Callable[[Request], int | None] = lambda request: request.cap_bytes,
    ) -> None:
        self._card, self._shortens, self._cap_of = card, shortens, cap_of
        self.runner: Runner
        self._predictor, self._row = Predictor(), 0
        self._is_off = False  # whether a trial has contradicted a replayed one
        # Whether the user's code may know which call it is; None: a look has shown that it makes no difference.
        self._counts: bool | None = False
        self._stepped: int | None = None  # by the last call that ran
        self._asked: Request | None = None
        self._left: list[Call] = []  # of the trial that runs
        self._runs_nothing = False  # whether another card's trials are replayed on this one

    @property
    def facts(self) -> RunnerInfo:
        """What the runner knows."""
        return self.runner.facts

    def measure(self) -> Measured:
        """Sample the memory."""
        return self.runner.measure()

    def run(self, request: Request) -> Outcome:
        """Answer a request from what has run, or run it and learn from it."""
        if request.row != self._row:
            self._row, self._predictor = request.row, Predictor()
        must_run = request.exact and not (self._runs_nothing and request.confirms)
        trial = None if must_run or self._is_off else self._predict(request)
        if trial is not None:
            return self._answer(request, trial)
        outcome = self.runner.run(self._shorten(request) if self._shortens else request)
        if request.accumulation_steps > 1:
            return outcome
        return self._learn(request, outcome)

    # --- a trial that is answered ---

    def _predict(self, request: Request) -> Trial | None:
        """Replay a cold trial; None if it does not follow from those that ran."""
        if request.looks and self._counts:
            return None
        names = [call.step for call in request.calls]
        if len({*names}) == 1:
            names += names[:1] * (REPLAYED_CALLS - len(names))
        calls = self._predictor.calls(request.batch_size, names)
        if calls is None:
            calls = self._predictor.calls(request.batch_size, names[: len(request.calls)])
        if calls is None:
            return None
        return self._replayed(request, calls, self._predictor.workspace_at(request.batch_size))

    def _answer(self, request: Request, trial: Trial) -> Outcome:
        records: tuple[CallRecord, ...] = ()
        if request.looks or request.confirms:  # each call is like the last
            records = tuple(
                CallRecord(step=call.step, stepped=self._stepped, blocks=1)
                for call in request.calls
            )
        measured = self.measure() if self._runs_nothing and trial.passed else None
        return Outcome(trial=trial, records=records, measured=measured)

    def _replayed(
        self, request: Request, calls: Sequence[RecordedCall], workspace_bytes: int
    ) -> Trial | None:
        usage = self._card.replay(calls, self._cap_of(request), workspace_bytes)
        if usage is None:
            return None
        step_name = None
        if len({call.step for call in request.calls}) > 1:
            step_name = request.calls[usage.limiting].step
        return Trial.of(
            request,
            Verdict.OOM if usage.error else Verdict.FITS,
            peak_allocated_bytes=usage.peak_allocated_bytes,
            peak_reserved_bytes=usage.peak_reserved_bytes,
            peak_upper_bytes=usage.peak_upper_bytes,
            alloc_retries=usage.alloc_retries,
            error=usage.error,
            step_name=step_name,
            replayed=True,
        )

    # --- a trial that runs ---

    def _shorten(self, request: Request) -> Request:
        """Return the first calls of a trial; `further` makes the others, or they are replayed."""
        self._asked, self._left = request, []
        if not _is_plain(request):
            if request.accumulation_steps > 1 or len(self.facts.step_names) == 1:
                return request
            kept = list[Call]()
            for _, turn in groupby(request.calls):
                kept += islice(turn, CALLS_A_TURN)
            return replace(request, calls=tuple(kept))
        self._left = [*request.calls[FEW_CALLS:]]
        until = request.until
        if until is not None and until.period:
            until = None  # `further` ends the trial
        return replace(request, calls=request.calls[:FEW_CALLS], until=until)

    def further(self, request: Request, records: Sequence[CallRecord]) -> Sequence[Call]:
        """Return the next call of the trial that runs; none once its calls repeat."""
        asked = self._asked
        assert asked is not None
        if not _is_plain(asked):
            more = program.further(asked, records, time.monotonic())
            return [call for call in more if not call.is_extra]
        if self._repeats(records):
            return []
        if not self._left:
            self._left = [*program.further(asked, records, time.monotonic())]
        if self._left:
            return [self._left.pop(0)]
        is_unclear = not any(record.counts for record in records)
        if is_unclear and len(records) < program.most_calls(asked) + MORE_CALLS:
            return [replace(asked.calls[-1], is_extra=True)]
        return []

    def _repeats(self, records: Sequence[CallRecord]) -> bool:
        """Return whether each further call would do what the last one did."""
        calls = self._card.calls
        counts = self._counts is not None and any(record.counts for record in records)
        least = LEAST_CALLS
        if self._asked is not None and self._asked.confirms and self._predictor.lines is None:
            least = UNPREDICTED_CALLS
        if len(calls) < least or counts:
            return False
        has_stepped = any(record.stepped is not None for record in records)
        return has_stepped and calls[-1].repeats(calls[-2])

    def _learn(self, request: Request, outcome: Outcome) -> Outcome:
        """Learn from a trial that ran, and replay the calls that it has not made."""
        trial, records = outcome.trial, outcome.records
        if self._counts is not None and any(record.counts for record in records):
            later = zip(self._card.calls[1:], self._card.calls[2:], strict=False)
            is_alike = request.looks and all(call.repeats(before) for before, call in later)
            self._counts = None if is_alike else True
        contradicts = self._contradicts(request, outcome)
        self._is_off |= contradicts
        if trial.passed and self._shortens and _is_plain(request) and self._repeats(records):
            outcome = self._extended(request, outcome)
        unpredicted = "" if self._is_off else self._predictor.reason
        return replace(outcome, contradicts_replay=contradicts, unpredicted=unpredicted)

    def _contradicts(self, request: Request, outcome: Outcome) -> bool:
        """Take what a trial asked for as evidence; return whether that proves replayed trials wrong."""
        trial, calls = outcome.trial, self._card.calls
        names = [record.step for record in outcome.records]
        if not trial.passed:
            expected = self._predict(request)
            return request.confirms or (expected is not None and expected.passed)
        if self._card.counts_values:
            return not self._predictor.give_up(COUNTS_VALUES)
        if self._shortens:
            calls = calls[: len(names)]
        if not calls or not names:
            return False
        names += names[-1:] * (len(calls) - len(names))
        self._stepped = outcome.records[-1].stepped
        self._predictor.workspace_bytes[trial.batch_size] = self._card.workspace_bytes
        return not self._predictor.learn(trial.batch_size, names, calls)

    def _extended(self, request: Request, outcome: Outcome) -> Outcome:
        """Return the outcome with all its calls, of which the last ones are replayed."""
        made, asked = len(outcome.records), program.most_calls(request)
        calls, last = self._card.calls[:made], replace(outcome.records[-1], seconds=None)
        records = tuple(replace(record, seconds=None) for record in outcome.records)
        outcome = replace(outcome, records=records + (last,) * (asked - made))
        if asked <= made:
            return outcome
        calls = [*calls, *[calls[-1]] * (asked - made)]
        replayed = self._replayed(request, calls, self._card.workspace_bytes)
        if replayed is None:
            return outcome
        return replace(
            outcome,
            trial=replace(
                outcome.trial,
                verdict=replayed.verdict,
                error=replayed.error,
                steps=asked,
                peak_allocated_bytes=replayed.peak_allocated_bytes,
                peak_reserved_bytes=replayed.peak_reserved_bytes,
                peak_upper_bytes=replayed.peak_upper_bytes,
                alloc_retries=replayed.alloc_retries,
            ),
        )

    # --- another card ---

    def on(self, card: SimulatedDevice, runner: Runner) -> Predicting | None:
        """Return what replays these trials on another card of the kind; None if they do not follow.

        `runner` gets the trials that it cannot replay.
        """
        predictor = self._predictor.on(card.card.processors)
        if self._is_off or predictor is None or not card.begin_as(self._card):
            return None
        replaying = Predicting(card)
        replaying.runner, replaying._predictor, replaying._row = runner, predictor, self._row
        replaying._stepped, replaying._counts = self._stepped, self._counts
        replaying._runs_nothing = True
        return replaying


def _is_plain(request: Request) -> bool:
    """Return whether a trial makes the same call of one step again and again."""
    first = request.calls[0]
    ordinary = not (first.accumulates or first.is_recorded)
    return ordinary and {replace(call, is_extra=False) for call in request.calls} == {
        replace(first, is_extra=False)
    }


def open_local(work: Workload) -> tuple[LocalRunner, Runner]:
    """Return the runner of a workload in this process, and what stands around it."""
    if not work.device.replays:
        local = LocalRunner(work)
        return local, local
    predicting = Predicting(cast("SimulatedDevice", work.device))
    local = predicting.runner = LocalRunner(replace(work, further=predicting.further))
    return local, predicting


def open_predicting(runner: CommandRunner) -> Runner:
    """Return what stands around a command's runner, which may run it on a simulated card."""
    if runner.replays is None:
        return runner
    predicting = Predicting(runner.replays, shortens=False, cap_of=runner.cap_bytes)
    predicting.runner = runner
    return predicting
