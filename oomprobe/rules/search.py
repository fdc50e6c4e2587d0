"""Doubling and bisection over integers. Pure: it asks whether a size runs and never looks at memory itself.

A search has four phases. *grow* doubles the size with all the memory until one fails, then looks at a small size for what
happens only at some calls (the look, which counts as growing). *bisect* closes the bracket under the cap, and tries a size slightly above the bracket in case
the failure there was isolated. *recheck* repeats the failure that decided, or runs a size that was
only expected to fail. *confirm* runs the answer for longer and moves
down if that fails. Whatever the replies, a size is only returned after it ran under the cap and passed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from oomprobe.records.sizes import Sizes
from oomprobe.records.trials import Phase

# Fraction of the size: how narrow the bracket must be if the limit is not sharp, and the first step down after a failed
# confirmation. If sequence lengths vary from step to step, moving down one size at a time would fail many times.
STRIDE = 1 / 128
# Fraction of the size: how far above the bracket to look past a hole, which is a failing size below the limit. On CUDA's
# allocator one size in five to twenty is a hole, and a search that stopped at one would answer up to a tenth too low.
PAST_HOLES = 1 / 64
# The look runs at the size that ran, divided by this, and by twice as much where that leaves
# LOOK_LEAST samples. At size 1, a call with four times the usual batch allocates 0.8 % more bytes
# than the others, because the parameters' own memory hides it; at 256 (of an MLP that runs 4096), 180 % more.
# At a few samples, calls may differ by chance.
LOOK_DIVISOR, LOOK_LEAST = 16, 16
NEAR = 1 / 16  # of a size that is expected to be near the limit: the first stride from there
# Where a failure costs as much as many passes, as with ranks, which must be started and built anew: bisect at this place in the
# bracket instead of halfway, and make the first stride this fraction of the size, both down from an answer that is not confirmed and
# away from a size that is expected to be near the limit. Over 800 random limits, a search from the smallest size to 1/128 then met
# 5 failures (at most 6) in 26 trials instead of 6.5 (9) in 23.
PLACE, LONG_STRIDE = 1 / 5, 1 / 64
# Of the size that a row of a table is expected to run: the first stride, twice as far as the row before was off. Five tables took 0.62,
# 0.57, 0.92, 1.24 and 1.37 of separate probes; with a first stride of 1/16 always, 0.68, 0.65, 0.92, 1.32 and 1.30.
NEAREST, FURTHEST = 1 / 64, 1 / 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """How a trial ended.

    Attributes:
        passed: Whether the size ran.
        within_cap: Whether its peak proves that it passes under the cap too.
        grows_no_further: Whether to try nothing larger: memory would not limit it either, or no time is left.
        grows_by: The factor by which to grow from here.
        varies: After a look, whether later calls need more memory than the calls of the trials before it. After another
            trial, whether the same calls of this size ended differently before, so that a pass proves nothing.
        guess: After a look, the size at which the straight line through the peaks of the smallest size and of the look reaches the
            memory under the cap: where to go on, never the answer.
        is_certain: Whether a failure needs no second try: the allocator said so in a fresh process. After a look, whether that holds for
            all failures before it.
        tolerance: After a look, how narrow the bracket must be, as a fraction of the size: long trials need to be few.
        lengthens: After a confirmation, whether it failed in a later call than the trials before it made, so that trials are
            longer from here on, and earlier passes prove nothing; `tolerance` is then that of longer trials.
        is_expected: Whether the size has not run: its verdict follows from others. It must run where
            it decides.
    """

    passed: bool
    within_cap: bool = False
    grows_no_further: bool = False
    grows_by: int = 2
    varies: bool = False
    is_certain: bool = False
    lengthens: bool = False
    is_expected: bool = False
    tolerance: float = 0.0
    guess: int | None = None


class TrySize(Protocol):
    """Runs a size and replies."""

    def __call__(self, size: int, phase: Phase, *, capped: bool) -> Reply: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The outcome of a search."""

    batch_size: int | None  # the confirmed answer; None if nothing fits
    limit: int | None = None  # largest size that passed at all
    first_failing: int | None = (
        None  # smallest size that failed without the margin and did not pass later
    )
    deciding: int | None = (
        None  # smallest failure above the answer, under the cap or in confirmation
    )
    transient: tuple[int, ...] = ()  # sizes that failed, then passed when tried again
    unconfirmed: tuple[int, ...] = ()  # sizes that passed, then failed in confirmation


def find(
    try_size: TrySize,
    sizes: Sizes,
    *,
    capped: bool,
    out_of_time: Callable[[int, int], bool],
    resolution: float = 0.0,
    look: Callable[[int], Reply] | None = None,
    start: int | None = None,
    grows_capped: bool = False,
    confirmations: int = 1,
    failures_cost: bool = False,
    known: Reply | None = None,
    near: float = NEAR,
) -> Found:
    """Find the largest size that runs under the cap. On a monotone limit the answer is exact.

    Unless `capped`, there is no cap, and grow's replies hold for bisect too. Bisecting stops when the bracket is within
    `resolution`, a fraction of the size, or when `out_of_time`, called with the largest good and the smallest bad size,
    says so. `look` runs many calls of a small size after growing; if its reply varies,
    `try_size` runs longer trials from then on, and the search forgets what passed before. `start` is where growing begins; if
    that fails, the size is halved until one runs. With `grows_capped`, growing is under the cap too. The answer must pass
    `confirmations` times. If `failures_cost`, the search runs more trials that pass, and fewer that fail. `known` is the reply
    of the look in an earlier search of the same step: the limit is then expected near `start`, and sought from there in small
    strides under the cap, the first of which is the share `near` of it.

    Examples:
        >>> def try_size(size, phase, *, capped):
        ...     return Reply(passed=size <= (90 if capped else 100))
        >>> sizes = Sizes(first=1, last=None, step=1)
        >>> find(try_size, sizes, capped=True, out_of_time=lambda good, bad: False).batch_size
        90
    """
    search = _Search(
        try_size,
        sizes,
        capped,
        out_of_time,
        resolution,
        start=sizes.first if start is None else sizes.nearest(start),
        grows_capped=grows_capped,
        confirmations=confirmations,
        failures_cost=failures_cost,
        near=near,
    )
    if known is not None:
        search.follow(known)
    search.grow()
    ran = search.full_good
    if look is not None and ran is not None and search.can_look_below(ran):
        search.look(look, ran)
    if search.full_good is not None:
        search.enter_cap()
        if search.guess is not None:
            search.begin_at(search.guess)
        search.look_past_holes()  # bisects first, to within `STRIDE`
        search.bisect()  # to the end
        search.recheck()
    answer, deciding = search.confirm()
    return Found(
        batch_size=answer,
        limit=max(search.passed, default=None),
        first_failing=min(search.failed_full - search.passed, default=None),
        deciding=deciding,
        transient=tuple(search.transient),
        unconfirmed=tuple(search.unconfirmed),
    )


def nearness(expected: int, answer: int) -> float:
    """Return the first stride, as a share of the expected size, after a search whose answer was expected there."""
    return min(FURTHEST, max(NEAREST, 2 * abs(answer - expected) / expected))


def look_size(sizes: Sizes, largest: int) -> int:
    """Return the size of the look below the largest that ran."""
    size = sizes.down(largest, LOOK_DIVISOR)
    return max(sizes.down(size, 2), min(size, sizes.nearest(LOOK_LEAST)))


@dataclass(slots=True)
class _Search:
    """A search while it runs."""

    try_size: TrySize
    sizes: Sizes
    has_cap: bool
    out_of_time: Callable[[int, int], bool]
    resolution: float
    start: int  # where growing begins
    grows_capped: bool = False
    confirmations: int = 1
    failures_cost: bool = False
    near: float = NEAR
    starts_near_limit: bool = (
        False  # whether an earlier search of the same step expects the limit near `start`
    )
    varies: bool = False  # whether later calls of a step need more memory than earlier ones
    full_good: int | None = None  # the bracket with all the memory
    full_bad: int | None = None
    good: int | None = None  # the bracket under the cap
    bad: int | None = None
    within_cap: int | None = (
        None  # largest size whose peak with all the memory stayed within the cap
    )
    passed: set[int] = field(default_factory=set)
    failed_full: set[int] = field(default_factory=set)  # with all the memory
    failed: set[int] = field(default_factory=set)  # under the cap
    certain: set[int] = field(default_factory=set)  # failures that need no second try
    expected: set[int] = field(default_factory=set)  # failures of sizes that have not run
    tolerance: float = 0.0  # fraction of the size: a bracket this narrow is not closed further
    least_tolerance: float = 0.0
    guess: int | None = None  # where to begin under the cap
    transient: list[int] = field(default_factory=list)
    unconfirmed: list[int] = field(default_factory=list)

    def can_look_below(self, size: int) -> bool:
        """Return whether there is a size below, at which many calls are cheap, and no earlier search has found that they vary."""
        return not self.varies and look_size(self.sizes, size) < size

    def follow(self, known: Reply) -> None:
        """Begin with what the look of an earlier search of the same step has found."""
        self.starts_near_limit = self.grows_capped = True
        if known.varies:
            self.varies, self.least_tolerance = True, known.tolerance

    def ask(self, size: int, phase: Phase, *, capped: bool) -> Reply:
        if phase is Phase.RECHECK and size in self.certain:
            return Reply(passed=False)
        is_capped = capped and self.has_cap
        return self.keep(size, self.try_size(size, phase, capped=is_capped), is_capped=is_capped)

    def keep(self, size: int, reply: Reply, *, is_capped: bool = False) -> Reply:
        """Keep how a size ended, and return that."""
        if reply.passed:
            self.passed.add(size)
            return reply
        if reply.is_certain:
            self.certain.add(size)
        if reply.is_expected:
            self.expected.add(size)
        if is_capped or not self.has_cap:
            self.failed.add(size)
        if not is_capped:
            self.failed_full.add(size)
        return reply

    def grow(self) -> None:
        """Double the size, or grow as the reply says, until one fails, or halve it until one runs. Near an expected limit, begin with small strides."""
        size = stride = self.start
        if self.starts_near_limit:
            stride = self._near(size)
        while True:
            reply = self.ask(size, Phase.GROW, capped=self.grows_capped)
            if not reply.passed and size == self.sizes.first:  # nothing is below it
                reply = self.ask(size, Phase.RECHECK, capped=self.grows_capped)
                if reply.passed:
                    self._forget_failure(size, reply)
            if not reply.passed:
                self.full_bad = size
                if self.full_good is not None or size == self.sizes.first:
                    return
                size = max(self.sizes.down(size, 2), size - stride)
                stride *= 2
                continue
            self.full_good = size
            if reply.within_cap:
                self.within_cap = size
            if reply.grows_no_further and self.full_bad is None:
                self.sizes = replace(self.sizes, last=size)
            if size == self.sizes.last or self.full_bad is not None:
                return
            size = self.sizes.up(size, (reply.grows_by - 1) * stride)
            stride *= reply.grows_by

    def look(self, look: Callable[[int], Reply], largest: int) -> None:
        """Look for what happens only at some calls, at a size where many calls are cheap. If it does, believe only that size."""
        size = look_size(self.sizes, largest)
        reply = self.keep(size, look(size))
        # A late call needs far more memory than the others.
        while not reply.passed and size > self.sizes.first:
            self.full_bad, size = size, self.sizes.down(size, LOOK_DIVISOR)
            reply = self.keep(size, look(size))
        if reply.is_certain:
            self.certain |= self.failed
        if not reply.passed:
            self.full_good, self.bad = None, size
        elif reply.varies or size < look_size(self.sizes, largest):
            self.varies, self.least_tolerance, self.guess = True, reply.tolerance, reply.guess
            self.full_good, self.passed = size, {size}
            self.within_cap = size if reply.within_cap else None
            if self.expected:  # grow anew: from shorter trials than needed nothing follows
                self.start, self.full_bad = self.sizes.first, None
                self.grow()

    def _forget_failure(self, size: int, reply: Reply) -> None:
        """Take the pass of a size that failed before as its verdict; call the failure transient unless the step varies."""
        if not reply.varies:
            self.transient.append(size)
        self.failed.discard(size)
        self.failed_full.discard(size)

    def enter_cap(self) -> None:
        """Move the bracket under the cap: if its lower end does not run there, that becomes the upper end."""
        self.good, self.bad = self.full_good, self.full_bad
        last_good, first = self.full_good, self.sizes.first
        assert last_good is not None
        holds_under_cap = not self.has_cap or self.within_cap == last_good
        # Where nothing is below or between, confirmation alone decides.
        is_left_to_confirm = (self.good, self.bad) == (first, self.sizes.up(first, self.sizes.step))
        if (
            not holds_under_cap
            and not is_left_to_confirm
            and not self.ask(last_good, Phase.BISECT, capped=True).passed
        ):
            self.good, self.bad = self.within_cap, last_good
        last = self.sizes.last
        # If nothing failed, and the last size has not passed, the look took back what growing had passed.
        if self.bad is None and last is not None and self.good != last:
            if self.ask(last, Phase.BISECT, capped=True).passed:
                self.good = last
            else:
                self.bad = last

    def begin_at(self, guess: int) -> None:
        """Bracket the limit around a guess, in strides that double: trials of many calls need to be few.

        The stride after one that has bracketed it is longer than all before it together, so it leads out of the bracket.
        """
        size, stride = self.sizes.nearest(guess), self._near(guess)
        while self._is_between(size):
            if self.ask(size, Phase.BISECT, capped=True).passed:
                self.good, size = size, self.sizes.up(size, stride)
            else:
                self.bad, size = size, size - stride
            stride *= 2

    def _is_between(self, size: int) -> bool:
        """Return whether a size lies in the bracket, or above its lower end while nothing has failed."""
        above = size >= self.sizes.first if self.good is None else size > self.good
        return above and (self.bad is None or size < self.bad)

    def _near(self, size: int) -> int:
        """Return the first stride from a size that is expected to be near the limit."""
        step, share = self.sizes.step, LONG_STRIDE if self.failures_cost else self.near
        return max(step, int(share * size) // step * step)

    def bisect(self) -> None:
        """Close the bracket under the cap. Its upper end must fail there too, not just with all the memory."""
        stride = self.sizes.step
        while (size := self._candidate(stride)) is not None:
            if not self.ask(size, Phase.BISECT, capped=True).passed:
                self.bad = size
                continue
            if size == self.bad:  # it failed with all the memory but passed under the cap
                self.transient.append(size)
                self.failed_full.discard(size)
            self.good, self.bad = size, self._failure_above(size)
            if self.bad is None:
                stride *= 2

    def _candidate(self, stride: int) -> int | None:
        """Return the next size in the bracket, or above it while nothing has failed; None once it is narrow enough."""
        if self.bad is None:
            assert self.good is not None
            return None if self.good == self.sizes.last else self.sizes.up(self.good, stride)
        if self.good is not None:
            share = max(self.resolution, self.tolerance, self.least_tolerance)
            is_narrow = self.bad - self.good <= share * self.good
            if is_narrow or self.out_of_time(self.good, self.bad):
                return None
        place = PLACE if self.failures_cost else 1 / 2
        # Halfway; if the step varies, the geometric middle while the failure is more than twice as large: the limit may lie far below.
        middle = self.sizes.middle(self.good, self.bad, geometric=self.varies, place=place)
        if middle is None and self.bad not in self.failed:
            return self.bad
        return middle

    def _failure_above(self, size: int) -> int | None:
        above = filter(lambda failed: failed > size, self.failed | self.failed_full)
        return min(above, default=None)

    def recheck(self) -> None:
        """Repeat the deciding failure once: a leak, another process or fragmentation may have caused it.

        If the step varies, a pass would prove nothing; a size only expected to fail runs.
        """
        if self.bad is None:
            return
        has_run = self.bad not in self.expected
        if has_run and (self.bad not in self.failed or self.varies or self.transient):
            return
        deciding = self.bad
        reply = self.ask(deciding, Phase.RECHECK, capped=True)
        if reply.passed and not reply.varies:
            self._forget_failure(deciding, reply)
            self.good, self.bad = deciding, self._failure_above(deciding)
            self.bisect()

    def look_past_holes(self) -> None:
        """Try a size slightly above the bracket. If it passes, the failure below it was a hole: continue from there.

        If a coarse resolution or the length of trials ended bisecting, a size slightly above the lower end would lie in the bracket
        or in the same hole: then it is a size slightly above the upper end.
        """
        met_hole = False
        self.tolerance = STRIDE
        self.bisect()
        while self.good is not None and self.bad is not None:
            hole = self.bad
            width = hole - self.good
            stride = round(PAST_HOLES * self.good / self.sizes.step) * self.sizes.step
            narrow = max(self.sizes.step, STRIDE * self.good)
            widest = max(self.resolution, self.least_tolerance) * self.good
            if width > max(narrow, widest):
                break  # no time is left
            size = self.sizes.up(self.good if width <= narrow else hole, stride)
            if size <= hole or size in self.failed | self.failed_full:
                break
            if not self.ask(size, Phase.BISECT, capped=True).passed:
                break
            self.certain |= self.expected & {hole}  # it decides nothing, so it need not run
            reply = self.ask(hole, Phase.RECHECK, capped=True)
            if reply.passed:
                self._forget_failure(hole, reply)
            else:
                met_hole = True
            self._climb(size, stride)
            self.bisect()
        self.tolerance = STRIDE if met_hole else 0.0

    def _climb(self, size: int, stride: int) -> None:
        """Move up from a size that passed, in doubling strides, until one fails."""
        self.good, self.bad = size, None
        if self.full_bad is not None and self.full_bad > size:
            self.bad = self.full_bad
        while True:
            stride *= 2
            size = self.sizes.up(self.good, stride)
            if size == self.good or not self._is_between(size):
                return
            if not self.ask(size, Phase.BISECT, capped=True).passed:
                self.bad = size
                return
            self.good = size

    def confirm(self) -> tuple[int | None, int | None]:
        """Run the answer for longer. While that fails, move down in growing strides; then close the bracket.

        If it fails in a later call than the trials before it made, bisect again below it, by longer trials.
        """
        good, bad, size, stride = None, self.bad, self.good, 0
        first = self.sizes.first
        while size is not None:
            reply = self._confirmed(size)
            if reply.passed:
                good = size
            else:
                self.unconfirmed.append(size)
                bad = size
            if good is not None:
                share = max(self.resolution, self.least_tolerance)
                closest = max(self._stride(good), share * good)
                if not self.unconfirmed or bad is None or bad - good <= closest:
                    break
                if self.out_of_time(good, bad):
                    break
                size = self.sizes.middle(good, bad)
            elif reply.lengthens:
                self._search_below(size, reply.tolerance)
                bad, size = self.bad, self.good
            elif size == first:
                break
            else:
                stride = max(2 * stride, self._stride(size), self.sizes.step)
                size = max(size - stride, first)
        return good, bad

    def _search_below(self, size: int, tolerance: float) -> None:
        self.good, self.bad, self.varies = None, size, True
        self.least_tolerance = max(STRIDE, tolerance)
        self.passed.clear()
        self.begin_at(size - self._near(size))
        self.look_past_holes()
        self.bisect()

    def _stride(self, size: int) -> int:
        share = LONG_STRIDE if self.failures_cost else STRIDE
        return round(share * size / self.sizes.step) * self.sizes.step

    def _confirmed(self, size: int) -> Reply:
        for _ in range(self.confirmations - 1):
            reply = self.ask(size, Phase.CONFIRM, capped=True)
            if not reply.passed:
                return reply
        reply = self.ask(size, Phase.CONFIRM, capped=True)
        # Where nothing is below it, one failure does not decide.
        if not reply.passed and size == self.sizes.first:
            reply = self.ask(size, Phase.CONFIRM, capped=True)
            if reply.passed:
                self._forget_failure(size, reply)
        return reply
