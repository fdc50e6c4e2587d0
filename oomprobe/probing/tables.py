"""Make a table: one search for each value of an axis, in one opened session; each begins with what the last has learned."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from oomprobe.errors import (
    InvalidArgumentError,
    NothingFitsError,
    OomProbeError,
    TimeLimitError,
)
from oomprobe.probing.epochs import EpochSearch, deaths_of, settle
from oomprobe.probing.finish import finish
from oomprobe.probing.session import Session
from oomprobe.probing.summary import result_of
from oomprobe.records.axis import Axis, is_larger, magnitude, text_of_value
from oomprobe.records.epoch import EpochRecord
from oomprobe.records.patience import Clock
from oomprobe.records.savings import Comparison
from oomprobe.records.sizes import Sizes
from oomprobe.records.trials import Call, Phase, Request
from oomprobe.results.result import ProbeResult
from oomprobe.results.table import ProbeTable
from oomprobe.rules.epoch import SHARES, BucketOrders
from oomprobe.rules.search import NEAREST, nearness

ALIKE = 1.02  # answers of all rows that differ by no more than this factor are the same
UNUSED = "all values of {axis} have the same batch size: does the step use {axis}?"
NOT_TRIED = "not tried, since {axis} {value} does not fit"
NONE_TRAINS = (
    "no share of these batch sizes trains with all values in turn: of {orders}, {deaths} run out of "
    "memory at the smallest"
)
FAILED_ALONE = "batch {size}, with which the epoch trains, ended with {verdict} alone"
ROW_CALLS = 4  # of a row at a lowered size
CUT_OFF = "time limit: there are no rows for {axis} {values}. Allow more time, or make another table for them"


class Rows:
    """The rows of a table while it is made.

    As a context manager it ends the table where a time limit passed, and attaches finished rows to other errors.

    Attributes:
        planned: The values that are to have a row.
    """

    def __init__(self, axis: Axis, target: str | None) -> None:
        self.axis, self.target = axis, target
        self.planned = [*axis.values]
        self._opened: Session | None = None
        self.results: dict[Any, ProbeResult | None] = {}
        self.unfit: dict[Any, str] = {}
        self.notes: list[str] = []
        self.required: int | None = None  # of cards
        self.savings: Comparison | None = None
        self._settles = False  # whether calls of any row have repeated: nothing counts them
        # The size at which the last row began; None for the first.
        self._expected: int | None = None
        self._started_s = time.monotonic()

    def __enter__(self) -> Rows:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if isinstance(error, TimeLimitError) and any(self.results.values()):
            missing = [text_of_value(value) for value in self.planned if value not in self.results]
            values = ", ".join(missing) or "all that was left"
            self.notes.append(CUT_OFF.format(axis=self.axis.name, values=values))
            return True
        if self.results and isinstance(error, OomProbeError):
            error.table = self.table()
        elif self.results and isinstance(error, KeyboardInterrupt | SystemExit):
            error.add_note(f"the rows that were finished:\n{self.table()}")
        return False

    @contextmanager
    def filling(self, value: Any, label: str) -> Iterator[None]:
        """Enter into the table that nothing fits, and name the row in any other error."""
        try:
            yield
        except NothingFitsError as error:
            self.results[value], self.unfit[value] = None, str(error)
        except InvalidArgumentError:  # which is about all rows
            raise
        except OomProbeError as error:
            error.args = (f"{label}: {error}",)
            raise

    def table(self) -> ProbeTable:
        """Return the table. Once the session of all its rows is closed, which restores and compares the state, each row has its notes."""
        rows = {}
        for value in self.axis.values:
            if value in self.results:
                rows[value] = self._with_notes(self.results[value])
        return ProbeTable(
            axis=self.axis.name,
            rows=rows,
            unfit=self.unfit,
            required=self.required,
            savings=self.savings,
            notes=tuple(self.notes),
            elapsed_s=time.monotonic() - self._started_s,
        )

    def _with_notes(self, result: ProbeResult | None) -> ProbeResult | None:
        if self._opened is None or result is None:
            return result
        return replace(
            result._with_notes(before=self._opened.notes),
            state_verified=self._opened.state_verified,
        )

    def search(self, opened: Session) -> None:
        """Find the largest size for each value, and with an epoch the share of these that trains with all values in turn.

        Above a value that does not fit, none is tried.
        """
        self._opened, last = opened, None
        for row, value in enumerate(self.axis.values):
            smaller = next(filter(partial(is_larger, value), self.unfit), None)
            if smaller is not None:
                self.results[value] = None
                self.unfit[value] = NOT_TRIED.format(
                    axis=self.axis.name, value=text_of_value(smaller)
                )
                continue
            label = self.axis.label(row)
            opened.reporter.row(label)
            session = self._session(opened, row, last)
            with self.filling(value, label):
                result = result_of(session, finish(session, session.find()), self.target)
                self.results[value], last = result, (session, value, result)
        if last is not None:
            self._compare(last[0])

    def _compare(self, session: Session) -> None:
        """Note answers that are all alike, and lower those that do not train in turn."""
        answers = {
            row: result
            for row, value in enumerate(self.axis.values)
            if (result := self.results[value]) is not None
        }
        sizes = [result.batch_size for result in answers.values()]
        is_limited = {result.limited_by for result in answers.values()} == {"memory"}
        is_limited &= not session.device.on_host
        if len(answers) > 1 and is_limited and max(sizes) <= ALIKE * min(sizes):
            self.notes.append(UNUSED.format(axis=self.axis.name))
        if self.axis.epochs and answers:
            self._train(session, answers)

    def _train(self, session: Session, answers: Mapping[int, ProbeResult]) -> None:
        """Lower the answers to the share of them with which the epoch trains, each row a bucket."""
        values = self.axis.values
        buckets = BucketOrders.of(
            self.axis,
            session.runner.facts.step_names,
            {row: result.batch_size for row, result in answers.items()},
            session.options.sizes,
            session.runner.facts.world_size,
        )
        search = EpochSearch(session, buckets, Sizes(first=1, last=SHARES, step=1))
        share, ends, _, reason = settle(session, search, SHARES)
        record = EpochRecord(batch_size=SHARES, reason=reason, drawn=buckets.describe())
        sizes = buckets.sizes
        if not reason:
            tried = share or 1  # the smallest, if none trains
            record, sizes = search.record_of(tried, ends), buckets.share(tried)
        if deaths_of(ends):
            orders = {"orders": search.title, "deaths": deaths_of(ends)}
            self.notes.append(NONE_TRAINS.format(**orders))
        for row, result in answers.items():
            size, alone, trials = sizes[row], result.batch_size, result.trials
            if size < alone:
                call = Call(step=buckets.step, batch_size=size, row=row)
                request = Request(phase=Phase.CONFIRM, calls=(call,) * ROW_CALLS)
                cap_bytes = session.budget.search_cap()
                trial = session.run(replace(request, cap_bytes=cap_bytes))
                trials = (*trials, trial)
                if not trial.passed:
                    self.unfit[values[row]] = FAILED_ALONE.format(size=size, verdict=trial.verdict)
                    self.results[values[row]] = None
                    continue
            of_row = replace(record, batch_size=size, longest_only_batch_size=alone)
            self.results[values[row]] = replace(
                result, batch_size=size, trials=trials, epoch=of_row
            )

    def _session(
        self, opened: Session, row: int, last: tuple[Session, Any, ProbeResult] | None
    ) -> Session:
        """Return the session of a row, which begins with what the last one that has an answer learned, if memory limited it."""
        opened.trials.clear()
        options, clock = (
            opened.options,
            Clock(opened.options, opened.clock.end_s, patience=opened.clock.patience),
        )
        if last is None or last[2].limited_by == "step":
            return Session(opened.runner, options, opened.reporter, clock, opened.trials, row=row)
        session, value, result = last
        start, near = None, NEAREST
        if self._expected is not None:
            near = nearness(self._expected, result.batch_size)
        # Where trials are predicted, small sizes teach the prediction, and large ones then take no time.
        if not any(trial.replayed for trial in result.trials):
            ratio = (magnitude(value) or 1) / (magnitude(self.axis.values[row]) or 1)
            start = options.sizes.nearest(int(ratio * result.batch_size))
        following = Session(
            opened.runner,
            replace(options, start_batch=start),
            opened.reporter,
            clock,
            opened.trials,
            row=row,
        )
        self._expected = start
        following.budget.expect(session.budget)
        self._settles |= result.trials[-1].settled_after is not None
        following.follow(session.program, near, settles=self._settles)
        return following
