"""What there is to train with: looked at once, before the first trial."""

from __future__ import annotations

from typing import Any

from oomprobe.errors import InvalidArgumentError
from oomprobe.integrations.framework import LOOP_STEPS
from oomprobe.integrations.lightning.loaders import (
    Kind,
    flat,
    indices_of,
    kind_of,
    length_of,
    refuse_fixed,
    size_of,
)
from oomprobe.integrations.lightning.loop import Loop, unfollowed
from oomprobe.integrations.lightning.sources import EVAL, TRAIN
from oomprobe.integrations.worst_case import Order, largest_first, refuse_once
from oomprobe.result import ProbeResult

_SAID = {TRAIN: "training", EVAL: "validation"}


class Examples:
    """The examples of each loader, largest first, and how many a batch may have.

    Args:
        loop: Asks for the loaders.
        size: The first batch size that will be tried.
        scan_s: Seconds for each data set.

    Raises:
        InvalidArgumentError: a loader cannot be made, or is not made, with another batch size.
    """

    def __init__(self, loop: Loop, size: int, scan_s: float) -> None:
        self._loop, self._size, self._scan_s = loop, size, scan_s
        self._lengths: list[int | None] = []
        self._asked_beyond = False
        self._notes: list[str] = []
        self.largest_ran = True  # as far as can be told; each loader may say otherwise
        loop.look(size, self._meet)

    @property
    def count(self) -> int | None:
        """How many examples every training loader has; None where one does not say, and none has fewer."""
        return min((length for length in self._lengths if length is not None), default=None)

    def _meet(self, name: str, loaders: Any) -> None:
        found = flat(loaders)
        if name == TRAIN:
            self._check(found)
        orders = self._loop.orders.setdefault(name, {})
        for place, loader in enumerate(found):
            if kind_of(loader) is Kind.EXAMPLES:
                orders[place] = self._order(name, loader)
            else:
                self._note_unseen(name, loader)
            if name == TRAIN and (self._is_handed_in or size_of(loader) in (self._size, None)):
                self._lengths.append(length_of(loader))

    @property
    def _is_handed_in(self) -> bool:
        return self._loop.sources[TRAIN].holder is None

    def _check(self, loaders: list[Any]) -> None:
        if self._is_handed_in:
            for loader in loaders:
                refuse_fixed(loader)
            return
        sizes = [size_of(loader) for loader in loaders]
        if loaders and all(size not in (self._size, None) for size in sizes):
            own = {size for size in sizes if size is not None}
            raise InvalidArgumentError(unfollowed(self._loop.batch_size, self._size, own))

    def _order(self, name: str, loader: Any) -> Order:
        order = largest_first(loader.dataset, indices_of(loader), self._scan_s)
        there = len(order.indices)
        if order.variable:
            self._notes.append(f"{_SAID[name]} batches were made of the largest examples")
        if not order.complete:
            self._notes.append(
                f"{order.seen} of {there} {_SAID[name]} examples were looked at in {self._scan_s:g} s: larger ones may be "
                "among the rest (allow more with scan_s)"
            )
        if not order.known and there:
            self._notes.append(
                f"the size of {_SAID[name]} examples could not be told from what the data set gives: if they differ, the "
                "largest may not have been in a trial"
            )
        self.largest_ran = self.largest_ran and order.complete and order.known
        return order

    def _note_unseen(self, name: str, loader: Any) -> None:
        if kind_of(loader) is Kind.STREAM:
            refuse_once(loader.dataset, f"{_SAID[name]} data set")
        what = "a stream" if kind_of(loader) is Kind.STREAM else f"a {type(loader).__name__}"
        self.largest_ran = False
        self._notes.append(
            f"{_SAID[name]} batches came from {what} in its own order: longer examples may come later, and where it "
            "stood is not restored"
        )

    def limited(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options, with no batch larger than the data.

        Raises:
            InvalidArgumentError: the smallest size is.
        """
        there, asked = self.count, options.get("max_batch")
        if there is None:
            return dict(options)
        if there < self._size:
            raise InvalidArgumentError(
                f"the data set has {there} examples, fewer than the smallest batch asked for, {self._size}: lower min_batch "
                "or multiple_of, or look at what train_dataloader() reads"
            )
        self._asked_beyond = asked is None or asked > there
        return {**options, "max_batch": there if self._asked_beyond else asked}

    def all_led(self, batch_size: int) -> bool:
        """Whether the largest of each field was in a batch of a trial at that size."""
        drawn = batch_size * LOOP_STEPS * self._loop.micro
        return all(order.leaders <= drawn for order in self._loop.orders.get(TRAIN, {}).values())

    def notes(self, result: ProbeResult) -> list[str]:
        """What a careful reader should know of the data behind this number."""
        found = list(dict.fromkeys(self._notes))
        if not self.all_led(result.batch_size):
            found.append(
                "the largest examples are others for each of their fields, and not all of them were in a batch"
            )
        if self._asked_beyond and result.limited_by == "max_batch":
            found.append(f"the data set ends the search: it has {self.count} examples, and no larger batch is possible")
        if self.count is None:
            found.append("the number of examples is not known: the answer may be larger than the data set")
        return found
