"""Answer requests by replaying what trials asked of an allocator.

A step takes time to run, and what it asked for takes none to replay. Around the runner of a card's
trials stands one that answers those that follow from trials that ran. A trial that must run runs.

On a simulated card (`Predicting`) a trial that runs ends as soon as its calls repeat, and the rest
is replayed. On a real one (`PredictingOnCard`) a replay only says which size to run next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import dropwhile, groupby, islice
from operator import attrgetter
from typing import TYPE_CHECKING, cast

from oomprobe.records.axis import NO_AXIS, Axis, magnitude
from oomprobe.records.trials import (
    Call,
    CallRecord,
    Measured,
    Outcome,
    Phase,
    Request,
    Runner,
    RunnerInfo,
    Trial,
    Verdict,
)
from oomprobe.rules import program
from oomprobe.rules.look import differ, needed, turns_of
from oomprobe.runners.explaining import Explaining
from oomprobe.runners.local import LocalRunner, Workload
from oomprobe.tape.calls import RecordedCall
from oomprobe.tape.fit import Line, Predictor
from oomprobe.tape.shapes import Growth, Growths, learn_row, lines_of_row

if TYPE_CHECKING:
    from oomprobe.devices.base import CallRecorder
    from oomprobe.devices.simulated import SimulatedDevice
    from oomprobe.runners.command.runner import CommandRunner
    from oomprobe.tape.record import TapedTrial
    from oomprobe.tape.reductions import Processors

# --- of a simulated card (`Predicting`) ---
FEW_CALLS = 2  # of a trial, that run before anything is known of the next
LEAST_CALLS, UNPREDICTED_CALLS = 3, 6  # that run before others are replayed; the latter to confirm
MORE_CALLS = 2  # that a trial makes to show whether its calls repeat
CALLS_A_TURN = 6  # that run of a turn of one of several steps: they are not replayed
# --- of a real one (`PredictingOnCard`) ---
REACH = 8  # times the largest size that ran: how far a prediction is trusted
REACH_TIMED = 64  # times it: while sizes grow, such a size runs too, to know the time of a call
ADDED_CALLS = 2  # to a trial that may teach something: its calls must be seen to repeat
HOPEFUL_SIZES = 6  # that run with more calls although no two of them have shown how sizes grow
MOST_CALLS = 24  # of a trial, that are recorded to predict others
MOST_MISTAKES = 2  # of replays, after which nothing is predicted
# --- of both ---
REPLAYED_CALLS = 8  # of a trial that is answered, at least, where its calls repeat
WRONG = "a size failed that should have run"
COUNTS_VALUES = "what it allocates depends on values of the batch"


class Replays:
    """Trials that follow from those that ran, replayed on a card's allocator.

    Args:
        processors: Of a card whose recordings have bare sizes; None where they name kernels.

    Attributes:
        card: Replays a trial from where the last one began.
        predictor: What the calls of a size that did not run ask for.
        is_off: Whether nothing is predicted any more.
    """

    def __init__(
        self,
        card: SimulatedDevice | TapedTrial,
        cap_of: Callable[[Request], int | None],
        processors: Processors | None = None,
    ) -> None:
        self.card, self._cap_of = card, cap_of
        self.row: int | None = None
        self.predictor = Predictor(processors=processors)
        self._value: float | None = None  # of the row
        self._last: Sequence[Line] = ()  # of the last row that was predicted
        self._growths = Growths(Growth)  # of the lines of all such rows
        self.is_off = False

    def start_row(self, row: int, value: float | None = None) -> None:
        """Begin a row of a table with a value, by what rows with others asked for."""
        if row == self.row:
            return
        lines = None
        if self._value and self.predictor.lines:
            self._last = self.predictor.lines
            learn_row(self._growths, self._value, self._last)
        if value:
            lines = lines_of_row(self._growths, self._last, value)
        self.row, self._value = row, value
        self.predictor = self.predictor.following(lines)

    def give_up(self, reason: str) -> None:
        """Predict nothing more of this row, nor of others by those before them."""
        self.predictor.give_up(reason)
        self._growths.clear()

    @property
    def largest(self) -> int:
        """The largest size of the row that has run; 1 if none has."""
        return max(self.predictor.workspace_bytes, default=1)

    @property
    def hopes(self) -> bool:
        """Whether a trial that runs may show how sizes grow, or has shown it."""
        has_lines = self.predictor.lines is not None
        return has_lines or len(self.predictor.workspace_bytes) < HOPEFUL_SIZES

    def predict(self, request: Request) -> Trial | None:
        """Replay a cold trial; None if it does not follow from those that ran."""
        if self.is_off:
            return None
        names = [call.step for call in request.calls]
        # Calls of several steps have no period.
        names += names[:1] * (REPLAYED_CALLS * self.predictor.period - len(names))
        calls = self.predictor.calls(request.batch_size, names)
        if calls is None:
            return None
        return self.replay(request, calls, self.predictor.workspace_at(request.batch_size))

    def replay(
        self, request: Request, calls: Sequence[RecordedCall], workspace_bytes: int
    ) -> Trial | None:
        """Replay the calls of a trial; None if no trial has shown how one begins."""
        usage = self.card.replay(calls, self._cap_of(request), workspace_bytes)
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


class Taping:
    """Runs trials, and records those that are to be on a tape; see `oomprobe.records.trials.Runner`."""

    def __init__(self, recorder: CallRecorder, runner: Runner) -> None:
        self._recorder, self._runner = recorder, runner

    @property
    def facts(self) -> RunnerInfo:
        """What the runner knows."""
        return replace(self._runner.facts, records=True)

    def measure(self) -> Measured:
        """Sample the memory."""
        return self._runner.measure()

    def run(self, request: Request) -> Outcome:
        """Run a trial."""
        if not request.records:
            return self._runner.run(request)
        with self._recorder.recording(max(len(request.calls), MOST_CALLS)):
            outcome = self._runner.run(request)
        taped, reason = self._recorder.taped_trial(), self._recorder.reason
        return replace(outcome, taped=(taped,) if taped else (), unrecorded=reason)


class PredictingOnCard:
    """Runs trials on a real card, or replays them; see `oomprobe.records.trials.Runner`.

    Trials that grow make a few calls more, to show whether these repeat. Before a size that fails a
    replay, one at least an eighth as large runs. A replay only guides the search: the look, the
    answer, and the size above it run. Of several ranks each has a tape, and one that runs out of
    memory decides.
    """

    def __init__(self, runner: Runner, axis: Axis = NO_AXIS) -> None:
        self._runner, self._axis = runner, axis
        self._replays: list[Replays] = []  # by rank, once a trial was recorded
        self._mistakes, self._reason = 0, ""  # why nothing was recorded
        self._recorded_calls = 0  # of each step, in the last trial

    @property
    def facts(self) -> RunnerInfo:
        """What the runner knows. The environment's "predicted" is true, or says why nothing was."""
        facts, reasons = self._runner.facts, map(attrgetter("predictor.reason"), self._replays)
        predicted = self._reason or max(reasons, default="") or True
        return replace(facts, environment={**facts.environment, "predicted": predicted})

    def measure(self) -> Measured:
        """Sample the memory."""
        return self._runner.measure()

    def run(self, request: Request) -> Outcome:
        """Answer a request from what has run, or run it and learn from it."""
        self._start_row(request.row)
        records = request.records or any(call.is_recorded for call in request.calls)
        if request.accumulation_steps > 1 or records:  # torch records for one at a time
            return self._runner.run(request)
        # What building left in the cache is in no tape.
        expected = None if request.as_built else self._predict(request)
        if request.confirms or request.looks:  # unrecorded, as that would slow them down
            outcome = self._judge(self._runner.run(request), expected)
            made, starts_alike = self._recorded_calls, outcome.starts_alike
            if request.looks and needed(outcome.records, made, starts_alike=starts_alike) > made:
                self._replays.clear()  # what shorter trials asked for is not all
            return outcome
        if expected is not None and self._may_answer(request, expected):
            return Outcome(trial=expected)
        is_recorded = not request.explains  # which records it in another way
        outcome = self._runner.run(replace(self._lengthen(request), records=is_recorded))
        if outcome.trial.passed:
            self._learn(request, outcome)
        return self._judge(replace(outcome, taped=()), expected)

    def _start_row(self, row: int) -> None:
        value = magnitude(self._axis.values[row])
        for replays in self._replays:
            replays.start_row(row, value)

    def _predict(self, request: Request) -> Trial | None:
        """Replay a cold trial, on all ranks; None if it does not follow from those that ran."""
        trials = [trial for one in self._replays if (trial := one.predict(request)) is not None]
        if len(trials) < len(self._replays):
            return None

        def severity(trial: Trial) -> tuple[bool, int]:
            return not trial.passed, trial.peaks[1]

        return max(trials, key=severity, default=None)

    def _may_answer(self, request: Request, expected: Trial) -> bool:
        """Return whether a replay will do.

        While sizes grow, the first runs of which `REACH` times as much fails a replay: 8, if 64
        fails. So the largest that ran is no less than an eighth of the limit when sizes near it are
        replayed. A size that is `REACH_TIMED` times what has run does too. Where other rows of a
        table tell what a row asks for, mostly no other size runs while sizes grow.
        """
        if request.must_run or request.phase is Phase.RECHECK:
            return False
        if request.phase is not Phase.GROW or not expected.passed:
            return True
        largest = self._replays[0].largest
        if request.batch_size > REACH_TIMED * largest:
            return False
        has_run_near = not self._reaches(request, largest)
        return has_run_near or self._reaches(request, request.batch_size)

    def _lengthen(self, request: Request) -> Request:
        """Return a trial with more calls, whose failures would not count, where it may teach something."""
        learns = request.learns
        hopes = all(map(attrgetter("hopes"), self._replays))
        is_long = len(request.calls) >= MOST_CALLS  # so that it repeats if it ever does
        if request.phase not in (Phase.GROW, Phase.RECHECK) or is_long or not hopes:
            return request
        if learns is not None:  # nobody knows yet how many calls a full step takes
            calls = (*request.calls, *request.calls[-1:] * ADDED_CALLS)
            learns = replace(learns, full_steps=learns.full_steps + ADDED_CALLS)
            return replace(request, calls=calls, learns=learns)
        more = replace(request.calls[-1], is_extra=True)
        # A full step more, if that takes several calls; of several steps, more of the last one.
        added = max(ADDED_CALLS, len(request.calls) // 2)
        if len(request.calls) > REPLAYED_CALLS:
            added = len(request.calls)  # to meet once more the call that made it so long
        return replace(request, calls=(*request.calls, *(more,) * added))

    def _reaches(self, request: Request, size: int) -> bool:
        """Return whether `REACH` times a size passes a replay."""
        calls = tuple(replace(call, batch_size=REACH * size) for call in request.calls)
        expected = self._predict(replace(request, calls=calls))
        return expected is not None and expected.passed

    def _learn(self, request: Request, outcome: Outcome) -> None:
        self._reason = outcome.unrecorded
        self._recorded_calls = len(outcome.records) // len(self._runner.facts.step_names)
        if not self._replays:
            for taped in outcome.taped:
                self._replays.append(Replays(taped, _cap_of, taped.processors))
        self._start_row(request.row)
        for replays, taped in zip(self._replays, outcome.taped, strict=False):
            names = [*map(attrgetter("step"), outcome.records[: len(taped.calls)])]
            replays.card, size = taped, outcome.trial.batch_size
            replays.predictor.workspace_bytes[size] = 0  # it is among what was recorded
            replays.predictor.learn(size, names, taped.calls)
        if self._reason:
            self._give_up(self._reason)

    def _give_up(self, reason: str) -> None:
        for replays in self._replays:
            replays.give_up(reason)

    def _judge(self, outcome: Outcome, expected: Trial | None) -> Outcome:
        """Compare a trial that ran with its replay; predict no more once that was wrong too often.

        A trial that failed teaches nothing, so it is the last mistake.
        """
        is_wrong = expected is not None and expected.passed != outcome.trial.passed
        if is_wrong:
            self._mistakes += 1
            if self._mistakes > MOST_MISTAKES or not outcome.trial.passed:
                self._give_up(WRONG)
        return replace(outcome, contradicts_replay=is_wrong)


def _cap_of(request: Request) -> int | None:
    return request.cap_bytes


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
        cap_of: Callable[[Request], int | None] = _cap_of,
    ) -> None:
        self._card, self._shortens = card, shortens
        self.runner: Runner
        self._replays = Replays(card, cap_of)
        # Whether the user's code may know which call it is; None: a look has shown that it makes no difference.
        self._counts: bool | None = False
        self._stepped = dict[str, int]()  # by the last full step of each step
        self._asked: Request | None = None
        self._left: list[Call] = []  # of the trial that runs
        self._again: dict[int, int] = {}  # how often the calls repeat that it does not make
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
        self._replays.start_row(request.row)
        if request.records:
            self._asked = request
            outcome = self.runner.run(request)
            taped = self._card.taped_trial()
            return replace(outcome, taped=(taped,) if taped else ())
        must_run = request.must_run and not (self._runs_nothing and request.confirms)
        if not must_run and not (request.looks and self._counts):
            trial = self._replays.predict(request)
            if trial is not None:
                return self._answer(request, trial)
        outcome = self.runner.run(self._shorten(request) if self._shortens else request)
        if request.accumulation_steps > 1:
            return outcome
        return self._learn(request, outcome)

    def _answer(self, request: Request, trial: Trial) -> Outcome:
        records = tuple(  # each call is like the last
            CallRecord(step=call.step, stepped=self._stepped.get(call.step), blocks=1)
            for call in request.calls
        )
        measured = self.measure() if self._runs_nothing and trial.passed else None
        return Outcome(trial=trial, records=records, measured=measured)

    # --- a trial that runs ---

    def _shorten(self, request: Request) -> Request:
        """Return the first calls of a trial; `further` makes the others, or they are replayed."""
        self._asked, self._left, self._again = request, [], {}
        if not _is_plain(request):
            is_listed = request.learns is None and not request.calls[-1].is_recorded
            takes_turns = request.accumulation_steps == 1 and len(self.facts.step_names) > 1
            if not (is_listed and takes_turns):
                return request
            kept = list[Call]()
            for name, turn in groupby(request.calls, attrgetter("step")):
                full = self._stepped.get(name) or 1  # a turn ends with a full step
                kept += islice(turn, full * max(2, CALLS_A_TURN // full))
            self._asked = request = replace(request, calls=tuple(kept))
        self._left = [*request.calls[FEW_CALLS:]]
        # `further` ends it once its calls repeat.
        return replace(request, calls=request.calls[:FEW_CALLS], settles=None)

    def further(self, request: Request, records: Sequence[CallRecord]) -> Sequence[Call]:
        """Return the next call of the trial that runs; none once its calls repeat."""
        asked = self._asked
        assert asked is not None
        if asked.records:
            return []
        if not _is_plain(asked):
            if self._repeats_in_turn(records):
                rest = [*dropwhile(lambda call: call.step == records[-1].step, self._left)]
                self._again[len(records) - 1] = len(self._left) - len(rest)
                self._left = rest
            if self._left:
                return [self._left.pop(0)]
            more = program.further(asked, records, time.monotonic())
            return [call for call in more if not call.is_extra]
        if self._repeats(records):
            self._again[len(records) - 1] = max(0, program.most_calls(asked) - len(records))
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
        assert self._asked is not None
        least = LEAST_CALLS
        is_known = self._asked.settles is not None  # a look, or another row, has shown it
        if self._asked.confirms and self._replays.predictor.lines is None and not is_known:
            least = UNPREDICTED_CALLS
        if len(calls) < least or self._may_count(records):
            return False
        has_stepped = any(record.stepped is not None for record in records)
        return has_stepped and calls[-1].repeats(calls[-2])

    def _repeats_in_turn(self, records: Sequence[CallRecord]) -> bool:
        """Return whether the rest of a turn would do what its last two calls did."""
        assert self._asked is not None
        step, turn = records[-1].step, turns_of(records)[-1]
        is_within = turn[-1].stepped is None and self._stepped.get(step) != 0  # a full step
        is_unknown = self._asked.confirms and self._replays.predictor.lines is None
        if min(len(turn), len(self._card.calls)) < 2 or is_within or is_unknown:
            return False
        before, last = self._card.calls[-2:]
        return last.repeats_anywhere(before) and not self._may_count(records)

    def _may_count(self, records: Sequence[CallRecord]) -> bool:
        """Return whether a step may know which call it is; a turn begins in another mode."""
        counts = any(record.counts for turn in turns_of(records) for record in turn[1:])
        return self._counts is not None and counts

    def _learn(self, request: Request, outcome: Outcome) -> Outcome:
        """Learn from a trial that ran, and replay the calls that it has not made."""
        trial, records = outcome.trial, outcome.records
        if self._may_count(records):
            later = zip(self._card.calls[1:], self._card.calls[2:], strict=False)
            is_alike = request.looks and all(call.repeats(before) for before, call in later)
            self._counts = None if is_alike else True
        contradicts = self._contradicts(request, outcome)
        self._replays.is_off |= contradicts
        if trial.passed and self._again:
            outcome = self._extended(request, outcome)
        unpredicted = "" if self._replays.is_off else self._replays.predictor.reason
        return replace(outcome, contradicts_replay=contradicts, unpredicted=unpredicted)

    def _contradicts(self, request: Request, outcome: Outcome) -> bool:
        """Take what a trial asked for as evidence; return whether that proves replayed trials wrong."""
        trial, calls = outcome.trial, self._card.calls
        names = [record.step for record in outcome.records]
        expected = self._replays.predict(request) or trial
        if not trial.passed:
            return request.confirms or expected.passed
        if self._card.counts_values:
            return not self._replays.predictor.give_up(COUNTS_VALUES)
        if self._shortens:
            calls = calls[: len(names)]
            for record in outcome.records:
                if record.stepped is not None:
                    self._stepped[record.step] = record.stepped
        if not calls:
            return False
        names += [request.calls[0].step] * (len(calls) - len(names))
        self._replays.predictor.workspace_bytes[trial.batch_size] = self._card.workspace_bytes
        # Between its steps, a command may do what none of the calls that it wrote down has done.
        was_another = not self._shortens and differ(expected.peaks[1], trial.peaks[1])
        return was_another or not self._replays.predictor.learn(trial.batch_size, names, calls)

    def _extended(self, request: Request, outcome: Outcome) -> Outcome:
        """Return the outcome with all its calls, of which the last ones are replayed."""
        records, calls = list[CallRecord](), list[RecordedCall]()
        for number, record in enumerate(outcome.records):
            call, more = self._card.calls[number], self._again.get(number, 0)
            calls += [call, *[call.repetition] * more]
            records += [replace(record, seconds=None)] * (1 + more)
        made, outcome = len(outcome.records), replace(outcome, records=tuple(records))
        if len(calls) == made:
            return outcome
        replayed = self._replays.replay(request, calls, self._card.workspace_bytes)
        if replayed is None:
            return outcome
        return replace(
            outcome,
            trial=replace(
                outcome.trial,
                verdict=replayed.verdict,
                error=replayed.error,
                steps=len(calls),
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
        predictor = self._replays.predictor.on(card.card.processors)
        if self._replays.is_off or predictor is None or not card.begin_as(self._card):
            return None
        replaying = Predicting(card)
        replaying.runner = runner
        replaying._replays.predictor, replaying._replays.row = predictor, self._replays.row
        replaying._stepped, replaying._counts = self._stepped, self._counts
        replaying._runs_nothing = True
        return replaying


def _is_plain(request: Request) -> bool:
    """Return whether a trial makes the same call of one step again and again."""
    first = request.calls[0]
    ordinary = not (first.accumulates or first.is_recorded)
    if request.learns is not None and len({*request.learns.turns}) > 1:
        return False
    return ordinary and {replace(call, is_extra=False) for call in request.calls} == {
        replace(first, is_extra=False)
    }


def open_local(work: Workload) -> tuple[LocalRunner, Runner]:
    """Return the runner of a workload in this process, and what stands around it."""
    if not work.device.is_simulated:
        local, recorder = LocalRunner(work), work.device.call_recorder()
        if recorder is None:
            return local, local
        return local, Taping(recorder, Explaining(work.device, local))
    predicting = Predicting(cast("SimulatedDevice", work.device))
    local = LocalRunner(replace(work, further=predicting.further))
    predicting.runner = Explaining(work.device, local)
    return local, predicting


def predict_on_card(runner: Runner, axis: Axis = NO_AXIS) -> Runner:
    """Return what stands around a runner, if it records what its trials ask for."""
    return PredictingOnCard(runner, axis) if runner.facts.records else runner


def open_predicting(runner: CommandRunner) -> Runner:
    """Return what stands around a command's runner, which may run it on a simulated card."""
    if runner.simulated is None:
        return predict_on_card(runner)
    predicting = Predicting(runner.simulated, shortens=False, cap_of=runner.cap_bytes)
    predicting.runner = runner
    return predicting
