"""Which calls a trial makes. Pure, but for the clock.

A trial makes a list of calls, which is fixed before it begins, because with several ranks a call too many waits for ever. `Program`
makes the lists from what earlier trials showed of the step. Two kinds of trial go on after their list, by the calls that `further`
adds from what the trial itself has shown: the first one, when nobody knows yet how many calls a full step takes, and one that makes
many calls, which may end once these repeat.

By default a trial makes a first full step and `Options.steps` (1) more, a look makes
`Patience.look_calls` (50) calls, and a confirmation at least `SEEN_STEPS` (3) full steps after the
first and up to 50 calls, unless they repeat before. A step that counts on and on never does. A
simulated card may replay calls that would repeat, and runs fewer (`oomprobe.runners.predicting`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from oomprobe.ground import words
from oomprobe.ground.words import count
from oomprobe.records.notes import Note, remark
from oomprobe.records.options import MAX_CALLS, Options
from oomprobe.records.patience import SEEN_STEPS, UNSEEN_STEPS, Clock
from oomprobe.records.trials import (
    Call,
    Learning,
    Outcome,
    Phase,
    Request,
    RunnerInfo,
    Settling,
    Trial,
)
from oomprobe.rules import look
from oomprobe.rules.look import Records

# Of the time that is left, the share that the calls of a look and of a confirmation may take.
LOOK_SHARE, CONFIRM_SHARE = 1 / 8, 1 / 2
# Calls of a confirmation, where another row of the table has made all of `Patience.look_calls`. Of 162 rows confirmed over 8 calls, 6
# failed within 200 calls under the cap; over 15, 2; over 25, 1; over 50 none, but the rows then took 1.3 times the calls.
ROW_CALLS = 25
# Times the calls after which a confirmation failed that later trials make: at a smaller size an epoch has more calls, and several steps
# take turns. Ten loops with a large call at large sizes only took 3675 calls in all; with twice 3739, with all that the confirmation was
# to make 4118, and 4541 by confirming ever smaller sizes (20 confirmations instead of 140).
AHEAD = 4
EARLY = 6  # full steps after the first
ENDED_EARLY = "call {number} of batch {size} failed with {error}, which is not about memory: later calls were not seen"
VARYING = (
    "the step allocates different amounts from call to call (sequence lengths, routing, a last partial batch): a later call "
    "can need more than those that ran. To be sure, let step_fn make the largest batch it can meet"
)
LONG_CALLS = (
    "the step allocates different amounts from call to call (evaluation, lengths, an average or a buffer that it keeps), and the "
    "most within {calls} calls, so each trial after growing made that many: a later call can still need more. To be sure, let "
    "step_fn make the largest batch it can meet"
)
FAILED_LATE = (
    "batch {size} failed its confirmation after {made}, and {before}: those that followed made {calls}. A later "
    "call can still need more. To be sure, let step_fn make the largest batch it can meet"
)


class Program:
    """Makes the calls of each trial of a probe, and learns from each how many the next one needs.

    Numbers of calls are those of each step, over all its turns. `row` is the row of a table whose value the step gets.

    Attributes:
        first: Calls of the first full step.
        needed: Calls that meet the one that needs the most memory, as a look or a failed confirmation found; 0 before that.
        confirmed: Calls of the last confirmation.
        looked: The trial of the look.
        learned: Which optimizers step, as `Outcome.learned`.
    """

    def __init__(self, facts: RunnerInfo, options: Options, clock: Clock, row: int = 0) -> None:
        self._facts, self._options, self._clock, self._row = facts, options, clock, row
        self._patience = patience = clock.patience
        self._look_s = patience.host_look_s if facts.device.on_host else patience.look_s
        self._names = facts.step_names
        # Several steps take two turns of half the calls each, because training resumes after evaluation: that splits cached blocks,
        # and only in the second turn does the state of every step's optimizers exist.
        self._turns = 2 if len(self._names) > 1 else 1
        self.first = self.needed = self.confirmed = 0
        self._full = 0  # calls of a full step after that; 0: no trial has passed yet
        # The first: fewer if a late call failed with a bug.
        self._most = self._most_to_confirm = patience.look_calls
        self._call_s: dict[int, float] = {}  # the time of one call of each step, by batch size
        self._decided = 0  # calls of the last trial that passed and was no confirmation
        self._settling_period = 0  # calls after which those of a look repeated; 0: they did not
        self.period = 1  # calls after which a step does the same again, as far as any trial showed
        self.has_varied = False  # whether calls of a confirmation asked for different amounts
        self.varies = False  # whether a look found that later calls need more than earlier ones
        self.looked: Trial | None = None
        self.learned: Mapping[str, Sequence[int]] = {}

    def follow(self, last: Program, *, settles: bool = False) -> None:
        """Begin with what another row of the table has shown of the step; its look and its confirmation count for all rows.

        A step that `settles` does not count its calls, so this row needs no look of its own.
        """
        self.first, self._full, self._most = last.first, last._full, last._most
        self.period, self.learned = last.period, last.learned
        self.needed, self.looked, self.varies = last.needed, last.looked, last.varies
        self._most_to_confirm = ROW_CALLS
        if settles:
            self._settling_period = last._settling_period

    # --- the kinds of trials ---

    def growing(self, size: int) -> Request:
        """Return a trial while the size grows: a first full step, which creates optimizer state, and `steps` more.

        A call that comes later and needs more shows in the look, at a small size, for less.
        """
        return self._request(Phase.GROW, size, self._calls_of(self._options.steps))

    def bisecting(self, size: int, phase: Phase) -> Request:
        """Return a trial that bisects or rechecks: as long as one that grows, or as many calls as the look found that it needs.

        Where a failure is expensive, it makes more: a failed confirmation would cost two failures.
        """
        calls = at_most = self._calls_of(self._options.steps)
        if self._facts.failure_cost_s:
            at_most = self.affordable(
                size, limit_s=self._patience.cost_share * self._facts.failure_cost_s
            )
        return self._request(phase, size, calls, at_most=at_most)

    def confirming(self, size: int) -> Request:
        """Return a trial that confirms: `confirm_steps` more full steps, and then as many calls as there is time for.

        Of 162 answers, 6 that were confirmed over 8 calls failed later, and none over 50. It ends early where further calls
        would repeat.
        """
        calls = at_most = self._calls_of(self._confirm_steps)
        if not self._facts.starts_anew:
            at_most = min(self._most_to_confirm, self.affordable(size))
        return self._request(
            Phase.CONFIRM, size, calls, at_most=at_most, extra_from=self._passed_after
        )

    def looking(self, size: int, calls: int) -> Request:
        """Return the look: many calls of a small size, which tell how many calls each later trial needs."""
        request = self._request(Phase.GROW, size, calls, extra_from=self._passed_after)
        return replace(request, looks=True, must_run=False)

    def accumulating(self, size: int, micro_batches: int) -> Request:
        """Return the trial of an accumulation plan: one full step, which creates optimizer state, and then the micro-batches."""
        calls = []
        for name in self._names * self._turns:
            call = Call(step=name, batch_size=size, row=self._row)
            calls += [call] * max(1, self.first)
            calls += [replace(call, accumulates=True)] * micro_batches
        return Request(phase=Phase.CONFIRM, calls=tuple(calls))

    def recording(self, size: int) -> Request:
        """Return the trial of a breakdown: an ordinary one, and one more full step of each, whose allocations are recorded."""
        calls = []
        for name in self._names * self._turns:
            call = Call(step=name, batch_size=size, row=self._row)
            calls += [call] * max(1, self._ordinary(1) // self._turns)
            calls += [replace(call, is_recorded=True)] * max(1, self._full)
        return Request(phase=Phase.CONFIRM, calls=tuple(calls))

    def _request(
        self,
        phase: Phase,
        size: int,
        calls: int,
        *,
        at_most: int = 0,
        extra_from: int | None = None,
    ) -> Request:
        """Return a trial that makes these calls, and goes on to `at_most` unless they repeat before."""
        if not self._full:
            return self._to_learn(phase, size)
        total, settles = max(calls, at_most), None
        if total > calls and self._settling_period:
            # `further` adds the calls that would repeat others: of 4 calls with a period of 1, 3 are listed.
            settles = Settling(period=self._settling_period, most_calls=total)
            total = max(1, calls - self._settling_period)
        listed = self._in_turns(size, total, extra_from=extra_from)
        return Request(phase=phase, calls=listed, settles=settles)

    def _in_turns(self, size: int, calls: int, *, extra_from: int | None) -> tuple[Call, ...]:
        """Return this many calls of each step, half of them in each of its turns if there are several steps.

        Those from the one numbered `extra_from` on are extra.
        """
        listed = []
        each_turn = -(-calls // self._turns)
        for turn in range(self._turns):
            for name in self._names:
                for number in range(turn * each_turn, (turn + 1) * each_turn):
                    share = number * self._turns  # of both turns: the first stands for both
                    call = Call(
                        step=name,
                        batch_size=size,
                        row=self._row,
                        is_extra=extra_from is not None and share >= extra_from,
                    )
                    listed.append(call)
        return tuple(listed)

    def _to_learn(self, phase: Phase, size: int) -> Request:
        """Return a trial that goes on until it has made its full steps, since nobody knows yet how many calls these take."""
        confirms = phase is Phase.CONFIRM
        full_steps = 1 + (self._confirm_steps if confirms else self._options.steps)
        learns = Learning(turns=self._names * self._turns, full_steps=full_steps)
        if confirms and not self._facts.starts_anew:
            learns = replace(learns, most_calls=self._patience.look_calls, within_s=self._look_s)
        first = Call(step=self._names[0], batch_size=size, row=self._row)
        return Request(phase=phase, calls=(first,) * full_steps, learns=learns)

    # --- how many calls ---

    @property
    def is_steady(self) -> bool:
        """Whether a call asks for the same memory each time, as a look has shown."""
        return self._settling_period > 0 and not self.is_long and self._facts.world_size == 1

    @property
    def is_long(self) -> bool:
        """Whether trials make more calls than the options ask for, as a look found."""
        return self.needed > self._ordinary(self._options.steps)

    @property
    def _confirm_steps(self) -> int:
        return self._options.confirm_steps or (UNSEEN_STEPS if self.looked is None else SEEN_STEPS)

    @property
    def to_confirm(self) -> int:
        """Calls that are still to be made for an answer, at least."""
        before = self.needed if self.is_long else 0  # of another such trial
        return before + max(self._ordinary(self._confirm_steps), self.needed)

    def _calls_of(self, steps: int) -> int:
        """Return the calls of a trial of so many full steps, or more if the one that needs the most memory comes later."""
        return max(self._ordinary(steps), self.needed)

    @property
    def _passed_after(self) -> int | None:
        """Calls after which a trial that makes many has passed, so that a bug only ends it.

        None where each call is a training run of its own (`Step.starts_anew`): the next one would fail alike.
        """
        return None if self._facts.starts_anew else self._ordinary(self._options.steps)

    def _ordinary(self, steps: int) -> int:
        """Return the calls of the first full step and of this many more; of one that takes very many calls, only one more."""
        if self._full > MAX_CALLS:
            steps = min(steps, 1)
        return self._turns * (self.first + steps * self._full)

    def for_look(self, size: int) -> int:
        """Return the calls of a look; 0 if it would show nothing new."""
        calls = self.affordable(size, share=LOOK_SHARE)
        if self._settling_period or calls <= self._ordinary(self._options.steps):
            return 0
        return calls

    def affordable(
        self, size: int, *, share: float = CONFIRM_SHARE, limit_s: float | None = None
    ) -> int:
        """Return how many calls of this size, up to `Patience.look_calls`, fit in this share of the time that is left.

        They take no longer than `limit_s`; by default, than the search has taken, or `Patience.look_s` if that is more.
        """
        if limit_s is None:
            limit_s = (
                self._look_s
                if self._facts.device.on_host
                else max(self._look_s, self._clock.elapsed_s)
            )
        limit_s = min(limit_s, share * self._clock.left_s)
        if self._options.trial_time_limit_s is not None:
            limit_s = min(limit_s, CONFIRM_SHARE * self._options.trial_time_limit_s)
        call_s = _expected_s(self._call_s, size, grows=not self._facts.device.is_simulated)
        return min(self._most, int(limit_s / call_s)) if call_s else self._most

    # --- what a trial has shown ---

    def learn(self, request: Request, outcome: Outcome) -> Iterator[Note]:
        """Learn from a trial that ended, and yield notes about it."""
        trial, records = outcome.trial, outcome.records
        is_plan = trial.accumulation_steps > 1
        is_varying = look.is_varying(records)
        call_s = look.step_s(records)
        if call_s:
            self._call_s[trial.batch_size] = call_s
        if not self._full and trial.passed and records and not is_plan:
            # Without an optimizer too: the second call finds memory that the first has divided.
            self.first = max(1, *map(look.first_calls, look.by_step(records).values()))
            self.period = self._full = max(map(look.step_calls, look.by_step(records).values()))
        if outcome.ended_early is not None:
            yield self._end_early(trial, records, outcome.ended_early)
        if is_varying and request.confirms and not self.is_long and not self._facts.starts_anew:
            self.has_varied = True
            yield remark(VARYING)
        if request.looks:
            yield from self._learn_from_look(outcome)
        elif not is_plan:
            yield from self._compare_calls(request, trial)

    def _end_early(self, trial: Trial, records: Records, error: str) -> Note:
        """Make no more calls from now on than until a late one failed with a bug."""
        made = max(map(len, look.by_step(records).values()))
        self._most = min(self._most, made)
        self.needed = min(self.needed, self._most)
        text = ENDED_EARLY.format(
            number=made + 1, size=trial.batch_size, error=words.shortened(error)
        )
        return remark(text, trial.batch_size)

    def _learn_from_look(self, outcome: Outcome) -> Iterator[Note]:
        trial, ordinary = outcome.trial, self._ordinary(self._options.steps)
        self.looked, self._settling_period = trial, 0
        if not trial.passed:
            return
        needed = look.needed(outcome.records, ordinary, starts_alike=outcome.starts_alike)
        self.needed = min(self._most, max(self.needed, needed))
        if len(self._names) == 1:  # of several steps, calls do not follow each other
            self.period = look.period_of(outcome.records, ordinary, times=2) or self.period
            if len(outcome.records) >= self._patience.look_calls:
                self._settling_period = look.period_of(outcome.records, ordinary)
        self.varies = needed > ordinary
        if self.varies:
            yield remark(LONG_CALLS.format(calls=self.needed))

    def _compare_calls(self, request: Request, trial: Trial) -> Iterator[Note]:
        """Make trials longer from now on if a confirmation failed in a later call than the trials before it made."""
        steps = len(self._names)
        if trial.passed and request.confirms:
            self.confirmed = trial.steps // steps
        elif trial.passed:
            self._decided = trial.steps // steps
        elif request.as_built:  # with an empty cache it may pass
            return
        elif request.confirms and self._full and self._decided <= min(trial.steps, self._most - 1):
            # Several steps take turns, so count the calls of all of them.
            failed = trial.steps + 1
            longest = min(self._most, max(most_calls(request) // steps, failed))
            # A call before any can settle is like those of the look: memory that calls have divided ends it, not what it asks for.
            # Once: a loop that counts, say examples, may do something large ever earlier as sizes grow.
            if self.is_long or self._settling_period != 1 or failed > self._ordinary(EARLY):
                failed, self._settling_period = AHEAD * failed, 0  # the look has not met that call
            self.needed = max(self.needed, min(longest, failed))
            yield _failed_late(trial, before=steps * self._decided, calls=steps * self.needed)

    def lengthen(self, size: int) -> None:
        """Make as many calls as there is time for from now on, because the step varies."""
        self.needed = max(self.needed, self.affordable(size))
        self._settling_period = 0


def _failed_late(trial: Trial, *, before: int, calls: int) -> Note:
    made = count(trial.steps, "call", "calls")
    earlier = f"each trial had made {count(before, 'call', 'calls')}"
    if not before:
        earlier = "the trials before it were replayed"
    text = FAILED_LATE.format(size=trial.batch_size, made=made, before=earlier, calls=calls)
    return remark(text, trial.batch_size)


def _expected_s(call_s: Mapping[int, float], size: int, *, grows: bool) -> float:
    """Return the time of a call, judged by the nearest size that ran; 0 if none did. A simulated call takes as long at any size."""
    if not call_s:
        return 0.0
    nearest = min(call_s, key=lambda ran: max(ran / size, size / ran))
    if not grows:
        return call_s[nearest]
    return call_s[nearest] * max(1.0, size / nearest)


def most_calls(request: Request) -> int:
    """Return the calls that a trial makes at most, of all steps together."""
    goes_on = request.settles or request.learns
    return max(len(request.calls), goes_on.most_calls if goes_on else 0)


def made_as_long(request: Request, calls: int) -> Request:
    """Return the trial with exactly this many calls, of all steps together, such as before a rank's data ended."""
    longest = request.calls + request.calls[-1:] * max(0, calls - len(request.calls))
    return replace(request, calls=longest[:calls], learns=None, settles=None)


# --- calls that follow from what the trial itself has shown ---


def further(request: Request, records: Records, now_s: float) -> list[Call]:
    """Return the calls that follow the recorded ones; none where the trial ends.

    Args:
        request: The trial.
        records: What its calls so far showed; of several ranks, `merged`.
        now_s: The time now, on the clock of the request's deadline.
    """
    if request.settles is not None:
        return _until_settled(request, request.settles, records)
    if request.learns is not None:
        return _until_stepped(request, request.learns, records, now_s)
    return []


def _until_settled(request: Request, settles: Settling, records: Records) -> list[Call]:
    """Go on call by call until one repeats an earlier one, and then until what lies between them has repeated.

    The runner checks what the user's code counts with whenever such calls end, which may take 0.2 s. Code that counts on and on is
    checked more and more rarely: after once, once, twice, three times ... the calls that seem to repeat.
    """
    left = settles.most_calls - len(records)
    if look.have_settled(records, settles.period):
        return []
    length = look.calls_since(look.marks_of(records), settles.period)
    checks = len(look.checks_of(records))
    calls = max(1, length * max(1, checks - 1))
    return [replace(request.calls[-1], is_extra=request.confirms)] * min(left, calls)


def _until_stepped(
    request: Request, learns: Learning, records: Records, now_s: float
) -> list[Call]:
    """Go on call by call until each step in turn has made its full steps, and then, to confirm, while there is time."""
    turns = look.turns_of(records)
    call = request.calls[0]
    if len(turns) > len(learns.turns):
        return []  # the extra calls of all steps were made
    last = turns[-1]
    if look.full_steps(last) < learns.full_steps:
        return [replace(call, step=last[-1].step)]
    if len(turns) < len(learns.turns):
        return [replace(call, step=learns.turns[len(turns)])] * learns.full_steps
    longest_s = max(look.seconds_of(records), default=0.0)
    spent_s = sum(_extra_seconds(last, learns.full_steps))
    left_s = learns.within_s - spent_s
    if request.deadline_s is not None:
        left_s = min(left_s, (request.deadline_s - now_s) / 2)
    made = max(map(len, look.by_step(records).values()))
    extra = max(0, learns.most_calls - made)  # 0 while sizes grow
    if longest_s:
        extra = min(extra, math.floor(left_s / longest_s))
    each_turn = -(-extra // (len(learns.turns) // len({*learns.turns})))
    return [
        replace(call, step=name, is_extra=True) for name in learns.turns for _ in range(each_turn)
    ]


def _extra_seconds(turn: Records, full_steps: int) -> Iterator[float]:
    """Yield the times of the calls of a turn after so many full steps."""
    completed = 0
    for record in turn:
        if completed >= full_steps and record.seconds is not None:
            yield record.seconds
        completed += record.stepped is not None
