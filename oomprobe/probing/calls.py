"""How many calls each trial makes: a number fixed before the trial, from what earlier trials showed of the step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from oomprobe.ground.words import count, shortened
from oomprobe.records.options import MAX_CALLS, Options
from oomprobe.records.trials import Calls, Request, RunnerInfo, Trial
from oomprobe.runners.signals import Clock

# Of the time that is left, the share that the calls of a look and of a confirmation may take.
LOOK_SHARE, CONFIRM_SHARE = 1 / 8, 1 / 2
# Calls of a confirmation, where another row of the table has made all of `Patience.look_calls`. Of 162 rows confirmed over 8 calls, 6
# failed within 200 calls under the cap; over 15, 2; over 25, 1; over 50 none, but the rows then took 1.3 times the calls.
ROW_CALLS = 25
# Times the calls after which a confirmation failed that later trials make: at a smaller size an epoch has more calls, and several steps
# take turns. Ten loops with a large call at large sizes only took 3675 calls in all; with twice 3739, with all that the confirmation was
# to make 4118, and 4541 by confirming ever smaller sizes (20 confirmations instead of 140).
AHEAD = 4
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
LATE = (
    "batch {size} failed its confirmation after {made}, and each trial had made {before}: those that followed made {calls}. A later "
    "call can still need more. To be sure, let step_fn make the largest batch it can meet"
)


class CallPlan:
    """Plans the calls of each trial. Numbers of calls are those of each step."""

    def __init__(self, facts: RunnerInfo, options: Options, clock: Clock) -> None:
        self._facts, self._options, self._clock, self._patience = facts, options, clock, clock.patience
        self.first = 0  # calls until every optimizer has stepped
        self._full = 0  # calls of a full step after that; 0: no trial has passed yet
        self._most = self._patience.look_calls  # fewer if a late call failed with a bug
        self._most_to_confirm = self._most
        self._call_s: dict[int, float] = {}  # the time of one call of each step, by batch size
        self._counts = False  # whether the user's code may know which call it is
        self._decided = 0  # calls of the last trial that passed and was no confirmation
        self.needed = 0  # calls that meet the one that needs the most memory, as a look or a failed confirmation found
        self.confirmed = 0  # calls of the last confirmation
        self.looked: Trial | None = None
        self._period = 0  # calls after which those of this row's own look repeated; 0: they did not

    def follow(self, last: CallPlan) -> None:
        """Begin with what another row of the table has shown of the step; its look and its confirmation count for all rows."""
        self.first, self._full, self._most, self._counts = last.first, last._full, last._most, last._counts
        self.needed, self.looked = last.needed, last.looked
        self._most_to_confirm = ROW_CALLS

    @property
    def repeats(self) -> bool:
        """Whether the device may repeat calls instead of running them, because each is like the last."""
        return self._facts.device.replays and not self._counts

    @property
    def is_long(self) -> bool:
        """Whether trials make more calls than the options ask for, as the look found that they need."""
        return self.needed > self._ordinary(self._options.steps)

    @property
    def to_confirm(self) -> int:
        """Calls that are still to be made for an answer, at least."""
        calls = max(self._ordinary(self._options.confirm_steps), self.needed)
        return calls + self.needed if self.is_long else calls  # another such trial comes before it

    def _ordinary(self, steps: int) -> int:
        """Return the calls until every optimizer has stepped, and of this many full steps more, or of one long step."""
        steps = steps if self._full <= MAX_CALLS else min(steps, 1)
        return self.first + steps * self._full

    def _steps(self, *, confirms: bool) -> int:
        """Return the full steps of a trial; where calls are repeated, which takes no time, every trial runs the most."""
        options = self._options
        if self.repeats and len(self._facts.step_names) == 1 and self._full <= 1:
            return max(options.steps, options.confirm_steps)
        return options.confirm_steps if confirms else options.steps

    def planned(self, request: Request, *, decides: bool = True) -> Request:
        """Return the request with the number of its calls; a look keeps its own. `decides` is false while the size grows."""
        if request.accumulation_steps > 1:  # one full step creates the state, and the micro-batches follow
            return replace(request, steps=0, repeats=not self._counts)
        steps = self._steps(confirms=request.confirms)
        calls = request.calls or self._calls(request.batch_size, steps, confirms=request.confirms, decides=decides)
        makes_many = calls is not None and calls > self._ordinary(steps) and not request.looks
        may_end_early = (request.looks or request.confirms) and not self._facts.starts_anew
        return replace(
            request,
            steps=steps,
            calls=calls,
            settled_calls=max(self._ordinary(steps), self.needed) if makes_many and self._period else None,
            period=max(1, self._period),
            least_calls=self._ordinary(self._options.steps) if self._full and may_end_early else None,
            repeats=not request.looks and not self._counts,
        )

    def _calls(self, size: int, steps: int, *, confirms: bool, decides: bool) -> int | None:
        """Return the calls of a trial; None if no trial has shown how many an optimizer's step takes."""
        if not self._full:
            return None
        least = max(self._ordinary(steps), self.needed)
        if decides and not confirms and self._facts.failure_cost_s:
            return max(least, self.affordable(size, limit_s=self._patience.cost_share * self._facts.failure_cost_s))
        if not confirms or self._facts.starts_anew or (self.repeats and len(self._facts.step_names) > 1):
            return least
        return max(least, min(self._most_to_confirm, self.affordable(size, CONFIRM_SHARE)))

    def for_look(self, size: int) -> int:
        """Return the calls of a look; 0 if it would show nothing."""
        if self.repeats:
            return 0  # trials have repeated the call, which is like the last
        calls = self.affordable(size, LOOK_SHARE)
        return calls if calls > self._ordinary(self._options.steps) else 0

    def affordable(self, size: int, share: float = CONFIRM_SHARE, limit_s: float | None = None) -> int:
        """Return how many calls of this size, up to `Patience.look_calls`, fit in `limit_s`.

        None: in the time that the search has taken, or in `Patience.look_s`.
        """
        device, patience = self._facts.device, self._patience
        look_s = patience.host_look_s if device.on_host else max(patience.look_s, self._clock.elapsed_s)
        limits_s = [look_s if limit_s is None else limit_s]
        limits_s += [] if self._clock.end_s is None else [share * (self._clock.end_s - time.monotonic())]
        if self._options.trial_time_limit_s is not None:
            limits_s.append(CONFIRM_SHARE * self._options.trial_time_limit_s)
        if self.repeats and len(self._facts.step_names) == 1:  # repeated calls take no time
            return self._most
        nearest = min(self._call_s, key=lambda one: abs(one - size), default=None)
        # A simulated call takes as long at any size.
        scale = 1.0 if nearest is None or device.replays else max(1.0, size / nearest)
        call_s = 0.0 if nearest is None else self._call_s[nearest] * scale
        return min(self._most, int(min(limits_s) / call_s) if call_s else patience.look_calls)

    def learn(self, request: Request, trial: Trial, calls: Calls) -> Iterator[str]:
        """Learn from a trial that ended, and yield notes about it."""
        device, size = self._facts.device, trial.batch_size
        self._counts |= (calls.counts or calls.varying) and device.replays and self.looked is None
        if calls.call_s:
            self._call_s[size] = calls.call_s
        if trial.passed and not self._full and calls.made and trial.accumulation_steps == 1:
            self.first = calls.first
            self._full = max(1, (calls.made - calls.first) // request.steps)
        self.needed = max(self.needed, calls.needed)
        if calls.ended_early is not None:
            self._most = min(self._most, calls.made)
            self.needed = min(self.needed, self._most)
            yield ENDED_EARLY.format(number=calls.made + 1, size=size, error=shortened(calls.ended_early))
        if calls.varying and request.confirms and not self.is_long and not self._facts.starts_anew:
            yield VARYING
        if trial.accumulation_steps == 1 and not request.looks:
            yield from self._compare_calls(request, trial)
        if request.looks:
            self.looked = trial
            made_all = trial.steps >= self._patience.look_calls
            self._period = calls.period if trial.passed and made_all and len(self._facts.step_names) == 1 else 0
            if self.is_long:
                yield LONG_CALLS.format(calls=self.needed)
            elif trial.passed:
                self._counts = False  # what the step counts does not decide about memory

    def _compare_calls(self, request: Request, trial: Trial) -> Iterator[str]:
        """Make trials longer from now on if a confirmation failed in a later call than the trials before it made."""
        calls_each = trial.steps // len(self._facts.step_names)
        if trial.passed and request.confirms:
            self.confirmed = calls_each
        elif trial.passed:
            self._decided = calls_each
        elif request.as_built:  # with an empty cache it may pass
            return
        elif request.confirms and request.calls and self._decided <= min(trial.steps, self._most - 1):
            longest = min(self._most, max(request.calls, trial.steps + 1))
            self.needed = max(self.needed, min(longest, AHEAD * (trial.steps + 1)))
            self._period = 0  # the look has not met that call
            each = len(self._facts.step_names)  # the text counts those of all steps
            made, before = (count(calls, "call", "calls") for calls in (trial.steps, each * self._decided))
            yield LATE.format(size=trial.batch_size, made=made, before=before, calls=each * self.needed)

    def lengthen(self, size: int) -> None:
        """Make as many calls as there is time for from now on, because the step varies."""
        self.needed, self._period = max(self.needed, self.affordable(size)), 0
