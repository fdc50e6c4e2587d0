"""One probe while it runs: the trials that the search asks for, and their second tries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from oomprobe.errors import (
    DeviceLostError,
    StepFailedError,
    TimeLimitError,
    UnreliableError,
)
from oomprobe.ground.words import count
from oomprobe.probing.budget import Budget, HostBudget
from oomprobe.probing.neighbours import Neighbours
from oomprobe.probing.second_tries import AsBuilt, Deaths
from oomprobe.records.axis import NO_AXIS, Axis
from oomprobe.records.breakdown import Breakdown
from oomprobe.records.epoch import UNLIMITED, EpochRecord
from oomprobe.records.notes import Notes, remark, warning
from oomprobe.records.options import Options
from oomprobe.records.patience import Clock
from oomprobe.records.trials import (
    SECOND_OPINIONS,
    DeviceInfo,
    Measured,
    Outcome,
    Phase,
    Request,
    Runner,
    Trial,
    last_of,
)
from oomprobe.results.progress import Reporter
from oomprobe.results.why import Explanation
from oomprobe.rules import diagnosis, search
from oomprobe.rules.diagnosis import Calls
from oomprobe.rules.look import bracket_tolerance
from oomprobe.rules.program import Program, most_calls
from oomprobe.rules.search import STRIDE, Found, Reply

UNSTEADY = (
    "the step varies: batch {size} ended differently in two trials of {calls} under the same cap ({how}), so something that it "
    "depends on was not put back between trials (an iterator, a file, a thread, the time). Keep the margin"
)


UNSTEADY_GROUPS = (
    "two trials of batch {size} on groups of ranks differ ({how}). With DDP over NCCL that is one more set of gradients, which NCCL may "
    "hold for a moment when DDP rebuilds its buckets after the first step; otherwise the ranks' data vary. Keep the margin"
)

STOPPED = (
    "time limit: bisecting stopped between {good}, which ran, and {bad}, which failed; a larger size may fit (allow more with "
    "time_limit_s)"
)
DROPPED = "memory at batch {size} differs from what other sizes predicted: predicted trials were dropped, and the search went on from what ran"


class ContradictedError(Exception):
    """A predicted trial was wrong: the search must go on without predictions."""


class Session:
    """Runs the trials that the search asks for and appends them to `trials`. `clock` started with the probe.

    Each row of a table, numbered by `row`, has a session of its own.
    """

    def __init__(
        self,
        runner: Runner,
        options: Options,
        reporter: Reporter,
        clock: Clock,
        trials: list[Trial],
        *,
        row: int = 0,
        axis: Axis = NO_AXIS,
    ) -> None:
        self.runner, self.trials, self.clock, self.axis = runner, trials, clock, axis
        self.options = options.within(min(axis.most, runner.facts.max_batch or UNLIMITED))
        self.notes, self.in_steps_s = Notes(), 0.0
        self.budget = Budget(runner, options.memory_fraction)
        self.host = HostBudget(options.host_limit_bytes)
        self.program = Program(runner.facts, options, clock, row)
        self.deaths = Deaths(runner, clock, trials)
        self.as_built = AsBuilt(runner, options.memory_fraction)
        self.neighbours = Neighbours(runner, clock.patience)
        self.state_verified = False  # whether restored state was equal; set when the session closes
        self.stretches: list[Trial] = []  # of an epoch, whose calls have many shapes
        self.epoch: EpochRecord | None = None  # how an epoch trains at the answer, if one was given
        self.breakdown: Breakdown | None = None  # what held the memory at the answer, if requested
        self.why: Explanation | None = None  # the size that failed next ran out of memory, if known
        self.explained: dict[int, Mapping[str, Any]] = {}  # why a size ran out, as `Outcome.why`
        self.outcome: Outcome | None = None  # of the last trial
        self.searches = False  # whether a search goes on, which begins anew after a wrong replay
        self.splits = False  # whether the step splits its batch itself: memory does not limit it
        self.has_time_to_grow = True  # to run and confirm twice the last size that passed
        self.reporter = reporter
        self.held_by_step = ""  # a sentence that names what grows from call to call
        self.gradients_hold_graphs = False  # as in `Outcome`
        self._asked_calls = 0  # of the last trial
        self.calls: dict[int, Calls] = {}  # by batch size
        self.examples: dict[int, int] = {}  # that reached the model, by batch size
        self.comparable = self.options.sizes  # with the answer, to show that the step uses its size
        self._ends: dict[tuple[int, int | None, int], Trial] = {}  # by batch size, cap and calls
        self._known: Reply | None = None  # what the look of another row found
        # How near to `start_batch` the limit is expected then, and whether its calls repeated.
        self._near, self._is_steady = search.NEAR, False
        self._ran: dict[tuple[int, int | None], Trial] = {}  # before predicted ones were dropped

    @property
    def device(self) -> DeviceInfo:
        """The device, as far as the runner knows it yet."""
        return self.runner.facts.device

    @property
    def follows(self) -> bool:
        """Whether another row's session has shown what the step does."""
        return self._known is not None

    def follow(self, last: Program, near: float, *, settles: bool = False) -> None:
        """Begin with what another row's session has learned of the step; the limit is expected this near to `start_batch`.

        `settles` if calls that confirmed an answer have repeated.
        """
        self.program.follow(last, settles=settles)
        self._near, self._is_steady = near, last.is_steady
        tolerance = bracket_tolerance(self.program.needed)
        self._known = Reply(passed=True, varies=last.varies, tolerance=tolerance)

    # --- the search ---

    def find(self) -> Found:
        """Find the largest size that runs."""
        look, resolution = None, self.options.resolution
        if self.device.counts_bytes and not self.runner.facts.starts_anew:
            look = self.look
        if self.device.on_host:  # closer to the limit, fragmentation of malloc's heap decides
            resolution = max(resolution, STRIDE)
        find = partial(
            search.find,
            self.try_size,
            self.options.sizes,
            capped=self.options.memory_fraction < 1,
            out_of_time=self.out_of_time,
            resolution=resolution,
            grows_capped=self.runner.facts.grows_capped,
            confirmations=self.runner.facts.confirmations,
            failures_cost=bool(self.runner.facts.failure_cost_s),
            known=self._known,
            near=self._near,
        )
        start, self.searches = self.options.start_batch, True
        try:
            while True:
                try:
                    answer = find(start=start, look=look)
                    self.searches = False
                    return answer
                except ContradictedError:
                    start = self._drop_predictions()
                    if self.program.looked:
                        look = None
        except (DeviceLostError, StepFailedError, TimeLimitError, UnreliableError) as error:
            is_bug = isinstance(error, StepFailedError) and error.__cause__ is not None
            if not is_bug:  # the text of a bug says what ran
                error.args = (f"{diagnosis.known_so_far(self.trials)}{error}",)
            raise

    def _drop_predictions(self) -> int:
        """Forget the predicted trials, and return the size from which to grow: growing then meets the same sizes as before."""
        size = self.trials[-1].batch_size
        self.notes.add(remark(DROPPED.format(size=size), size))
        grown = {trial.batch_size for trial in self.trials if trial.phase is Phase.GROW}
        self.trials[:] = [trial for trial in self.trials if not trial.replayed]
        self._ran = {(trial.batch_size, trial.cap_bytes): trial for trial in self.trials}
        last = self.trials[-1].batch_size  # the nearest to the limit of those that ran
        return max((size for size in grown if size <= last), default=last)

    def try_size(self, size: int, phase: Phase, *, capped: bool) -> Reply:
        """Run one size for the search."""
        needed = self.program.needed
        cap_bytes = self.budget.search_cap() if capped else self.budget.grow_cap()
        trial = None if phase in SECOND_OPINIONS else self._ran.get((size, cap_bytes))
        if trial is None:
            trial = self.run(self.requested(size, phase, cap_bytes))
            if phase is Phase.GROW and trial.passed:
                self._judge_growth(trial)
                of_twice = 2 * len(self.program.growing(size).calls) + self.program.to_confirm
                self.has_time_to_grow = self._has_time_for(size, calls=of_twice)
        lengthens = phase is Phase.CONFIRM and self.program.needed > needed
        return Reply(
            passed=trial.passed,
            within_cap=self.budget.holds(trial),
            grows_no_further=self.splits or not self.has_time_to_grow,
            grows_by=diagnosis.growth(
                trial, self.calls, self.device.total_bytes, self.clock.patience.slow_start_s
            ),
            varies=self._varies(trial),
            is_certain=self.budget.decided(trial, self.trials, is_steady=self.program.is_steady),
            lengthens=lengthens,
            is_expected=trial.replayed and not self.device.is_simulated,
            tolerance=bracket_tolerance(self.program.needed),
        )

    def requested(self, size: int, phase: Phase, cap_bytes: int | None) -> Request:
        """Return the trial of one size for the search."""
        if phase is Phase.CONFIRM:
            request = replace(self.program.confirming(size), as_built=self.as_built.is_due)
        elif phase is Phase.GROW and not self.follows:  # what grows from a known limit decides too
            request = self.program.growing(size)
        else:
            request = self.program.bisecting(size, phase)
        confirms = phase is Phase.CONFIRM
        # These show whether the model gets what is asked for: at 1 it may get one of anything.
        is_first = all(trial.batch_size == 1 for trial in self.trials)
        return replace(
            request,
            cap_bytes=cap_bytes,
            fresh=phase in SECOND_OPINIONS,
            must_run=confirms,
            explains=phase is Phase.RECHECK and self.runner.facts.explains,  # it may decide
            watches_inputs=confirms or is_first,
        )

    def look(self, size: int) -> Reply:
        """Make many calls of a small size, to learn how many calls a trial needs."""
        calls = self.program.for_look(size)
        if not calls or not self.has_time_to_grow:
            return Reply(passed=True)
        looking = self.program.looking(size, calls)
        trial = self.run(replace(looking, cap_bytes=self.budget.grow_cap()))
        varies = trial.passed and self.program.varies
        return Reply(
            passed=trial.passed,
            within_cap=self.budget.holds(trial),
            varies=varies,
            is_certain=self.budget.decided_all(self.trials, is_steady=self.program.is_steady),
            tolerance=bracket_tolerance(self.program.needed),
            guess=diagnosis.line_through(self.trials, trial, self.budget.total_bytes),
        )

    def out_of_time(self, good: int, bad: int) -> bool:
        """Return whether the time left is needed to confirm."""
        if self._has_time_for(good):
            return False
        self.notes.add(remark(STOPPED.format(good=good, bad=bad), good, bad))
        return True

    def _has_time_for(self, size: int, calls: int = 0) -> bool:
        """Return whether there is time to confirm a size after so many other calls of it."""
        facts = self.runner.facts
        starting_s = (1 + facts.confirmations) * facts.failure_cost_s  # of the recheck too
        calls += self.program.to_confirm
        return self.clock.suffices_to_confirm(size, self.trials, calls=calls, starting_s=starting_s)

    def confirm_only(self, size: int) -> Found:
        """Run one size under the cap. Rerun it if it failed for no certain reason, or if the cap shrank below its peak once kernels were loaded."""
        self.comparable = replace(self.comparable, first=self.comparable.step)
        self.budget.take(self.runner.measure(), is_final=False)
        first_budget_bytes = self.budget.total_bytes
        trial = first = self.run(self.requested(size, Phase.CONFIRM, self.budget.search_cap()))
        if self.budget.decided(trial, self.trials, is_steady=self._is_steady):
            return Found(batch_size=None)
        reruns = self.runner.facts.confirmations - 1
        if not trial.passed:
            reruns += 1
        else:
            self._take_budget(self.runner.measure())
            had_more = (trial.cap_bytes or first_budget_bytes) > self.budget.total_bytes
            if had_more and not self.budget.holds(trial):
                reruns += 1
        varies = self._varies(trial)
        for _ in range(reruns):
            trial = self.run(self.requested(size, Phase.CONFIRM, self.budget.search_cap()))
            varies |= self._varies(trial)
            if not trial.passed:
                return Found(batch_size=None)
        transient = () if first.passed or varies else (size,)
        return Found(batch_size=size, limit=size, transient=transient)

    # --- one trial, with second tries ---

    def run(self, request: Request) -> Trial:
        """Run one trial, and again for as long as there is a reason other than its size; return the last try."""
        while True:
            self.reporter.started(request.batch_size, request.phase)
            self._asked_calls = most_calls(request)
            outcome = self.host.judge(self.runner.run(self.with_evidence(request)))
            self.take_over(outcome)
            again = self._second_try(request, outcome)
            if again is None:
                return outcome.trial
            request = again

    def _second_try(self, request: Request, outcome: Outcome) -> Request | None:
        """Return the trial to run in its place; None if it counts. Each policy asks for another one, for a reason of its own."""
        again = self.neighbours.second_try(
            request, outcome, lambda: self.runner.measure().outside_bytes
        )
        if again is not None:
            return again  # others had taken memory: the trial is as if it had not been
        self._record(request, outcome)
        again = self.deaths.second_try(request, outcome.trial)
        if again is None:
            self._stop_if_final(outcome)
            again = self.as_built.second_try(request, outcome.trial)
        self.notes.extend([*self.deaths.notes, *self.as_built.notes])
        return again

    def with_evidence(self, request: Request) -> Request:
        """Add the deadline and the evidence from earlier trials."""
        ran = (trial.batch_size for trial in self.trials if trial.passed and not trial.replayed)
        return replace(
            request,
            must_run=request.must_run or self.host.is_taken,
            deadline_s=self.clock.deadline_s(),
            passed=tuple(dict.fromkeys(ran)),
            learned=self.program.learned,
        )

    def take_over(self, outcome: Outcome) -> None:
        """Add up what belongs to the probe rather than to the trial."""
        self.notes.extend(outcome.notes)
        self.in_steps_s += outcome.in_steps_s
        self.program.learned = outcome.learned or self.program.learned
        self.gradients_hold_graphs |= outcome.gradients_hold_graphs
        self.outcome = outcome
        if outcome.holders:
            self.held_by_step = f". At the end of a trial the step's code held {', '.join(outcome.holders)}, which was not there before"

    def _record(self, request: Request, outcome: Outcome) -> None:
        trial = outcome.trial
        self.trials.append(trial)
        calls = self.calls[trial.batch_size] = Calls.of(outcome.records)
        if calls.examples:
            self.examples[trial.batch_size] = calls.examples
        if outcome.why:
            self.explained[trial.batch_size] = outcome.why
        self.notes.extend(self.program.learn(request, outcome))
        self.reporter.finished(trial)
        if outcome.measured is not None and not self.budget.is_final:
            self._take_budget(outcome.measured)

    def _take_budget(self, measured: Measured) -> None:
        self.budget.take(measured)
        self.neighbours.expect(measured.outside_bytes)

    def _stop_if_final(self, outcome: Outcome) -> None:
        """Raise if no further trial makes sense."""
        self.deaths.stop_if_final(outcome.trial)
        if outcome.refusal is not None:
            raise UnreliableError(outcome.refusal)
        is_wrong = outcome.contradicts_replay and any(trial.replayed for trial in self.trials)
        if is_wrong and self.searches:  # later, what ran stands, whatever was predicted of it
            raise ContradictedError

    # --- what trials say about the step ---

    def leak_of_step(self, answer: int) -> tuple[int, int]:
        """Return the bytes that each step of the answer leaks and the bytes that the answer leaves free."""
        last, budget_bytes = last_of(self.trials, answer), self.budget.total_bytes
        kept_bytes = diagnosis.step_leak_bytes(last, self.program.looked)
        return kept_bytes, self.budget.available_bytes - min(
            budget_bytes, last.peak_reserved_bytes or budget_bytes
        )

    def _judge_growth(self, now: Trial) -> None:
        """Raise if the step takes the same memory at every size, and find out whether it splits its batch itself."""
        smaller = self._same_memory_smaller()
        if smaller is not None and now.replayed:
            # The sizes from which it follows may have had different lengths: it runs.
            self.trials.remove(now)
            asked = self.requested(now.batch_size, now.phase, now.cap_bytes)
            self.run(replace(asked, must_run=True))
            smaller = self._same_memory_smaller()
        if smaller is not None:
            raise self.flat(now, smaller)
        if self.options.max_batch is not None:
            return
        first = diagnosis.splits_from(self.trials, self.calls)
        self.splits = first is not None
        if first is not None:
            sizes = first.batch_size, now.batch_size
            self.notes.add(remark(diagnosis.SPLITS.format(smaller=sizes[0], size=sizes[1]), *sizes))

    def flat(self, now: Trial, smaller: Trial) -> UnreliableError:
        """Return the error that a size takes no more memory than a smaller one."""
        examples, got = self.calls[now.batch_size].examples, ""
        if examples:
            got = diagnosis.AT_BOTH.format(examples=examples)
        sizes = {"size": now.batch_size, "smaller": smaller.batch_size}
        return UnreliableError(diagnosis.FLAT.format(examples=got, **sizes))

    def _same_memory_smaller(self) -> Trial | None:
        return diagnosis.same_memory_smaller(self.trials, self.calls, on_host=self.device.on_host)

    def _varies(self, trial: Trial) -> bool:
        """Return whether the size ended differently before, after the same calls under the same cap, and note that."""
        before = self._ends.setdefault(
            (trial.batch_size, trial.cap_bytes, self._asked_calls), trial
        )
        if trial.replayed or before.replayed:
            return False
        if self.neighbours.contaminated or self.device.on_host:
            return False  # others, or fragmentation of malloc's heap, make peaks differ
        how = diagnosis.how_different(before, trial)
        if how is None:
            return False
        calls = count(trial.steps, "call", "calls")
        note = warning(
            UNSTEADY.format(size=trial.batch_size, calls=calls, how=how), trial.batch_size
        )
        if self.runner.facts.world_size > 1:
            note = remark(UNSTEADY_GROUPS.format(size=trial.batch_size, how=how), trial.batch_size)
        self.notes.add(note)
        self.program.lengthen(trial.batch_size)
        return True
