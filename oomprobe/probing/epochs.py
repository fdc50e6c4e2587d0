"""Find the largest size with which an epoch trains, by a few recorded calls and many orders.

A search at the worst shape bounds the sizes. One cold trial of calls of other shapes is the tape.
It is fitted over shapes and replayed in many orders, from the bound downwards, until a size runs in
all of them. The calls up to the one in which the most is reserved then run, cold and under the cap,
and are compared with their replay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice

import torch

from oomprobe.allocator.caching import AllocatorOutOfMemory
from oomprobe.errors import NothingFitsError, TimeLimitError, UnreliableError
from oomprobe.ground.allocator_settings import allocator_settings, to_expand
from oomprobe.ground.units import format_bytes
from oomprobe.ground.words import count
from oomprobe.probing.session import Session
from oomprobe.records.epoch import EpochRecord
from oomprobe.records.notes import remark
from oomprobe.records.sizes import Sizes
from oomprobe.records.trials import Call, Outcome, Phase, Request, Trial, Verdict
from oomprobe.rules.epoch import Orders, StepOrders, shape_of
from oomprobe.tape.calls import RecordedCall
from oomprobe.tape.epochs import OrderEnd, expand, replay_order, replay_orders
from oomprobe.tape.record import TapedTrial
from oomprobe.tape.shapes import ShapedTape, share_alike

STRETCH = 50  # calls up to the hardest, that run
LEAST_STRETCH = 20
ROUNDS = 3  # of learning from a stretch that was predicted wrongly
TOLERANCE = 0.01  # of reserved memory, between a stretch and its replay
MATCHED = 0.9  # of its requests, at least
DYING_SHARE = 3 / 4  # of a size, at which the tape is recorded if too few calls ran
OUT_OF_TIME = "the time limit passed while {orders} were replayed: allow more, or ask for fewer"
UNRECORDED = "what the calls ask of the allocator cannot be recorded on {device}"
TOO_FEW = "batch {size} ran for {calls}, too few to learn what other shapes allocate"
ENDED = "a trial of its calls ended with {verdict}"
MISMATCH = (
    "a stretch of calls did not allocate what was predicted: {matched:.0f} % of the "
    "requests came as predicted, "
    "{reserved} were reserved, {expected} expected; {ended}, {expected_end} expected"
)
MANY = 10  # structures of a step: a dozen shapes mostly have one
MANY_KINDS = (
    ". Its calls made {count} different lists of requests, as where a step generates token by token: "
    "let it round the number of tokens up, so that there are fewer (docs/recipes.md)"
)
EXPANDS = (
    "with {setting}, set before training, {deaths} of {orders} orders run out of memory at batch "
    "{size}: probe again with it"
)
NONE_RUNS = (
    "no batch size from {first} to {largest} trains: of {orders}, {deaths} run out of memory at "
    "{first}. {instead}Try shorter examples, or a larger memory_fraction"
)
Ends = Mapping[int, OrderEnd]  # by order


class EpochSearch:
    """An epoch while its sizes are tried."""

    def __init__(self, session: Session, orders: Orders, sizes: Sizes) -> None:
        self._session, self.orders, self._sizes = session, orders, sizes
        self._period = session.program.period
        # By rank that runs: a simulated card has the first alone, and all others are like it.
        self._starts: Sequence[TapedTrial]
        self._tapes: Sequence[ShapedTape]
        self.matched_fraction: float | None = None
        self._hardest_first: list[int] = [*range(orders.count)]

    @property
    def title(self) -> str:
        """How many orders of how many calls are replayed."""
        return f"{self.orders.count} orders of {self.orders.calls:,} calls"

    # --- the tape ---

    def record(self, size: int) -> str:
        """Run calls of many shapes up to this size, and learn from them; return why not, or ""."""
        while True:
            calls = self.orders.to_record(size)
            outcome = self._run(calls, None)
            if outcome.trial.verdict not in (Verdict.FITS, Verdict.OOM):
                return ENDED.format(verdict=outcome.trial.verdict)
            if not any(outcome.taped):
                return outcome.unrecorded or UNRECORDED.format(device=self._session.device.name)
            ran = min(len(taped.calls) if taped else 0 for taped in outcome.taped)
            if ran > len(calls) // 2:
                break
            if size == 1:
                return TOO_FEW.format(size=size, calls=count(ran, "call", "calls"))
            size = max(1, int(size * DYING_SHARE))
        self._starts = outcome.taped
        self._tapes = [ShapedTape(start.processors, self._period) for start in self._starts]
        self._learn(calls, outcome.taped)
        return ""

    def _learn(self, calls: Sequence[Call], taped: Sequence[TapedTrial | None]) -> None:
        for rank, recording in enumerate(taped):
            if recording is not None:
                made = [(call.step, shape_of(call.on_rank(rank))) for call in calls]
                self._tapes[rank].learn(made, recording.calls)

    def _run(self, calls: Sequence[Call], cap_bytes: int | None) -> Outcome:
        """Run calls, cold, and record what they ask for."""
        session = self._session
        request = Request(
            phase=Phase.CONFIRM, calls=tuple(calls), cap_bytes=cap_bytes, records=True, fresh=True
        )
        session.reporter.started(request.batch_size, request.phase)
        outcome = session.host.judge(session.runner.run(session.with_evidence(request)))
        session.take_over(outcome)
        session.deaths.stop_if_final(outcome.trial)
        return outcome

    # --- the orders ---

    def ends(self, size: int, *, stops: bool = False, starts: Sequence[TapedTrial] = ()) -> Ends:
        """Replay the orders at a size, the hardest first; if it `stops`, until one dies."""

        def replay(order: int) -> OrderEnd:
            return self._replay([*self.orders.order(order, size)], starts)

        ends = {}
        for order, end in replay_orders([*self._hardest_first], replay):
            ends[order] = end
            if self._session.clock.is_over:
                raise TimeLimitError(OUT_OF_TIME.format(orders=self.title))
            if end.died:
                self._hardest_first.remove(order)
                self._hardest_first.insert(0, order)
                if stops:
                    break
        return dict(sorted(ends.items()))

    def _replay(self, calls: Sequence[Call], starts: Sequence[TapedTrial] = ()) -> OrderEnd:
        """Replay calls on each rank. They end with the first death of any."""
        cap_bytes, ends = self._session.budget.search_cap(), list[OrderEnd]()
        starts = starts or self._starts
        for rank in range(max(len(starts), 1 + len(calls[0].others))):
            start, predicted = starts[rank % len(starts)], self._predict(calls, rank)
            ends.append(replace(replay_order(start, cap_bytes, predicted), rank=rank))
            calls = calls[: ends[-1].died]
        died = [end for end in ends if end.died]
        decisive = died[-1] if died else max(ends, key=lambda end: end.peak_reserved_bytes)
        peak_bytes = max(end.peak_allocated_bytes for end in ends)
        return replace(decisive, peak_allocated_bytes=peak_bytes)

    def _predict(self, calls: Iterable[Call], rank: int) -> Iterator[RecordedCall]:
        made, tape = Counter[str](), self._tapes[rank % len(self._tapes)]
        for call in calls:
            yield tape.call(call.step, shape_of(call.on_rank(rank)), made[call.step])
            made[call.step] += 1

    def largest(self, bound: int) -> tuple[int | None, Ends]:
        """Return the largest size up to a bound that runs in all orders, and how they end.

        None if none does, with the ends of the smallest.
        """
        size, resolution = bound, self._session.options.resolution
        while True:
            ends = self.ends(size, stops=True)
            if not deaths_of(ends) and not self._replay(self._stretch(ends, size)).died:
                return size, ends
            if size == self._sizes.first:
                return None, self.ends(size)
            size = self._sizes.nearest(size - max(self._sizes.step, int(size * resolution)))

    # --- the stretch that runs ---

    def _stretch(self, ends: Ends, size: int) -> list[Call]:
        """Return the calls up to the first death, or up to the one in which the most is reserved.

        The first call of a trial has shown what one shape asks for, so others come with it.
        """
        order, last = hardest_of(ends)
        first = max(0, last - STRETCH) // self._period * self._period  # a trial begins a period
        calls = islice(
            self.orders.order(order, size), first, max(last, first + self._period, LEAST_STRETCH)
        )
        if len(self._starts) > 1:
            return [*calls]
        return [call.on_rank(ends[order].rank) for call in calls]

    def run_stretch(self, ends: Ends, size: int) -> tuple[Trial, str]:
        """Run the hardest calls under the cap; return the trial, and how it differs from its replay or ""."""
        calls = self._stretch(ends, size)
        expected = self._replay(calls)
        outcome = self._run(calls, self._session.budget.search_cap())
        trial = replace(outcome.trial, step_s=None, samples_per_s=None)  # of calls of many shapes
        self._session.trials.append(trial)
        self._session.stretches.append(trial)
        self._session.reporter.finished(trial)
        if trial.verdict not in (Verdict.FITS, Verdict.OOM):
            return trial, ENDED.format(verdict=trial.verdict)
        if not any(outcome.taped):
            return trial, outcome.unrecorded
        matched_fraction = self._match(calls, outcome.taped)
        self.matched_fraction = matched_fraction
        self._learn(calls, outcome.taped)
        died = None if trial.passed else trial.steps + 1
        _, reserved_bytes = trial.peaks
        is_near = abs(reserved_bytes - expected.peak_reserved_bytes) <= TOLERANCE * reserved_bytes
        if died == expected.died and matched_fraction >= MATCHED and (died or is_near):
            return trial, ""
        kinds, instead = max(tape.structures for tape in self._tapes), ""
        if kinds > MANY:
            instead = MANY_KINDS.format(count=kinds)
        reason = MISMATCH.format(
            matched=100 * matched_fraction,
            reserved=format_bytes(reserved_bytes),
            expected=format_bytes(expected.peak_reserved_bytes),
            ended=_ended(died),
            expected_end=_ended(expected.died),
        )
        return trial, reason + instead

    def _match(self, calls: Iterable[Call], taped: Sequence[TapedTrial | None]) -> float:
        """Return the share of the requests that came as predicted."""
        matched = requests = 0
        for rank, recording in enumerate(taped):
            made = recording.calls if recording else []
            for call, predicted in zip(made, self._predict(calls, rank), strict=False):
                alike, asked = share_alike(call, predicted)
                matched, requests = matched + alike, requests + asked
        return matched / requests if requests else 1.0  # it died in its first call

    # --- what is said of it ---

    def with_expandable_segments(self, size: int) -> Ends | None:
        """Replay the orders with expandable segments; None if they are on, or nothing fits.

        The blocks that were there when the trial began are requested anew.
        """
        if self.is_expandable:
            return None
        try:
            return self.ends(size, starts=[expand(start) for start in self._starts])
        except AllocatorOutOfMemory:
            return None

    @property
    def is_expandable(self) -> bool:
        """Whether the trials that were recorded had expandable segments."""
        return self._starts[0].allocator.settings.expandable_segments

    def record_of(self, size: int, ends: Ends) -> EpochRecord:
        """Return the record of a size."""
        deaths, running = deaths_of(ends), [end for end in ends.values() if not end.died]
        settings = {f"expandable_segments:{self.is_expandable}": deaths}
        if deaths:
            expanded = self.with_expandable_segments(size)
            if expanded is not None:
                settings["expandable_segments:True"] = deaths_of(expanded)
        return EpochRecord(
            batch_size=size,
            ends=tuple(end.died for end in ends.values()),
            deaths=deaths,
            settings=settings,
            peak_allocated_bytes=max((end.peak_allocated_bytes for end in running), default=None),
            peak_reserved_bytes=max((end.peak_reserved_bytes for end in running), default=None),
            reserved=tuple(end.curve for end in ends.values()),
            hardest=hardest_of(ends),
            matched_fraction=self.matched_fraction,
            drawn=self.orders.describe(),
        )


def deaths_of(ends: Ends) -> int:
    """Return how many orders die."""
    return sum(end.died is not None for end in ends.values())


def hardest_of(ends: Ends) -> tuple[int, int]:
    """Return the order and the call of the first death, or that in which the most is reserved."""
    deaths = [(end.died, order) for order, end in ends.items() if end.died]
    if deaths:
        died, order = min(deaths)
        return order, died
    order = max(ends, key=lambda number: ends[number].peak_reserved_bytes)
    return order, ends[order].hardest


def _ended(died: int | None) -> str:
    return f"out of memory in call {died}" if died else "no death"


def search_of(session: Session) -> EpochSearch:
    """Return the search of a session's steps."""
    facts = session.runner.facts
    epochs = {step: session.axis.epoch_of(step) for step in facts.step_names}
    orders = StepOrders(epochs, facts.world_size)
    return EpochSearch(session, orders, session.options.sizes)


def find_epoch(session: Session, bound: int) -> int:
    """Return the size with which the epoch trains, and keep its record; a search found the bound.

    Raises:
        NothingFitsError: some order runs out of memory at every size.
    """
    if not session.axis.epochs or session.axis.name:
        return bound
    search = search_of(session)
    size, ends, trial, reason = settle(session, search, bound)
    if reason:
        drawn = search.orders.describe()
        session.epoch = EpochRecord(batch_size=bound, reason=reason, drawn=drawn)
        return bound
    if size is None:
        setting, instead = to_expand(allocator_settings(), torch.__version__), ""
        if setting:
            instead = f"Set {setting}. "
        sizes = {"first": session.options.sizes.first, "largest": bound}
        orders = {"orders": search.title, "deaths": deaths_of(ends)}
        raise NothingFitsError(NONE_RUNS.format(**sizes, **orders, instead=instead))
    assert trial is not None
    session.program.confirmed = trial.steps
    session.epoch = replace(search.record_of(size, ends), longest_only_batch_size=bound)
    with suppress(TimeLimitError):  # the answer stands without what follows
        _look_at_bound(session, search, bound, ends if size == bound else search.ends(bound))
    return size


def _look_at_bound(session: Session, search: EpochSearch, bound: int, ends: Ends) -> None:
    """Keep how the orders end at the largest size that runs alone, and note what would help there."""
    assert session.epoch is not None
    died = tuple(end.died for end in ends.values())
    reserved = tuple(end.curve for end in ends.values())
    if bound == session.epoch.batch_size:
        reserved = ()  # the same
    session.epoch = replace(session.epoch, longest_only_ends=died, longest_only_reserved=reserved)
    setting = to_expand(allocator_settings(), torch.__version__)
    expanded = search.with_expandable_segments(bound) if any(died) and setting else None
    if expanded is not None and deaths_of(expanded) < deaths_of(ends):
        numbers = {"deaths": deaths_of(expanded), "orders": len(expanded), "size": bound}
        session.notes.add(remark(EXPANDS.format(setting=setting, **numbers), bound))


def settle(
    session: Session, search: EpochSearch, bound: int
) -> tuple[int | None, Ends, Trial | None, str]:
    """Return the largest size that trains, how its orders end, and the stretch that ran.

    The size is None if none trains. Instead of all that, there may be a reason why no epoch can be
    replayed.
    """
    session.reporter.row(f"an epoch, from {bound} downwards")
    reason = search.record(bound)
    if reason:
        return None, {}, None, reason
    for _ in range(ROUNDS):
        session.reporter.row(f"replaying {search.title}")
        try:
            size, ends = search.largest(bound)
        except TimeLimitError as error:  # the answer without the epoch stands
            return None, {}, None, str(error)
        if size is None:
            return None, ends, None, ""
        session.reporter.row(f"the hardest calls at {size}")
        trial, reason = search.run_stretch(ends, size)
        if trial.passed and not reason:
            return size, ends, trial, ""
    return None, {}, None, reason


def check_epoch(session: Session, size: int) -> None:
    """Keep the record of an epoch at one size, whatever dies.

    Raises:
        UnreliableError: no calls could be recorded.
    """
    search = search_of(session)
    session.reporter.row(f"an epoch at {size}")
    reason = search.record(size)
    if reason:
        raise UnreliableError(reason)
    for _ in range(ROUNDS):
        session.reporter.row(f"replaying {search.title}")
        ends = search.ends(size)
        _, reason = search.run_stretch(ends, size)
        if not reason:
            session.epoch = search.record_of(size, ends)
            return
    session.epoch = EpochRecord(batch_size=size, reason=reason, drawn=search.orders.describe())
