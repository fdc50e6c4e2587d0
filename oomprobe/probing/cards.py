"""A search on each of several simulated cards: steps run on the largest card of each kind, and are replayed on the others.

Cards of one compute capability run the same kernels, so they make the same requests, but for the scratch memory that depends on the
number of multiprocessors, which a replay computes anew.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

from oomprobe.devices import describe, opened_if_simulated
from oomprobe.errors import InvalidArgumentError, NothingFitsError
from oomprobe.probing.finish import finish
from oomprobe.probing.order import Order
from oomprobe.probing.session import Session
from oomprobe.probing.summary import result_of
from oomprobe.probing.tables import Rows
from oomprobe.records.axis import CARDS, NO_AXIS, Axis
from oomprobe.records.options import names_simulated
from oomprobe.records.patience import Clock
from oomprobe.records.trials import Measured, Outcome, Request, RunnerInfo
from oomprobe.results.progress import reporter
from oomprobe.results.table import ProbeTable
from oomprobe.rules.search import Found
from oomprobe.runners.predicting import Predicting
from oomprobe.simulation.catalogue import each_name

if TYPE_CHECKING:
    from oomprobe.devices.simulated import SimulatedDevice  # takes a second to import

Open = Callable[[Order], AbstractContextManager[Session]]

NOT_CARDS = (
    "several devices can only be simulated cards, and one of them is {device!r}: write names such as 'sim:24GiB' or 'sim:H100-80GB' "
    "(`oomprobe devices` lists them), or 'sim:all', and probe a real device alone"
)
NOT_TRIED = "not tried: nothing fits {card}, which has more memory"


def cards_of(devices: Iterable[object], ranks: int = 1) -> dict[str, SimulatedDevice]:
    """Return the simulated cards that are named, by their names; ``"sim:all"`` names the whole catalogue.

    Raises:
        InvalidArgumentError: one is no simulated card, or is named twice.
        NoDeviceError: the catalogue has no such card.
    """
    names = each_name(devices)
    for name in names:
        if not names_simulated(name):
            raise InvalidArgumentError(NOT_CARDS.format(device=name))
    if len(set(names)) < len(names):
        raise InvalidArgumentError(f"name each card only once, not {names}")
    return {str(name): opened_if_simulated(name, ranks) for name in names}


def search_cards(
    order: Order, opened: Open, *, ranks: int = 1, target: str | None = None
) -> ProbeTable:
    """Find the largest size on each card, and run it on the smallest one on which it is at least the required one.

    `opened` opens a session for an order, whose device is a card, or one of several `ranks` with such a card.
    """
    cards = cards_of(order.axis.values, ranks)
    order = replace(order, axis=NO_AXIS)
    kinds = defaultdict[tuple[int, int], list[str]](list)
    for name in sorted(cards, key=lambda name: -cards[name].available_bytes()):
        kinds[cards[name].card.compute_capability].append(name)
    with Rows(Axis(CARDS, tuple(cards)), target) as rows:
        search, rows.required = _Search(rows, order, opened, cards), order.required
        for name, *smaller in kinds.values():
            search.run(name, smaller)
        search.run_smallest()
    return rows.table()


class _Search:
    """Searches on cards, and enters what it finds into the rows of a table."""

    def __init__(
        self, rows: Rows, order: Order, opened: Open, cards: Mapping[str, SimulatedDevice]
    ) -> None:
        self._rows, self._order, self._opened, self._cards = rows, order, opened, cards
        self._clock = Clock(order.options, patience=order.patience)

    def run(self, name: str, smaller: Sequence[str] = ()) -> None:
        """Search on a card by running the step, and on smaller ones of its kind by replaying what it did."""
        card, rows, left = self._cards[name], self._rows, list[str]()
        replayed: dict[str, tuple[Session, Found]] = {}
        options = self._clock.left_of(self._order.options)
        with rows.filling(name, name):
            with self._opened(replace(self._order, device=card, options=options)) as session:
                largest = session.find()
                for next_name in smaller:
                    if largest.batch_size is None:  # `finish` raises
                        break
                    try:
                        card = self._cards[next_name]
                        replayed[next_name] = _search_again(session, card, self._order)
                    except _CannotReplayError:
                        left.append(next_name)
                    except NothingFitsError as error:
                        rows.results[next_name], rows.unfit[next_name] = None, str(error)
                finish(session, largest)
            rows.results[name] = result_of(session, largest, rows.target)
        if rows.results[name] is None:
            rows.results |= dict.fromkeys(smaller)
            rows.unfit |= dict.fromkeys(smaller, NOT_TRIED.format(card=name))
            return
        for next_name, (again, largest) in replayed.items():
            again.state_verified = session.state_verified
            rows.results[next_name] = result_of(again, largest, rows.target)
        for next_name in left:
            self.run(next_name)

    def run_smallest(self) -> None:
        """Run the answer of the smallest card on which the required size runs."""
        while True:
            name = self._rows.table().smallest()
            result = self._rows.results.get(name)
            if result is None or not result.was_replayed:
                return
            self.run(name)


class _CannotReplayError(Exception):
    """A trial cannot be replayed: the card needs a search of its own."""


class _Nothing:
    """Runs no trial: each must be replayed; see `oomprobe.records.trials.Runner`."""

    def __init__(self, facts: RunnerInfo, card: SimulatedDevice) -> None:
        self.facts, self._card = facts, card

    def measure(self) -> Measured:
        """Return the memory of the card."""
        return Measured(available_bytes=self._card.available_bytes(), outside_bytes=None)

    def run(self, request: Request) -> Outcome:
        """Raise _CannotReplayError."""
        raise _CannotReplayError


def _search_again(
    session: Session, smaller: SimulatedDevice, order: Order
) -> tuple[Session, Found]:
    """Search on another card of the kind by replaying what the step did on this one.

    Raises:
        _CannotReplayError: the step's calls differ, or memory was not as predicted.
        NothingFitsError: not even the smallest size fits.
    """
    nothing = _Nothing(replace(session.runner.facts, device=describe(smaller)), smaller)
    runner = None
    if isinstance(session.runner, Predicting):
        runner = session.runner.on(smaller, nothing)
    if runner is None:
        raise _CannotReplayError
    options = replace(order.options, global_batch=None, breakdown=False)  # these run the step
    again = Session(runner, options, reporter("off"), Clock(options, patience=order.patience), [])
    return again, finish(again, again.find())
