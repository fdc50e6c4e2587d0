"""Search with each saving of memory, with the best two together, and with what reaches a required size; nothing is estimated."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import product, takewhile

import torch

from oomprobe.devices import Device
from oomprobe.errors import (
    InvalidArgumentError,
    NotApplicableError,
    NothingFitsError,
    OomProbeError,
    StepFailedError,
    UnreliableError,
)
from oomprobe.ground.allocator_settings import allocator_settings, to_expand
from oomprobe.probing.finish import finish
from oomprobe.probing.order import Order
from oomprobe.probing.session import Session
from oomprobe.probing.summary import result_of
from oomprobe.probing.tables import Rows
from oomprobe.records import savings
from oomprobe.records.axis import Axis
from oomprobe.records.patience import Clock
from oomprobe.records.savings import (
    AS_IS,
    AUTOCAST,
    EXPANDABLE,
    FIRST,
    LAST,
    Comparison,
    Saving,
    label,
)
from oomprobe.records.trials import Phase, RunnerInfo, Trial, Verdict
from oomprobe.results.savings import from_the_cheapest, last_run, runs
from oomprobe.results.table import ProbeTable
from oomprobe.rules.program import Program
from oomprobe.rules.search import NEAREST
from oomprobe.runners.savings import NO_BLOCKS
from oomprobe.state.surroundings import garbage_frozen

Open = Callable[[Order], AbstractContextManager[Session]]

SAME_CALLS = {EXPANDABLE: AS_IS}  # savings with which a step makes the same calls as with others
ENOUGH = 3  # savings that reach the required size
MOST_PAIRS = 8  # that are tried at the required size
SET_ALREADY = "already on, or the allocator is another one"
NOT_CUDA = "only CUDA's allocator has it"
OWN_PROCESS = "a process must start with it: probe a target, oomprobe run train.py:build"
OWN_CARD = "name the card by a text, such as 'sim:24GiB'"
IDLE = (
    "it had nothing to act on: no optimizer of torch's stepped, no module ran forward, or no "
    "attention kernel ran in a repeated block"
)
FEWEST = "batch {size} ran with {name}, and failed with one block fewer"
TOO_LARGE = "nor does batch {size} run with {names}"


def search_savings(order: Order, opened: Open, target: str | None = None) -> ProbeTable:
    """Find the largest size as the step is and with each saving, and compare them at one size.

    Args:
        order: What is asked: the names of the savings, or "all" for all, and then also the best two of them together; and the
            size that is to run, at which all are compared, or None for the answer without savings.
        opened: Opens a session for an order.
        target: What is probed, if it has a name.
    """
    assert order.savings is not None
    chosen = savings.chosen(order.savings)
    with Rows(Axis(savings.AXIS), target) as rows, garbage_frozen():  # once for all rows
        search = _Search(rows, order, opened)
        search.run(())
        search.run_all(chosen)
    return rows.table()


def first_alike(trials: Sequence[Trial]) -> int | None:
    """Return the smaller of the two sizes that larger ones were replayed from; None if none were.

    Still smaller ones may run other kernels, so they tell nothing of the larger ones.
    """
    ran = [*takewhile(lambda trial: not trial.replayed, trials)]
    return ran[-2].batch_size if 1 < len(ran) < len(trials) else None


class _Search:
    """Searches with savings, and enters what it finds into the rows of a table."""

    def __init__(self, rows: Rows, order: Order, opened: Open) -> None:
        self._rows, self._order, self._opened = rows, order, opened
        self._required = order.required
        self._clock = Clock(order.options, patience=order.patience)
        self._facts: RunnerInfo | None = None
        self._typed, self._not_run = dict[str, str](), dict[str, str]()
        self._recomputed: dict[str, float] = {}
        self._failed: dict[str, Verdict] = {}
        self._blocks = 0  # that the model repeats
        self._start: int | None = None  # where rows after the first begin to grow
        # What each row's search has learned of the step, and nothing that holds its model.
        self._programs: dict[str, Program] = {}

    def run_all(self, chosen: list[Saving] | None) -> None:
        """Run the savings that are chosen; of all, also the best two together, and pairs that reach the required size."""
        self._rows.planned = [label(saving) for saving in chosen or self._singles()]
        if chosen is not None:
            for saving in chosen:
                self.run(saving)
            self._divide()
            return
        able = []
        for saving in self._singles():
            self.run(saving)
            if self._answer(saving) > self._answer(()):
                able.append(saving)
        able.sort(key=self._answer, reverse=True)
        self._divide()
        best = savings.best_pair(able)
        if best is not None:
            self.run(best)
        if self._required is not None:
            self._reach(self._required, savings.pairs_of(able))

    def _divide(self) -> None:
        """Find how few of the model's blocks, from either end, run the required size."""
        size = self._required
        if size is None or runs(self._rows.results[AS_IS], size):
            return
        for kind, end in product(savings.DIVISIBLE, (FIRST, LAST)):
            if kind in self._programs:
                self._bisect(size, kind, end)

    def _bisect(self, size: int, kind: str, end: str) -> None:
        """Enter the fewest blocks from one end that run a size."""
        results, total = self._rows.results, self._blocks
        if not total:
            self._not_run[f"{kind} first or last K of N"] = NO_BLOCKS
            return
        of_part = partial(savings.DIVIDED.format, name=kind, end=end, total=total)
        tried = {0: False, total: runs(results[kind], size)}
        while (count := savings.next_count(tried)) is not None:
            name = of_part(count=count)
            self.run((name,), only_if_runs=size, follows=self._programs[kind])
            if name in self._not_run:
                return
            tried[count] = name in results
        passed = [of_part(count=count) for count in sorted(tried) if tried[count]]
        if passed:
            self._rows.notes.append(FEWEST.format(size=size, name=passed[0]))
        for name in passed[1:]:
            results.pop(name, None)
            self._typed.pop(name, None)
            self._recomputed.pop(name, None)

    def _reach(self, size: int, pairs: list[Saving]) -> None:
        """Run pairs, the cheapest first, until enough savings reach a size."""
        reaching = [
            name
            for name, result in self._rows.results.items()
            if runs(result, size) and "+" not in name
        ]
        too_large = []
        for pair in pairs[:MOST_PAIRS]:
            if len(reaching) >= ENOUGH:
                break
            if label(pair) not in self._rows.results:
                self.run(pair, only_if_runs=size)
            if runs(self._rows.results.get(label(pair)), size):
                reaching.append(label(pair))
            else:
                too_large.append(label(pair))
        if too_large:
            self._rows.notes.append(TOO_LARGE.format(size=size, names=", ".join(too_large)))

    def _singles(self) -> list[Saving]:
        assert self._facts is not None
        names = [name for name in savings.ORDER[1:] if name not in AUTOCAST.values()]
        names.append(AUTOCAST[self._facts.device.half])
        return [(name,) for name in sorted(names, key=savings.ORDER.index)]

    def _answer(self, saving: Saving) -> int:
        result = self._rows.results.get(label(saving))
        if result is None:
            return 0
        return result.batch_size

    def run(
        self, saving: Saving, *, only_if_runs: int | None = None, follows: Program | None = None
    ) -> None:
        """Search, and run the size at which all are compared.

        Args:
            saving: Those that are on.
            only_if_runs: A size without which there is no row.
            follows: Of the search with the same saving on all blocks; then only that size is run.
        """
        rows, name = self._rows, label(saving)
        with self._reported(saving):
            with self._started(saving) as session:
                known = follows or self._programs.get(SAME_CALLS.get(name, ""))
                if known is not None:  # calls that repeat with one do with the other
                    session.follow(known, NEAREST, settles=True)
                if only_if_runs is not None:
                    largest = session.confirm_only(only_if_runs)
                    if largest.batch_size is None:
                        return
                if follows is None:
                    largest = session.find()
                    if session.device.is_simulated:
                        self._start = first_alike(session.trials)
                self._learn(saving, session)
                finish(session, largest, broken_down_at=self._compared(session))
                self._facts = session.runner.facts  # a command's device is known once it has run
            rows.results[name] = result_of(session, largest, rows.target)
            self._programs[name] = session.program
        self._compare()

    @contextmanager
    def _reported(self, saving: Saving) -> Iterator[None]:
        """Enter into the table why a saving has no answer."""
        name, rows = label(saving), self._rows
        try:
            yield
        except NothingFitsError as error:
            if self._facts is None:  # not even the model does
                raise
            rows.results[name], rows.unfit[name] = None, str(error)
            if error.trials:
                self._failed[name] = error.trials[-1].verdict
        except (NotApplicableError, StepFailedError, UnreliableError) as error:
            if not saving:
                raise
            self._not_run[name] = str(error).splitlines()[0]
            rows.planned = [planned for planned in rows.planned if planned != name]
        except InvalidArgumentError:  # which is about all rows
            raise
        except OomProbeError as error:
            error.args = (f"{name}: {error}",)
            raise

    @contextmanager
    def _expandable(self, saving: Saving) -> Iterator[None]:
        """Let simulated cards and workers that are made inside start with expandable segments, if these are among the savings.

        Raises:
            NotApplicableError: no process can start with them.
        """
        if EXPANDABLE not in saving:
            yield
            return
        self._refuse_expandable()
        before = allocator_settings()
        self._typed[EXPANDABLE] = to_expand(before, torch.__version__)
        name, _, value = self._typed[EXPANDABLE].partition("=")
        os.environ[name] = value
        try:
            yield
        finally:
            del os.environ[name]
            os.environ.update(before)

    @contextmanager
    def _started(self, saving: Saving) -> Iterator[Session]:
        """Open a session with savings, for as long as the table may take."""
        options = self._clock.left_of(self._order.options)
        options = replace(options, start_batch=options.start_batch or self._start)
        axis = replace(self._order.axis, savings=saving)
        order = replace(self._order, axis=axis, options=options)
        with self._expandable(saving), self._opened(order) as session:
            session.reporter.row(label(saving))
            self._facts = session.runner.facts
            yield session

    def _learn(self, saving: Saving, session: Session) -> None:
        """Take over what the trials showed of savings.

        Raises:
            NotApplicableError: one has done nothing.
        """
        shown = session.outcome
        if shown is None or not any(trial.passed for trial in session.trials):
            return
        idle = {*saving} - {EXPANDABLE, *shown.typed}
        if idle:
            raise NotApplicableError(IDLE)
        self._typed |= shown.typed
        self._blocks = shown.blocks or self._blocks
        if session.device.is_simulated:
            self._recomputed[label(saving)] = shown.recomputed

    def _compared(self, session: Session) -> int | None:
        """Run the size at which all are compared, unless the search has run it, and return it if it runs."""
        size = self._size()
        if size is None:
            return None
        trial = last_run(session.trials, size)
        if trial is None or not session.budget.holds(trial):  # sizes grow without the cap
            request = session.requested(size, Phase.BISECT, session.budget.search_cap())
            trial = session.run(replace(request, must_run=True))
        if not trial.passed:
            return None
        return size

    def _compare(self) -> None:
        """Give the table what it shows beside the answers."""
        size = self._size()
        if size is not None:
            self._rows.savings = compared = Comparison(
                batch_size=size,
                required=self._required is not None,
                typed=self._typed,
                recomputed=self._recomputed,
                not_run=self._not_run,
                failed=self._failed,
            )
            in_order = from_the_cheapest(self._rows.results, compared)
            self._rows.axis = Axis(savings.AXIS, tuple(in_order))

    def _size(self) -> int | None:
        """Return the size at which all are compared; None while the answer without savings is not known."""
        if self._required is not None or AS_IS not in self._rows.results:
            return self._required
        return self._answer(()) or self._order.options.sizes.first

    def _refuse_expandable(self) -> None:
        """Raise NotApplicableError if no process can start with expandable segments."""
        assert self._facts is not None
        device = self._facts.device
        is_of_process = not device.is_simulated
        if device.on_host or (is_of_process and not device.torch_device.startswith("cuda")):
            raise NotApplicableError(NOT_CUDA)
        if not to_expand(allocator_settings(), torch.__version__):
            raise NotApplicableError(SET_ALREADY)
        if isinstance(self._order.device, Device):
            raise NotApplicableError(OWN_CARD)
        if is_of_process and not self._facts.replaceable:
            raise NotApplicableError(OWN_PROCESS)
